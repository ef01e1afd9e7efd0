"""Tasks in Redis or Valkey: one server, one behind Sentinel, or a Cluster; sharded from the first day."""

from bide.stores.redis.store import RedisStore

__all__ = ["RedisStore"]
