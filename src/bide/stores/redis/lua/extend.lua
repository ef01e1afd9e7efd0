-- extend: extend leases.
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
      local flags, token, created, due = unpack_bytes('>BI7I6I6', body)
      if has(flags, 7) == LEASED and token == asked then
        put(topic, key, LEASED, LEASED,
            pack('>BI7I6I6I6', flags, token, created, due, until_at) .. sub(body, HEAD + 1), until_at)
        kept_it = 1
      end
    end
    reply[#reply + 1] = kept_it
  end
end
commit()
return answer(reply)
