"""Drawings of a topic: its ladder of retries, and its last day. Numbers for pictures without a style of their own.

A bar's length, or a line's height, goes by the logarithm where seconds stand beside hours.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import log1p
from typing import NamedTuple

from bide.core.instants import Millis
from bide.engine.history import Past
from bide.engine.told_routes import ToldRoute
from bide.engine.topics import QUARTER, Quarter

WIDTH, HEIGHT = 960, 100
_UNIT = 100
"""Milliseconds below which pauses look alike."""


class Rung(NamedTuple):
    """One pause."""

    failure: int
    """After so many failures."""
    pause: Millis
    after: Millis
    """Since the first failure, all pauses together."""
    width: int
    """Of 100."""


class Ladder(NamedTuple):
    """The pauses that are told, and how it goes on."""

    rungs: Sequence[Rung]
    tries: int | None
    left: int
    """Pauses beyond those that are told; of one that never ends, nought."""


class Day(NamedTuple):
    """The last day, in two pictures of `WIDTH` by `HEIGHT`, and as a table."""

    box: str
    most: int
    """Outcomes in the fullest quarter of an hour."""
    done: str
    retried: str
    dead: str
    late_most: Millis
    half: str
    nearly_all: str
    marks: Sequence[Millis]
    """Instants to be written below: the beginning, the quarters of it, the end."""
    bars: Sequence[tuple[int, Quarter]]
    """What happened, by its place."""
    total: Past


def drawn_ladder(route: ToldRoute) -> Ladder:
    """The pauses of a route, as bars."""
    longest = max(route.pauses, default=0)
    rungs: list[Rung] = []
    after = 0
    for place, pause in enumerate(route.pauses, 1):
        after += pause
        width = round(100 * log1p(pause / _UNIT) / log1p(longest / _UNIT)) if longest else 0
        rungs.append(Rung(place, pause, after, max(1, width)))
    left = 0 if route.tries is None else max(0, route.tries - 1 - len(rungs))
    return Ladder(rungs, route.tries, left)


def drawn_day(day: Sequence[Quarter]) -> Day | None:
    """None where nothing is known of it."""
    if not day:
        return None
    total = Past()
    for quarter in day:
        total.add(quarter.past)
    most = max(_ended(quarter.past) for quarter in day)
    heights = [
        _stacked([quarter.past.done, quarter.past.retried, quarter.past.dead], most) if most else (0, 0, 0)
        for quarter in day
    ]
    step = WIDTH // len(day)

    def bars(kind: int) -> str:
        found: list[str] = []
        for place, stack in enumerate(heights):
            if stack[kind]:
                found.append(f"M{place * step} {HEIGHT - sum(stack[:kind])}v-{stack[kind]}h{step - 2}v{stack[kind]}z")
        return "".join(found)

    half = [quarter.past.lateness(0.5) for quarter in day]
    nearly_all = [quarter.past.lateness(0.99) for quarter in day]
    late_most = max((late for late in nearly_all if late is not None), default=0)
    height = _height_of(late_most)
    part = len(day) // 4
    marks = [quarter.since for quarter in day[::part]][:4] if part else []
    return Day(
        f"0 0 {WIDTH} {HEIGHT}", most, bars(0), bars(1), bars(2), late_most, _steps(half, step, height),
        _steps(nearly_all, step, height), [*marks, day[-1].since + QUARTER],
        [(place * step, quarter) for place, quarter in enumerate(day) if quarter.past.begun or quarter.past.ended],
        total,
    )  # fmt: skip


def _ended(past: Past) -> int:
    return past.done + past.retried + past.dead


def _stacked(numbers: Sequence[int], most: int) -> tuple[int, ...]:
    """Heights that add up to their sum's, each at least one where there is anything."""
    return tuple(max(1, round(number / most * (HEIGHT - 2))) if number else 0 for number in numbers)


def _height_of(most: Millis) -> Callable[[Millis], int]:
    """How far up a lateness is drawn, by its logarithm."""
    whole = log1p(most) or 1.0
    return lambda late: HEIGHT - 4 - round((HEIGHT - 8) * log1p(late) / whole)


def _steps(lates: Sequence[Millis | None], step: int, height: Callable[[Millis], int]) -> str:
    """A line of steps, broken where nothing was delivered."""
    found: list[str] = []
    before: Millis | None = None
    for place, late in enumerate(lates):
        if late is not None:
            found.append(f"M{place * step} {height(late)}h{step}" if before is None else f"V{height(late)}h{step}")
        before = late
    return "".join(found)
