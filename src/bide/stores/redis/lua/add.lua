-- add: schedule tasks, each with its own on_conflict.
-- asked: for each topic a count, then for each task
--   key, how ('r' replace, 'k' keep, 'e' earliest, 'l' latest, 'f' refuse; the body's flags; then an instant; after a
--   capital letter also a space and the token that a task under the key must have), seed (the body without its head)
-- answers: {server's time in us, now, first token, then for each task that was not simply created
--   its place, the result ('p' replaced, 'k' kept, 'f' refused, 's' stale_token), the old body or '', the old wake or
--   -1}
-- The task at place n (from 0) has the token `first + n`, whatever happened to the other tasks.
local function taken(how, known, old)
  local mode, flags, due = byte(how), byte(old), known.due
  if known.if_token then
    if known.if_token ~= unpack_bytes('>I7', old, 2) then return false, 's' end
    mode = mode + 32
  end
  local state = has(flags, 7)
  if state == CANCELLED or state == DEAD or mode == 114 then return true end     -- 'r'
  if mode == 107 then return false, 'k' end                                       -- 'k': waiting, leased or done
  if mode == 102 then return false, 'f' end                                       -- 'f'
  local old_due = unpack_bytes('>I6', old, 15)
  if mode == 101 then                                                             -- 'e'
    if state == LEASED or (state == WAITING and due >= old_due) then return false, 'k' end
  elseif state == WAITING and due <= old_due then                                 -- 'l'
    return false, 'k'
  end
  return true
end

-- Most tasks of a batch have the same `how`, so each distinct one is decoded once.
local meant = {}
local function meaning(how)
  local text, if_token = sub(how, 3), nil
  if byte(how) < 97 then text, if_token = string.match(text, '(%S+) (%d+)') end
  local due = instant(text)
  local wake = max(due, now)
  local known = {due = due, wake = wake, flags = byte(how, 2), times = pack('>I6I6I6', now, due, wake)}
  if if_token then known.if_token = tonumber(if_token) end  -- not above: a fifth field would double the table
  meant[how] = known
  return known
end

-- Handle a key that has a body. If the body's retention has passed, the answer is as if the key were free. Returns
-- true if the new task takes the key, and the state of the old task.
local function replace(topic, key, how, known, old, place, reply)
  local state, over = has(byte(old), 7), gone(old)
  old = with_end(topic.index[LEASED], key, old)
  local put_it, word, was = true, nil, -1
  if not over then put_it, word = taken(how, known, old) end
  if put_it then
    if state <= LEASED then was = unpack_bytes('>I6', old, 21) end
    if has(byte(old), GROUP) ~= 0 then leave(topic, key, old, nil, state) end
    if state >= DONE then unkept[#unkept + 1] = topic.name .. '\0' .. key end
  end
  if over then return put_it, state end
  local count = #reply
  reply[count + 1] = place
  reply[count + 2] = word or 'p'
  reply[count + 3] = put_it and '' or old
  reply[count + 4] = was
  return put_it, state
end

local first = next_token()
local reply = {micros, now, first}
local place = 0
for _, topic in ipairs(topics) do
  local keys, from = share_of(topic, 3)
  local olds, written, added = topic.old, topic.written, bucket(topic.added, WAITING)
  local bodies, entries, least = 0, 0, topic.wake
  for task = 1, #keys do
    local key, how, seed = keys[task], ARGV[from + 1], ARGV[from + 2]
    from = from + 3
    local known = meant[how] or meaning(how)
    local put_it, flags, wake = true, known.flags, known.wake
    local body = pack('>BI7', flags, first + place) .. known.times .. seed
    if olds[key] then
      -- flush first: the existing task may come from this batch
      topic.wake = least
      flush(topic)
      local old, state = (read(topic, key)), nil
      if old then
        put_it, state = replace(topic, key, how, known, old, place, reply)
        if put_it then put(topic, key, state, WAITING, body, wake) end
      else
        set_aside(topic, key)
        put(topic, key, nil, WAITING, body, wake)
      end
      flush(topic)
      written, added, bodies, entries = topic.written, bucket(topic.added, WAITING), 0, 0
    else
      -- the common case, inlined: each function call or table would add a tenth to its cost
      written[bodies + 1], written[bodies + 2] = key, body
      added[entries + 1], added[entries + 2] = wake, key
      bodies, entries = bodies + 2, entries + 2
      olds[key] = body
    end
    if put_it then
      if not least or wake < least then least = wake end
      if has(flags, GROUP) ~= 0 then
        local start = has(flags, DEADLINE) ~= 0 and 7 or 1
        join(topic, key, sub(seed, start + 1, start + byte(seed, start)), WAITING)
      end
    end
    place = place + 1
  end
  topic.wake = least
end
last_token = first + place - 1
commit()
return answer(reply)
