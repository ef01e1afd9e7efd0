-- count: the numbers of some topics' tasks in one shard: by index, and of the first index also by interval.
-- KEYS the indexes of the first topic, then those of the next; ARGV 1 the number of indexes of each, then the edges of
--   the intervals, ascending; fewer than two edges make no interval
-- answers: for each topic {length of each index, entries of the first with edge <= score < the next edge ...}; only the
--   lengths if it has no entry between the first edge and the last
-- Each interval takes two ranks, O(log n) each: 150 intervals over 10^6 entries take a third of a millisecond.
local call = redis.call
local each, last, found = tonumber(ARGV[1]), #ARGV, {}
for first = 1, #KEYS, each do
  local numbers = {}
  for place = 1, each do numbers[place] = call('ZCARD', KEYS[first + place - 1]) end
  if last > 2 and numbers[1] > 0 and call('ZCOUNT', KEYS[first], ARGV[2], '(' .. ARGV[last]) > 0 then
    for place = 2, last - 1 do
      numbers[each + place - 1] = call('ZCOUNT', KEYS[first], ARGV[place], '(' .. ARGV[place + 1])
    end
  end
  found[#found + 1] = numbers
end
return found
