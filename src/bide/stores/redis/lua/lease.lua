-- lease: take what is due, oldest first, of each topic up to a number; a number of 0 only asks.
-- asked: until (ms from now), holder, since (leases with this token or a later one are left alone: the same call gave
--   them out a moment ago, and they were over at once), then for each topic a number
-- answers: {us, now, the last token before, then for each topic: head of what waits (-1: nothing), head of what is leased (-1),
--   how many, and for each: key, the time at which it woke, body as it now is (in a repeated answer '' for one that
--   has changed hands since)}
-- An entry whose body is missing or cannot be read is set aside, and counted as `damaged`.
local until_at = now + tonumber(ARGV[next_argument])
local holder = sub(ARGV[next_argument + 1], 1, 255)
local since = tonumber(ARGV[next_argument + 2])
next_argument = next_argument + 3

-- What waits and what a lost holder left, merged by time; most often there is nothing of the latter.
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

-- What a first delivery writes behind planned_at: attempt 1, nothing else has happened yet.
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

local reply = {micros, now, tonumber(call('GET', KEYS[1]) or 0)}
local remember, left_out = {micros, now, reply[3]}, {}
for number, topic in ipairs(topics) do
  local want = tonumber(ARGV[next_argument])
  next_argument = next_argument + 1
  local head_at = #reply + 1
  reply[head_at], reply[head_at + 1], reply[head_at + 2] = -1, -1, 0
  remember[head_at], remember[head_at + 1], remember[head_at + 2] = -1, -1, 0
  local taken = 0
  if want > 0 then
    local keys = due(topic, want)
    load(topic, keys)
    for _, key in ipairs(keys) do
      local body = read(topic, key)
      local flags, state, wake
      if body then
        flags, wake = byte(body), unpack_bytes('>I6', body, 21)
        state = has(flags, 7)
      end
      if not body or state > LEASED then
        set_aside(topic, key)
        call('HINCRBY', KEYS[6], 'damaged', 1)
      elseif wake > now then  -- the body is the truth: its entry stood at the wrong time, or in the wrong index
        call('ZREM', topic.index[state == WAITING and LEASED or WAITING], key)
        call('ZADD', topic.index[state], wake, key)
      elseif state == WAITING or unpack_bytes('>I7', body, 2) < since then
        local token, place = next_token(), head_at + 3 * taken + 3
        local held = hold(body, flags, token, wake)
        put(topic, key, state, LEASED, held, until_at)
        reply[place], reply[place + 1], reply[place + 2] = key, wake, held
        remember[place], remember[place + 1], remember[place + 2] = key, wake, ''
        local count = #left_out
        left_out[count + 1], left_out[count + 2], left_out[count + 3] = place + 2, number, token
        taken = taken + 1
      end
    end
    flush(topic)
    reply[head_at + 2] = taken
  end
  reply[head_at] = head(topic, WAITING) or -1
  reply[head_at + 1] = head(topic, LEASED) or -1
  for place = head_at, head_at + 2 do remember[place] = reply[place] end
end
commit()
remember[#reply + 1] = left_out
return answer(reply, remember)
