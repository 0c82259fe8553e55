-- Stop a job. What is committed now is what its owner gets; attempts in flight learn of it at their next beat.
-- KEYS job, ready, leases, own, progress   ARGV id, now_s
-- Returns 'ok' (again if it is being cancelled, or is cancelled), or the state that forbids it.
local state = redis.call('HGET', KEYS[1], 'state')
if state == 'cancelling' or state == 'cancelled' then return 'ok' end
if state ~= 'validating' and state ~= 'in_progress' then return state or 'gone' end
redis.call('HSET', KEYS[1], 'state', 'cancelling', 'cancelling_at', ARGV[2])
redis.call('HDEL', KEYS[1], 'paused')
redis.call('DEL', KEYS[2], KEYS[3], KEYS[4], KEYS[5])
requeue(ARGV[1])
return 'ok'
