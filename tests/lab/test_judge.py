"""The judge of the lab: right and wrong histories, each told by the calls and firings that the processes wrote down."""

from __future__ import annotations

from pathlib import Path

import pytest

from bide_lab.figures import SHARES, Figures
from bide_lab.journal import Call, Firing, Journal, judge, read

MS = 1_000_000
LATER = 10_000 * MS


def call(
    verb: str, at: int, due: int | None = None, *, key: str = "k", answered: bool = True, done: bool = True
) -> Call:
    """Begun at this millisecond, and answered in the next."""
    return Call(verb, key, due, at * MS, (at + 1) * MS if answered else None, answered and done)


def fires(at: int, *, key: str = "k") -> Firing:
    return Firing(key, 0, at * MS)


def counts(seen: Figures) -> dict[str, int]:
    """Everything that is not as it should be."""
    found = {"lost": seen.lost, "twice": seen.duplicated, "early": seen.early, "revived": seen.revived}
    return {name: count for name, count in found.items() if count}


SCHEDULE = call("schedule", 10, 100)
MOVE_ON = call("reschedule", 50, 200)
MOVE_BACK = call("reschedule", 50, 70)
CANCEL = call("cancel", 50)
FIRE = call("fire_now", 50)


@pytest.mark.parametrize(
    ("calls", "firings", "wrong"),
    [
        ([SCHEDULE], [fires(101)], {}),
        ([SCHEDULE], [], {"lost": 1}),
        ([SCHEDULE], [fires(101), fires(102)], {"twice": 1}),
        ([SCHEDULE], [fires(99)], {"early": 1}),
        ([SCHEDULE, MOVE_ON], [fires(201)], {}),
        ([SCHEDULE, MOVE_ON], [fires(101)], {"early": 1}),
        ([SCHEDULE, MOVE_ON], [fires(101), fires(201)], {"early": 1, "twice": 1}),
        ([SCHEDULE, MOVE_BACK], [fires(71)], {}),
        ([SCHEDULE, MOVE_BACK], [fires(71), fires(101)], {"twice": 1}),
        ([SCHEDULE, MOVE_BACK], [], {"lost": 1}),
        ([SCHEDULE, CANCEL], [], {}),
        ([SCHEDULE, CANCEL], [fires(101)], {"revived": 1}),
        ([SCHEDULE, FIRE], [fires(51)], {}),
        ([SCHEDULE, FIRE], [fires(49)], {"early": 1, "lost": 1}),
        ([SCHEDULE, FIRE], [fires(51), fires(101)], {"twice": 1}),
        # too late for the move, and so it said
        ([SCHEDULE, call("reschedule", 120, 300, done=False)], [fires(101)], {}),
        ([SCHEDULE, call("cancel", 120, done=False)], [fires(101)], {}),
        # after it had fired as it should, it was moved, and has to fire again
        ([SCHEDULE, call("reschedule", 120, 300)], [fires(101), fires(301)], {}),
        ([SCHEDULE, call("reschedule", 120, 300)], [fires(101)], {"lost": 1}),
        # nobody knows whether it was done, and so nothing is held against anybody
        ([call("schedule", 10, 100, answered=False)], [], {}),
        ([call("schedule", 10, 100, answered=False)], [fires(101)], {}),
        ([SCHEDULE, call("cancel", 50, answered=False)], [], {}),
        ([SCHEDULE, call("cancel", 50, answered=False)], [fires(101)], {}),
        ([SCHEDULE, call("reschedule", 50, 200, answered=False)], [fires(101)], {}),
        # due now, and done before the answer was there
        ([Call("schedule", "k", 10, 10 * MS, 30 * MS, True)], [fires(20)], {}),
        # due later than the cell is long
        ([call("schedule", 10, 20_000)], [], {}),
        ([call("schedule", 10, 20_000)], [fires(500)], {"early": 1}),
        # it was under way already when it was cancelled
        ([SCHEDULE, call("cancel", 103)], [fires(101)], {}),
        # nobody had ever scheduled it
        ([], [fires(101)], {"revived": 1}),
    ],
)  # fmt: skip
def test_what_is_wrong_is_found_and_nothing_else(
    calls: list[Call], firings: list[Firing], wrong: dict[str, int]
) -> None:
    assert counts(judge(calls, firings, until=LATER)) == wrong
    assert counts(judge(calls, firings[::-1], until=LATER)) == wrong


def test_lateness_is_that_of_the_first_firing_of_each_time_in_force() -> None:
    figures = judge([SCHEDULE, MOVE_ON], [fires(203), fires(250)], until=LATER)
    assert (figures.scheduled, figures.expected, figures.fired) == (1, 1, 1)
    assert (figures.p50, figures.most, len(figures.late)) == (3.0, 3.0, len(SHARES))


def test_a_journal_is_read_as_it_was_written_and_a_line_that_was_cut_off_is_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    journal = Journal(path)
    first, second, third = journal.begun("schedule", [("a", 5), ("b", 6), ("c", None)])
    journal.answered([first], "ok")
    journal.answered([second], "late")
    journal.answered([third], "failed")
    journal.effect("b", 6, 8)
    journal.effect("a", 5, 7)
    journal.close()
    with path.open("a", encoding="utf-8") as file:
        file.write("! c 7 12")
    calls, firings = read([path])
    assert [(one.verb, one.key, one.due, one.answered is not None, one.done) for one in calls] == [
        ("schedule", "a", 5, True, True), ("schedule", "b", 6, True, False), ("schedule", "c", None, False, False),
    ]  # fmt: skip
    assert firings == [Firing("a", 5, 7), Firing("b", 6, 8)]
