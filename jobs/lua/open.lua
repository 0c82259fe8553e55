-- The plan is complete: the job may be worked on.
-- KEYS job, active   ARGV id, order, total_shards, now_s, field, value, ...
-- Returns 'ok' (again if it is open already), or the state that forbids it.
-- Where all shards are settled already, their segments having been adopted, it goes straight on to `finalizing`.
local state = redis.call('HGET', KEYS[1], 'state')
if state == 'in_progress' then return 'ok' end
if state ~= 'validating' then return state or 'gone' end
redis.call('HSET', KEYS[1], 'state', 'in_progress', 'total', ARGV[3], 'in_progress_at', ARGV[4], unpack(ARGV, 5))
if redis.call('HGET', KEYS[1], 'settled') == ARGV[3] then
  redis.call('HSET', KEYS[1], 'state', 'finalizing', 'finalizing_at', ARGV[4])
  return 'ok'
end
redis.call('ZADD', KEYS[2], ARGV[2], ARGV[1])
return 'ok'
