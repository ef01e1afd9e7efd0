"""Under an old snapshot thorough looks begin where little is missed, and whole ones are made in the background."""

from __future__ import annotations

from collections.abc import Sequence

from bide.stores.mysql.leasing import BACK, Depth, Depths
from bide.stores.sql import leasing
from bide.stores.sql.leasing import SLACK
from bide.testing.store_suite.base import NOW

WHOLE = Depth({"t": 0}, {"t": 0}, {"t": 0}, True, True)


class Known(Depths):
    """With a stopwatch that is set by hand, and a note of what was begun in the background."""

    def __init__(self) -> None:
        self.seconds = 100.0
        self.begun: list[Sequence[str]] = []
        super().__init__(used=True, background=self._begin, clock=lambda: self.seconds)

    def _begin(self, topics: Sequence[str]) -> bool:
        self.begun.append(topics)
        return True

    def look(self, at: int, *, took: float = 0.001, waiting: int | None = None, lost: int | None = None) -> Depth:
        depth = self.reach(["t"], [NOW - 7], thorough=True)
        self.looked(depth, took, at)
        self.left("t", waiting, lost)
        return depth


def test_as_long_as_a_whole_look_is_cheap_each_is_one() -> None:
    known = Known()
    for second in range(3):
        assert known.look(NOW + second, took=0.004) == WHOLE
    assert known.reach(["t"], [5], thorough=False) == Depth({"t": 5}, {"t": 5}, {}, False, False)


def test_after_a_dear_one_a_look_begins_a_little_before_the_last() -> None:
    known = Known()
    known.look(NOW, took=0.02)
    assert known.look(NOW + 1_000) == Depth({"t": NOW - BACK}, {"t": NOW - 7}, {"t": NOW - SLACK}, False, True)
    assert known.look(NOW + 2_000).waiting == {"t": NOW + 1_000 - BACK}
    known.look(NOW + 30_000, waiting=NOW + 7, lost=NOW + 8)
    assert known.look(NOW + 31_000) == Depth({"t": NOW + 7}, {"t": NOW + 7}, {"t": NOW + 8}, False, True), (
        "what was left is due"
    )
    known.told({"t": NOW + 3, "u": NOW})
    assert known.look(NOW + 32_000).waiting == {"t": NOW + 3}


def test_whole_ones_are_made_in_the_background() -> None:
    known = Known()
    known.look(NOW, took=0.02)
    known.look(NOW + 1_000)
    assert known.begun == []
    known.seconds += 0.02 * leasing.SHARE
    known.look(NOW + 40_000)
    assert known.begun == [["t"]]
    known.found({"t": (NOW + 5, NOW + 6)}, 0.02)
    assert known.look(NOW + 41_000) == Depth({"t": NOW + 5}, {"t": NOW + 5}, {"t": NOW + 6}, False, True)
    known.found({"t": (None, NOW * 2)}, 0.004)
    assert known.look(NOW + 42_000) == WHOLE, "it is cheap again"


def test_with_another_connection_or_an_earlier_clock_nothing_is_known() -> None:
    known = Known()
    connection = object()
    known.on(connection)
    known.look(NOW, took=0.02)
    known.on(connection)
    assert not known.look(NOW + 1_000).whole
    known.on(object())
    assert known.look(NOW + 2_000, took=0.02).whole
    assert not known.look(NOW).whole
    assert known.look(NOW + 1).whole, "the clock was set back"
