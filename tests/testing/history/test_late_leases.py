"""What a store of several servers has leased too late for its answer: it gives it out with the next one of the holder,
or gives it back."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from bide.core.records import In, Result, State
from bide.testing.history import events as ev
from bide.testing.history.check import check
from bide.testing.history.events import Asks, Event

MS = 1_000_000
WAITS = ev.Seen("one", State.WAITING, 100, 100, 0, 0, 0, 0, 10_000, 10)
HELD = ev.Seen("one", State.LEASED, 100, 2_605, 100, 1, 0, 0, 105_000, 10)
"""Leased at 105 for 2,500 milliseconds."""


def history(first_holder: str) -> list[Event]:
    """It is leased for the question that was asked at 100, seen to be so at 150, and given out with the next answer."""
    return [
        ev.Asked(1, "client-0/0", 9 * MS, 9, Asks.SCHEDULE, "steady", "k", "one", In(90), 1),
        ev.Answered(1, 10 * MS, 10, Result.CREATED, WAITS),
        ev.Leasing(2, first_holder, 100 * MS, 100, {"steady": 5}, 2_600),
        ev.Leased(2, 120 * MS, 105, [], None),
        ev.Asked(3, "client-0/0", 150 * MS, 150, Asks.GET, "steady", "k"),
        ev.Answered(3, 151 * MS, 151, None, HELD),
        ev.Leasing(4, "worker-0", 200 * MS, 200, {"steady": 5}, 2_700),
        ev.Leased(4, 210 * MS, 205, [ev.Held("steady", "k", HELD)], None),
    ]


def test_what_comes_late_was_leased_for_an_earlier_question_of_its_holder() -> None:
    assert check(history("worker-0")).violations == []


def test_it_was_so_too_where_the_clocks_of_the_servers_are_known_by_seconds_only() -> None:
    assert check([ev.Header(slack=4_002), *history("worker-0")]).violations == []


@pytest.mark.parametrize("first_holder", ["worker-1", "worker-00"])
def test_it_was_not_leased_for_the_question_of_another(first_holder: str) -> None:
    assert [one.promise for one in check(history(first_holder)).violations] != []


GIVES_BACK = ev.Header(gives_back=True)
AGAIN = ev.Seen("one", State.LEASED, 100, 2_905, 300, 1, 0, 0, 405_000, 10)
"""The same life, leased once more at 405 after it was given back at 300."""


def given_back(*between: Event, again: ev.Seen = AGAIN) -> list[Event]:
    """Leased for a question that was answered without it, given back, and then given out as never leased before."""
    return [
        *history("worker-0")[:4],
        *between,
        ev.Leasing(4, "worker-1", 400 * MS, 400, {"steady": 5}, 2_900),
        ev.Leased(4, 410 * MS, 405, [ev.Held("steady", "k", again)], None),
    ]


SEEN_HELD = history("worker-0")[4:6]


@pytest.mark.parametrize("between", [[], SEEN_HELD])
def test_what_nobody_was_told_of_may_be_given_back(between: list[Event]) -> None:
    assert check([GIVES_BACK, *given_back(*between)]).violations == []


@pytest.mark.parametrize("between", [[], SEEN_HELD])
def test_by_other_stores_it_is_not(between: list[Event]) -> None:
    assert [one.promise for one in check(given_back(*between)).violations] != []


def test_what_its_holder_was_told_of_is_not_given_back() -> None:
    assert [one.promise for one in check([GIVES_BACK, *history("worker-0"), *given_back()[4:]]).violations] == ["P3"]


@pytest.mark.parametrize("wrong", [
    replace(AGAIN, attempt=2), replace(AGAIN, planned_at=99), replace(AGAIN, id="two"), replace(AGAIN, due_at=300),
])  # fmt: skip
@pytest.mark.parametrize("between", [[], SEEN_HELD])
def test_giving_back_changes_nothing_else(between: list[Event], wrong: ev.Seen) -> None:
    assert [one.promise for one in check([GIVES_BACK, *given_back(*between, again=wrong)]).violations] != []
