"""The store that fails on purpose: where it is told to, and nowhere else."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from bide import Bide, StoreUnavailable, Task
from bide.core.instants import In
from bide.core.names import new_id
from bide.core.records import NewTask, Ref
from bide.ports import Features, Store, all_answers
from bide.stores.memory import MemoryStore
from bide.testing import FaultyStore, VirtualClock, VirtualLoop, run_virtual

NOW = 1_000_000


def once(point: str) -> Callable[[str], BaseException | None]:
    """Fails at `point` the first time."""
    faults: Iterator[BaseException] = iter([StoreUnavailable("cable cut")])
    return lambda here: next(faults, None) if here == point else None


def task(key: str) -> NewTask:
    return NewTask("greet", key, new_id(), In(0))


def test_it_is_all_that_the_store_in_memory_is() -> None:
    store = FaultyStore(MemoryStore())
    assert isinstance(store, Store)
    assert store.features == Features(wakes=store, workers=store, events=store)


@pytest.mark.parametrize(("point", "there"), [("add:before", False), ("add:after", True)])
async def test_a_fault_comes_before_the_call_or_after_it(point: str, there: bool) -> None:
    store = FaultyStore(MemoryStore(), fault=once(point))
    await store.open()
    with pytest.raises(StoreUnavailable, match="cable cut"):
        await store.add([task("ann")], now=NOW)
    (record,) = await store.get([Ref("greet", "ann")])
    assert (record is not None) is there, "nothing was done, or it was done and the answer lost"
    assert [answer.ok for answer in await all_answers(await store.add([task("bob")], now=NOW))] == [True]
    await store.close()


async def test_every_operation_passes_its_points_and_is_counted() -> None:
    points: list[str] = []

    def watch(point: str) -> None:
        points.append(point)

    store = FaultyStore(MemoryStore(), fault=watch)
    app = Bide(store, history="off", keep_done="0s")  # the history is written by calls of its own

    @app.handler("greet")
    async def greet(task: Task[str]) -> None: ...

    async with app:
        settled = asyncio.Event()
        async with app.worker(observe=lambda record, outcome: settled.set()):
            await greet.schedule("ann", key="ann", delay="0s")
            await greet.schedule("bob", key="bob", delay="1h")
            await greet.reschedule("bob", delay="2h")
            await settled.wait()
        await greet.get("bob")
        await app.tally()
        assert [one.key async for one in app.find(topic="greet")] == ["bob"]
        await app.events()
    assert {"open", "add", "change", "lease", "settle", "get", "tally", "find", "events", "announce"} <= set(
        store.calls
    )
    assert store.calls["add"] == 2
    assert points.count("add:before") == points.count("add:after") == 2


def test_what_the_inner_store_cannot_do_it_cannot_either() -> None:
    plain: Any = Plain()
    store = FaultyStore(plain)
    assert store.features == Features()


async def test_deaf_it_takes_subscriptions_and_never_serves_them() -> None:
    for deaf in (False, True):
        heard: list[str] = []
        store = FaultyStore(MemoryStore(), deaf=deaf)
        await store.open()
        listening = await store.listen(["greet"], lambda topic, wake, heard=heard: heard.append(topic))  # type: ignore[misc]
        await store.add([task("ann")], now=NOW)
        await asyncio.sleep(0)
        await listening.close()
        assert heard == ([] if deaf else ["greet"])
        await store.close()


def test_latency_is_virtual_time_where_time_is() -> None:
    async def story(loop: VirtualLoop) -> None:
        store = FaultyStore(MemoryStore(), latency=lambda name: 30.0 if name == "add" else 0.0)
        async with Bide(store, clock=VirtualClock(loop)) as app:
            await app.schedule("greet", key="ann", delay="0s")
        assert loop.time() == 30

    run_virtual(story)


class Plain:
    """A store that can do no more than it must: nothing but the nine operations of the one it wraps."""

    features = Features()

    def __init__(self) -> None:
        self._inner = MemoryStore()

    def __getattr__(self, name: str) -> object:
        if name in {"announce", "record", "events", "listen"}:
            raise AttributeError(name)
        return getattr(self._inner, name)
