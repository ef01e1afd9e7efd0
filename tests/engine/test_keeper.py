"""Leases of what runs are kept alive in one call; a loop that stood still says so."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import pytest
from tests.waiting import elapse

from bide import Task

if TYPE_CHECKING:
    from tests.engine.conftest import Tell, World


def test_all_leases_are_extended_in_one_call(virtual: Tell) -> None:
    async def story(world: World) -> None:
        app = world.app(lease="9s")

        @app.handler("slow", concurrency=50)
        async def slow(task: Task[Any]) -> None:
            await elapse(30)

        async with app, app.worker() as worker:
            await app.schedule_many([slow.new(None, delay="0s") for _ in range(50)])
            await world.pause(29)
            assert world.store.calls["extend"] == 9
            await world.until(lambda: worker.stats.done == 50)
            assert worker.stats.lost == 0

    virtual(story)


def test_an_idle_worker_extends_nothing(virtual: Tell) -> None:
    async def story(world: World) -> None:
        app = world.app(lease="9s")

        @app.handler("work")
        async def work(task: Task[Any]) -> None: ...

        async with app, app.worker():
            await work.schedule(None, delay="1h")
            await world.pause(1_800)
            assert "extend" not in world.store.calls

    virtual(story)


def test_a_loop_that_stood_still_longer_than_a_lease_says_so(virtual: Tell, caplog: pytest.LogCaptureFixture) -> None:
    async def story(world: World) -> None:
        app = world.app(lease="9s")

        @app.handler("busy")
        async def busy(task: Task[Any]) -> None:
            world.loop._jumping.now += 20  # a handler computes, and time passes without a turn for anybody else
            await elapse(1)

        async with app, app.worker() as worker:
            await busy.schedule(None, delay="0s")
            await worker.until_empty()

    with caplog.at_level(logging.WARNING, "bide.keeper"):
        virtual(story)
    assert "blocked for 17.0 s" in caplog.text
    assert "plain function" in caplog.text
