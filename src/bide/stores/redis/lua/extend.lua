-- extend: extend leases, in their index alone: a body is never written for it, however large it is.
-- asked: until (ms from now), then for each topic a count, and for each lease key, token
-- answers: {us, now, then 1 or 0 for each}
local until_at = now + tonumber(ARGV[next_argument])
next_argument = next_argument + 1
local reply = {micros, now}
for _, topic in ipairs(topics) do
  local keys, from = share_of(topic, 2)
  for number = 1, #keys do
    local key, asked = keys[number], tonumber(ARGV[from + 1])
    from = from + 2
    local body, kept_it = read(topic, key), 0
    if body then
      local flags, token = unpack_bytes('>BI7', body)
      if has(flags, 7) == LEASED and token == asked then
        local added = bucket(topic.added, LEASED)
        added[#added + 1] = until_at
        added[#added + 1] = key
        topic.changed = true
        kept_it = 1
      end
    end
    reply[#reply + 1] = kept_it
  end
end
commit()
return answer(reply)
