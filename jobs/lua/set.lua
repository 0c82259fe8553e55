-- Change where a job stands in its model's queue, and until when. Of an empty argument the old value stays.
-- KEYS job, deadlines   ARGV id, priority, weight, expires_at (Unix seconds, or 'never')
-- Returns 'ok', or the state that forbids it. Shards in work are not touched.
local state = redis.call('HGET', KEYS[1], 'state')
if state ~= 'validating' and state ~= 'in_progress' then return state or 'gone' end
if ARGV[2] ~= '' then move(ARGV[1], ARGV[2]) end
if ARGV[3] ~= '' then redis.call('HSET', KEYS[1], 'weight', ARGV[3]) end
if ARGV[4] == 'never' then
  redis.call('HDEL', KEYS[1], 'expires_at')
  redis.call('ZREM', KEYS[2], ARGV[1])
elseif ARGV[4] ~= '' then
  redis.call('HSET', KEYS[1], 'expires_at', ARGV[4])
  redis.call('ZADD', KEYS[2], ARGV[4], ARGV[1])
end
return 'ok'
