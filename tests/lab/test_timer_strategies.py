"""S12 to S17, the timers of one process: what each claims, and what it is known for."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.lab.playing import keeps_its_word, named, setting_of, shows

from bide.lab.actor import Step
from bide.lab.figures import Figures
from bide.lab.stage import Stage, keys_of
from bide.lab.strategies.s12_heap_wait import HeapWait
from bide.lab.strategies.s13_ring import AsPublished, Counted, PublishedRing, Ring, as_counted, as_published
from bide.lab.strategies.s14_hashed_wheel import Exact, Ticking, TickingWheel
from bide.lab.strategies.s15_hierarchical_wheel import HierarchicalWheels
from bide.lab.strategies.s16_idle_ring import IdleConnections, LazyRing, TimerEach, WholeScan
from bide.lab.strategies.s16_idle_ring import PublishedRing as PublishedIdleRing
from bide.lab.strategies.s17_threads import POOL, Pooled, ThreadEach
from bide.lab.strategy import Flaw, Item, Strategy, now
from bide.lab.workloads import WORKLOADS
from bide.lab.workloads.structures import cost_of

SOUND: list[type[Strategy]] = [HeapWait, Counted, Ticking, Exact, HierarchicalWheels, ThreadEach, Pooled]
"""Those that are never early."""
IDLE: list[type[IdleConnections]] = [PublishedIdleRing, LazyRing, WholeScan, TimerEach]
EVERY: list[type[Strategy]] = [*SOUND, AsPublished, *IDLE]
FLAWS: list[tuple[type[Strategy], Flaw]] = [(strategy, flaw) for strategy in EVERY for flaw in strategy.flaws]
TOUCHED = [known for known in FLAWS if known[1].workload == "touch"]
"""What is touched late fires early, and who touches 10,000 connections on a machine with others on it is late."""
KNOWN = [known for known in FLAWS if known not in TOUCHED]
Seen = Mapping[tuple[str, str], tuple[str, Figures]]
_AT_ONCE = 8
"""Cells that are played at the same time: they mostly wait, and none of them holds a figure that is matter of luck."""


@pytest.mark.real_time
@pytest.mark.parametrize("strategy", SOUND, ids=named)
async def test_it_does_what_it_claims(strategy: type[Strategy], tmp_path: Path) -> None:
    await keeps_its_word(strategy, {}, tmp_path)


def _seen(known: Sequence[tuple[type[Strategy], Flaw]], tmp_path_factory: pytest.TempPathFactory) -> Seen:
    """By strategy and flaw: what of it is to be seen, and the figures."""

    async def all_of_them() -> dict[tuple[str, str], tuple[str, Figures]]:
        room = asyncio.Semaphore(_AT_ONCE)

        async def one(strategy: type[Strategy], flaw: Flaw) -> tuple[str, Figures]:
            async with room:
                return await shows(strategy, flaw, {}, tmp_path_factory.mktemp("cell"))

        found = await asyncio.gather(*(one(*which) for which in known))
        return {(strategy.name, flaw.text): what for (strategy, flaw), what in zip(known, found, strict=True)}

    return asyncio.run(all_of_them())


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Seen:
    return _seen(KNOWN, tmp_path_factory)


@pytest.fixture(scope="module")
def touched(tmp_path_factory: pytest.TempPathFactory) -> Seen:
    return _seen(TOUCHED, tmp_path_factory)


@pytest.mark.real_time
@pytest.mark.parametrize(("strategy", "flaw"), KNOWN, ids=named)
def test_its_flaw_is_seen(strategy: type[Strategy], flaw: Flaw, seen: Seen) -> None:
    words, figures = seen[strategy.name, flaw.text]
    assert words
    if flaw.workload == "restarted":
        assert figures.lost == figures.expected == 500
    elif flaw.workload != "cost":
        assert not figures.lost
        assert not figures.duplicated


@pytest.mark.real_time
@pytest.mark.alone
@pytest.mark.parametrize(("strategy", "flaw"), TOUCHED, ids=named)
def test_its_flaw_is_seen_where_much_is_touched(strategy: type[Strategy], flaw: Flaw, touched: Seen) -> None:
    words, figures = touched[strategy.name, flaw.text]
    assert words
    assert not figures.lost
    assert not figures.duplicated


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
    assert as_published(3610, 3600) == as_counted(3610, 3600) == (10, 1)
    assert as_published(3600, 3600) == (0, 1)
    assert as_counted(3600, 3600) == (0, 0)


@pytest.mark.parametrize("counted", [True, False])
def test_the_boundary_between_adding_and_ticking(counted: bool) -> None:
    present = 0

    def clock() -> int:
        return present

    step = 1_000_000_000
    ring = (
        Ring[str](slots=60, step=step, start=0)
        if counted
        else PublishedRing[str](slots=60, step=step, start=0, clock=clock)
    )
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
        Ring(slots=7, step=step * 1_000_000, start=start)
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


def test_a_wheel_may_be_full(tmp_path: Path) -> None:
    wheel = Ticking(setting_of(Ticking, {}, tmp_path, options={"pending": "2"}))

    async def fill() -> None:
        await wheel.schedule([Item("a", now() + 1000), Item("b", now() + 1000)])
        with pytest.raises(RuntimeError, match="2 tasks are waiting, of 2 that may"):
            await wheel.schedule([Item("c", now() + 1000)])
        await wheel.cancel("a")
        await wheel.schedule([Item("c", now() + 1000)])

    asyncio.run(fill())


# connections


@pytest.mark.real_time
@pytest.mark.parametrize("strategy", IDLE, ids=named)
async def test_a_packet_puts_the_time_out_off(strategy: type[IdleConnections], tmp_path: Path) -> None:
    setting = setting_of(strategy, {}, tmp_path, minute=0.8)
    after = round(setting.span(30) * 1000)
    silent, talking, closed = keys_of(10, "silent"), keys_of(10, "talking"), keys_of(10, "closed")
    steps = [Step(0, "schedule", [(key, after)]) for key in (*silent, *talking, *closed, "thrown-out")]
    steps += [Step(at, "reschedule", [(key, at + after)]) for at in (150, 300) for key in talking]
    steps += [Step(160, "cancel", [(key, None)]) for key in closed]
    steps += [Step(170, "fire_now", [("thrown-out", None)])]
    async with Stage(strategy, setting) as stage:
        [player] = await stage.start()
        begin = now() + 50
        stage.sound(await player.play(begin, steps, callers=len(steps)))
        end = (begin + 300 + after) / 1000
        await stage.until_fired(21, by=end + stage.patience)
        await stage.rest()
        await stage.unharmed()
        verdict = stage.verdict(until=end)
        assert all(call.done for call in stage.calls())
    assert (verdict.expected, verdict.fired, verdict.duplicated, verdict.revived) == (21, 21, 0, 0)
    slot = setting.span(1) * 1000
    earliest = -2 * slot if strategy is PublishedIdleRing else 0
    assert verdict.late[0] > earliest - 1, "by clocks of whole milliseconds"


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


@pytest.mark.parametrize("strategy", [one for one in (*SOUND, AsPublished) if hasattr(one, "structure")], ids=named)
def test_everything_that_is_measured_comes_due_once(strategy: type[Strategy], tmp_path: Path) -> None:
    found = cost_of(strategy(setting_of(strategy, {}, tmp_path)).structure, 100)  # type: ignore[attr-defined]
    assert set(found) == {"insert_ns", "cancel_ns", "advance_ns", "bytes", "pause_ns"}
    assert min(value for name, value in found.items() if name != "bytes") > 0  # that needs a process of its own


def test_cost_is_measured_where_there_is_a_structure() -> None:
    cost = WORKLOADS["cost"]
    assert not cost.why_not(HierarchicalWheels)
    assert "no structure in memory" in cost.why_not(ThreadEach)
    assert "heap of S12" in cost.why_not(Pooled)
    assert "one time-out" in cost.why_not(LazyRing)


@pytest.mark.real_time
def test_a_thread_for_each_task_and_no_more_than_the_machine_bears(
    seen: Mapping[tuple[str, str], tuple[str, Figures]],
) -> None:
    _, figures = seen["S17-A", "every waiting task is a thread"]
    assert figures.scheduled == ThreadEach.bears
    assert figures.threads == ThreadEach.bears + 1
    _, pooled = seen["S17-B", Pooled.flaws[0].text]
    assert pooled.counts["slow"] == POOL
