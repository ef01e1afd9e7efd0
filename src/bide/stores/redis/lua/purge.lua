-- purge: forget ended tasks whose retention has passed.
-- asked: for each topic a count, then keys (found in `finished` a moment ago: each is checked again)
-- answers: {us, now, the number of forgotten tasks}
local reply = {micros, now, 0}
for _, topic in ipairs(topics) do
  for _, key in ipairs((share_of(topic, 1))) do
    local body = read(topic, key)
    local state = body and has(byte(body), 7)
    if state and state >= DONE then
      local place, _, _, _, _, _, keep = ran(body)
      if keep <= now then
        forget(topic, key, body, state, place)
        reply[3] = reply[3] + 1
      end
    else
      unkept[#unkept + 1] = topic.name .. '\0' .. key
    end
  end
end
commit()
return answer(reply)
