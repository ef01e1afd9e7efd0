"""Outcomes: what a handler may say, and that it says one thing."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from bide.core.errors import BadInput
from bide.core.instants import At, In, one_due
from bide.core.outcomes import Dead, Defer, Done, Outcome, Retry

NOON = datetime(2030, 1, 31, 12, tzinfo=UTC)
NOON_MILLIS = 1_896_091_200_000


def test_done_may_begin_again() -> None:
    assert Done().again is None
    assert Done(again_at=NOON).again == At(NOON_MILLIS)
    assert Done(again_in="4h").again == In(14_400_000)


def test_retry_goes_by_the_policy_or_by_its_own_time() -> None:
    assert Retry().due is None
    assert Retry("busy").why == "busy"
    assert Retry(delay="5s").due == In(5_000)
    assert Retry("busy", at=NOON).due == At(NOON_MILLIS)


def test_defer_needs_a_time() -> None:
    assert Defer("5s").due == In(5_000)
    assert Defer(timedelta(seconds=5)).due == In(5_000)
    assert Defer(at=NOON).due == At(NOON_MILLIS)
    with pytest.raises(BadInput, match="when shall it be"):
        Defer()


def test_dead_says_why() -> None:
    assert Dead("the account is closed").why == "the account is closed"
    assert str(Dead("the account is closed")) == "the account is closed"


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda: Done(again_at=NOON, again_in="4h"), "again_at, again_in"),
        (lambda: Done(again_in="-4h"), "again_in"),
        (lambda: Done(again_at=datetime(2030, 1, 31)), "again_at"),
        (lambda: Retry(delay="5s", at=NOON), "at, delay"),
        (lambda: Retry(delay="soon"), "delay"),
        (lambda: Defer("5s", at=NOON), "at, delay"),
        (lambda: one_due(None, None), "at, delay"),
    ],
)
def test_what_is_refused_names_its_field(make: Any, field: str) -> None:
    with pytest.raises(BadInput) as caught:
        make()
    assert caught.value.field == field


@pytest.mark.parametrize("outcome", [Done(), Retry("busy"), Defer("5s"), Dead("no")])
def test_an_outcome_can_be_raised_from_any_depth(outcome: Outcome) -> None:
    def depths() -> None:
        raise outcome

    with pytest.raises(Outcome) as caught:
        depths()
    assert caught.value is outcome
