-- Return the shards of expired leases to the ready set. Their old owners find their leases lost.
-- KEYS job, ready, leases, own, progress   ARGV id, limit
-- Returns {expired, ready, leased}; of a paused job none is ready to be handed out.
local expired = redis.call('ZRANGEBYSCORE', KEYS[3], '-inf', now_ms(), 'LIMIT', 0, ARGV[2])
for _, shard in ipairs(expired) do
  local attempt = redis.call('HGET', KEYS[4], 's:' .. shard)
  redis.call('HDEL', KEYS[4], 's:' .. shard, 'f:' .. shard, 'a:' .. (attempt or ''))
  redis.call('ZREM', KEYS[3], shard)
  redis.call('HDEL', KEYS[5], shard)
  put_up(ARGV[1], shard)
end
requeue(ARGV[1])
local paused = redis.call('HEXISTS', KEYS[1], 'paused') == 1
return {#expired, paused and 0 or redis.call('ZCARD', KEYS[2]), redis.call('ZCARD', KEYS[3])}
