"""Under an old snapshot thorough scans begin where little is missed, and full ones are made in the background."""

from __future__ import annotations

from collections.abc import Sequence

from bide.stores.mysql.leasing import LONGEST_TRANSACTION, MySqlScanBounds, ScanStart
from bide.stores.sql import leasing
from bide.stores.sql.leasing import SLACK
from bide.testing.store_suite.base import NOW

FULL = ScanStart({"t": 0}, {"t": 0}, {"t": 0}, True, True)


class Known(MySqlScanBounds):
    """With a stopwatch that is set by hand, and a note of what was begun in the background."""

    def __init__(self) -> None:
        self.seconds = 100.0
        self.begun: list[Sequence[str]] = []
        super().__init__(used=True, background=self._begin, clock=lambda: self.seconds)

    def _begin(self, topics: Sequence[str]) -> bool:
        self.begun.append(topics)
        return True

    def scan(self, at: int, *, took: float = 0.001, waiting: int | None = None, lost: int | None = None) -> ScanStart:
        start = self.start(["t"], [NOW - 7], thorough=True)
        self.scanned(start, took, at)
        self.left("t", waiting, lost)
        return start


def test_as_long_as_a_full_scan_is_cheap_each_is_one() -> None:
    known = Known()
    for second in range(3):
        assert known.scan(NOW + second, took=0.004) == FULL
    assert known.start(["t"], [5], thorough=False) == ScanStart({"t": 5}, {"t": 5}, {}, False, False)


def test_after_an_expensive_one_a_scan_begins_a_little_before_the_last() -> None:
    known = Known()
    known.scan(NOW, took=0.02)
    assert known.scan(NOW + 1_000) == ScanStart(
        {"t": NOW - LONGEST_TRANSACTION}, {"t": NOW - 7}, {"t": NOW - SLACK}, False, True
    )
    assert known.scan(NOW + 2_000).waiting == {"t": NOW + 1_000 - LONGEST_TRANSACTION}
    known.scan(NOW + 30_000, waiting=NOW + 7, lost=NOW + 8)
    assert known.scan(NOW + 31_000) == ScanStart({"t": NOW + 7}, {"t": NOW + 7}, {"t": NOW + 8}, False, True), (
        "what was left is due"
    )
    known.note_wakes({"t": NOW + 3, "u": NOW})
    assert known.scan(NOW + 32_000).waiting == {"t": NOW + 3}


def test_full_ones_are_made_in_the_background() -> None:
    known = Known()
    known.scan(NOW, took=0.02)
    known.scan(NOW + 1_000)
    assert known.begun == []
    known.seconds += 0.02 * leasing.SHARE
    known.scan(NOW + 40_000)
    assert known.begun == [["t"]]
    known.found({"t": (NOW + 5, NOW + 6)}, 0.02)
    assert known.scan(NOW + 41_000) == ScanStart({"t": NOW + 5}, {"t": NOW + 5}, {"t": NOW + 6}, False, True)
    known.found({"t": (None, NOW * 2)}, 0.004)
    assert known.scan(NOW + 42_000) == FULL, "it is cheap again"


def test_with_another_connection_or_an_earlier_clock_nothing_is_known() -> None:
    known = Known()
    connection = object()
    known.on_connection(connection)
    known.scan(NOW, took=0.02)
    known.on_connection(connection)
    assert not known.scan(NOW + 1_000).full
    known.on_connection(object())
    assert known.scan(NOW + 2_000, took=0.02).full
    assert not known.scan(NOW).full
    assert known.scan(NOW + 1).full, "the clock was set back"
