"""The names of keys: all of a shard in one slot, and the same for every client for ever."""

from __future__ import annotations

from redis.crc import key_slot

from bide.stores.redis.layout import Layout


def test_the_keys_of_a_shard_share_a_slot() -> None:
    layout = Layout("shop", 16)
    for shard in range(16):
        keys = [*layout.fixed(shard, b"caller"), *layout.topic(shard, "a{b}c"), layout.wake_channel(shard)]
        assert len({key_slot(key) for key in keys}) == 1
        assert len(set(keys)) == len(keys)
    assert len({key_slot(layout.counts(shard)) for shard in range(16)}) > 10, "and the shards are spread"


def test_the_shard_of_a_task_never_changes() -> None:
    """These figures are in servers by now: another hash would not find the tasks."""
    layout = Layout("any", 16)
    assert [layout.shard_of("order.close", str(number)) for number in range(8)] == [11, 13, 7, 1, 2, 4, 14, 8]
    assert layout.shard_of("löschen", "ключ") == 4
