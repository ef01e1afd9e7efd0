"""Recurring tasks for a reader: what the log says of each instant, the bounded search, and what is to come."""

from __future__ import annotations

from datetime import UTC
from typing import Any

import pytest
from tests.engine.conftest import World, virtual

from bide import BadInput, Bide, Dead, Every, Ladder, Task
from bide.core.instants import Millis
from bide.core.outcomes import Outcome
from bide.core.records import Count
from bide.core.recurrence.rules import EveryRule
from bide.insight import recurring
from bide.insight.forecast import DAY, HOUR, MINUTE, Forecast, ForecastQuery, Range, Span
from bide.insight.recurring import coming_of, misses_of, past_of, recurring_tasks
from bide.testing import ManualClock

START = 1_900_000_800_000
"""On a whole hour."""


async def told(world: World, app: Bide) -> dict[int, str]:
    """The instants with a miss, in minutes since the start, and its reason."""
    task = await app.get("t", "t")
    assert task is not None
    assert task.recurrence is not None
    misses = misses_of(await app.events("t", "t"))
    past = past_of(task.recurrence.rule, "t", world.clock.now(), misses, 50)
    assert [at for at, _ in past] == sorted((at for at, _ in past), reverse=True)
    return {(at - world.start) // MINUTE: miss.why for at, miss in past if miss is not None}


@pytest.mark.parametrize(
    ("overlap", "expected"),
    [
        ("skip", {2: "overlap", 3: "overlap", 5: "overlap", 6: "overlap"}),
        ("queue", {}),
        ("cancel_running", dict.fromkeys(range(1, 8), "overlap: the occurrence was cancelled by the next one")),
    ],
)
@virtual
async def test_instants_that_came_while_one_ran(world: World, overlap: str, expected: dict[int, str]) -> None:
    app = world.app(world.memory)

    @app.handler("t")
    async def handle(task: Task[Any]) -> None:
        await world.pause(150)

    async with app, app.worker():
        await app.recurring.add("t", Every("1m"), overlap=overlap)
        await world.pause(8.4 * 60)
        assert await told(world, app) == expected


@pytest.mark.parametrize(
    ("how", "missed"),
    [
        ({"catch_up": "latest"}, range(10, 190, 5)),
        ({"catch_up": "none"}, range(10, 195, 5)),
        ({"catch_up": "all"}, ()),
        ({"catch_up": "all", "most": 3}, range(10, 180, 5)),
        ({"catch_up": "latest", "jitter": "2m"}, range(10, 190, 5)),
    ],
)
@virtual
async def test_instants_of_an_outage(world: World, how: dict[str, Any], missed: range) -> None:
    app = world.app(world.memory)
    rule = Every("5m", jitter=how.pop("jitter", "0s"))

    @app.handler("t")
    async def handle(task: Task[Any]) -> None: ...

    async with app:
        async with app.worker():
            await app.recurring.add("t", rule, **how)
            await world.pause(8 * 60)
        await world.pause(184.5 * 60)
        async with app.worker():
            await world.pause(1)
        assert await told(world, app) == dict.fromkeys(missed, "late")


@virtual
async def test_an_occurrence_that_died(world: World) -> None:
    app = world.app(world.memory)

    @app.handler("t", retry="never")
    async def handle(task: Task[Any]) -> Outcome | None:
        return Dead("broken") if world.elapsed // MINUTE == 2 else None

    async with app, app.worker():
        await app.recurring.add("t", Every("1m"))
        await world.pause(4.5 * 60)
        assert await told(world, app) == {2: "broken"}


@virtual
async def test_an_occurrence_that_died_after_a_retry_is_the_one_that_began(world: World) -> None:
    app = world.app(world.memory)

    @app.handler("t", retry=Ladder("150s"))
    async def handle(task: Task[Any]) -> None:
        if world.elapsed // MINUTE < 5:
            raise ValueError("broken")

    async with app, app.worker():
        await app.recurring.add("t", Every("1m"))
        await world.pause(4.5 * 60)
        assert (await told(world, app))[1] == "ValueError: broken"


async def test_the_search_is_bounded_and_small_topics_are_read_to_their_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recurring, "MOST", 30)
    async with Bide("memory:", clock=ManualClock(START)) as app:
        await app.recurring.add("many", Every("1m"))
        await app.schedule_many([app.new("many", None, key=str(number), delay="2m") for number in range(40)])
        await app.recurring.add("many", Every("1m"), key="paused")
        await app.recurring.pause("many", "paused")
        await app.recurring.add("many", Every("30d"), key="late")
        await app.recurring.add("small", Every("30d"))
        await app.recurring.add("runs", Every("1s"))
        await app.recurring.run_now("small")
        assert (await app.store.lease({"runs": 1}, now=START + 2_000, until=START + HOUR, holder="w")).tasks
        found, whole = await recurring_tasks(app)
        assert [one.key for one in found] == ["many", "runs", "small", "paused"]
        assert not whole
        found, whole = await recurring_tasks(app, (await app.tally(topics=["small"])).counts)
        assert [one.key for one in found] == ["small"]
        assert whole
        found, whole = await recurring_tasks(app, (await app.tally(topics=["many"])).counts)
        assert [one.key for one in found] == ["many", "paused"]
        assert not whole


