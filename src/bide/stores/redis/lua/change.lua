-- change: move, cancel or redrive tasks.
-- asked: for each topic a count, then for each change
--   key, what: op (1: 0 move, 1 cancel, 2 redrive), if_token (7; 0: none), keep_until (6), deadline (6; 2^48-1: none),
--   when (1 + n: an instant), then the new id as a body has it
-- answers: {us, now, then for each change: word, old wake (-1: none), the current body ('': none)}
--   words: m moved, u under_way, f finished, s stale_token, n not_found, x refused, c cancelled,
--   w cancelled_while_leased, r redriven
local NO_DEADLINE = 281474976710655

local function change(topic, key, what)
  local body = read(topic, key)
  if not body or gone(body) then return 'n', -1, '' end
  local op, if_token, keep, new_deadline, when, id_at = unpack_bytes('>BI7I6I6Bc0', what)
  local flags, token, created, due, wake = unpack_bytes('>BI7I6I6I6', body)
  local state = has(flags, 7)
  if state == LEASED then body = with_end(topic.index[LEASED], key, body) end
  if state >= DONE and not (op == 2 and state == DEAD) then return 'f', -1, body end
  if if_token ~= 0 and if_token ~= token then return 's', -1, body end
  if op == 1 then
    local place, planned, attempt, failures, losses, _, _, holder, size, error = ran(body)
    if state == LEASED then wake = started(token) end
    token = next_token()
    local ended = body_of(flags, CANCELLED, token, created, due, wake, planned, attempt, failures, losses, now, keep,
                          holder, size, error, sub(body, place))
    finish(topic, key, body, state, CANCELLED, ended, keep, place)
    return state == LEASED and 'w' or 'c', -1, ended
  end
  if state == LEASED or (op == 2 and state == WAITING) then return 'u', -1, body end
  local new_due = instant(when)
  local new_wake = max(new_due, now)
  local place = ran(body)
  if op == 0 then
    if new_deadline ~= NO_DEADLINE or has(flags, DEADLINE) ~= 0 then
      local deadline, _ = parts(body, place)
      local rest = deadline and place + 6 or place
      if new_deadline ~= NO_DEADLINE then deadline = new_deadline end
      if new_wake > deadline then return 'x', -1, body end
      flags = flags - has(flags, DEADLINE) + DEADLINE
      body = sub(body, 1, place - 1) .. pack('>I6', deadline) .. sub(body, rest)
    end
    local moved = pack('>BI7I6I6I6', flags, next_token(), created, new_due, new_wake) .. sub(body, HEAD + 1)
    put(topic, key, WAITING, WAITING, moved, new_wake)
    return 'm', wake, moved
  end
  local redriven = reborn(body, place, flags, next_token(), new_due, new_wake, sub(what, id_at))
  if has(flags, GROUP) ~= 0 then leave(topic, key, body, place, DEAD, WAITING) end
  put(topic, key, DEAD, WAITING, redriven, new_wake)
  unkept[#unkept + 1] = topic.name .. '\0' .. key
  return 'r', -1, redriven
end

local reply, count = {micros, now}, 2
for _, topic in ipairs(topics) do
  local keys, from = share_of(topic, 2)
  for number = 1, #keys do
    reply[count + 1], reply[count + 2], reply[count + 3] = change(topic, keys[number], ARGV[from + 1])
    from, count = from + 2, count + 3
  end
end
commit()
return answer(reply)
