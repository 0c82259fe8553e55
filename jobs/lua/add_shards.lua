-- Put planned shards up for leasing. Planning twice writes the same shards twice: the plan follows from spec and input.
-- KEYS job, ready, shards   ARGV shard, place, plan, shard, place, plan, ...
-- Returns 'ok', or the state of a job that is no longer being planned, and changes nothing.
local state = redis.call('HGET', KEYS[1], 'state')
if state ~= 'validating' then return state or 'gone' end
for i = 1, #ARGV, 3 do
  redis.call('HSET', KEYS[3], ARGV[i], ARGV[i + 2])
  redis.call('ZADD', KEYS[2], ARGV[i + 1], ARGV[i])
end
return 'ok'
