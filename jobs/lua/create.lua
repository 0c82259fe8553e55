-- Write a new job, once.
-- KEYS job, jobs, live, deadlines   ARGV id, now_ms, expires_at ('' for never), field, value, ...
-- Returns 'ok', or 'exists' and changes nothing: a retried submit finds its first try.
if redis.call('HSETNX', KEYS[1], 'state', 'validating') == 0 then return 'exists' end
redis.call('HSET', KEYS[1], unpack(ARGV, 4))
redis.call('HSET', KEYS[1], 'settled', 0, 'fence', 0, 'done', 0, 'failed', 0)
redis.call('ZADD', KEYS[2], ARGV[2], ARGV[1])
redis.call('ZADD', KEYS[3], ARGV[2], ARGV[1])
if ARGV[3] ~= '' then
  redis.call('HSET', KEYS[1], 'expires_at', ARGV[3])
  redis.call('ZADD', KEYS[4], ARGV[3], ARGV[1])
end
return 'ok'
