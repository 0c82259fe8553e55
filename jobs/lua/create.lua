-- Write a new job, once, and claim the files that it will write.
-- KEYS job, jobs, live, deadlines, outputs
-- ARGV id, now_ms, expires_at ('' for never), output_url, error_url, field, value, ...
-- Returns {'ok'}; {'exists'}: a retried submit finds its first try; or {'taken', url, id}: a job that has not ended writes
-- that file. The last two change nothing.
if redis.call('EXISTS', KEYS[1]) == 1 then return {'exists'} end
for i = 4, 5 do
  local holder = redis.call('HGET', KEYS[5], ARGV[i])
  if holder then return {'taken', ARGV[i], holder} end
end
redis.call('HSET', KEYS[1], 'state', 'validating', unpack(ARGV, 6))
redis.call('HSET', KEYS[1], 'settled', 0, 'fence', 0, 'done', 0, 'failed', 0, 'claims', cjson.encode({ARGV[4], ARGV[5]}))
redis.call('HSET', KEYS[5], ARGV[4], ARGV[1], ARGV[5], ARGV[1])
redis.call('ZADD', KEYS[2], ARGV[2], ARGV[1])
redis.call('ZADD', KEYS[3], ARGV[2], ARGV[1])
if ARGV[3] ~= '' then
  redis.call('HSET', KEYS[1], 'expires_at', ARGV[3])
  redis.call('ZADD', KEYS[4], ARGV[3], ARGV[1])
end
return {'ok'}
