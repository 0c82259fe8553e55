-- Enter the segments that a lost ledger's attempts left in storage, before the job opens.
-- KEYS job, ready, commit
-- ARGV fence, then for each: shard, record, rows_ok, rows_failed, prompt_tokens, completion_tokens, cached_tokens
-- Returns 'ok' (again for a repeated call), or the state of a job that is no longer being planned, and changes nothing.
-- Fences go on above `fence`. The record of a shard is never replaced.
local state = redis.call('HGET', KEYS[1], 'state')
if state ~= 'validating' then return state or 'gone' end
if tonumber(redis.call('HGET', KEYS[1], 'fence')) < tonumber(ARGV[1]) then redis.call('HSET', KEYS[1], 'fence', ARGV[1]) end
local counters = {'done', 'failed', 'prompt_tokens', 'completion_tokens', 'cached_tokens'}
for i = 2, #ARGV, 7 do
  if redis.call('HSETNX', KEYS[3], ARGV[i], ARGV[i + 1]) == 1 then
    redis.call('ZREM', KEYS[2], ARGV[i])
    for n, counter in ipairs(counters) do redis.call('HINCRBY', KEYS[1], counter, ARGV[i + 1 + n]) end
    redis.call('HINCRBY', KEYS[1], 'settled', 1)
  end
end
return 'ok'
