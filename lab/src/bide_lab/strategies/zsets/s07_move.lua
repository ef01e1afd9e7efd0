local due = redis.call('zrangebyscore', KEYS[1], 0, ARGV[1], 'limit', 0, ARGV[2])
for _, member in ipairs(due) do
    redis.call('rpush', KEYS[3], member)
    redis.call('lrem', KEYS[2], 1, member)
end
if #due > 0 then redis.call('zrem', KEYS[1], unpack(due)) end
return {#due, redis.call('zrange', KEYS[1], 0, 0, 'withscores')[2] or ''}
