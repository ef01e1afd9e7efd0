for i = 0, redis.call('llen', KEYS[2]) - 1 do
    local member = redis.call('lindex', KEYS[2], i)
    if string.match(member, '^%d+ (.*)$') == ARGV[1] then
        redis.call('zrem', KEYS[1], member)
        redis.call('lrem', KEYS[2], 1, member)
        return 1
    end
end
return 0
