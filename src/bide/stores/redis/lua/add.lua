-- add: schedule tasks, each by its own on_conflict.
-- asked: for each topic a count, then for each task
--   key, when ('r' replace, 'k' keep, 'e' earliest, 'l' latest, 'f' refuse; then an instant),
--   seed (a body without its head: flags, then the parts after RAN)
-- answers: {server's time in us, now, first token, then for each task that was not simply created
--   its place, what happened ('p' replaced, 'k' kept, 'f' refused), the old body or '', the wake before or -1}
-- The task at place n (from 0) has the token `first + n`, whatever became of the others.
local function taken(when, due, old)
  local mode, flags = byte(when), byte(old)
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

local first = next_token()
local reply = {micros, now, first}
local place = 0
for _, topic in ipairs(topics) do
  local count = tonumber(ARGV[next_argument])
  local keys, from = {}, next_argument + 1
  for task = 1, count do keys[task] = ARGV[from + 3 * (task - 1)] end
  load(topic, keys)
  for task = 1, count do
    local key, when, seed = keys[task], ARGV[from + 1], ARGV[from + 2]
    from = from + 3
    local due = instant(sub(when, 2))
    local wake = max(due, now)
    local old, there = read(topic, key)
    local state, put_it, word = nil, true, nil
    if old then
      state = has(byte(old), 7)
      put_it, word = taken(when, due, old)
      local was = -1
      if put_it then
        if state <= LEASED then was = unpack_bytes('>I6', old, 21) end
        if has(byte(old), GROUP) ~= 0 then
          local _, group = parts(old, (ran(old)))
          left[#left + 1] = group_member(topic, key, group)
        end
        if state >= DONE then unkept[#unkept + 1] = topic.name .. '\0' .. key end
      end
      reply[#reply + 1] = place
      reply[#reply + 1] = word or 'p'
      reply[#reply + 1] = put_it and '' or old
      reply[#reply + 1] = was
    elseif there then
      set_aside(topic, key)
    end
    if put_it then
      local flags = byte(seed)
      put(topic, key, state, WAITING, pack('>BI7I6I6I6', flags, first + place, now, due, wake) .. sub(seed, 2), wake)
      topic.born = true
      if has(flags, GROUP) ~= 0 then
        local size = byte(seed, has(flags, DEADLINE) ~= 0 and 8 or 2)
        local start = has(flags, DEADLINE) ~= 0 and 9 or 3
        joined[#joined + 1] = 0
        joined[#joined + 1] = group_member(topic, key, sub(seed, start, start + size - 1))
      end
    end
    place = place + 1
  end
  next_argument = from
end
last_token = first + place - 1
commit()
return answer(reply)
