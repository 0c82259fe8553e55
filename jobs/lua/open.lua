-- The plan is complete: the job may be worked on.
-- KEYS job   ARGV id, total_shards, now_s, field, value, ...
-- Returns 'ok' (again if it is open already), or the state that forbids it.
-- Where all shards are settled already, their segments having been adopted, it goes straight on to `finalizing`.
local state = redis.call('HGET', KEYS[1], 'state')
if state == 'in_progress' then return 'ok' end
if state ~= 'validating' then return state or 'gone' end
redis.call('HSET', KEYS[1], 'state', 'in_progress', 'total', ARGV[2], 'in_progress_at', ARGV[3], unpack(ARGV, 4))
if redis.call('HGET', KEYS[1], 'settled') == ARGV[2] then
  redis.call('HSET', KEYS[1], 'state', 'finalizing', 'finalizing_at', ARGV[3])
  redis.call('HDEL', KEYS[1], 'paused')
  return 'ok'
end
requeue(ARGV[1])
return 'ok'
