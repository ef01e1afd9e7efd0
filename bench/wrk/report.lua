-- What both scripts end with: one line of JSON, from what each thread has counted as `created`, `others` and `example`.

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
