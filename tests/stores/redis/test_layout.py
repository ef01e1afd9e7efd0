"""The keys of a shard share a slot; a body that was written is read back, and damage is recognised."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from redis.crc import key_slot

from bide.core.instants import In
from bide.core.names import new_id
from bide.core.records import NewTask, State
from bide.stores.redis.layout import Layout, flags_of, packed_id, record_of, seed_of

PLAIN_HEAD = 1 + 7 + 3 * 6
texts = st.text(min_size=1, max_size=50)


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


def body_of(new: NewTask) -> bytes:
    """As `lua/add.lua` puts it together."""
    flags = flags_of(new)
    times = b"".join(number.to_bytes(6, "big") for number in (3, 2, 4))
    return bytes([flags]) + (7).to_bytes(7, "big") + times + seed_of(new, flags)


@given(
    new=st.builds(
        NewTask,
        topic=st.just("t"),
        key=st.just("k"),
        id=st.one_of(texts, st.uuids().map(str), st.uuids().map(lambda one: str(one).upper())),
        due=st.just(In(0)),
        payload=st.binary(max_size=300),
        group=st.one_of(st.none(), texts),
        options=st.binary(max_size=50),
        deadline=st.one_of(st.none(), st.integers(0, 2**48 - 2)),
    )
)
def test_a_new_task_is_read_back_as_it_was(new: NewTask) -> None:
    record = record_of("t", "k", body_of(new))
    assert (record.id, record.payload, record.group, record.options, record.deadline) == (
        new.id, new.payload, new.group, new.options, new.deadline,
    )  # fmt: skip
    assert (record.state, record.token, record.created_at, record.due_at, record.wake_at) == (
        State.WAITING, 7, 3, 2, 4,
    )  # fmt: skip
    assert (record.attempt, record.holder, record.error, record.finished_at) == (0, None, None, None)


def test_a_plain_task_takes_43_bytes_and_its_payload() -> None:
    new = NewTask("t", "k", new_id(), In(0), b"x" * 100)
    assert len(body_of(new)) == 143
    assert len(packed_id(new.id)) == 17
