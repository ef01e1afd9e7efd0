"""The server's clock, read off its answers: within the round trip, whatever this machine's clock says."""

from __future__ import annotations

import time
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bide.stores.clocks import ServerTime, StoreClock


def seen(there: float, answers: list[tuple[float, float, float]]) -> ServerTime:
    """After answers at (moment, way there, way back), by a server that is ahead of the steady clock by `there`."""
    known = ServerTime()
    for moment, out, back in answers:
        known.saw(int((moment + there) * 1e6), moment - out, moment + back)
    return known


def ahead(known: ServerTime) -> float:
    """Seconds by which the server's clock is ahead of the steady one, by what is known."""
    with patch("time.monotonic", return_value=0.0):
        return known.seconds()


@given(
    there=st.floats(-1e6, 1e9),
    answers=st.lists(st.tuples(st.floats(0, 100), st.floats(0, 0.5), st.floats(0, 0.5)), min_size=1, max_size=20),
)
def test_it_is_known_within_half_of_the_quickest_round_trip(
    there: float, answers: list[tuple[float, float, float]]
) -> None:
    answers.sort()
    known = seen(there + 1e6, answers)
    quickest = min(out + back for _, out, back in answers)
    assert abs(ahead(known) - (there + 1e6)) <= quickest / 2 + 100 * 200e-6 + 1e-3


def test_a_clock_that_was_set_is_believed_at_once() -> None:
    known = seen(1000.0, [(1.0, 0.001, 0.001), (2.0, 0.001, 0.001)])
    known.saw(int((3.0 + 4600.0) * 1e6), 2.999, 3.001)
    assert ahead(known) == pytest.approx(4600.0, abs=0.01)


def test_the_clock_of_the_engine_does_not_care_what_this_machine_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "monotonic", lambda: 100.0)
    known = ServerTime()
    known.saw(1_700_000_000_000_000, 100.0, 100.0)
    clock = StoreClock(known)
    monkeypatch.setattr(time, "time", lambda: 5.0)
    monkeypatch.setattr(time, "time_ns", lambda: 5_000_000_000)
    assert clock.now() == 1_700_000_000_000
    assert clock.seconds_until(1_700_000_010_000) == pytest.approx(10)
    assert known.skew < -1_600_000_000


@pytest.mark.parametrize(("spans", "asked"), [([0.01], 1), ([2.0, 0.01], 2), ([2.0, 1.0, 3.0, 0.01], 3)])
async def test_a_slow_look_is_repeated_a_few_times(
    monkeypatch: pytest.MonkeyPatch, spans: list[float], asked: int
) -> None:
    """The first may have waited for a connection: it tells the time to within half of all that."""
    moment, there, times = 100.0, 5000.0, 0

    async def ask() -> int:
        """Answered at once, and heard late."""
        nonlocal moment, times
        answer = int((moment + there) * 1e6)
        moment += spans[times]
        times += 1
        return answer

    monkeypatch.setattr(ServerTime, "clock", staticmethod(lambda: moment))
    known = ServerTime()
    await known.read(ask)
    assert times == asked
    assert abs(ahead(known) - there) <= min(spans[:asked]) / 2 + 0.01
