-- Hand out no more shards of a job. Those in work are finished and committed.
-- KEYS job   ARGV id, now_s
-- Returns 'ok' (again if it is paused already), or the state that forbids it.
local state = redis.call('HGET', KEYS[1], 'state')
if state ~= 'validating' and state ~= 'in_progress' then return state or 'gone' end
redis.call('HSETNX', KEYS[1], 'paused', ARGV[2])
requeue(ARGV[1])
return 'ok'
