-- Put a leased shard back before its lease runs out.
-- KEYS ready, leases, own, tries, progress, faults   ARGV id, shard, attempt, fault, counts, rest_ms
-- The try stays counted where counts is 1: the shard may be what failed, and not its worker. The fault, if it is not
-- empty, is kept so that people can see why the shard is tried again. It rests for rest_ms, doubled with each try after
-- the first: a lease without an owner, which expires as any other does.
-- Returns 1, or 0 if the attempt does not hold the shard.
local shard, attempt = ARGV[2], ARGV[3]
if redis.call('HGET', KEYS[3], 's:' .. shard) ~= attempt then return 0 end
redis.call('HDEL', KEYS[3], 's:' .. shard, 'a:' .. attempt, 'f:' .. shard)
redis.call('ZREM', KEYS[2], shard)
redis.call('HDEL', KEYS[5], shard)
if ARGV[4] ~= '' then redis.call('HSET', KEYS[6], shard, ARGV[4]) end
if ARGV[5] == '0' then redis.call('HINCRBY', KEYS[4], shard, -1) end
local rest = tonumber(ARGV[6])
if rest > 0 then
  local tries = tonumber(redis.call('HGET', KEYS[4], shard))
  redis.call('ZADD', KEYS[2], now_ms() + rest * 2 ^ (tries - 1), shard)
else
  put_up(ARGV[1], shard)
end
requeue(ARGV[1])
return 1
