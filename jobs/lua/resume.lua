-- Go on with a paused job.
-- KEYS job   ARGV id
-- Returns 'ok' (also for a job that is not paused), or the state that forbids it.
local state = redis.call('HGET', KEYS[1], 'state')
if state ~= 'validating' and state ~= 'in_progress' then return state or 'gone' end
redis.call('HDEL', KEYS[1], 'paused')
requeue(ARGV[1])
return 'ok'
