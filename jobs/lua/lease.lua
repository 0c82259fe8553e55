-- Hand one shard of a model's jobs to one attempt, with a fence that only grows.
-- ARGV model, attempt, ttl_ms, now_s, patience_ms, worker, left_to_each, tenant, weight, ...
-- A tenant that is not listed has the weight 1. Nothing is handed out of a job that has not more than left_to_each shards
-- ready for each other worker.
-- Returns {'ok', job, spec, shard, fence, plan, tries}, or {'empty'}. Keys follow from what the queue holds: see queue.lua.
-- An attempt that holds a shard gets the same answer again: the first reply may have been lost.
-- Tries are counted here and not at failure, since a shard that kills its worker never reports one.
-- The highest priority is served. A lower one that got nothing for patience_ms comes first, at every fourth turn at most.
-- Of the job whose turn it is, the shard is the first in line, or, where the job is worked on in runs, the next in the
-- worker's run: see next_in_runs.
local TURNS = 3
local model, attempt, now, worker = 'pm:queue:' .. ARGV[1], ARGV[2], now_ms(), ARGV[6]
local left_to_others = ARGV[7] * (redis.call('SCARD', 'pm:workers') - 1)
local asked = 'pm:asked:' .. attempt
local weights = {}
for i = 8, #ARGV, 2 do weights[ARGV[i]] = tonumber(ARGV[i + 1]) end

local function key(id, name) return 'pm:{' .. id .. '}:' .. name end

local function lease_of(id, shard, fence)
  redis.call('ZADD', key(id, 'leases'), now + ARGV[3], shard)
  local spec, plan = redis.call('HGET', key(id, 'job'), 'spec'), redis.call('HGET', key(id, 'shards'), shard)
  return {'ok', id, spec, shard, fence, plan, redis.call('HGET', key(id, 'tries'), shard)}
end

-- The level whose turn it is.
local function next_level()
  local priority = redis.call('ZRANGE', model, 0, 0)[1]
  if not priority then return nil end
  local waiting = redis.call('ZRANGE', model .. ':served', 0, 0, 'WITHSCORES')
  local turns = tonumber(redis.call('GET', model .. ':turns') or 0)
  if waiting[1] ~= priority and now - waiting[2] >= tonumber(ARGV[5]) and turns >= TURNS then return waiting[1] end
  return priority
end

-- The tenant of a level and the job of that tenant with the least virtual time; of tenants with the same, the one whose
-- job is the oldest. Places sort by age.
local function next_job(level)
  local least = redis.call('ZRANGE', level, 0, 0, 'WITHSCORES')[2]
  local tenant, place
  for _, candidate in ipairs(redis.call('ZRANGEBYSCORE', level, '-inf', least)) do
    local first = redis.call('ZRANGE', level .. '/' .. candidate, 0, 0)[1]
    if not place or first < place then tenant, place = candidate, first end
  end
  return tenant, place
end

local function charge(priority, tenant, place, weight)
  local level = model .. ':' .. priority
  local jobs, past = level .. '/' .. tenant, level .. ':past'
  redis.call('HSET', past, 'clock', redis.call('ZSCORE', level, tenant), 'clock/' .. tenant, redis.call('ZSCORE', jobs, place))
  redis.call('ZINCRBY', level, 1 / (weights[tenant] or 1), tenant)
  redis.call('ZINCRBY', jobs, 1 / weight, place)
  if priority == redis.call('ZRANGE', model, 0, 0)[1] then
    redis.call('INCR', model .. ':turns')
  else
    redis.call('SET', model .. ':turns', 0)
  end
  redis.call('ZADD', model .. ':served', now, priority)
end

