"""What ended a worker's sleeps: so that a wake-up channel that has died shows."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from tests.waiting import elapse

from bide import Task
from bide.core.retry import policy
from bide.engine.delivery.lease_loop import Waker
from bide.engine.delivery.long_poll import LongPoll
from bide.ports import Policy

if TYPE_CHECKING:
    from tests.engine.conftest import Tell, World


def test_a_notification_an_alarm_and_the_cap_are_told_apart(virtual: Tell) -> None:
    async def story(world: World) -> None:
        app = world.app(max_sleep="5s")
        fired: list[int] = []

        @app.handler("post")
        async def post(task: Task[Any]) -> None:
            fired.append(world.elapsed)

        async with app:
            await post.schedule(None, key="known", delay="2s")
            async with app.worker() as worker:
                await world.until(lambda: len(fired) == 1)
                assert (worker.wakes.by_alarm, worker.wakes.by_notification, worker.wakes.by_cap) == (1, 0, 0)
                await post.schedule(None, key="told", delay="3s")
                await world.until(lambda: len(fired) == 2)
                assert (worker.wakes.by_alarm, worker.wakes.by_notification, worker.wakes.by_cap) == (1, 1, 0)
                assert worker.wakes.notifications == 1
                assert worker.wakes.heard_at is not None
                await world.pause(25)
                assert (worker.wakes.by_alarm, worker.wakes.by_notification) == (1, 1)
                assert worker.wakes.by_cap in (4, 5)
                assert worker.wakes.missed == 0

    virtual(story)


def test_what_was_due_during_a_whole_sleep_was_missed(virtual: Tell) -> None:
    async def story(world: World) -> None:
        world.store.deaf = True
        app = world.app(max_sleep="10s")
        fired: list[int] = []

        @app.handler("post")
        async def post(task: Task[Any]) -> None:
            fired.append(world.elapsed)

        async with app, app.worker() as worker:
            await world.pause(1)
            await post.schedule(None, key="a", delay="2s")
            await world.until(lambda: len(fired) == 1)
            assert fired == [10_000]
            assert worker.wakes.missed == 1
            assert worker.wakes.notifications == 0
            await world.pause(20)
            assert worker.wakes.missed == 1

    virtual(story)


def test_the_desk_counts_its_sleeps_too(virtual: Tell) -> None:
    async def story(world: World) -> None:
        world.store.deaf = True
        app = world.app(max_sleep="10s")
        async with app:
            long_poll = LongPoll(app, policy_of=lambda _: Policy(policy(None)))
            await long_poll.start()
            leasing = asyncio.ensure_future(long_poll.lease({"post": 1}, holder="me", lease_for=10_000, wait=60))
            await world.pause(1)
            await app.schedule("post", key="a", delay="2s")
            assert [record.key for record in await leasing] == ["a"]
            assert (long_poll.wakes.by_cap, long_poll.wakes.missed) == (1, 1)
            await long_poll.close()

    virtual(story)


def test_the_longest_sleep_counts_from_the_question_and_not_from_its_answer(virtual: Tell) -> None:
    """What was added in between, and wakes just beyond the cap from then, was told to nobody."""

    async def story(world: World) -> None:
        loop = asyncio.get_running_loop()
        waker = Waker(world.app().clock, 1_000)
        for answer_takes in (0.0, 0.4, 3.0):
            asked_at = loop.time()
            waker.forget()
            await elapse(answer_takes)
            await waker.sleep(None)
            assert loop.time() - asked_at == max(1.0, answer_takes)
        began = loop.time()
        await waker.sleep(None)
        assert loop.time() - began == 1.0, "nothing was asked since the last sleep"
        waker.close()

    virtual(story)
