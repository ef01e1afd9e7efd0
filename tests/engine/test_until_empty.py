"""`until_empty` returns when nothing of the worker's topics waits or is held, and not a moment before."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from tests.engine.conftest import World, nothing, virtual
from tests.waiting import elapse

from bide import Defer, Done, Fixed, Task
from bide.core.records import OutcomeKind, Settlement, State


@virtual
async def test_it_waits_for_the_last_and_for_every_retry_of_it(world: World) -> None:
    app, ended = world.app(), []

    @app.handler("work", retry=Fixed("10s", tries=3))
    async def work(task: Task[Any]) -> None:
        await elapse(2)
        if task.key == "fails" and task.attempt < 3:
            raise OSError("not yet")
        if task.key == "waits" and world.elapsed < 60_000:
            raise Defer("1m")
        ended.append((task.key, world.elapsed))

    async with app, app.worker() as worker:
        for key, delay in (("soon", "1s"), ("fails", "5s"), ("waits", "0s")):
            await work.schedule(None, key=key, delay=delay)
        await worker.until_empty()
        assert ended == [("soon", 3_000), ("fails", 31_000), ("waits", 64_000)]
        assert world.elapsed == pytest.approx(64_000, abs=5)
        assert {state for _, state in (await app.tally()).counts} == {State.DONE}


@virtual
async def test_asked_again_right_after_a_schedule_it_waits_again(world: World) -> None:
    """What it knew before the schedule counts no more, whether or not the notifications have come yet."""
    app = world.app()
    work = world.noted(app, "work")
    async with app, app.worker() as worker:
        await worker.until_empty()
        for number in range(10):
            await work.handler.schedule(None, key=str(number), delay="5s")
            await worker.until_empty()
            assert len(work.keys) == number + 1
        assert world.elapsed == pytest.approx(50_000, abs=100)


@virtual
async def test_also_when_the_notifications_are_lost(world: World) -> None:
    world.store.deaf = True
    app = world.app(max_sleep="1h")
    work = world.noted(app, "work")
    async with app, app.worker() as worker:
        await world.pause(1)
        await work.handler.schedule(None, key="k", delay="5s")
        await worker.until_empty()
        assert work.keys == ["k"]


@virtual
async def test_a_task_that_begins_again_is_never_over(world: World) -> None:
    app = world.app()

    @app.handler("beat")
    async def beat(task: Task[Any]) -> Done:
        return Done(again_in="10s")

    async with app, app.worker() as worker:
        await beat.schedule(None, key="heart", delay="0s")
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(600):
                await worker.until_empty()
        await app.cancel("beat", "heart")
        await worker.until_empty()
        assert world.elapsed == pytest.approx(600_000, abs=1_100)


@virtual
async def test_a_flood_that_is_past_its_deadline(world: World) -> None:
    """Every slot is filled with what must not be delivered any more: nothing runs, and yet there is more to come."""
    app, mourned = world.app(), []
    remind = app.handler("remind", concurrency=10)(nothing)

    @app.on_dead("remind")
    def mourn(task: Task[Any]) -> None:
        mourned.append(task.key)

    async with app:
        await app.schedule_many([remind.new(None, delay="1s", deadline="2s") for _ in range(95)])
        await world.pause(10)
        async with app.worker() as worker:
            await worker.until_empty()
        assert (await app.tally()).number() == len(mourned) == 95


@virtual
async def test_what_another_worker_holds_is_waited_for(world: World) -> None:
    app = world.app(max_sleep="1s", lease="1h")
    work = app.handler("work")(nothing)
    async with app:
        await work.schedule(None, key="k", delay="0s")
        now = world.clock.now()
        leased = await world.memory.lease({"work": 1}, now=now, until=now + 3_600_000, holder="another")
        async with app.worker() as worker:
            waiting = asyncio.create_task(worker.until_empty())
            await world.pause(600)
            assert not waiting.done()
            (task,) = leased.tasks
            done = Settlement(task.topic, task.key, task.token, OutcomeKind.DONE)
            assert await world.memory.settle([done], now=world.clock.now()) == [True]
            await waiting
            assert world.elapsed <= 601_000, "seen at the next look, at most the longest sleep later"
        assert worker.stats.leased == 0


@virtual
async def test_what_another_worker_lost_is_delivered_first(world: World) -> None:
    app, given = world.app(), list[Task[Any]]()

    @app.handler("work")
    async def work(task: Task[Any]) -> None:
        given.append(task)

    async with app:
        await work.schedule(None, key="k", delay="0s")
        now = world.clock.now()
        lost = await world.memory.lease({"work": 1}, now=now, until=now + 30_000, holder="killed")
        async with app.worker() as worker:
            await worker.until_empty()
        assert world.elapsed == pytest.approx(30_000, abs=5)
    [task] = given
    assert (task.attempt, task.record.losses) == (2, 1)
    assert task.token > lost.tasks[0].token


@virtual
async def test_several_may_wait_and_one_may_give_up(world: World) -> None:
    app = world.app()
    work = app.handler("work")(nothing)
    async with app, app.worker() as worker:
        await work.schedule(None, key="k", delay="10s")
        patient = [asyncio.create_task(worker.until_empty()) for _ in range(3)]
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1):
                await worker.until_empty()
        patient[1].cancel()
        done, _ = await asyncio.wait(patient, timeout=60)
        assert len(done) == 3
        assert [one.cancelled() for one in patient] == [False, True, False]
        assert world.elapsed == pytest.approx(10_000, abs=5)


@virtual
async def test_topics_of_others_are_not_waited_for(world: World) -> None:
    app = world.app()
    mine = app.handler("mine")(nothing)
    elsewhere = app.handler("not here")(nothing)
    async with app:
        await app.schedule("nobody's", delay="0s")
        await elsewhere.schedule(None, delay="0s")
        await mine.schedule(None, delay="3s")
        async with app.worker(topics=["mine"]) as worker:
            await worker.until_empty()
        assert world.elapsed == pytest.approx(3_000, abs=5)
        assert (await app.tally()).number(state=State.WAITING) == 2


@virtual
async def test_a_worker_that_stops_first_says_so(world: World) -> None:
    app = world.app()
    work = app.handler("work")(nothing)
    async with app:
        await work.schedule(None, key="k", delay="1h")
        async with app.worker() as worker:
            waiting = asyncio.create_task(worker.until_empty())
            await world.pause(1)
        with pytest.raises(RuntimeError, match="stopped"):
            async with asyncio.timeout(60):
                await waiting
        with pytest.raises(RuntimeError, match="stopped"):
            await worker.until_empty()
