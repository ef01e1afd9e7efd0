-- The beginning of every writing script: one shard's keys, the format of bodies, and the writes of one batch, gathered
-- so that each kind is one command.
--
-- KEYS  1 counter, 2 the caller's last answer, 3 topics, 4 groups, 5 finished, 6 counts; then for each topic of the
--       batch: bodies, waiting, leased, done, cancelled, dead
-- ARGV  1 the caller's sequence, 2 the caller's time in ms ("": use the server's), 3 the command that publishes wakes
--       (PUBLISH, SPUBLISH or ""), 4 the channel, 5 the shard, 6 the number of topics, then their names, then the
--       arguments of the script
--
-- A body: flags (1 byte: the state and the parts that follow), token (7), created_at, due_at, wake_at (6 each);
--   if RAN: planned_at (6), attempt, failures, losses (4 each), finished_at, keep_until (6 each),
--           holder (1 + n), error (4 + n; 2^32-1: none)
--   if DEADLINE: deadline (6); if GROUP: group (1 + n); then parts that no script reads: id, options, payload
-- A body is authoritative, and the indexes only point to it, with one exception: the end of a lease is the score of
--   its entry (see `with_end`), so that extending a lease does not write the body. A member of an index is the bare key.

local call, sub, byte, floor, max = redis.call, string.sub, string.byte, math.floor, math.max
local pack, unpack_bytes, has = struct.pack, struct.unpack, bit.band

local WAITING, LEASED, DONE, CANCELLED, DEAD = 0, 1, 2, 3, 4
local RAN, DEADLINE, GROUP, OPTIONS = 8, 16, 32, 64
local HEAD = 26            -- bytes before the optional parts
local NO_ERROR = 4294967295
local LAST_INSTANT = 253402300799999
local LAST_CLOCK = 9000000000000000 -- microseconds: beyond 2^53 a double cannot rise by one
local ANSWER_TTL = 600000  -- ms that an answer is kept for a resend: callers and copies of a call end much sooner
local SLICE = 4000         -- the most arguments of one command: Lua's stack holds 8000

-- A body as it is judged and answered: that of a leased task has the end of its lease only from when that began, so it
-- gets the score of its entry in `index`, that of the leased tasks.
local function with_end(index, key, body)
  local ends = has(byte(body), 7) == LEASED and tonumber(call('ZSCORE', index, key))
  if not ends then return body end
  return sub(body, 1, HEAD - 6) .. pack('>I6', max(0, math.min(floor(ends), LAST_INSTANT))) .. sub(body, HEAD + 1)
end

-- Rebuild the answer to a lease from its short form: for each topic both heads, the count, and key and token of each
-- task; the table of heads at the end marks it. Keeping the bodies would double the cost of a lease. Tasks that still
-- have the token are read again; the other ones have no body.
local function with_bodies(short)
  local reply, from = {short[1], short[2], short[3]}, 4
  for number = 1, tonumber(ARGV[6]) do
    local taken, count = short[from + 2], #reply
    for place = 0, 2 do reply[count + 1 + place] = short[from + place] end
    from, count = from + 3, count + 3
    for _ = 1, taken do
      local key, token = short[from], short[from + 1]
      local body, wake = call('HGET', KEYS[6 * number + 1], key), 0
      if body and #body > HEAD + 6 and unpack_bytes('>I7', body, 2) == token then
        wake, body = unpack_bytes('>I6', body, HEAD + 1), with_end(KEYS[6 * number + 3], key, body)
      else
        body = ''
      end
      reply[count + 1], reply[count + 2], reply[count + 3] = key, wake, body
      from, count = from + 2, count + 3
    end
  end
  reply[#reply + 1] = short[#short]
  return reply
end

-- A resend gets the remembered answer: the caller sends one batch at a time, and its numbers only rise.
local sequence = tonumber(ARGV[1])
local remembered = call('GET', KEYS[2])
if remembered then
  local last = unpack_bytes('>I8', remembered)
  if last == sequence then
    call('PEXPIRE', KEYS[2], ANSWER_TTL)  -- a write, so that a WAIT after it waits until replicas have the answer too
    local reply = cmsgpack.unpack(sub(remembered, 9))
    return type(reply[#reply]) == 'table' and with_bodies(reply) or reply
  elseif last > sequence then
    return redis.error_reply('BIDEOLD an older call arrived after a newer one, and was not done')
  end
end

-- Remember the answer, and return it. `remember` may be a short form from which `with_bodies` rebuilds the answer.
local function answer(reply, remember)
  call('SET', KEYS[2], pack('>I8', sequence) .. cmsgpack.pack(remember or reply), 'PX', ANSWER_TTL)
  return reply
end

local time = call('TIME')
local micros = tonumber(time[1]) * 1000000 + tonumber(time[2])
local now = ARGV[2] == '' and floor(micros / 1000) or tonumber(ARGV[2])

-- The last token of this shard. An invalid value counts as 0, because new tokens follow the clock.
local function stored_token()
  local found = tonumber(call('GET', KEYS[1]) or 0)
  return found and found >= 0 and found < 9007199254740992 and floor(found) or 0
end

local last_token, least_token = nil, math.min(now * 1000, LAST_CLOCK)
local function next_token()
  last_token = max((last_token or stored_token()) + 1, least_token)
  return last_token
end

-- The time at which a lease with this token began: an ended task has it in place of its next wake.
local function started(token) return math.min(floor(token / 1000), now) end

-- '+900000' is a length from now, '1790000000000' an instant. The result is clamped to the range of datetimes.
local function instant(text)
  local at = tonumber(text)
  if byte(text) == 43 or byte(text) == 45 then at = now + at end
  return at < 0 and 0 or at > LAST_INSTANT and LAST_INSTANT or at
end

local function send(command, key, list)
  local count = #list
  if count == 0 then return end
  for first = 1, count, SLICE do
    call(command, key, unpack(list, first, math.min(count, first + SLICE - 1)))
  end
end

local topics, next_argument = {}, 7 + tonumber(ARGV[6])
local joined, left = {}, {}          -- writes to `groups`
local kept, unkept = {}, {}          -- writes to `finished`

for number = 1, tonumber(ARGV[6]) do
  local first = 6 * number + 1
  topics[number] = {
    name = ARGV[6 + number], bodies = KEYS[first],
    index = {[0] = KEYS[first + 1], KEYS[first + 2], KEYS[first + 3], KEYS[first + 4], KEYS[first + 5]},
    old = {}, touched = {}, written = {}, deleted = {}, changed = false, moved = false, wake = nil, head = nil,
    added = {}, removed = {},  -- by state, each made at its first use
  }
end

local function head(topic, state)
  local first = call('ZRANGE', topic.index[state], 0, 0, 'WITHSCORES')
  return first[2] and tonumber(first[2])
end

-- Write the gathered changes of one topic. Removals come first: within one write a key occurs once.
local function write(topic)
  if (topic.wake or topic.moved) and topic.head == nil then topic.head = head(topic, WAITING) or false end
  for state, members in pairs(topic.removed) do send('ZREM', topic.index[state], members) end
  send('HDEL', topic.bodies, topic.deleted)
  send('ZREM', KEYS[4], left)
  send('ZREM', KEYS[5], unkept)
  send('HSET', topic.bodies, topic.written)
  for state, members in pairs(topic.added) do send('ZADD', topic.index[state], members) end
  send('ZADD', KEYS[4], joined)
  send('ZADD', KEYS[5], kept)
  if #left + #unkept + #joined + #kept > 0 then joined, left, kept, unkept = {}, {}, {}, {} end
end

-- Write them in mid-batch, and gather on.
local function flush(topic)
  write(topic)
  topic.deleted, topic.written, topic.touched, topic.added, topic.removed = {}, {}, {}, {}, {}
end

-- The bodies of many keys, in order; `false` for each missing one.
local function bodies_of(topic, keys)
  local count = #keys
  if count == 0 then return {} end
  if count <= SLICE then return call('HMGET', topic.bodies, unpack(keys)) end
  local all = {}
  for first = 1, count, SLICE do
    local bodies = call('HMGET', topic.bodies, unpack(keys, first, math.min(count, first + SLICE - 1)))
    for place = 1, #bodies do all[first + place - 1] = bodies[place] end
  end
  return all
end

-- The next topic's arguments, `width` for each key. Loads the bodies; returns the keys, and the position of the first
-- key's arguments.
local function share_of(topic, width)
  local count, from = tonumber(ARGV[next_argument]), next_argument + 1
  local keys = {}
  for number = 1, count do keys[number] = ARGV[from + width * (number - 1)] end
  next_argument = from + width * count
  local old, bodies = topic.old, bodies_of(topic, keys)
  for place = 1, count do old[keys[place]] = bodies[place] end
  return keys, from
end

-- True if a body has all the parts that its flags and sizes promise.
local function sound(body)
  local size, flags = #body, byte(body)
  if size <= HEAD or has(flags, 7) > DEAD or flags > 127 then return false end
  local place = HEAD + 1
  if has(flags, RAN) ~= 0 then
    local holder = byte(body, place + 30)
    if not holder or size < place + 34 + holder then return false end
    local error = unpack_bytes('>I4', body, place + 31 + holder)
    place = place + 35 + holder + (error == NO_ERROR and 0 or error)
  end
  if flags >= DEADLINE then  -- it has any of the parts after RAN
    if has(flags, DEADLINE) ~= 0 then place = place + 6 end
    if has(flags, GROUP) ~= 0 then place = place + 1 + (byte(body, place) or size) end
  end
  local id = byte(body, place)
  if not id then return false end
  place = place + 1 + (id == 0 and 16 or id)
  if flags >= OPTIONS then
    if place + 3 > size then return false end
    place = place + 4 + unpack_bytes('>I4', body, place)
  end
  return place <= size + 1
end

-- The body of a key if it is sound, or nil; and true if there is a body, even an unreadable one. Flushes the gathered
-- writes first if they include this key.
local function read(topic, key)
  local body = topic.old[key]
  if topic.touched[key] then flush(topic) end
  if not body then return nil, false end
  if sound(body) then return body, true end
  return nil, true
end

-- The position of the parts after RAN, and the fields of RAN.
local function ran(body)
  if has(byte(body), RAN) == 0 then return HEAD + 1, 0, 0, 0, 0, 0, 0, '', NO_ERROR, '' end
  local planned, attempt, failures, losses, finished, keep, holder, after = unpack_bytes('>I6I4I4I4I6I6Bc0', body, HEAD + 1)
  local size, place = unpack_bytes('>I4', body, after)
  local error = ''
  if size ~= NO_ERROR then
    error = sub(body, place, place + size - 1)
    place = place + size
  end
  return place, planned, attempt, failures, losses, finished, keep, holder, size, error
end

-- True if the retention of an ended task has passed: every verb treats it as missing, even before a purge.
local function gone(body)
  if has(byte(body), 7) < DONE then return false end
  local _, _, _, _, _, _, keep = ran(body)
  return keep <= now
end

-- Make a body; `rest` is everything after RAN.
local function body_of(flags, state, token, created, due, wake, planned, attempt, failures, losses, finished, keep,
                       holder, size, error, rest)
  return pack('>BI7I6I6I6I6I4I4I4I6I6B', flags - has(flags, 7 + RAN) + state + RAN, token, created, due, wake, planned,
              attempt, failures, losses, finished, keep, #holder) .. holder .. pack('>I4', size) .. error .. rest
end

-- The deadline, the group, and the position of the parts that no script reads; `place` is that of the parts after RAN.
local function parts(body, place)
  local flags, deadline, group = byte(body), nil, nil
  if has(flags, DEADLINE) ~= 0 then
    deadline, place = unpack_bytes('>I6', body, place)
  end
  if has(flags, GROUP) ~= 0 then
    local size = byte(body, place)
    group = sub(body, place + 1, place + size)
    place = place + 1 + size
  end
  return deadline, group, place
end

-- The body of a task's next life, with a new id and its own group, options and payload; `place` is that of the parts
-- after RAN. Size 0 of an id stands for the 16 bytes of a UUID.
local function reborn(body, place, flags, token, due, wake, id)
  local _, group, tail = parts(body, place)
  local size = byte(body, tail)
  return pack('>BI7I6I6I6', flags - has(flags, 7 + RAN + DEADLINE), token, now, due, wake)
    .. (group and string.char(#group) .. group or '') .. id .. sub(body, tail + 1 + (size == 0 and 16 or size))
end

-- The entry of a task in the index of groups; that of a live task begins with NUL, so that these stand together.
local function group_member(topic, key, group, state)
  return (state <= LEASED and '\0' or '') .. group .. '\0' .. topic.name .. '\0' .. key
end

local function join(topic, key, group, state)
  local count = #joined
  joined[count + 1], joined[count + 2] = 0, group_member(topic, key, group, state)
end

-- Take a task with a group out of the index of groups, or move it to its place there in the state `to`.
local function leave(topic, key, body, place, state, to)
  local _, group = parts(body, place or (ran(body)))
  left[#left + 1] = group_member(topic, key, group, state)
  if to then join(topic, key, group, to) end
end

local function bucket(buckets, state)
  local members = buckets[state]
  if not members then
    members = {}
    buckets[state] = members
  end
  return members
end

-- Put a body under a key, and move the key from the index of its old state (if any) to that of the new state.
local function put(topic, key, from, to, body, score)
  topic.touched[key] = true
  if from == WAITING then topic.moved = true elseif from then topic.changed = true end
  topic.old[key] = body
  local written, added = topic.written, bucket(topic.added, to)
  local count = #written
  written[count + 1], written[count + 2] = key, body
  if from and from ~= to then
    local removed = bucket(topic.removed, from)
    removed[#removed + 1] = key
  end
  count = #added
  added[count + 1], added[count + 2] = score, key
  if to == WAITING and (not topic.wake or score < topic.wake) then topic.wake = score end
end

-- Delete a key's body, and every entry that points to it.
local function forget(topic, key, body, state, place)
  topic.touched[key] = true
  if state == WAITING then topic.moved = true else topic.changed = true end
  topic.old[key] = false
  topic.deleted[#topic.deleted + 1] = key
  local removed = bucket(topic.removed, state)
  removed[#removed + 1] = key
  if has(byte(body), GROUP) ~= 0 then leave(topic, key, body, place, state) end
  if state >= DONE then unkept[#unkept + 1] = topic.name .. '\0' .. key end
end

-- Put an ended task into its index, or forget it at once if it has no retention.
local function finish(topic, key, old, from, to, body, keep, place)
  if keep <= now then
    forget(topic, key, old, from, place)
  else
    if has(byte(old), GROUP) ~= 0 then leave(topic, key, old, place, from, to) end
    put(topic, key, from, to, body, now)
    kept[#kept + 1], kept[#kept + 2] = keep, topic.name .. '\0' .. key
  end
end

-- Remove a key with a missing or unreadable body from all indexes by state.
local function set_aside(topic, key)
  topic.changed = true
  for state = 0, 4 do call('ZREM', topic.index[state], key) end
end

-- Put a topic into the index of topics under its head, the earlier of both; infinite: it has only ended tasks.
-- Not needed while more of it is due and its head did not get earlier: the entry is due too.
local function index_head(topic, wake, ends)
  if wake or ends then
    call('ZADD', KEYS[3], wake and (not ends or wake < ends) and wake or ends, topic.name)
  elseif call('EXISTS', topic.bodies) == 1 then
    call('ZADD', KEYS[3], '+inf', topic.name)
  else
    call('ZREM', KEYS[3], topic.name)
  end
end

-- Write everything, and notify the listeners of each wake that is earlier than the topic's previous head.
local function commit()
  for _, topic in ipairs(topics) do
    write(topic)
    local earlier = topic.wake and (not topic.head or topic.wake < topic.head)
    if earlier or topic.moved or topic.changed then
      local wake = head(topic, WAITING)
      if topic.changed and (not wake or wake > now) or topic.head ~= nil and topic.head ~= (wake or false) then
        index_head(topic, wake, head(topic, LEASED))
      end
    end
    if earlier and ARGV[3] ~= '' then
      call(ARGV[3], ARGV[4], ARGV[5] .. ' ' .. string.format('%.0f', topic.wake) .. ' ' .. topic.name)
    end
  end
  if last_token then call('SET', KEYS[1], string.format('%.0f', last_token)) end
end
