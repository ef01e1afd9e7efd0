-- lease: take due tasks, oldest first, up to a number for each topic; a number of 0 only reads the topic's heads, and
--   repairs its entry in the index of topics.
-- asked: until (ms from now), holder, the most bytes of all bodies (but always one body), since (leases with this token
--   or a later one are left alone: the same call made them a moment ago, and they expired at once), which heads of all
--   topics here to read ('': none, 's': those that wake soon, 'a': all), 1 if there are other workers, then for each
--   topic a number
-- answers: {us, now, the last token before, then for each topic: head of the waiting tasks (-1: none), head of the
--   leased tasks (-1: none), count, and for each task: key, the time at which it woke, its current body (in a repeated
--   answer '' for a task that has changed hands since), and at the end {1 if these are all heads, topic, head, ...}}
-- An entry whose body is missing or unreadable is set aside, and counted as `damaged`.
local SOON = 2000          -- ms: more than the time between two reads
local FEW = 64             -- up to this number all heads are read; the most bodies at once
local until_at = now + tonumber(ARGV[next_argument])
local holder = sub(ARGV[next_argument + 1], 1, 255)
local most, bytes, full = tonumber(ARGV[next_argument + 2]), 0, false
local since = tonumber(ARGV[next_argument + 3])
local which = ARGV[next_argument + 4]
local others = ARGV[next_argument + 5] == '1'
next_argument = next_argument + 6

-- Waiting tasks and tasks with an expired lease, merged by time; mostly there are none of the latter.
local function due(topic, want)
  local waiting = call('ZRANGEBYSCORE', topic.index[WAITING], '-inf', now, 'LIMIT', 0, want)
  local lost = call('ZRANGEBYSCORE', topic.index[LEASED], '-inf', now, 'LIMIT', 0, want)
  if #lost == 0 then return waiting end
  if #waiting == 0 then return lost end
  local all = {}
  for state, keys in pairs({[WAITING] = waiting, [LEASED] = lost}) do
    for _, key in ipairs(keys) do all[#all + 1] = {tonumber(call('ZSCORE', topic.index[state], key)), key} end
  end
  table.sort(all, function(one, other) return one[1] < other[1] end)
  local keys = {}
  for number = 1, math.min(want, #all) do keys[number] = all[number][2] end
  return keys
end

-- The fields after planned_at at a first delivery: attempt 1, and everything else still zero.
local until_packed = pack('>I6', until_at)
local first_time = pack('>I4I4I4I6I6B', 1, 0, 0, 0, 0, #holder) .. holder .. pack('>I4', NO_ERROR)

local function hold(body, flags, token, wake)
  if has(flags, RAN) == 0 then
    return pack('>BI7', flags + LEASED + RAN, token) .. sub(body, 9, 20) .. until_packed .. sub(body, 21, 26)
      .. first_time .. sub(body, HEAD + 1)
  end
  local created, due_at = unpack_bytes('>I6I6', body, 9)
  local place, planned, attempt, failures, losses, _, _, _, size, error = ran(body)
  if has(flags, 7) == LEASED then losses = losses + 1 else planned = wake end
  return body_of(flags, LEASED, token, created, due_at, until_at, planned, attempt + 1, failures, losses, 0, 0, holder,
                 size, error, sub(body, place))
end

local reply = {micros, now, stored_token()}
local remember = {micros, now, reply[3]}
for number, topic in ipairs(topics) do
  local want = tonumber(ARGV[next_argument])
  next_argument = next_argument + 1
  local head_at, remember_at = #reply + 1, #remember + 1
  for place = 0, 2 do reply[head_at + place], remember[remember_at + place] = 0, 0 end
  local taken, changed = 0, false
  if want > 0 and not full then
    local keys = due(topic, want)
    changed = #keys > 0
    local bodies, first, last, size = {}, 1, 0, most  -- `size`: of the last body, by which the next ones are read
    local waited, written, leased = {}, {}, {}  -- each key occurs once, so no flush is needed between
    for place = 1, #keys do
      if place > last then
        first, last = place, math.min(#keys, place - 1 + max(1, math.min(FEW, floor((most - bytes) / size))))
        bodies = call('HMGET', topic.bodies, unpack(keys, first, last))
      end
      local key, body = keys[place], bodies[place - first + 1]
      size = body and #body + 1 or size
      full = body and bytes > 0 and bytes + size > most
      if full then break end
      local flags, state, wake
      if body and sound(body) then
        flags = byte(body)
        state = has(flags, 7)
        if state == LEASED then body = with_end(topic.index[LEASED], key, body) end
        wake = unpack_bytes('>I6', body, 21)
      end
      if not flags or state > LEASED then
        set_aside(topic, key)
        redis.pcall('HINCRBY', KEYS[6], 'damaged', 1)  -- pcall, because the counter may be damaged too
      elseif wake > now then  -- the entry had the wrong time or was in the wrong index
        call('ZREM', topic.index[state == WAITING and LEASED or WAITING], key)
        call('ZADD', topic.index[state], wake, key)
      elseif state == WAITING or unpack_bytes('>I7', body, 2) < since then
        local token = next_token()
        local held = hold(body, flags, token, wake)
        if state == WAITING then waited[#waited + 1] = key end
        local at, short, two = head_at + 3 * taken + 3, remember_at + 2 * taken + 3, 2 * taken
        reply[at], reply[at + 1], reply[at + 2] = key, wake, held
        remember[short], remember[short + 1] = key, token
        written[two + 1], written[two + 2] = key, held
        leased[two + 1], leased[two + 2] = until_at, key
        taken, bytes = taken + 1, bytes + size
      end
    end
    send('ZREM', topic.index[WAITING], waited)
    send('HSET', topic.bodies, written)
    send('ZADD', topic.index[LEASED], leased)
  end
  local wake, ends = head(topic, WAITING), head(topic, LEASED)
  if want == 0 or changed and (not wake or wake > now) then index_head(topic, wake, ends) end
  reply[head_at], reply[head_at + 1] = wake or -1, ends or -1
  if others and taken > 0 and (not wake or wake > now) and ends > now then
    local first = string.format('%.0f', wake and math.min(wake, ends) or ends)
    call(ARGV[3], ARGV[4], ARGV[5] .. ' -' .. first .. ' ' .. topic.name)
  end
  reply[head_at + 2] = taken
  for place = 0, 2 do remember[remember_at + place] = reply[head_at + place] end
end
commit()
local heads = {}
if which ~= '' then
  local all = which == 'a' or call('ZCOUNT', KEYS[3], '-inf', '(+inf') <= FEW
  heads = call('ZRANGEBYSCORE', KEYS[3], '-inf', all and '(+inf' or now + SOON, 'WITHSCORES')
  table.insert(heads, 1, all and 1 or 0)
end
reply[#reply + 1], remember[#remember + 1] = heads, heads
return answer(reply, remember)
