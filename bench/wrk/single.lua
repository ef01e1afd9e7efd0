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

dofile(string.match(debug.getinfo(1, "S").source, "^@(.*/)") .. "report.lua")
