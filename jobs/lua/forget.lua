-- Remove a job that has ended, and all that is kept of it.
-- KEYS job, jobs, live, then the job's other keys   ARGV id
-- Returns 'ok' (again if it is gone already), or the state of a job that has not ended, and changes nothing.
local state = redis.call('HGET', KEYS[1], 'state')
local ended = {completed = true, failed = true, cancelled = true, expired = true}
if state and not ended[state] then return state end
redis.call('ZREM', KEYS[2], ARGV[1])
redis.call('ZREM', KEYS[3], ARGV[1])
redis.call('DEL', KEYS[1], unpack(KEYS, 4))
return 'ok'
