-- Stop a job whose deadline has passed by the server's clock: it ends as expired, with what is committed now.
-- KEYS job, ready, leases, own, progress, deadlines   ARGV id, now_s
-- Returns 'ok' (again if it is ending so, or has), or the state that forbids it: a job that is ending anyway ends as it
-- would have. 'early' if the deadline is yet to come.
local state, ending, deadline = unpack(redis.call('HMGET', KEYS[1], 'state', 'ending', 'expires_at'))
if state == 'expired' or (state == 'finalizing' and ending) then return 'ok' end
if state ~= 'validating' and state ~= 'in_progress' then return state or 'gone' end
if not deadline or now_ms() < deadline * 1000 then return 'early' end
redis.call('HSET', KEYS[1], 'state', 'finalizing', 'finalizing_at', ARGV[2], 'ending', 'expired')
redis.call('HDEL', KEYS[1], 'paused')
redis.call('DEL', KEYS[2], KEYS[3], KEYS[4], KEYS[5])
redis.call('ZREM', KEYS[6], ARGV[1])
requeue(ARGV[1])
return 'ok'
