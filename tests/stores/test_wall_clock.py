"""Times without a zone: a time has come once the zone's clock shows it, or a later one, for good."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone, tzinfo
from zoneinfo import ZoneInfo

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from bide.core.instants import LAST_INSTANT, instant
from bide.stores.clocks import instant_of, stretch

BERLIN = ZoneInfo("Europe/Berlin")
ZONES: list[tzinfo] = [
    UTC, BERLIN, ZoneInfo("Australia/Lord_Howe"), ZoneInfo("America/New_York"), ZoneInfo("Asia/Kathmandu"),
    timezone(timedelta(hours=-3)),
]  # fmt: skip
BEGIN, END = datetime(2020, 1, 1), datetime(2030, 1, 1)


@pytest.mark.parametrize(
    ("shown", "comes"),
    [
        ("2027-01-16T08:00", "2027-01-16T08:00+01:00"),
        ("2027-03-28T01:59:59.999", "2027-03-28T01:59:59.999+01:00"),
        ("2027-03-28T02:00", "2027-03-28T03:00+02:00"),
        ("2027-03-28T02:59", "2027-03-28T03:00+02:00"),
        ("2027-10-31T01:59", "2027-10-31T01:59+02:00"),
        ("2027-10-31T02:00", "2027-10-31T02:00+01:00"),
        ("2027-10-31T02:59", "2027-10-31T02:59+01:00"),
        ("2027-07-16T08:00:00.0001", "2027-07-16T08:00:00.001+02:00"),
    ],
)
def test_when_a_time_has_come(shown: str, comes: str) -> None:
    assert instant_of(datetime.fromisoformat(shown), BERLIN) == instant(comes)


@given(first=st.datetimes(BEGIN, END), later=st.timedeltas(timedelta(0), timedelta(hours=4)))
@example(first=datetime(2027, 10, 31, 1, 59), later=timedelta(minutes=2))
@example(first=datetime(2027, 3, 28, 2, 30), later=timedelta(minutes=31))
def test_a_later_time_never_comes_earlier(first: datetime, later: timedelta) -> None:
    assert instant_of(first, BERLIN) <= instant_of(first + later, BERLIN)


@given(shown=st.datetimes())
def test_any_time_at_all(shown: datetime) -> None:
    assert 0 <= instant_of(shown, BERLIN) <= LAST_INSTANT


def test_a_stretch_ends_where_the_offset_changes() -> None:
    jump = instant("2027-10-31T01:00Z")
    before = stretch(jump - 1_000, BERLIN)
    assert (before.offset, before.until) == (timedelta(hours=2), jump)
    assert before.least == datetime(2027, 10, 31, 2)
    assert stretch(jump, BERLIN).offset == timedelta(hours=1)
    assert stretch(LAST_INSTANT, BERLIN).until == LAST_INSTANT
