-- The queue of a model's shards: whose turn it is. These lines stand before every script that can change it.
--   pm:queue:<model>                       Z  priority -> its negative: the levels that have shards to hand out
--   pm:queue:<model>:served                Z  priority -> when the level was served last, or began to wait, in ms
--   pm:queue:<model>:turns                 S  shards handed out by priority since a level that had waited too long
--   pm:queue:<model>:<priority>            Z  tenant -> virtual time
--   pm:queue:<model>:<priority>/<tenant>   Z  place of a job, which is its age and id -> virtual time
--   pm:queue:<model>:<priority>:past       H  virtual times of those who have nothing ready now, and the clocks
-- A level's tenants, and a tenant's jobs, share by start-time fair queuing (Goyal, Vin and Cheng, 1996): a shard moves
-- its owner's virtual time on by 1 / weight, and the least is served next. The clock is the time of the one served
-- last. Who comes back starts at the clock at least, so that nobody saves up turns by having no work.

local function started(past, name, clock)
  local times = redis.call('HMGET', past, name, clock)
  return math.max(tonumber(times[1] or 0), tonumber(times[2] or 0))
end

local function now_ms()
  local time = redis.call('TIME')
  return time[1] * 1000 + math.floor(time[2] / 1000)
end

local function leave(model, priority, tenant, place, time, id)
  local level = model .. ':' .. priority
  local jobs, past = level .. '/' .. tenant, level .. ':past'
  redis.call('HSET', past, 'job/' .. id, time)
  redis.call('ZREM', jobs, place)
  if redis.call('EXISTS', jobs) == 1 then return end
  redis.call('HSET', past, 'tenant/' .. tenant, redis.call('ZSCORE', level, tenant))
  redis.call('ZREM', level, tenant)
  if redis.call('EXISTS', level) == 1 then return end
  redis.call('DEL', past)
  redis.call('ZREM', model, priority)
  redis.call('ZREM', model .. ':served', priority)
  if redis.call('EXISTS', model) == 0 then redis.call('DEL', model .. ':turns') end
end

-- Put a job into the queue, or take it out, as its state asks for. To be called after each change of a job's state, of
-- its pause or of its ready shards.
local function requeue(id)
  local job = redis.call('HMGET', 'pm:{' .. id .. '}:job', 'state', 'paused', 'model_key', 'priority', 'tenant', 'place')
  if not job[3] then return end
  local model, priority, tenant, place = 'pm:queue:' .. job[3], job[4], job[5], job[6]
  local level = model .. ':' .. priority
  local jobs, past = level .. '/' .. tenant, level .. ':past'
  local waits = job[1] == 'in_progress' and not job[2] and redis.call('EXISTS', 'pm:{' .. id .. '}:ready') == 1
  local time = redis.call('ZSCORE', jobs, place)
  if time and not waits then
    leave(model, priority, tenant, place, time, id)
  elseif waits and not time then
    redis.call('ZADD', jobs, started(past, 'job/' .. id, 'clock/' .. tenant), place)
    if not redis.call('ZSCORE', level, tenant) then
      redis.call('ZADD', level, started(past, 'tenant/' .. tenant, 'clock'), tenant)
    end
    redis.call('ZADD', model, -priority, priority)
    redis.call('ZADD', model .. ':served', 'NX', now_ms(), priority)
  end
  if job[1] ~= 'in_progress' then redis.call('HDEL', past, 'job/' .. id) end
end

-- Put a job on the level of another priority. It comes in there as one that comes back.
local function move(id, priority)
  local job = 'pm:{' .. id .. '}:job'
  local model_key, old, tenant, place = unpack(redis.call('HMGET', job, 'model_key', 'priority', 'tenant', 'place'))
  if old == priority then return end
  local model = 'pm:queue:' .. model_key
  local level = model .. ':' .. old
  local time = redis.call('ZSCORE', level .. '/' .. tenant, place)
  if time then leave(model, old, tenant, place, time, id) end
  redis.call('HDEL', level .. ':past', 'job/' .. id)
  redis.call('HSET', job, 'priority', priority)
  requeue(id)
end

-- Make a shard ready to be handed out, at its place in line.
local function put_up(id, shard)
  local plan = redis.call('HGET', 'pm:{' .. id .. '}:shards', shard)
  redis.call('ZADD', 'pm:{' .. id .. '}:ready', plan and cjson.decode(plan).place or shard, shard)
end

-- Wake those who wait for news of a job. Only a hint: who may not publish, or does not listen, misses nothing but time.
local function tell(id)
  redis.pcall('PUBLISH', 'pm:news:' .. id, '')
end
