"""What a store of several servers has leased too late for its answer: it gives it out with the next one of the holder,
or gives it back."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from bide.core.instants import In
from bide.core.records import OutcomeKind, Result, State
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


def broken(*events: Event) -> list[str]:
    return [one.promise for one in check(list(events)).violations]


def test_what_comes_late_was_leased_for_an_earlier_question_of_its_holder() -> None:
    """Also where the clocks of the servers are known by seconds only."""
    assert broken(*history("worker-0")) == []
    assert broken(ev.Header(slack=4_002), *history("worker-0")) == []


@pytest.mark.parametrize("first_holder", ["worker-1", "worker-00"])
def test_it_was_not_leased_for_the_question_of_another(first_holder: str) -> None:
    assert broken(*history(first_holder)) != []


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
def test_what_nobody_was_told_of_may_be_given_back_as_it_was_by_a_store_that_does_so(between: list[Event]) -> None:
    assert broken(GIVES_BACK, *given_back(*between)) == []
    assert broken(*given_back(*between)) != []
    for wrong in ({"attempt": 2}, {"planned_at": 99}, {"id": "two"}, {"due_at": 300}):
        assert broken(GIVES_BACK, *given_back(*between, again=replace(AGAIN, **wrong))) != [], wrong


def test_what_its_holder_was_told_of_is_not_given_back() -> None:
    assert broken(GIVES_BACK, *history("worker-0"), *given_back()[4:]) == ["P3"]


TWICE = ev.Seen("one", State.LEASED, 100, 6_505, 3_700, 2, 0, 0, 4_005_000, 10)
"""Leased at 4,005, after a lease that ended unknown to anybody, and one that was given back at 3,700."""
CALLED_OFF = ev.Seen("one", State.CANCELLED, 100, 3_700, 0, 1, 0, 0, 4_005_000, 10, finished_at=4_005, keep_until=9_999)
"""The same, cancelled at 4,005."""


def given_back_after_a_loss(slack: int, *ends: Event) -> list[Event]:
    return [
        replace(GIVES_BACK, slack=slack),
        *history("worker-0")[:4],
        ev.Leasing(5, "worker-1", 2_700 * MS, 2_700, {"steady": 5}, 5_200),
        ev.Leased(5, 2_710 * MS, 2_705, [], None),
        *ends,
    ]


@pytest.mark.parametrize("slack", [0, 4_002])
def test_what_is_given_back_may_have_been_lost_before_and_be_cancelled(slack: int) -> None:
    leased: list[Event] = [
        ev.Leasing(4, "worker-1", 4_000 * MS, 4_000, {"steady": 5}, 6_500),
        ev.Leased(4, 4_010 * MS, 4_005, [ev.Held("steady", "k", TWICE)], None),
    ]
    cancelled: list[Event] = [
        ev.Asked(4, "client-0/0", 4_000 * MS, 4_000, Asks.CANCEL, "steady", "k", keeps=True),
        ev.Answered(4, 4_010 * MS, 4_005, Result.CANCELLED, CALLED_OFF),
    ]
    assert broken(*given_back_after_a_loss(slack, *leased)) == []
    assert broken(*given_back_after_a_loss(slack, *cancelled)) == []


def test_that_may_be_so_although_it_was_due_about_then_anyway() -> None:
    """When it wakes is known by seconds only; a loss before that counts for nothing says that it was given back."""
    told = ev.Seen("two", State.LEASED, 131, 6_505, 3_700, 2, 0, 0, 4_005_000, 121)
    events: list[Event] = [
        replace(GIVES_BACK, slack=4_002),
        *history("worker-0")[:3],
        ev.Leased(2, 110 * MS, 105, [ev.Held("steady", "k", HELD)], None),
        ev.Began("worker-0", 112 * MS, 112, "steady", "k", "one", 105_000, 1, 100),
        ev.Ended("worker-0", 114 * MS, "steady", "k", 105_000, "done"),
        ev.Settling(6, "worker-0", 120 * MS, 120, "steady", "k", 105_000, OutcomeKind.DONE, In(10), next_id="two"),
        ev.Told(6, 122 * MS, 122, True),
        ev.Leasing(7, "worker-1", 200 * MS, 200, {"steady": 5}, 2_700),
        ev.Leased(7, 210 * MS, 205, [], None),
        *given_back_after_a_loss(0)[-2:],
        ev.Leasing(4, "worker-1", 4_000 * MS, 4_000, {"steady": 5}, 6_500),
        ev.Leased(4, 4_010 * MS, 4_005, [ev.Held("steady", "k", told)], None),
        ev.Began("worker-1", 4_020 * MS, 4_020, "steady", "k", "two", 4_005_000, 2, 3_700),
    ]
    assert broken(*events) == []
