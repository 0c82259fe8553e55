-- Make one attempt's segment THE result of its shard. Only the shard's owner can, and only once.
-- KEYS job, leases, own, commit, progress, faults
-- ARGV id, shard, attempt, record, now_s, rows_ok, rows_failed, prompt_tokens, completion_tokens, cached_tokens
-- Returns 'ok' (again for a repeated call: the first reply may have been lost), 'superseded' (another attempt's segment
-- is the result), 'lost' (the lease has gone to another), or 'stop' (the job is no longer worked on).
-- The record of a shard is never replaced. An expired lease that nobody else has taken may still commit.
local present = redis.call('HGET', KEYS[4], ARGV[2])
if present then
  if cjson.decode(present).attempt == ARGV[3] then return 'ok' end
  return 'superseded'
end
if redis.call('HGET', KEYS[1], 'state') ~= 'in_progress' then return 'stop' end
if redis.call('HGET', KEYS[3], 's:' .. ARGV[2]) ~= ARGV[3] then return 'lost' end
redis.call('HSET', KEYS[4], ARGV[2], ARGV[4])
redis.call('HDEL', KEYS[3], 's:' .. ARGV[2], 'a:' .. ARGV[3], 'f:' .. ARGV[2])
redis.call('ZREM', KEYS[2], ARGV[2])
redis.call('HDEL', KEYS[5], ARGV[2])
redis.call('HDEL', KEYS[6], ARGV[2])
local counters = {'done', 'failed', 'prompt_tokens', 'completion_tokens', 'cached_tokens'}
for i, counter in ipairs(counters) do redis.call('HINCRBY', KEYS[1], counter, ARGV[5 + i]) end
if redis.call('HINCRBY', KEYS[1], 'settled', 1) == tonumber(redis.call('HGET', KEYS[1], 'total')) then
  redis.call('HSET', KEYS[1], 'state', 'finalizing', 'finalizing_at', ARGV[5])
  -- A job that is done is not paused, should a shard have to run again.
  redis.call('HDEL', KEYS[1], 'paused')
  requeue(ARGV[1])
end
tell(ARGV[1])
return 'ok'
