-- wrk -t1 -cN -s single.lua URL -- TOPIC PREFIX: one PUT of a fresh key each, 100 bytes of payload, due in an hour.
-- The last line of its output is JSON: what was answered with 201, with what else, and how long it took.

local topic, prefix, number
local headers = { ["Content-Type"] = "application/json" }
local body = '{"payload":"' .. string.rep("x", 98) .. '","delay":"1h"}'

created, others, example = 0, 0, ""

function init(args)
  topic, prefix, number = args[1], args[2], 0
end

function request()
  number = number + 1
  return wrk.format("PUT", "/v1/topics/" .. topic .. "/tasks/" .. prefix .. number, headers, body)
end

function response(status, _, said)
  if status == 201 then
    created = created + 1
  else
    others = others + 1
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
