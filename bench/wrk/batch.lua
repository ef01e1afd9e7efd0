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

local threads = {}

function setup(thread)
  table.insert(threads, thread)
end

local function quoted(text)
  return '"' .. string.gsub(text, '[%c"\\]', "'") .. '"'
end

function done(summary, latency)
  local made, wrong, said = 0, 0, ""
  for _, thread in ipairs(threads) do
    made, wrong, said = made + thread:get("created"), wrong + thread:get("others"), said .. thread:get("example")
  end
  local lost = summary.errors
  io.write(string.format(
    '{"created":%d,"others":%d,"example":%s,"unanswered":%d,"seconds":%.6f,"p50_ms":%.3f,"p99_ms":%.3f}\n',
    made, wrong, quoted(said), lost.connect + lost.read + lost.write + lost.timeout, summary.duration / 1e6,
    latency:percentile(50) / 1e3, latency:percentile(99) / 1e3
  ))
end
