"""Tasks in Redis or Valkey: one server, one behind Sentinel, or a Cluster. Every namespace is sharded."""

from bide.stores.redis.store import RedisStore

__all__ = ["RedisStore"]
