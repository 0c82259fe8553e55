-- Hand one shard of a job to one attempt, with a fence that only grows.
-- KEYS job, ready, leases, own, commit, tries, shards, faults, active   ARGV id, attempt, ttl_ms, max_tries, now_s
-- Returns {'ok', shard, fence, plan}, {'empty'}, or {'stop', state}.
-- An attempt that holds a shard gets the same answer again: the first reply may have been lost.
-- Tries are counted here and not at failure, since a shard that kills its worker never reports one.
local state = redis.call('HGET', KEYS[1], 'state')
if state ~= 'in_progress' then return {'stop', state or 'gone'} end
local time = redis.call('TIME')
local expiry = time[1] * 1000 + math.floor(time[2] / 1000) + ARGV[3]
local mine = redis.call('HGET', KEYS[4], 'a:' .. ARGV[2])
if mine then
  redis.call('ZADD', KEYS[3], expiry, mine)
  return {'ok', mine, redis.call('HGET', KEYS[4], 'f:' .. mine), redis.call('HGET', KEYS[7], mine)}
end
while true do
  local popped = redis.call('ZPOPMIN', KEYS[2])
  if #popped == 0 then return {'empty'} end
  local shard = popped[1]
  if redis.call('HEXISTS', KEYS[5], shard) == 0 then
    local tries = redis.call('HINCRBY', KEYS[6], shard, 1)
    if tries <= tonumber(ARGV[4]) then
      local fence = redis.call('HINCRBY', KEYS[1], 'fence', 1)
      redis.call('HSET', KEYS[4], 's:' .. shard, ARGV[2], 'a:' .. ARGV[2], shard, 'f:' .. shard, fence)
      redis.call('ZADD', KEYS[3], expiry, shard)
      redis.call('HSETNX', KEYS[1], 'started_at', ARGV[5])
      return {'ok', shard, tostring(fence), redis.call('HGET', KEYS[7], shard)}
    end
    local fault = redis.call('HGET', KEYS[8], shard) or nil
    redis.call('HSET', KEYS[5], shard, cjson.encode({dead = true, tries = tries - 1, fault = fault}))
    if redis.call('HINCRBY', KEYS[1], 'settled', 1) == tonumber(redis.call('HGET', KEYS[1], 'total')) then
      redis.call('HSET', KEYS[1], 'state', 'finalizing', 'finalizing_at', ARGV[5])
      redis.call('ZREM', KEYS[9], ARGV[1])
      return {'stop', 'finalizing'}
    end
  end
end
