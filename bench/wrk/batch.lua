-- wrk -t1 -cN -s batch.lua URL -- TOPIC PREFIX SIZE: batches of SIZE fresh keys, 100 bytes of payload each, due in an
-- hour. The last line of its output is JSON, as single.lua's; `created` are the items whose own answer says so.

local topic, prefix, size, number
local headers = { ["Content-Type"] = "application/json" }
local payload = string.rep("x", 98)

created, others, example = 0, 0, ""

function init(args)
  topic, prefix, size, number = args[1], args[2], tonumber(args[3]), 0
end

function request()
  local items = {}
  for place = 1, size do
    number = number + 1
    items[place] = '{"topic":"' .. topic .. '","key":"' .. prefix .. number .. '","payload":"' .. payload ..
      '","delay":"1h"}'
  end
  return wrk.format("POST", "/v1/schedule", headers, "[" .. table.concat(items, ",") .. "]")
end

function response(status, _, said)
  local found, from = 0, 1
  if status == 200 then
    while true do
      local first, last = string.find(said, '"answer":"created"', from, true)
      if not first then break end
      found, from = found + 1, last + 1
    end
  end
  created = created + found
  if found < size then
    others = others + size - found
    example = status .. " " .. string.sub(said, 1, 200)
  end
end

dofile(string.match(debug.getinfo(1, "S").source, "^@(.*/)") .. "report.lua")
