-- count: how much one shard has of a topic: in all, and of what waits, between instants.
-- KEYS 1 what waits, then the other indexes of the topic; ARGV the edges of the intervals, ascending; none or one: none
-- answers: {length of each index, how many wait with edge <= wake < the next edge ...}; only the lengths where none
--   waits between the first edge and the last
-- Two ranks of an interval, O(log n) each: 150 intervals of 10^6 entries are a third of a millisecond.
local call = redis.call
local found = {}
for place = 1, #KEYS do found[place] = call('ZCARD', KEYS[place]) end
local last = #ARGV
if last < 2 or found[1] == 0 or call('ZCOUNT', KEYS[1], ARGV[1], '(' .. ARGV[last]) == 0 then return found end
for place = 1, last - 1 do
  found[#KEYS + place] = call('ZCOUNT', KEYS[1], ARGV[place], '(' .. ARGV[place + 1])
end
return found
