-- page: the entries of an index after one place, in order of score and then of member.
-- KEYS 1 the index; ARGV 1 score and 2 member of the place, 3 before which score ('': no end), 4 how many,
--   5 'from': whatever the member, from that score on
-- answers: {member, score, ...}
-- Among equal scores the place is found by halves, since an index can be entered by score or by rank only: O(log n).
-- The place need not be there any more.
local call = redis.call
local score, member, before, count = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4])
if ARGV[5] == 'from' then
  local high = before == '' and '+inf' or '(' .. before
  return call('ZRANGEBYSCORE', KEYS[1], score, high, 'WITHSCORES', 'LIMIT', 0, count)
end
local low, high = call('ZCOUNT', KEYS[1], '-inf', '(' .. score), call('ZCOUNT', KEYS[1], '-inf', score)
while low < high do
  local middle = math.floor((low + high) / 2)
  if call('ZRANGE', KEYS[1], middle, middle)[1] <= member then low = middle + 1 else high = middle end
end
local last = low + count - 1
if before ~= '' then
  last = math.min(last, call('ZCOUNT', KEYS[1], '-inf', '(' .. before) - 1)
end
if last < low then return {} end
return call('ZRANGE', KEYS[1], low, last, 'WITHSCORES')
