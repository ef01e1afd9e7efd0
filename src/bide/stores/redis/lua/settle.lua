-- settle: record how leases ended.
-- asked: for each topic a count, then for each outcome key, token, what: '' (done, without retention), or
--   verdict (1: 0 done, 1 again, 2 retry, 3 defer, 4 dead), keep_until (6), error (4 + n; 2^32-1: none),
--   when (1 + n: an instant), then the next id as a body has it
-- answers: {us, now, then 1 or 0 for each}
local function settle(topic, key, asked, what)
  local body = read(topic, key)
  if not body then return 0 end
  local flags, token = unpack_bytes('>BI7', body)
  if has(flags, 7) ~= LEASED or token ~= asked then return 0 end
  if what == '' then  -- no new token: the next task under this key gets one above the last token of the shard
    forget(topic, key, body, LEASED)
    return 1
  end
  local created, due = unpack_bytes('>I6I6', body, 9)
  local place, planned, attempt, failures, losses, _, _, holder, size, error = ran(body)
  local verdict, keep, new_size, after = unpack_bytes('>BI6I4', what)
  local new_error = ''
  if new_size ~= NO_ERROR then
    new_error = sub(what, after, after + new_size - 1)
    after = after + new_size
  end
  local when, id_at = unpack_bytes('>Bc0', what, after)
  local new_token = next_token()
  if verdict == 0 or verdict >= 4 then  -- 5: dead after a failure, which is counted
    local to = verdict == 0 and DONE or DEAD
    if new_size ~= NO_ERROR or verdict == 0 then size, error = new_size, new_error end
    local ended = body_of(flags, to, new_token, created, due, started(token), planned, attempt,
                          failures + (verdict == 5 and 1 or 0), losses, now, keep,
                          holder, size, error, sub(body, place))
    finish(topic, key, body, LEASED, to, ended, keep, place)
    return 1
  end
  local new_due = instant(when)
  local new_wake = max(new_due, now)
  local waiting
  if verdict == 1 then
    waiting = reborn(body, place, flags, new_token, new_due, new_wake, sub(what, id_at))
  elseif verdict == 2 then
    waiting = body_of(flags, WAITING, new_token, created, due, new_wake, 0, attempt, failures + 1, 0, 0, 0, '',
                      new_size, new_error, sub(body, place))
  else
    waiting = body_of(flags, WAITING, new_token, created, due, new_wake, 0, attempt - 1, failures, 0, 0, 0, '', size,
                      error, sub(body, place))
  end
  put(topic, key, LEASED, WAITING, waiting, new_wake)
  return 1
end

local reply, answered = {micros, now}, 2
for _, topic in ipairs(topics) do
  local keys, from = share_of(topic, 3)
  for number = 1, #keys do
    answered = answered + 1
    reply[answered] = settle(topic, keys[number], tonumber(ARGV[from + 1]), ARGV[from + 2])
    from = from + 3
  end
end
commit()
return answer(reply)
