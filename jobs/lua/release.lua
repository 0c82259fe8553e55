-- Put a leased shard back before its lease runs out.
-- KEYS ready, leases, own, tries, progress, faults   ARGV shard, attempt, fault, rest_ms
-- An empty fault is a give-back: the worker was asked to stop, and the try does not count. Otherwise the try stays
-- counted, and the fault is kept so that people can see why the shard is tried again. It then rests for rest_ms, doubled
-- with each try after the first: a lease without an owner, which expires as any other does.
-- Returns 1, or 0 if the attempt does not hold the shard.
if redis.call('HGET', KEYS[3], 's:' .. ARGV[1]) ~= ARGV[2] then return 0 end
redis.call('HDEL', KEYS[3], 's:' .. ARGV[1], 'a:' .. ARGV[2], 'f:' .. ARGV[1])
redis.call('ZREM', KEYS[2], ARGV[1])
redis.call('HDEL', KEYS[5], ARGV[1])
if ARGV[3] == '' then
  redis.call('HINCRBY', KEYS[4], ARGV[1], -1)
else
  redis.call('HSET', KEYS[6], ARGV[1], ARGV[3])
end
local rest = tonumber(ARGV[4])
if rest > 0 then
  local time = redis.call('TIME')
  local tries = tonumber(redis.call('HGET', KEYS[4], ARGV[1]))
  redis.call('ZADD', KEYS[2], time[1] * 1000 + math.floor(time[2] / 1000) + rest * 2 ^ (tries - 1), ARGV[1])
else
  redis.call('ZADD', KEYS[1], ARGV[1], ARGV[1])
end
return 1
