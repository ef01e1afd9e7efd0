"""What only the memory store promises: that it never waits, keeps nothing dead for long, and lists lazily."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Any, TypeVar

import pytest

from bide.core.instants import At
from bide.core.records import Cancel, Filter, Lease, Move, Page, Record, Ref, State
from bide.stores.memory import MemoryStore
from bide.stores.memory.lines import NAMES, Listings
from bide.testing.store_suite import base
from bide.testing.store_suite.base import NOW, done, new
from bide.timers import HeapTimer, HierarchicalWheel

Value = TypeVar("Value")


def at_once(call: Awaitable[Value]) -> Value:
    """The value of a coroutine that never waits; fails if it does."""
    steps = call.__await__()
    try:
        next(steps)
    except StopIteration as stop:
        value: Value = stop.value
        return value
    raise AssertionError("the memory store has to answer without waiting")


def opened(**settings: Any) -> MemoryStore:
    store = MemoryStore(**settings)
    at_once(store.open())
    return store


def lease(store: MemoryStore, count: int, *, now: int = NOW) -> list[Record]:
    return at_once(base.lease(store, count, now=now)).tasks


def test_no_call_waits() -> None:
    store = opened()
    at_once(store.add([new("a"), new("b")], now=NOW))
    at_once(store.change([Move("t", "a", At(NOW + 1))], now=NOW))
    [held] = lease(store, 5)
    assert at_once(store.extend([Lease("t", "b", held.token)], now=NOW, until=NOW + 5)) == [True]
    assert at_once(store.settle([done(held)], now=NOW)) == [True]
    assert [task.key for task in at_once(store.find(Filter(), Page())).tasks] == ["a"]
    assert len(at_once(store.get([Ref("t", "a")]))) == 1
    assert at_once(store.tally([0, NOW])).counts[("t", State.WAITING)].number == 1
    assert at_once(store.purge(now=NOW, limit=5)) == 0
    assert at_once(store.announce("w", ["t"], NOW + 5, now=NOW)) == {"w": ["t"]}
    at_once(store.close())


def test_what_was_scheduled_survives_a_close_of_the_same_object() -> None:
    store = opened()
    [answer] = at_once(store.add([new(due=At(NOW + 5))], now=NOW))
    at_once(store.close())
    at_once(store.open())
    assert at_once(store.get([Ref("t", "k")])) == [answer.record]
    assert len(lease(store, 1, now=NOW + 5)) == 1


@pytest.mark.parametrize("timer", [None, lambda now: HeapTimer(start=now), lambda now: HierarchicalWheel(start=now)])
def test_nothing_of_an_ended_task_is_held(timer: Any) -> None:
    store = opened(timer=timer)
    tasks = [new(str(number), due=At(NOW + number % 7), group="g") for number in range(1_000)]
    at_once(store.add(tasks, now=NOW))
    at_once(store.find(Filter(group="g"), Page(limit=1)))
    at_once(store.find(Filter(state=State.WAITING), Page(limit=1)))
    held = lease(store, 700, now=NOW + 10)
    at_once(store.settle([done(record) for record in held], now=NOW + 10))
    at_once(store.change([Cancel("t", task.key) for task in tasks], now=NOW + 10))
    topic = store._topics["t"]
    assert (len(topic.records), len(topic.waits), len(topic.held)) == (0, 0, 0)
    assert topic.timer is None or len(topic.timer) == 0
    assert [len(one) for its in (topic.listings, topic.groups) for one in its.kept.values()] == [0, 0]
    at_once(store.purge(now=NOW + 10, limit=1))
    assert store._topics == {}, "an empty topic is forgotten at the next purge"


def test_a_key_scheduled_over_and_over_leaves_nothing_dead_for_long() -> None:
    store = opened()
    at_once(store.add([new("far", due=At(NOW + 1_000_000))], now=NOW))
    for number in range(5_000):
        at_once(store.add([new(due=At(NOW + 5_000 - number))], now=NOW))
    assert len(store._topics["t"].waits) <= 2 * 2 + 64


def test_an_extended_lease_leaves_nothing_dead_for_long() -> None:
    store = opened()
    at_once(store.add([new()], now=NOW))
    [held] = lease(store, 1)
    for number in range(5_000):
        assert at_once(store.extend([Lease("t", "k", held.token)], now=NOW, until=NOW + number % 97)) == [True]
    assert len(store._topics["t"].held) <= 2 + 64


def test_a_key_that_ends_over_and_over_leaves_one_retention_entry() -> None:
    store = opened()
    for _ in range(5_000):
        at_once(store.add([new()], now=NOW))
        at_once(store.settle([done(record, keep_until=NOW + 1_000) for record in lease(store, 1)], now=NOW))
    assert len(store._ended) <= 2 * 1 + 64
    assert at_once(store.purge(now=NOW + 1_000, limit=10)) == 1
    assert store._ended == []


def _record(key: str, wake_at: int) -> Record:
    return Record(
        key, key, "", None, State.WAITING, 0, wake_at, 0, 0, 0, 0, 0, None, b"", b"", None, None, 0, None, None
    )


def test_a_listing_is_made_when_somebody_looks_and_dropped_when_nobody_does() -> None:
    records = {str(number): _record(str(number), number) for number in range(10)}
    listings = Listings(records.values, patience=50)
    listings.note(None, _record("unseen", 1))
    assert NAMES not in listings.kept
    assert len(listings.listing(NAMES)) == 10
    for number in range(70):
        listings.note(None, _record(f"new {number}", number))
        listings.note(_record(f"new {number}", number), None)
        listings.listing(NAMES)
    assert NAMES in listings.kept, "it is looked at"
    for number in range(70):
        listings.note(None, _record(f"new {number}", number))
    assert NAMES in listings.kept, "it has grown, and would cost more to make again"
    for number in range(70):
        listings.note(_record(f"new {number}", number), None)
    assert NAMES not in listings.kept
    assert not listings.kept
