"""A lease begins where the one before left off, and once a second at the start."""

from __future__ import annotations

import pytest
from tests.stores.sql.fixtures import OpensStore

from bide.core.instants import In
from bide.stores.sql import leasing
from bide.stores.sql.leasing import SLACK, ScanPositions
from bide.testing.store_suite.base import HOUR, NOW, lease, new, put_one


def test_the_first_scan_is_thorough_and_the_next_goes_on() -> None:
    known = ScanPositions(used=True)
    assert known.begin(["t"], NOW) == ([0], True)
    known.scanned(["t"], None)
    known.emptied(["t"], NOW)
    assert known.begin(["t"], NOW) == ([NOW - SLACK], False)
    known.reached({"t": NOW - 5_000})
    assert known.begin(["t"], NOW) == ([NOW - 5_000], False)
    known.note_wakes({"t": NOW - 6_000, "u": NOW})
    assert known.begin(["t"], NOW) == ([NOW - 6_000], False)
    assert known.begin(["t", "u"], NOW) == ([0, 0], True), "one that was never scanned"
    assert known.begin(["t", "u"], NOW) == ([0, 0], True), "the one before has failed"
    known.scanned(["t", "u"], None)
    assert known.begin(["t"], NOW)[1] is False


def test_what_is_told_of_while_a_scan_is_under_way_is_where_the_next_begins() -> None:
    known = ScanPositions(used=True, slack=100)
    known.begin(["t", "u"], NOW)
    known.scanned(["t", "u"], None)
    known.note_wakes({"t": NOW - 700, "u": NOW - 800})
    known.note_wakes({"t": NOW - 300})
    known.emptied(["t"], NOW)
    known.reached({"u": NOW - 20})
    assert known.begin(["t", "u"], NOW) == ([NOW - 700, NOW - 800], False), "it may not have seen them"
    known.emptied(["t"], NOW)
    known.reached({"u": NOW - 20})
    assert known.begin(["t", "u"], NOW) == ([NOW - 100, NOW - 20], False)


def test_now_and_then_a_scan_is_thorough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leasing, "THOROUGH_EVERY", 0.0)
    known = ScanPositions(used=True)
    for _ in range(3):
        assert known.begin(["t"], NOW)[1] is True
        known.scanned(["t"], None)


def test_a_scan_is_thorough_once_a_lease_has_ended_that_others_hold() -> None:
    known = ScanPositions(used=True)
    known.begin(["t"], NOW)
    known.scanned(["t"], NOW + 400)
    assert known.sleep(NOW + 300, NOW, thorough=True) == NOW + 300
    assert known.sleep(None, NOW, thorough=True) == NOW + 400
    assert known.begin(["t"], NOW + 399)[1] is False
    assert known.sleep(NOW + 9_000, NOW + 399, thorough=False) == NOW + 400
    assert known.begin(["t"], NOW + 400)[1] is True
    known.scanned(["t"], None)
    assert known.begin(["t"], NOW + 401)[1] is False, "it is known of no other"
    assert known.sleep(None, NOW, thorough=True) is None
    unseen = known.sleep(None, NOW, thorough=False)
    assert unseen is not None
    assert NOW < unseen <= NOW + 1_000


def test_where_the_callers_clock_counts_every_scan_is_thorough() -> None:
    known = ScanPositions(used=False)
    known.emptied(["t"], NOW)
    assert [known.begin(["t"], NOW) for _ in range(3)] == [([0], True)] * 3


async def test_an_ordinary_scan_does_not_say_that_there_are_none(
    url: str, open_store: OpensStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leasing, "THOROUGH_EVERY", 600.0)
    store = await open_store(url, clock="server")
    await put_one(store, new(due=In(0)))
    assert len((await lease(store, 5, lasts=HOUR)).tasks) == 1
    for wanted in (5, 0):
        leased = await lease(store, wanted)
        assert leased.next_wake is not None
        assert leased.now < leased.next_wake <= leased.now + 600_001, "when the next thorough scan is due"
