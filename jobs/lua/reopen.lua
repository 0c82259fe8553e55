-- A committed segment has vanished from storage: run its shard again.
-- KEYS job, ready, commit, tries   ARGV id, shard, record, rows_ok, rows_failed, prompt_tokens, completion_tokens, cached_tokens
-- Returns 1, or 0 if the record is not the one that was found wanting, or the job is ending for another reason than that
-- all its shards are settled.
if redis.call('HGET', KEYS[3], ARGV[2]) ~= ARGV[3] then return 0 end
local state, ending = unpack(redis.call('HMGET', KEYS[1], 'state', 'ending'))
if ending or (state ~= 'finalizing' and state ~= 'in_progress') then return 0 end
redis.call('HDEL', KEYS[3], ARGV[2])
redis.call('HDEL', KEYS[4], ARGV[2])
redis.call('HDEL', KEYS[1], 'joined_at')
local counters = {'done', 'failed', 'prompt_tokens', 'completion_tokens', 'cached_tokens'}
for i, counter in ipairs(counters) do redis.call('HINCRBY', KEYS[1], counter, -ARGV[3 + i]) end
redis.call('HINCRBY', KEYS[1], 'settled', -1)
if state ~= 'in_progress' then redis.call('HSET', KEYS[1], 'state', 'in_progress') end
put_up(ARGV[1], ARGV[2])
requeue(ARGV[1])
return 1
