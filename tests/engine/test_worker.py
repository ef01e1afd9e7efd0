"""What a worker promises, told in virtual time: hours pass in milliseconds."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Mapping
from typing import Any

import pytest
from msgspec.structs import replace
from tests.engine.conftest import World, nothing, task_of, virtual
from tests.waiting import PATIENCE, elapse, forever

from bide import Dead, Defer, Done, Fixed, Ladder, Retry, StoreUnavailable, Task
from bide.core.records import Leased, Record, Settlement
from bide.stores.memory import MemoryStore


@virtual
async def test_each_delivery_starts_at_its_own_millisecond(world: World) -> None:
    app = world.app(max_sleep="1h")
    post = world.noted(app, "post")
    async with app, app.worker():
        for key, delay in (("late", "2h"), ("soon", "20ms"), ("hour", "1h"), ("now", "0s")):
            await post.handler.schedule(None, key=key, delay=delay)
        await world.until(lambda: len(post.keys) == 4)
    assert (post.keys, post.at) == (["now", "soon", "hour", "late"], [0, 20, 3_600_000, 7_200_000])


@virtual
async def test_lateness_is_from_the_planned_time_to_the_start(world: World) -> None:
    app, late = world.app(), list[float]()

    @app.handler("work")
    async def work(task: Task[Any]) -> None:
        late.append(task.lateness.total_seconds())
        await elapse(60)
        late.append(task.lateness.total_seconds())

    async with app:
        await work.schedule(None, delay="0s")
        await world.pause(1.5)
        async with app.worker() as worker:
            await worker.until_empty()
    assert late == [1.5, 1.5]


@virtual
async def test_an_idle_worker_asks_no_more_often_than_the_cap(world: World) -> None:
    app = world.app(max_sleep="1s")
    post = app.handler("post")(nothing)
    async with app, app.worker():
        await post.schedule(None, delay="1d")
        await world.pause(1)
        before = world.store.calls["lease"]
        await world.pause(100)
        assert world.store.calls["lease"] - before <= 101


@virtual
async def test_the_ladder_is_climbed_rung_by_rung_and_ends_dead(world: World) -> None:
    app = world.app()
    tries: list[tuple[int, int]] = []
    mourned: list[str] = []

    @app.handler("notify", retry=Ladder("15s", "15s", "30s"))
    async def notify(task: Task[Any]) -> None:
        tries.append((world.elapsed, task.attempt))
        raise ConnectionError("merchant is away")

    @app.on_dead("notify")
    async def mourn(task: Task[Any]) -> None:
        mourned.append(task.key)

    async with app, app.worker():
        await notify.schedule(None, key="p1", delay="0s")
        await world.until(lambda: bool(mourned))
        task = await task_of(app, "notify", "p1")
        assert (task.state, task.error, task.failures) == ("dead", "ConnectionError: merchant is away", 4)
        events = await app.events("notify", "p1")
        assert [event.kind for event in events] == ["dead", "retry", "retry", "retry"]
    assert tries == [(0, 1), (15_000, 2), (30_000, 3), (60_000, 4)]
    assert mourned == ["p1"]


@pytest.mark.parametrize("raised", [False, True])
@virtual
async def test_outcomes_count_alike_returned_or_raised(world: World, raised: bool) -> None:
    app = world.app(keep_done="1h")
    seen: list[tuple[int, int]] = []
    ends = [Defer("5s"), Retry("busy", delay="7s"), Done(again_in="10s"), Dead("hopeless")]

    @app.handler("work")
    async def work(task: Task[Any]) -> Any:
        seen.append((world.elapsed, task.attempt))
        outcome = ends[len(seen) - 1]
        if raised:
            raise outcome
        return outcome

    async with app, app.worker():
        first = (await work.schedule(None, key="k", delay="0s")).task
        await world.until(lambda: len(seen) == 4)
        await world.pause(0.01)
        task = await task_of(app, "work", "k")
        assert (task.state, task.error) == ("dead", "hopeless")
        assert first is not None
        assert task.id != first.id, "Done(again) starts a new life"
    assert seen == [(0, 1), (5_000, 1), (12_000, 2), (22_000, 1)]


@virtual
async def test_losses_in_a_row_are_bounded(world: World) -> None:
    app = world.app(lease="1s")
    poison = world.noted(app, "poison", losses=3)
    async with app:
        await poison.handler.schedule(None, key="k", delay="0s")
        for _ in range(3):
            now = world.clock.now()
            await world.memory.lease({"poison": 1}, now=now, until=now + 1_000, holder="killed")
            await world.pause(1)
        async with app.worker():
            await world.pause(5)
            task = await task_of(app, "poison", "k")
            assert (task.state, poison.keys) == ("dead", [])
            assert "holder lost" in (task.error or "")


@virtual
async def test_a_cancel_reaches_the_running_handler_within_a_lease(world: World) -> None:
    app, ended = world.app(lease="9s"), list[int]()

    @app.handler("slow")
    async def slow(task: Task[Any]) -> None:
        try:
            await forever()
        finally:
            ended.append(world.elapsed)

    async with app, app.worker() as worker:
        await slow.schedule(None, key="k", delay="0s")
        await world.pause(60)
        assert (await app.cancel("slow", "k")).result == "cancelled_while_leased"
        await world.until(lambda: bool(ended))
        await world.pause(1)
        assert (await task_of(app, "slow", "k")).state == "cancelled"
        assert worker.stats.lost == 1
    assert 60_000 <= ended[0] <= 63_100


@virtual
async def test_a_timeout_is_a_failure_and_frees_the_slot(world: World) -> None:
    app, seen = world.app(), []

    @app.handler("slow", timeout="30s", concurrency=1, retry=Fixed("10s", tries=2))
    async def slow(task: Task[Any]) -> None:
        seen.append((task.key, world.elapsed))
        await forever()

    async with app, app.worker():
        await slow.schedule(None, key="a", delay="0s")
        await world.pause(100)
        task = await task_of(app, "slow", "a")
        assert (task.state, task.error) == ("dead", "TimeoutError: no outcome within 30 s")
    assert seen == [("a", 0), ("a", 40_000)]


@virtual
async def test_the_deadline_is_kept(world: World) -> None:
    app, ran = world.app(), []

    @app.handler("remind", retry=Fixed("1h", tries=5))
    async def remind(task: Task[Any]) -> None:
        ran.append(task.key)
        raise OSError("no signal")

    async with app:
        await remind.schedule(None, key="missed", delay="10s", deadline="20s")
        await world.pause(60)
        async with app.worker():
            await remind.schedule(None, key="retried", delay="0s", deadline="30m")
            await world.pause(10)
            missed, retried = await app.get("remind", "missed"), await app.get("remind", "retried")
            assert missed is not None
            assert retried is not None
            assert (missed.state, retried.state) == ("dead", "dead")
            assert (missed.failures, retried.failures) == (0, 1), "what never ran has not failed"
            assert (missed.error or "").startswith("deadline: not after")
            assert "next try would be after it" in (retried.error or "")
    assert ran == ["retried"]


@virtual
async def test_a_drain_gives_back_what_no_handler_has_seen(world: World) -> None:
    app = world.app(grace="5s")
    slow = world.noted(app, "slow", takes=2, concurrency=3)
    async with app:
        for key in "abcde":
            await slow.handler.schedule(None, key=key, delay="0s")
        async with app.worker():
            await world.until(lambda: len(slow.keys) == 3)
        assert world.elapsed == pytest.approx(2_000, abs=100)
        left = [task async for task in app.find(topic="slow", state="waiting")]
        assert {task.key for task in left} == set("abcde") - set(slow.keys)
        assert [(task.state, task.attempt) for task in left] == [("waiting", 0), ("waiting", 0)]


@virtual
async def test_every_stop_waits_for_the_one_drain(world: World) -> None:
    app, sent = world.app(grace="10s"), list[str]()

    @app.handler("slow")
    async def slow(task: Task[Any]) -> None:
        await elapse(5)
        sent.append((await app.schedule("next", None, key="n", delay="1h")).result)

    async with app:
        async with app.worker() as worker:
            await slow.schedule(None, key="k", delay="0s")
            await world.until(lambda: worker.stats.leased == 1)
            stopping = asyncio.create_task(worker.stop())  # as the handler of a signal does
            await world.pause(1)
        assert (stopping.done(), sent, worker.stats.done) == (True, ["created"], 1)


@pytest.mark.parametrize("shared", [False, True], ids=["its own", "begun by another"])
@virtual
async def test_a_cancelled_stop_ends_the_grace_and_leaves_nothing_running(world: World, *, shared: bool) -> None:
    app = world.app(grace="1h")

    @app.handler("slow")
    async def slow(task: Task[Any]) -> None:
        await forever()

    async def serve() -> None:
        async with app.worker() as worker:
            await world.until(lambda: worker.stats.leased == 1)
            if shared:
                others.append(asyncio.create_task(worker.stop()))

    others: list[asyncio.Task[None]] = []
    async with app:
        before = asyncio.all_tasks()
        await slow.schedule(None, key="k", delay="0s")
        serving = asyncio.create_task(serve())
        await world.pause(10)
        assert not serving.done()
        serving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await serving
        await asyncio.gather(*others)
        assert asyncio.all_tasks() == before
        assert world.elapsed == pytest.approx(10_000, abs=100)
        task = await task_of(app, "slow", "k")
        assert (task.state, task.attempt, task.failures) == ("waiting", 0, 0)


@virtual
async def test_no_topic_holds_up_another(world: World) -> None:
    """P6: a flood of slow tasks fills its own slots and its share of the worker's, never the others'."""
    app, late = world.app(concurrency=20), []

    @app.handler("flood", concurrency=100)
    async def flood(task: Task[Any]) -> None:
        await elapse(60)

    @app.handler("quick")
    async def quick(task: Task[Any]) -> None:
        late.append(world.clock.now() - task.record.planned_at)

    async with app, app.worker() as worker:
        await app.schedule_many([flood.new(None, delay="0s") for _ in range(500)])
        await app.schedule_many([app.new("nobody", None, delay="0s") for _ in range(500)])
        for _ in range(50):
            await world.pause(0.1)
            await quick.schedule(None, delay="0s")
        await world.until(lambda: len(late) == 50, 1)
        assert worker.stats.delivered == 50
    assert max(late) <= 1


@virtual
async def test_a_flood_that_comes_in_several_leases_leaves_the_slots_of_others(world: World) -> None:
    """P6 where a store gives fewer tasks than wanted, since their payloads are large, and says that more is due."""

    class Cut(MemoryStore):
        async def lease(self, wants: Mapping[str, int], *, now: int, until: int, holder: str) -> Leased:
            leased = await super().lease({name: min(want, 3) for name, want in wants.items()}, now=now, until=until,
                                         holder=holder)  # fmt: skip
            asked = dict.fromkeys(wants, 0)
            return replace(await super().lease(asked, now=now, until=until, holder=holder), tasks=leased.tasks)

    app, started = world.app(Cut(), concurrency=20), dict.fromkeys(("flood", "quick"), 0)

    @app.handler("flood", concurrency=100)
    async def flood(task: Task[Any]) -> None:
        started["flood"] += 1
        await elapse(60)

    @app.handler("quick")
    async def quick(task: Task[Any]) -> None:
        started["quick"] += 1

    async with app, app.worker():
        await app.schedule_many([flood.new(None, delay="0s") for _ in range(50)])
        await world.pause(0.1)
        await quick.schedule(None, delay="0s")
        await world.pause(0.1)
    assert started == {"flood": 19, "quick": 1}


@virtual
async def test_what_a_handler_leaves_in_its_context_does_not_reach_the_next(world: World) -> None:
    user: contextvars.ContextVar[str] = contextvars.ContextVar("user", default="nobody")
    app, seen = world.app(), list[str]()

    @app.handler("work", concurrency=1)
    async def work(task: Task[Any]) -> None:
        seen.append(user.get())
        user.set(task.key)

    async with app, app.worker() as worker:
        await app.schedule_many([work.new(None, delay="0s") for _ in range(10)])
        await worker.until_empty()
    assert seen == ["nobody"] * 10


@virtual
async def test_a_handler_that_cancels_its_own_task_stops_nobody(world: World) -> None:
    app, seen = world.app(), []

    @app.handler("work", concurrency=1, retry="never")
    async def work(task: Task[Any]) -> None:
        seen.append(task.key)
        me = asyncio.current_task()
        assert me is not None
        if task.key == "odd":
            me.cancel()
        if task.key == "worse":
            raise asyncio.CancelledError

    async with app, app.worker():
        for key in ("odd", "worse", "even"):
            await work.schedule(None, key=key, delay="0s")
            await world.pause(1)
    assert seen == ["odd", "worse", "even"]


@virtual
async def test_plain_functions_run_in_threads_and_a_timed_out_one_keeps_its_slot(world: World) -> None:
    app, threads, gate = world.app(), [], threading.Event()
    stuck, ended = asyncio.Event(), asyncio.Queue[str]()

    @app.handler("sync", concurrency=1, timeout="1s", retry="never")
    def sync(task: Task[Any]) -> None:
        threads.append((task.key, threading.current_thread() is threading.main_thread()))
        if task.key == "stuck":
            world.loop.call_soon_threadsafe(stuck.set)
            gate.wait(PATIENCE)

    def observe(record: Record, outcome: Settlement) -> None:
        ended.put_nowait(record.key)

    async with app, app.worker(observe=observe) as worker:
        await sync.schedule(None, key="fine", delay="0s")
        assert await ended.get() == "fine"
        with world.loop.hold():  # time stands still, as a thread is outstanding: the timeout is called by hand
            await sync.schedule(None, key="stuck", delay="0s")
            await sync.schedule(None, key="next", delay="0s")
            await stuck.wait()
            delivery = next(iter(worker._executors["sync"].running))
            worker._time_out(delivery)
            assert (await ended.get(), worker.stats.dead) == ("stuck", 1)
            assert worker._executors["sync"].free == 0, "the thread still runs"
            gate.set()
            assert (await ended.get(), worker.stats.done) == ("next", 2)
    assert threads == [("fine", False), ("stuck", False), ("next", False)]


@virtual
async def test_a_failing_store_delays_and_loses_nothing(world: World) -> None:
    """Calls fail before and after they were done; every task is done in the end, and none twice after its settle."""
    app, done, count = world.app(lease="3s"), [], 0

    @app.handler("work")
    async def work(task: Task[Any]) -> None:
        done.append(task.key)

    def fault(point: str) -> BaseException | None:
        nonlocal count
        if point.split(":")[0] in ("lease", "settle", "extend"):
            count += 1
            if count % 3 == 0:
                return StoreUnavailable(f"made up, at {point}")
        return None

    async with app:
        await app.schedule_many([work.new(None, key=str(n), delay=f"{n * 50}ms") for n in range(100)])
        world.store.fault = fault
        async with app.worker():
            await world.until(lambda: len(set(done)) == 100)
            await world.pause(10)
        world.store.fault = lambda _: None
        assert {task.state async for task in app.find(topic="work")} == {"done"}
    assert set(done) == {str(n) for n in range(100)}


@virtual
async def test_what_a_handler_schedules_carries_on_its_trace(world: World) -> None:
    app, seen = world.app(), []

    @app.handler("first")
    async def first(task: Task[Any]) -> None:
        await app.schedule("second", key="s", delay="0s")

    @app.handler("second")
    async def second(task: Task[Any]) -> None:
        seen.append(dict(task.headers))

    trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    async with app, app.worker():
        await first.schedule(None, delay="0s", headers={"traceparent": trace, "x-own": "stays"})
        await world.until(lambda: bool(seen))
    assert seen == [{"traceparent": trace}]
