"""What `python -m bide_proofs.torture` counts, and what it calls wrong."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from msgspec.structs import replace
from tests.waiting import until

from bide.core.instants import In
from bide.core.records import OutcomeKind, Result, State
from bide.testing.history import events as ev
from bide.testing.history.events import Asks, Event
from bide_proofs.torture.clock import SharedClock
from bide_proofs.torture.figures import Figures, Span
from bide_proofs.torture.run import judged

# One life, due at the millisecond 100; `at` is in nanoseconds, and both clocks began together.
MS = 1_000_000
WAITS = ev.Seen("one", State.WAITING, 100, 100, 0, 0, 0, 0, 10_000, 10)
HELD = replace(WAITS, state=State.LEASED, wake_at=2_600, planned_at=100, attempt=1, token=101_000)
NEW = ev.Asked(1, "client-0.1/0", 9 * MS, 9, Asks.SCHEDULE, "steady", "k", "one", In(90), 1)
CREATED = ev.Answered(1, 10 * MS, 10, Result.CREATED, WAITS)
LEASING = ev.Leasing(2, "worker-0.1", 99 * MS, 99, {"steady": 5}, 2_600)
LEASED = ev.Leased(2, 101 * MS, 101, [ev.Held("steady", "k", HELD)], None)
BEGAN = ev.Began("worker-0.1", 102 * MS, 102, "steady", "k", "one", 101_000, 1, 100)
SETTLING = ev.Settling(3, "worker-0.1", 103 * MS, 103, "steady", "k", 101_000, OutcomeKind.DONE)
TOLD = ev.Told(3, 104 * MS, 104, True)
DELIVERED: list[Event] = [LEASING, LEASED, BEGAN, SETTLING, TOLD]
CANCEL = ev.Asked(4, "client-0.1/1", 20 * MS, 20, Asks.CANCEL, "steady", "k")
GONE = replace(WAITS, state=State.CANCELLED, token=21_000, finished_at=21, keep_until=5_021)
CANCELLED = ev.Answered(4, 21 * MS, 21, Result.CANCELLED, GONE)
HELD_AGAIN = replace(HELD, wake_at=5_202, token=2_702_000, attempt=2, losses=1)
AGAIN: list[Event] = [
    ev.Leasing(5, "worker-1.1", 2_700 * MS, 2_700, {"steady": 5}, 5_200),
    ev.Leased(5, 2_702 * MS, 2_702, [ev.Held("steady", "k", HELD_AGAIN)], None),
    ev.Began("worker-1.1", 2_703 * MS, 2_703, "steady", "k", "one", 2_702_000, 2, 100),
]  # fmt: skip
END = ev.End(9_000 * MS, 9_000, True)
TWICE: list[Event] = [
    ev.Leasing(5, "worker-1.1", 900 * MS, 900, {"steady": 5}, 3_400),
    ev.Leased(5, 902 * MS, 902, [ev.Held("steady", "k", replace(HELD, wake_at=3_400, token=902_000))], None),
]
"""The same life is given out once more, as if for the first time, while the first lease goes on."""


def test_a_call_that_failed_is_told_apart_from_one_that_its_caller_gave_up() -> None:
    given_up = ev.Failed(1, 10 * MS, True, "CancelledError()")
    refused = ev.Failed(1, 10 * MS, False, "StoreUnavailable('it is away')")
    assert Figures([NEW, given_up]).failed == []
    assert Figures([NEW, refused]).failed == [refused]


def test_the_journals_of_several_processes_are_judged_together(tmp_path: Path) -> None:
    """A task that was delivered after its cancel had been answered, told by two processes and the frame."""
    told: Mapping[str, Sequence[Event]] = {
        "frame": [ev.Header("none"), END], "client-0.1": [NEW, CREATED, CANCEL, CANCELLED], "worker-0.1": DELIVERED
    }  # fmt: skip
    for who, events in told.items():
        (tmp_path / f"{who}.jsonl").write_bytes(b"".join(ev.encode(event) for event in events))
    figures, checked, aside, wrong = judged(tmp_path, "none", [])
    assert figures.deliveries == 1
    assert not checked.ok
    assert aside == []
    assert {kind: len(cases) for kind, cases in wrong.items() if cases} == {"P4": 1}


def test_recovery_counts_from_the_end_of_a_fault_to_the_next_delivery() -> None:
    figures = Figures([NEW, CREATED, *DELIVERED, *AGAIN, END])
    assert figures.recovery([("reset", 0, 2 * MS), ("reset", 0, 103 * MS), ("kill", 0, 2_704 * MS)]) == {
        "reset": {"p50": 0.1, "p99": 2.6, "p999": 2.6, "most": 2.6}
    }
    assert figures.again == 1


@pytest.mark.parametrize(
    ("name", "spans", "excused"),
    [
        ("postgres", [("failover", 600 * MS, 850 * MS)], True),
        ("postgres", [("failover", 10_200 * MS, 10_300 * MS)], False),  # the lease was older than ten seconds then
        ("postgres", [("clock jump", 600 * MS, 850 * MS)], False),
        ("postgres", [], False),
        ("mariadb", [("failover", 600 * MS, 850 * MS)], False),  # which waits for the disk and for the replica
    ],
)
def test_leases_are_undone_by_a_crash_where_the_store_says_so(
    tmp_path: Path, name: str, spans: list[Span], excused: bool
) -> None:
    events = [ev.Header("none"), NEW, CREATED, LEASING, LEASED, BEGAN, *TWICE, END]
    (tmp_path / "all.jsonl").write_bytes(b"".join(ev.encode(event) for event in events))
    _, checked, aside, wrong = judged(tmp_path, name, spans)
    assert [one.promise for one in checked.violations] == ["P3"]
    assert [one.promise for one in aside] == (["P3"] if excused else [])
    assert bool(wrong["P3"]) is not excused


async def test_the_shared_clock_is_what_it_is_told_to_be_and_says_when_it_jumps(tmp_path: Path) -> None:
    clock, ahead, jumps = SharedClock(tmp_path / "clock"), [0.0], list[int]()
    clock.set(0.0)
    earliest = time.time_ns() // 1_000_000
    found, latest = clock.now(), time.time_ns() // 1_000_000
    assert sorted((earliest, found, latest)) == [earliest, found, latest]
    following = asyncio.create_task(clock.follow(lambda: ahead[0], jumps.append))
    await asyncio.sleep(0)
    ahead[0] = 100_000.0
    await until(lambda: jumps, "the clock to jump")
    other = SharedClock(tmp_path / "clock")  # as another process would see it
    away = other.now() - time.time_ns() // 1_000_000
    assert round(away / 100_000_000) == 1, away
    following.cancel()
    for one in (clock, other):
        one.close()
