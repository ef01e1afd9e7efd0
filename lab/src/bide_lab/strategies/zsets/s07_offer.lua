redis.call('zadd', KEYS[1], ARGV[1], ARGV[2])
redis.call('rpush', KEYS[2], ARGV[2])
if redis.call('zrange', KEYS[1], 0, 0)[1] == ARGV[2] then redis.call('publish', KEYS[3], ARGV[1]) end