async def test_coming_occurrences_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recurring, "MOST_OF_RULE", 100)
    monkeypatch.setattr(recurring, "MOST_COMING", 150)
    async with Bide("memory:", clock=ManualClock(START)) as app:
        for topic, rule in (("a", "1m"), ("b", "2m"), ("c", "3m")):
            await app.recurring.add(topic, Every(rule))
        tasks = (await recurring_tasks(app))[0]
        coming = await coming_of(tasks, START, START + DAY, START)
        due = {task.topic: task.due_at for task in tasks}
        first = coming.between(due["a"], due["a"] + 100 * MINUTE)["a"]
        assert first == Count(99), "the waiting one is not among them"
        day = {"a": Count(100, False), "b": Count(50, False), "c": Count(0, False)}
        assert coming.between(START, START + DAY) == day
        assert coming.between(START, START + HOUR)["b"] == Count(28)
        assert coming.between(START, START + MINUTE) == {}
        later = await coming_of(tasks[:1], START + 10 * DAY, START + 10 * DAY + HOUR - 1, START)
        assert later.between(START, START + 20 * DAY) == {"a": Count(60)}, "also at the first instant"


async def test_the_forecast_counts_coming_occurrences() -> None:
    async with Bide("memory:", clock=ManualClock(START)) as app:
        await app.recurring.add("hourly", Every("1h"), key="a")
        await app.recurring.add("hourly", Every("1h"), key="b")
        await app.recurring.add("secret", Every("1h"))
        await app.recurring.add("paused", Every("1h"))
        await app.recurring.pause("paused")
        await app.schedule("once", None, delay="1h")
        forecast = Forecast(app)

        async def seen(only: str | None = None) -> Any:
            query = ForecastQuery(Range(START, START + 4 * HOUR, HOUR), UTC, only)
            return await forecast.get(query, lambda topic: topic != "secret")

        found = await seen()
        assert found.total == Count(2 * 3 + 1)
        assert (found.later, found.all_rules, found.exact) == (Count(4), True, True)
        assert [bar.total.number for bar in found.bars] == [0, 3, 2, 2]
        assert [peak.top.low - START for peak in found.peaks] == [HOUR, 3 * HOUR], "to the second"
        assert (await seen("hourly")).total == Count(6)
        month = await forecast.get(ForecastQuery(Span.MONTH, UTC), lambda topic: topic == "hourly")
        assert month.total.number == 2 * (30 * 24 - 1)
        await forecast.close()


async def test_a_rule_that_cannot_be_computed_here_is_left_out() -> None:
    async with Bide("memory:", clock=ManualClock(START)) as app:
        await app.recurring.add("t", Every("1h"))
        [task] = (await recurring_tasks(app))[0]

        def fails(*_: Millis) -> None:
            raise BadInput("zone", "X/Y", "a zone")

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(EveryRule, "upto", fails)
            coming = await coming_of([task], START, START + DAY, START)
        assert coming.instants == {}
