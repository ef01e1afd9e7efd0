"""Wall-clock times through the verbs of the app: by its clock, in the zone that is named."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from tests.engine.conftest import nothing, task_of

from bide import Bide, Defer, Done, Retry, Task
from bide.core.instants import When
from bide.core.recurrence.rules import Cron
from bide.testing import TimeMachine

START = "2030-03-30T20:00:00Z"
"""In Rome it is Saturday, 21:00, and the clocks are set forward in the night."""


def utc(day: int, hour: int, minute: int = 0) -> datetime:
    return datetime(2030, 3, day, hour, minute, tzinfo=UTC)


@pytest.mark.parametrize(
    ("at", "zone", "due"),
    [
        ("tomorrow 20:00 Europe/Rome", None, utc(31, 18)),
        ("02:30", "Europe/Rome", utc(31, 1)),
        (datetime(2030, 3, 31, 8), "Europe/Rome", utc(31, 6)),
    ],
)
async def test_each_verb_takes_them(at: When, zone: str | None, due: datetime) -> None:
    app = Bide("memory:")
    handle = app.handler("t")(nothing)
    async with TimeMachine(app, start=START):
        made = await app.schedule("t", key="a", at=at, zone=zone)
        assert made.task is not None
        assert made.task.due_at == due
        await handle.schedule(None, key="b", at=at, zone=zone)
        await app.schedule_many([handle.new(None, key="c", at=at, zone=zone)])
        await app.schedule("t", key="d", delay="1m", deadline=at, zone=zone)
        found = await task_of(app, "t", "d")
        assert found.deadline == due
        for key in ("e", "f"):
            await app.schedule("t", key=key, delay="1h")
        await app.reschedule("t", "e", at=at, deadline=due + timedelta(days=1), zone=zone)
        await handle.reschedule("f", at=at, zone=zone)
        tasks = [task async for task in app.find(topic="t", wake_from=due, wake_before=due + timedelta(seconds=1))]
        assert {task.key for task in tasks} == set("abcef")


async def test_what_reads_and_steers_takes_them() -> None:
    app = Bide("memory:")
    async with TimeMachine(app, start=START):
        await app.schedule("t", key="a", delay="1h")
        await app.reschedule_many([(("t", "a"), "tomorrow 20:00 Europe/Rome")])
        bounds = ("tomorrow 20:00 Europe/Rome", "sunday 20:01 Europe/Rome")
        assert [task.key async for task in app.find(wake_from=bounds[0], wake_before=bounds[1])] == ["a"]
        found = await asyncio.to_thread(lambda: list(app.sync.find(wake_from=bounds[0], wake_before=bounds[1])))
        assert [task.key for task in found] == ["a"]
        tally = await app.tally(bounds)
        assert tally.forecast["t"][0].number == 1
        await app.recurring.add("r", Cron("@daily", zone="Europe/Rome", start="2030-03-01 00:00"))
        since, until = "2030-03-28 00:00 Europe/Rome", "today 00:00 Europe/Rome"
        assert len(await app.recurring.backfill("r", since=since, until=until)) == 3


async def test_outcomes_read_them_as_of_their_settlement() -> None:
    app = Bide("memory:")
    ends = {
        "done": Done(again_at="tomorrow 20:00 Europe/Rome"),
        "retry": Retry(at="22:30 Europe/Rome"),
        "defer": Defer(at="mon 09:00 Europe/Rome"),
        "fixed": Defer(at="2030-04-02 09:00 Europe/Rome"),
    }

    @app.handler("t")
    async def handle(task: Task[Any]) -> Any:
        return ends[task.key]

    async with TimeMachine(app, start=START) as machine:
        for key in ends:
            await handle.schedule(None, key=key, delay="0s")
        await machine.advance("0s")
        woken = {task.key: task.wake_at for task in await machine.waiting()}
        assert woken == {
            "done": utc(31, 18), "retry": utc(30, 21, 30), "defer": datetime(2030, 4, 1, 7, tzinfo=UTC),
            "fixed": datetime(2030, 4, 2, 7, tzinfo=UTC),
        }  # fmt: skip
        await machine.advance_to("tomorrow 20:00 Europe/Rome")
        assert machine.now == utc(31, 18)
        assert {task.key: task.wake_at for task in await machine.waiting()}["done"] == datetime(
            2030, 4, 1, 18, tzinfo=UTC
        )
