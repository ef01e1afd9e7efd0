"""S12 to S17, the timers of one process: what each claims, and what it is known for."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.lab.conftest import Plays
from tests.lab.playing import Effects, named, setting_of
from tests.waiting import not_before, pause

from bide_lab.strategies.timers.s12_heap_wait import HeapWait
from bide_lab.strategies.timers.s13_ring import AsPublished, Counted, Ring, place
from bide_lab.strategies.timers.s14_hashed_wheel import Exact, Ticking, TickingWheel
from bide_lab.strategies.timers.s15_hierarchical_wheel import HierarchicalWheels
from bide_lab.strategies.timers.s16_idle_ring import IdleConnections, LazyRing, TimerEach, WholeScan
from bide_lab.strategies.timers.s16_idle_ring import PublishedRing as PublishedIdleRing
from bide_lab.strategies.timers.s17_threads import Pooled, ThreadEach
from bide_lab.strategy import Item, Strategy, now
from bide_lab.workloads.memory import cost_of

SOUND: list[type[Strategy]] = [HeapWait, Counted, Ticking, Exact, HierarchicalWheels, ThreadEach, Pooled]


@pytest.mark.parametrize("strategy", [*SOUND, AsPublished], ids=named)
async def test_what_is_not_there_is_not_changed(strategy: type[Strategy], tmp_path: Path) -> None:
    timer = strategy(setting_of(strategy, {}, tmp_path))
    assert not await timer.reschedule(Item("nobody", now()))
    assert not await timer.cancel("nobody")
    assert not await timer.fire_now("nobody")
    await timer.schedule([Item("somebody", now() + 3_600_000)])
    assert await timer.cancel("somebody")
    assert not await timer.cancel("somebody")
    await timer.close()


# the ring


def test_a_published_ring_lets_a_whole_lap_pass_for_a_delay_of_a_lap() -> None:
    for published, of_a_lap in ((True, (0, 1)), (False, (0, 0))):
        assert place(3610, 3600, published=published) == (10, 1)
        assert place(3600, 3600, published=published) == of_a_lap


@pytest.mark.parametrize("counted", [True, False])
def test_the_boundary_between_adding_and_ticking(counted: bool) -> None:
    present = 0

    def clock() -> int:
        return present

    ring: Ring[str] = Ring(slots=60, step=1, start=0, clock=None if counted else clock)
    present = 900  # in the middle of a step
    ring.add("in 3 s", 3_900)
    ring.add("in a lap", 60_900)
    fired = {}
    for second in range(1, 130):
        present = second * 1000
        for item in ring.advance(present):
            fired[item] = present
    assert fired == ({"in 3 s": 4_000, "in a lap": 61_000} if counted else {"in 3 s": 3_000, "in a lap": 120_000})
    assert ring.visits - ring.vain_visits == 2


OPERATIONS = st.lists(
    st.tuples(st.sampled_from(["add", "cancel", "move", "advance"]), st.integers(0, 5), st.integers(0, 5_000)),
    max_size=60,
)


@pytest.mark.parametrize("kind", ["ring", "wheel"])
@given(operations=OPERATIONS)
def test_never_early_and_at_most_a_step_late(kind: str, operations: list[tuple[str, int, int]]) -> None:
    step, start = 100, 1_700_000_000_050
    timer: Ring[int] | TickingWheel[int] = (
        Ring(slots=7, step=step / 1000, start=start)
        if kind == "ring"
        else TickingWheel(tick=step, buckets=7, start=start)
    )
    due: dict[int, int] = {}
    added: dict[int, int] = {}
    present = start
    for verb, item, span in [*operations, ("advance", 0, 6_000)]:
        if verb == "advance":
            present += span
            came = timer.advance(present)
            assert len(came) == len(set(came))
            for one in came:
                assert due.pop(one) <= present
            for one, at in due.items():
                assert max(at, added[one]) + 2 * step > present, "it should have come"
        elif verb == "cancel":
            assert timer.cancel(item) == (due.pop(item, None) is not None)
        elif verb == "add" or item in due:
            (timer.add if verb == "add" else timer.move)(item, present + span)
            due[item], added[item] = present + span, present
        else:
            assert not timer.move(item, present + span)
        assert timer.next_deadline() > present
        assert len(timer) == len(due)
        assert all(one in timer for one in due)


# connections


@pytest.mark.parametrize("strategy", [LazyRing, WholeScan, TimerEach], ids=named)
async def test_a_packet_puts_the_time_out_off(strategy: type[IdleConnections], playing: Plays) -> None:
    """Of the published ring see the next test."""
    async with playing(strategy, minute=0.6) as company:
        connections, effects = company.client, Effects()
        await company.start(effects)
        touched = {key: time.time_ns() for key in ("silent", "talking", "closed", "thrown-out")}
        await connections.schedule([Item(key, 0) for key in touched])
        if await connections.cancel("closed"):  # a slow machine has called it idle by then
            del touched["closed"]
        if await connections.fire_now("thrown-out"):
            touched["thrown-out"] = 0
        while "silent" not in effects.at:
            at = time.time_ns()
            if await connections.reschedule(Item("talking", 0)):
                touched["talking"] = at
            await pause(0.02, why="the time between two packets")
        await company.until_fired(effects, *touched)
    assert effects.at.keys() == touched.keys()
    for key, times in effects.at.items():
        assert len(times) == 1, key
        if touched[key]:
            not_before(times[0], touched[key] + 298_000_000, f"{key}, by clocks of whole milliseconds,")


def test_the_published_idle_ring_counts_the_slot_of_the_hand_and_the_one_behind_it(tmp_path: Path) -> None:
    ring = PublishedIdleRing(setting_of(PublishedIdleRing, {}, tmp_path))
    ring.touch("a")
    turns = 0
    while not ring.turn():
        turns += 1
        if turns == 20:
            ring.touch("b")
    assert turns + 1 == 29
    assert not ring.knows("a")
    assert [bool(ring.turn()) for _ in range(20)] == [False] * 19 + [True]


# what they cost


@pytest.mark.parametrize("strategy", [one for one in SOUND if hasattr(one, "timer_of")], ids=named)
async def test_everything_that_is_measured_comes_due_once(strategy: type[Strategy], tmp_path: Path) -> None:
    found = await cost_of(strategy(setting_of(strategy, {}, tmp_path)), 100)
    assert set(found) == {"insert_ns", "cancel_ns", "advance_ns", "bytes", "pause_ns"}
    assert min(value for name, value in found.items() if name != "bytes") > 0  # that needs a process of its own
