-- Keep a lease alive, and say how many rows of the shard are done.
-- KEYS job, leases, own, progress   ARGV shard, attempt, ttl_ms, rows_done
-- Returns 'ok', 'lost' (another attempt has the shard, or nobody has), or 'stop' (the job is no longer worked on).
if redis.call('HGET', KEYS[1], 'state') ~= 'in_progress' then return 'stop' end
if redis.call('HGET', KEYS[3], 's:' .. ARGV[1]) ~= ARGV[2] then return 'lost' end
local time = redis.call('TIME')
redis.call('ZADD', KEYS[2], time[1] * 1000 + math.floor(time[2] / 1000) + ARGV[3], ARGV[1])
redis.call('HSET', KEYS[4], ARGV[1], ARGV[4])
return 'ok'
