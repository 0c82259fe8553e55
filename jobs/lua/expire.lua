-- Return the shards of expired leases to the ready set. Their old owners find their leases lost.
-- KEYS ready, leases, own, progress   ARGV limit
-- Returns {expired, ready, leased}.
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local expired = redis.call('ZRANGEBYSCORE', KEYS[2], '-inf', now, 'LIMIT', 0, ARGV[1])
for _, shard in ipairs(expired) do
  local attempt = redis.call('HGET', KEYS[3], 's:' .. shard)
  redis.call('HDEL', KEYS[3], 's:' .. shard, 'f:' .. shard, 'a:' .. (attempt or ''))
  redis.call('ZREM', KEYS[2], shard)
  redis.call('HDEL', KEYS[4], shard)
  redis.call('ZADD', KEYS[1], shard, shard)
end
return {#expired, redis.call('ZCARD', KEYS[1]), redis.call('ZCARD', KEYS[2])}
