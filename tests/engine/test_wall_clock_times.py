"""Wall-clock times through the verbs of the app: by its clock, in the zone that is named."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from tests.engine.conftest import nothing, task_of

from bide import BadInput, Bide, Defer, Done, Retry, Task
from bide.core.instants import When
from bide.core.recurrence import Cron
from bide.testing import TimeMachine

START = "2030-03-30T20:00:00Z"
"""In Rome it is Saturday, 21:00, and the clocks are set forward in the night."""


def utc(day: int, hour: int, minute: int = 0) -> datetime:
    return datetime(2030, 3, day, hour, minute, tzinfo=UTC)


@pytest.mark.parametrize(
    ("at", "zone", "due"),
    [
        ("tomorrow 20:00 Europe/Rome", None, utc(31, 18)),
        ("tomorrow 20:00", "Europe/Rome", utc(31, 18)),
        ("02:30 Europe/Rome", "Europe/Rome", utc(31, 1)),
        ("mon 09:00", "Europe/Rome", datetime(2030, 4, 1, 7, tzinfo=UTC)),
        (datetime(2030, 3, 31, 8), "Europe/Rome", utc(31, 6)),
        ("2030-03-31T08:00", "Europe/Rome", utc(31, 6)),
        ("2030-03-31T08:00+02:00", "Asia/Shanghai", utc(31, 6)),
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


async def test_a_deadline_ends_what_an_outcome_moves_past_it() -> None:
    app = Bide("memory:")

    @app.handler("t", keep_dead="1d")
    async def handle(task: Task[Any]) -> Defer:
        return Defer(at="tomorrow 08:00 Europe/Rome")

    async with TimeMachine(app, start=START) as machine:
        await handle.schedule(None, key="a", delay="0s", deadline="22:00 Europe/Rome")
        await machine.advance("0s")
        found = await task_of(app, "t", "a")
        assert (found.state, found.error) == ("dead", "deadline: deferred past it")


async def test_what_is_refused() -> None:
    app = Bide("memory:", max_past="1h")
    async with TimeMachine(app, start=START):
        for given, field in (
            ({"at": "tomorrow 20:00"}, "at"),
            ({"at": datetime(2030, 3, 31, 8)}, "at"),
            ({"at": "20:00 UTC", "zone": "Europe/Rome"}, "at"),
            ({"at": "20:00", "zone": "Nowhere"}, "zone"),
            ({"delay": "1h", "zone": "Nowhere"}, "zone"),
            ({"at": "today 00:00", "zone": "Europe/Rome"}, "at"),  # further back than max_past
            ({"delay": "1h", "deadline": "tomorrow 20:00"}, "deadline"),
            ({"delay": "1h", "deadline": "today 21:30", "zone": "Europe/Rome"}, "deadline"),  # before it is due
            ({"at": "20:00 UTC", "delay": "1h"}, "at, delay"),
        ):
            with pytest.raises(BadInput) as caught:
                await app.schedule("t", key="a", **given)
            assert caught.value.field == field, given
        assert await app.get("t", "a") is None


def test_without_an_event_loop(tmp_path: Path) -> None:
    app = Bide(f"sqlite:///{tmp_path}/tasks.db")
    try:
        made = app.sync.schedule("t", key="a", at="2099-01-31 08:00", zone="Asia/Shanghai")
        assert made.task is not None
        assert made.task.due_at == datetime(2099, 1, 31, tzinfo=UTC)
        moved = app.sync.reschedule("t", "a", at="tomorrow 08:00 Asia/Shanghai")
        assert moved.task is not None
        assert timedelta(0) < moved.task.due_at - app.now() <= timedelta(days=2)
        found = list(app.sync.find(wake_before="2098-01-31 08:00 Asia/Shanghai"))
        assert [task.key for task in found] == ["a"]
    finally:
        app.sync.close()