-- Of a job whose neighbours in line have prefixes in common: a worker computes a prefix once for shards that it has one
-- after the other. So each worker has a run of the line: it begins at the shard that the worker was handed last, and goes
-- to where the next one begins. A worker that is new to the job, or at the end of its run, takes what is in no run, and
-- then the second half of the longest.
--     line    . . . a a a . . . . . b b b . . . .      a, b: what two workers were handed
--             nobody's  a's run         b's run
local function next_in_runs(id)
  local ready, at = key(id, 'ready'), key(id, 'at')
  local function one_of(first, last, number)
    return redis.call('ZRANGEBYSCORE', ready, first, last, 'LIMIT', number, 1)[1]
  end
  local mine, others = nil, {}
  local found = redis.call('HGETALL', at)
  for i = 1, #found, 2 do
    local place = tonumber(found[i + 1])
    if found[i] == worker then mine = place else table.insert(others, {place = place, worker = found[i]}) end
  end
  table.sort(others, function(one, other) return one.place < other.place end)
  if mine then
    local ends = '+inf'
    for _, other in ipairs(others) do
      if other.place > mine then ends = '(' .. other.place; break end
    end
    local shard = one_of(mine, ends, 0)
    if shard then return shard end
  end
  local ends = {}
  for _, other in ipairs(others) do
    -- Who is gone has no run: what was in it belongs to the one before.
    if redis.call('EXISTS', 'pm:worker:' .. other.worker) == 1 then
      table.insert(ends, '(' .. other.place)
    else
      redis.call('HDEL', at, other.worker)
    end
  end
  table.insert(ends, '+inf')
  local first, most, longest = '-inf', 0, nil
  for i, last in ipairs(ends) do
    local count = redis.call('ZCOUNT', ready, first, last)
    if i == 1 and count > 0 then return one_of(first, last, 0) end
    if count > most then most, longest = count, {first, last} end
    first = last:sub(2)
  end
  return longest and one_of(longest[1], longest[2], math.floor(most / 2))
end

-- The next shard of a job that may be tried once more, with its fence; those that were tried too often are settled as
-- dead on the way.
local function take(id)
  local job, commit = key(id, 'job'), key(id, 'commit')
  local max_tries, total, in_runs = unpack(redis.call('HMGET', job, 'max_tries', 'total', 'in_runs'))
  in_runs = in_runs and worker ~= ''
  while true do
    local shard
    if in_runs then shard = next_in_runs(id) else shard = redis.call('ZRANGE', key(id, 'ready'), 0, 0)[1] end
    if not shard then return nil end
    local place = redis.call('ZSCORE', key(id, 'ready'), shard)
    redis.call('ZREM', key(id, 'ready'), shard)
    if redis.call('HEXISTS', commit, shard) == 0 then
      local tries = redis.call('HINCRBY', key(id, 'tries'), shard, 1)
      if tries <= tonumber(max_tries) then
        local fence = redis.call('HINCRBY', job, 'fence', 1)
        redis.call('HSET', key(id, 'own'), 's:' .. shard, attempt, 'a:' .. attempt, shard, 'f:' .. shard, fence)
        redis.call('HSETNX', job, 'started_at', ARGV[4])
        if in_runs then redis.call('HSET', key(id, 'at'), worker, place) end
        return shard, tostring(fence)
      end
      local fault = redis.call('HGET', key(id, 'faults'), shard) or nil
      redis.call('HSET', commit, shard, cjson.encode({dead = true, tries = tries - 1, fault = fault}))
      if redis.call('HINCRBY', job, 'settled', 1) == tonumber(total) then
        redis.call('HSET', job, 'state', 'finalizing', 'finalizing_at', ARGV[4])
      end
    end
  end
end

local before = redis.call('GET', asked)
if before then
  local shard = redis.call('HGET', key(before, 'own'), 'a:' .. attempt)
  if shard then return lease_of(before, shard, redis.call('HGET', key(before, 'own'), 'f:' .. shard)) end
end
while true do
  local priority = next_level()
  if not priority then return {'empty'} end
  local tenant, place = next_job(model .. ':' .. priority)
  local id = place:match(':(.*)$')
  if redis.call('ZCARD', key(id, 'ready')) <= left_to_others then return {'empty'} end
  local shard, fence = take(id)
  if shard then
    charge(priority, tenant, place, tonumber(redis.call('HGET', key(id, 'job'), 'weight')))
    redis.call('SET', asked, id, 'PX', ARGV[3])
  end
  requeue(id)
  if shard then return lease_of(id, shard, fence) end
end
