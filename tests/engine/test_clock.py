"""The machine's clock, and one that runs faster: never ahead of the truth, and of one mind with itself."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from tests.waiting import block

from bide import BadInput, Bide, ScaledClock, SystemClock, Task
from bide.core.records import Record, Settlement
from bide.ports import Clock


@pytest.mark.parametrize("clock", [SystemClock(), ScaledClock(60), ScaledClock(0.5)], ids=["real", "fast", "slow"])
def test_they_are_clocks(clock: Clock) -> None:
    assert isinstance(clock, Clock)
    assert isinstance(clock.now(), int)


def test_the_machines_clock_is_rounded_down(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bide.ports.time.time.time_ns", lambda: 1_800_000_000_000_999_999)
    assert SystemClock().now() == 1_800_000_000_000
    assert SystemClock().span(30_000) == 30_000


def test_it_begins_now_and_runs_as_fast_as_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = 1_800_000_000.0
    monkeypatch.setattr("bide.ports.time.time.time", lambda: seconds)
    clock = ScaledClock(3600)
    begin = clock.now()
    assert begin == 1_800_000_000_000
    seconds += 1.5
    assert clock.now() - begin == 5_400_000
    assert clock.seconds_until(begin + 2 * 3_600_000) == pytest.approx(0.5)
    assert clock.seconds_until(begin) == pytest.approx(-1.5)


def test_only_what_is_planned_is_fast_a_length_of_real_time_is_a_long_way() -> None:
    assert ScaledClock(3600).span(10_000) == 36_000_000
    assert ScaledClock(0.5).span(10_000) == 5_000


def test_a_sleep_until_then_is_over_when_the_clock_says_so() -> None:
    clock = ScaledClock(1_000)
    for ahead in (1, 500, 3_000):
        at = clock.now() + ahead
        block(max(0.0, clock.seconds_until(at)), why="the length of this sleep is what is tested")
        assert clock.seconds_until(at) <= 0
        assert clock.now() >= at


@pytest.mark.parametrize("speed", [0, -1, 1_000_001, float("nan")])
def test_a_speed_is_within_reason(speed: float) -> None:
    with pytest.raises(BadInput, match="speed"):
        ScaledClock(speed)


async def test_on_a_fast_clock_a_lease_lasts_as_long_as_ever() -> None:
    """Ten minutes of the story pass while the handler runs: its lease of one minute must not have ended."""
    app = Bide("memory:", clock=ScaledClock(6_000), lease="1m")
    attempts: list[int] = []

    @app.handler("slow", timeout="1m")
    def slow(task: Task[Any]) -> None:
        attempts.append(task.attempt)
        block(0.1, why="ten minutes of the story are to pass")

    ended = asyncio.Event()

    def end(record: Record, outcome: Settlement) -> None:
        ended.set()

    async with app, app.worker(observe=end) as first, app.worker(observe=end) as second:
        before = app.now()
        await slow.schedule(None, key="k", delay="1m")
        await ended.wait()
        assert (app.now() - before).total_seconds() >= 600
    assert attempts == [1]
    assert first.stats.lost + second.stats.lost == 0
