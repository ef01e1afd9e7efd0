-- page: the entries of an index after a place, ordered by score and then by member.
-- KEYS 1 the index; ARGV 1 score and 2 member of the place, 3 the score to stop before ('': no end), 4 the page size,
--   5 'from': start at the score, whatever the member
-- answers: {member, score, ...}
-- An index can only be entered by score or by rank, so a bisection finds the place among equal scores: O(log n). The
-- entry at the place may have been removed.
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
