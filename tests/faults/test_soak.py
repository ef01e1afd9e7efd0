"""What `python -m bide_proofs.soak` decides by: slopes, sums of ids, and what may be left in a store."""

from __future__ import annotations

import math
import os
import random
import sys
from collections.abc import Callable
from typing import Any

import pytest

from bide_proofs.soak.measure import (
    BYTES,
    FLAT,
    GROWS,
    MEBIBYTE,
    SETTLED,
    Slope,
    interval,
    judge,
    judged,
    process,
    too_much,
)
from bide_proofs.soak.worker import Ids

# --- slopes

MB = 1_000_000.0
MINUTES = 15
EVERY = 5.0
PER_TASK = 24
"""Bytes of the smallest leak there is, for each of 500 tasks a second."""


def verdict(course: Callable[[float, random.Random], float], minutes: float = MINUTES) -> Slope:
    """Of a process of 50 MB that holds so many bytes more after so many minutes."""
    chance = random.Random(1)
    points = [(at * EVERY, 50 * MB + course(at * EVERY / 60, chance)) for at in range(int(minutes * 60 / EVERY))]
    slope = judge(points, BYTES.of(50 * MB))
    assert slope is not None
    return slope


FLAT_ONES: dict[str, Callable[[float, random.Random], float]] = {
    "nothing changes": lambda _, __: 0.0,
    "noise": lambda _, chance: chance.gauss(0, MB),
    "a sawtooth": lambda minute, _: 4 * MB * (minute % 1),
    "a start that is over": lambda minute, _: 20 * MB * min(1.0, minute / 2.5),
    "some wild samples": lambda _, chance: 50 * MB * (chance.random() < 0.1),
    "it falls": lambda minute, chance: -MB * minute + chance.gauss(0, MB),
    "it rises by less than is allowed": lambda minute, _: 0.5 * MEBIBYTE * minute / MINUTES,
}


@pytest.mark.parametrize("course", FLAT_ONES.values(), ids=FLAT_ONES)
def test_what_does_not_grow_is_flat(course: Callable[[float, random.Random], float]) -> None:
    assert verdict(course).verdict == FLAT


def test_what_rises_and_stops_has_settled() -> None:
    assert verdict(lambda minute, chance: 10 * MB * min(1, minute / 7) + chance.gauss(0, MB / 10)).verdict == SETTLED
    assert verdict(lambda minute, _: 10 * MB * (1 - math.exp(-minute / 3))).verdict == SETTLED


def test_the_smallest_leak_for_each_task_grows() -> None:
    bytes_per_minute = 500 * 60 * PER_TASK
    for minutes in (4, 15, 60):
        slope = verdict(lambda minute, chance: bytes_per_minute * minute + chance.gauss(0, MB / 10), minutes)
        assert slope.verdict == GROWS, minutes
        assert slope.low < bytes_per_minute < slope.high
        assert slope.per_minute == pytest.approx(bytes_per_minute, rel=0.1)
        assert slope.percent_per_hour == pytest.approx(6000 * slope.per_minute / slope.mean)


def test_what_goes_up_and_down_within_a_minute_is_judged_by_whole_minutes() -> None:
    """Three minutes and a bit of a sawtooth rise; the medians of whole minutes do not. A leak shows in them too."""
    saw = [(float(at), 50 * MB + 10 * MB * ((at + 40) % 60) / 60) for at in range(0, 420, 5)]
    assert [judge(saw[:some], MB, period=60) is None for some in (20, 60, 84)] == [True, True, False]
    flat = judge(saw, MB, period=60)
    assert flat is not None
    assert flat.verdict == FLAT
    assert abs(flat.per_minute) < MB / 100
    leaking = judge([(at, value + at / 60 * MB) for at, value in saw], MB, period=60)
    assert leaking is not None
    assert leaking.verdict == GROWS


def test_of_too_few_samples_nothing_is_said() -> None:
    assert judge([], 1) is None
    assert judge([(0, 1), (1, 2), (2, 3)], 1) is None
    assert judge([(1, 1)] * 10, 1) is None
    assert interval([(0, 1)]) == (-math.inf, 0.0, math.inf)


def test_each_figure_has_its_own_measure() -> None:
    """Two files more are many, two objects more are none; a rate that goes up is no fault."""
    samples: list[dict[str, Any]] = [
        {"at": at, "worker-1_descriptors": 20 + at, "worker-1_blocks": 100_000 + at, "completed_per_s": at}
        for at in range(40)
    ]
    slopes = judged(samples)
    assert {name: slope.verdict for name, slope in slopes.items()} == {
        "worker-1_descriptors": GROWS,
        "worker-1_blocks": FLAT,
    }


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_a_process_is_looked_at_where_there_is_one() -> None:
    seen = process(os.getpid())
    assert seen["resident"] > MEBIBYTE
    assert seen["descriptors"] >= 3
    assert seen["threads"] >= 1
    assert process(1_000_000_000) == {}


# --- what is counted, and what is left


def test_ids_are_told_apart_though_their_number_is_the_same() -> None:
    one, other, both = Ids(), Ids(), Ids()
    for id in ("a", "b"):
        one.add(id)
        both.add(id)
    for id in ("c", "a"):
        other.add(id)
        both.add(id)
    assert one.number == other.number
    assert one != other
    assert one + other == both == other + one


@pytest.mark.parametrize(
    ("found", "wrong"),
    [
        ({"tasks": 0, "hidden tasks": 20, "event": 11_000, "caller": 20, "answers": 200, "layout": 1}, 0),
        ({"tasks": 1}, 1),
        ({"hidden tasks": 60}, 1),
        ({"event": 11_001}, 1),
        ({"caller": 30}, 1),
        ({"kept": 1, "grouped": 1}, 2),
        ({"keys f:": 3}, 1),
        ({"answers that do not end by themselves": 1}, 1),
    ],
)
def test_what_may_not_be_left_is_found(found: dict[str, int], wrong: int) -> None:
    assert len(too_much(found, minutes=15, processes=2)) == wrong
