"""Leases of what runs are kept alive in one call; a loop that stood still says so."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from tests.engine.conftest import World, nothing, stores, task_of, virtual
from tests.waiting import block, elapse, forever, pause, until

from bide import Bide, StoreUnavailable, Task
from bide.core.instants import Millis
from bide.core.records import Lease, Settlement
from bide.stores.memory import MemoryStore


@virtual
async def test_all_leases_are_extended_in_one_call(world: World) -> None:
    app = world.app(lease="9s")
    slow = world.noted(app, "slow", takes=30, concurrency=50)
    async with app, app.worker() as worker:
        await app.schedule_many([slow.handler.new(None, delay="0s") for _ in range(50)])
        await world.pause(29)
        assert world.store.calls["extend"] == 9
        await world.until(lambda: worker.stats.done == 50)
        assert worker.stats.lost == 0


@virtual
async def test_an_idle_worker_extends_nothing(world: World) -> None:
    app = world.app(lease="9s")
    work = app.handler("work")(nothing)
    async with app, app.worker():
        await work.schedule(None, delay="1h")
        await world.pause(1_800)
        assert "extend" not in world.store.calls


@virtual
async def test_a_loop_that_stood_still_longer_than_a_lease_says_so(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    app = world.app(lease="9s")

    @app.handler("busy")
    async def busy(task: Task[Any]) -> None:
        world.loop._jumping.now += 20  # a handler computes, and time passes without a turn for anybody else
        await elapse(1)

    async with app, app.worker() as worker:
        await busy.schedule(None, delay="0s")
        await worker.until_empty()
    assert "blocked for 17.0 s" in caplog.text
    assert "plain function" in caplog.text


@stores("memory", "sqlite", "redis", "postgres", "mysql")
async def test_a_loop_that_stood_still_settles_and_extends_before_it_leases(store_url: str) -> None:
    """One process: nobody else could have taken what it holds, so it must not take it itself."""
    app, runs = Bide(store_url, lease="500ms"), list[str]()
    blocked = asyncio.Event()

    @app.handler("work", concurrency=8)
    async def work(task: Task[Any]) -> None:
        runs.append(task.key)
        if task.key == "waits":
            await blocked.wait()
            await pause(0.1, why="it is still held when the worker looks again")
        else:
            block(1.2, why="a handler that computes without awaiting, for longer than its lease")
            blocked.set()

    async with app, app.worker() as worker:
        await work.schedule(None, key="waits", delay="0s")
        await until(lambda: runs, "the one that waits to begin")
        await work.schedule(None, key="blocks", delay="0s")
        await worker.until_empty()
        assert worker.stats.done == 2
    assert sorted(runs) == ["blocks", "waits"]


@pytest.mark.parametrize("why", ["somebody waits until it is empty", "something else is due"])
@virtual
async def test_no_lease_is_sent_in_the_turn_in_which_what_was_leased_begins(world: World, why: str) -> None:
    """A handler that blocks there would hold it up, until it took what this very process holds."""
    app, runs, lease = world.app(world.memory, lease="1s"), list[str](), world.memory.lease
    watching = list[asyncio.Task[Any]]()

    async def sent_at_the_end_of_the_turn(wants: Any, *, now: int, until: int, holder: str) -> Any:
        await asyncio.sleep(0)
        late = world.clock.now() - now
        leased = await lease(wants, now=now + late, until=until + late, holder=holder)
        if not watching:  # which asks for another lease after this
            asks = worker.until_empty() if "empty" in why else work.schedule(None, key="other", delay="0s")
            watching.append(asyncio.create_task(asks))
            await elapse(0.001)
        return leased

    @app.handler("work", concurrency=8)
    async def work(task: Task[Any]) -> None:
        runs.append(task.key)
        world.loop._jumping.now += 1.2

    async with app:
        await work.schedule(None, key="k", delay="0s")
        async with app.worker() as worker:
            setattr(world.memory, "lease", sent_at_the_end_of_the_turn)  # noqa: B010 - it is a method
            await worker.until_empty()
            await asyncio.wait(watching)
    assert runs == (["k"] if "empty" in why else ["k", "other"])


@virtual
async def test_what_waited_for_its_turn_behind_those_who_block_is_not_lost(world: World) -> None:
    """Nothing dies that never ran."""
    app, runs = world.app(lease="1s"), list[str]()

    @app.handler("work", losses=2)
    async def work(task: Task[Any]) -> None:
        runs.append(task.key)
        world.loop._jumping.now += 0.9

    async with app, app.worker() as worker:
        await app.schedule_many([work.new(None, key=f"{number:02}", delay="0s") for number in range(20)])
        await worker.until_empty()
        assert (worker.stats.done, worker.stats.dead) == (20, 0)
    assert sorted(runs) == [f"{number:02}" for number in range(20)]


@virtual
async def test_an_outcome_that_the_store_could_not_take_goes_before_a_lease_of_its_task(world: World) -> None:
    app, runs = world.app(lease="3s"), list[str]()

    @app.handler("work")
    async def work(task: Task[Any]) -> None:
        runs.append(task.key)
        world.store.fault = away

    def away(point: str) -> BaseException | None:
        settles = point == "settle:before" and world.elapsed < 2_950
        return StoreUnavailable("away") if settles else None

    async with app, app.worker() as worker:
        await work.schedule(None, key="k", delay="0s")
        await world.until(lambda: worker.stats.done == 1)
    assert runs == ["k"]


class Away(MemoryStore):
    """Answers no outcome and no extension until it is `back`, and outcomes a little later than extensions."""

    def __init__(self) -> None:
        super().__init__()
        self.back = asyncio.Event()

    async def settle(self, outcomes: Sequence[Settlement], *, now: Millis) -> list[bool]:
        await self.back.wait()
        await elapse(0.002)
        return await super().settle(outcomes, now=now)

    async def extend(self, leases: Sequence[Lease], *, now: Millis, until: Millis) -> list[bool]:
        await self.back.wait()
        return await super().extend(leases, now=now, until=until)


@virtual
async def test_outcomes_that_waited_for_a_store_are_told_before_a_lease_of_their_tasks(world: World) -> None:
    """When it is back, what was held up behind others goes first: also if that took as long as an extension did."""
    store, runs = Away(), list[str]()
    app = world.app(store, lease="1s")

    @app.handler("work")
    async def work(task: Task[Any]) -> None:
        runs.append(task.key)
        if task.key == "second":
            await elapse(0.01)  # what the first has done is on its way by now
            world.loop._jumping.now += 1.5
        elif task.key == "third":
            await elapse(20)  # held all the time, so that there is something to extend

    async with app, app.worker() as worker:
        await app.schedule_many([work.new(None, key=key, delay="0s") for key in ("first", "second", "third")])
        await app.schedule("work", None, key="later", delay="1s")
        await world.pause(4)
        store.back.set()
        await world.until(lambda: worker.stats.done >= 3)
    assert Counter(runs)["second"] == 1


@pytest.mark.parametrize("verb", ["extend", "purge", "announce", "get"])
@virtual
async def test_a_defect_of_the_store_ends_nothing_and_is_logged(
    world: World, caplog: pytest.LogCaptureFixture, verb: str
) -> None:
    """As leasing goes on: loudly."""
    app, runs = world.app(lease="3s"), list[str]()
    done, failed = getattr(world.memory, verb, None), 0

    async def defective(*args: Any, **kwargs: Any) -> Any:
        nonlocal failed
        failed += 1
        if failed == 2:
            raise ValueError("a defect")
        return await done(*args, **kwargs) if done else {}

    setattr(world.memory, verb, defective)

    @app.handler("work")
    async def work(task: Task[Any]) -> None:
        runs.append(task.key)
        if verb == "get":
            await task.extend("1h")
        await elapse(200)

    async with app, app.worker() as worker:
        await work.schedule(None, key="k", delay="0s")
        await worker.until_empty()
    assert (runs, worker.stats.lost) == (["k"], 0)
    assert failed > 2
    assert "a defect" in caplog.text


@virtual
async def test_an_extension_never_shortens_what_a_handler_has_extended(world: World) -> None:
    """A cancel is told within a lease all the same."""
    app, told = world.app(lease="3s"), list[int]()

    @app.handler("work")
    async def work(task: Task[Any]) -> None:
        assert await task.extend("1h")
        try:
            await forever()
        finally:
            told.append(world.elapsed)

    async with app, app.worker() as worker:
        await work.schedule(None, key="k", delay="0s")
        await world.pause(60)
        task = await task_of(app, "work", "k")
        assert (task.record.wake_at, worker.stats.lost) == (world.start + 3_600_000, 0)
        await app.cancel("work", "k")
        await world.until(lambda: bool(told))
    assert told[0] <= 61_100
