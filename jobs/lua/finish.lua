-- End a job. Its output is free for another.
-- KEYS job, live, deadlines, outputs, ready, leases, own, progress, shards, at
-- ARGV id, from_state, to_state, now_s, field, value, ...
-- Returns 'ok' (again if it ended so before), or the state that forbids it. The commit records stay, as the job's history.
local state, claims = unpack(redis.call('HMGET', KEYS[1], 'state', 'claims'))
if state == ARGV[3] then return 'ok' end
if state ~= ARGV[2] then return state or 'gone' end
redis.call('HSET', KEYS[1], 'state', ARGV[3], ARGV[3] .. '_at', ARGV[4], unpack(ARGV, 5))
redis.call('HDEL', KEYS[1], 'paused', 'ending', 'claims')
redis.call('ZREM', KEYS[2], ARGV[1])
redis.call('ZREM', KEYS[3], ARGV[1])
redis.call('HDEL', KEYS[4], unpack(cjson.decode(claims)))
redis.call('DEL', unpack(KEYS, 5))
requeue(ARGV[1])
tell(ARGV[1])
return 'ok'
