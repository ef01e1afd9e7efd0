"""Instants and durations: exact, never early, and nothing that could mean two things."""

from __future__ import annotations

from datetime import UTC, date, datetime, timedelta, timezone
from decimal import Decimal
from typing import Any
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from bide.core.errors import BadInput
from bide.core.instants import (
    LAST_INSTANT,
    LONGEST,
    _due_after,
    _duration_of_text,
    as_datetime,
    check_instant,
    due_of,
    duration,
    duration_text,
    instant,
    instant_text,
    one_due,
)

MILLISECOND = timedelta(milliseconds=1)
UNITS = {"ms": 1, "s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000, "w": 604_800_000}

instants = st.integers(0, LAST_INSTANT)
durations = st.integers(-LONGEST, LONGEST)
offsets = st.integers(-23 * 60 - 59, 23 * 60 + 59).map(lambda minutes: timezone(timedelta(minutes=minutes)))
moments = st.datetimes(min_value=datetime(1971, 1, 1), max_value=datetime(9998, 12, 31), timezones=offsets)


@pytest.mark.parametrize(
    ("text", "millis"),
    [
        ("15m", 900_000),
        ("1h30m", 5_400_000),
        ("1h 30m", 5_400_000),
        ("30m1h", 5_400_000),
        (" 250ms ", 250),
        ("1.5s", 1_500),
        ("0.1s", 100),
        ("2d", 172_800_000),
        ("1w", 604_800_000),
        ("0s", 0),
        ("+5s", 5_000),
        ("PT15M", 900_000),
        ("PT1H30M", 5_400_000),
        ("P1DT12H", 129_600_000),
        ("P2W", 1_209_600_000),
        ("PT0.5S", 500),
        ("0.0001ms", 1),
        ("0.0001s0.4ms", 1),
    ],
)
def test_durations_are_read(text: str, millis: int) -> None:
    assert duration(text) == millis


@pytest.mark.parametrize(
    "text",
    ["", " ", "-", "+", "15", "1.5", "m", "15 minutes", "15x", "1h1h", "1h, 5m", "1.s", ".5s", "1e3s", "0x10s",
     "1_000s", "P", "PT", "P1DT", "PT1H30", "pt15m", "P1Y", "P1M", "P-1D", "１５m", "١٥m", "1m\x00", "--5s", "- 5s",
     "∞", "nan", "infs", "9" * 81 + "s", "1m" * 1000, "\ud800m"],
)  # fmt: skip
def test_what_is_no_duration_is_refused(text: str) -> None:
    with pytest.raises(BadInput) as caught:
        duration(text, field="timeout")
    assert caught.value.field == "timeout"
    assert caught.value.value == text
    assert "15m" in caught.value.accepted


@pytest.mark.parametrize("value", [15, 15.0, True, None, b"15m", Decimal(1), date(2030, 1, 1), ["15m"], object()])
def test_only_text_and_timedelta_are_durations(value: Any) -> None:
    with pytest.raises(BadInput, match="a timedelta or text"):
        duration(value)


@pytest.mark.parametrize("value", ["-1ms", timedelta(milliseconds=-1), timedelta.min])
def test_a_negative_duration_has_to_be_asked_for(value: Any) -> None:
    with pytest.raises(BadInput, match="not negative"):
        duration(value)


@pytest.mark.parametrize("value", ["99999999999999s", "9" * 60 + "w", timedelta.max, timedelta(days=3_000_000)])
def test_absurd_durations_are_refused(value: Any) -> None:
    with pytest.raises(BadInput, match="before the year 10000"):
        duration(value)


@given(durations)
def test_a_duration_survives_its_text(millis: int) -> None:
    assert duration(duration_text(millis), negative=True) == millis


@given(moments)
def test_an_instant_is_rounded_up_by_less_than_a_millisecond(moment: datetime) -> None:
    rounded = as_datetime(instant(moment))
    assert timedelta(0) <= rounded - moment < MILLISECOND


@given(moments)
def test_an_instant_means_the_same_as_text(moment: datetime) -> None:
    assert instant(moment.isoformat()) == instant(moment)


@given(instants)
@example(0)
@example(LAST_INSTANT)
def test_an_instant_survives_datetime_and_text(millis: int) -> None:
    assert instant(as_datetime(millis)) == millis
    assert instant(instant_text(millis)) == millis


def test_instant_text_is_rfc_3339_in_utc() -> None:
    assert instant_text(0) == "1970-01-01T00:00:00.000Z"
    assert instant_text(instant("2030-01-31T08:00:00+01:00")) == "2030-01-31T07:00:00.000Z"
    assert instant_text(LAST_INSTANT) == "9999-12-31T23:59:59.999Z"


@pytest.mark.parametrize("value", [datetime(2030, 1, 1), "2030-01-01T08:00:00", "2030-01-01", "20300101"])
def test_naive_times_are_refused(value: Any) -> None:
    with pytest.raises(BadInput, match="without a zone"):
        instant(value)


@pytest.mark.parametrize(
    "value",
    ["", "tomorrow", "15m", "08:00Z", "2030-13-01T00:00:00Z", "2030-02-30T00:00:00Z", "10000-01-01T00:00:00Z",
     "-001-01-01T00:00:00Z", "２０３０-01-31T08:00:00Z", "2030-01-31T08:00:00Z\x00", "2030-01-31T08:00:00Z" * 9,
     "2030-01-31T08:00:00\ud800", 1_900_000_000, 1.5, True, None, date(2030, 1, 1), timedelta(1),
     b"2030-01-31T08:00:00Z"],
)  # fmt: skip
def test_what_is_no_instant_is_refused(value: Any) -> None:
    with pytest.raises(BadInput) as caught:
        instant(value, field="deadline")
    assert caught.value.field == "deadline"
    assert "ISO 8601" in caught.value.accepted


@pytest.mark.parametrize(
    "value",
    [
        datetime(1969, 12, 31, 23, 59, 59, 999000, tzinfo=UTC),
        datetime(1970, 1, 1, tzinfo=timezone(timedelta(hours=1))),
        datetime.min.replace(tzinfo=timezone(timedelta(hours=14))),
        datetime.max.replace(tzinfo=timezone(timedelta(hours=-14))),
        datetime.max.replace(tzinfo=UTC),
        "1969-12-31T23:59:59Z",
        "9999-12-31T23:59:59.9999Z",
    ],
)
def test_instants_outside_1970_to_9999_are_refused(value: Any) -> None:
    with pytest.raises(BadInput, match="1970 to 9999"):
        instant(value)


def test_check_instant_has_its_bounds() -> None:
    assert check_instant(0, field="at") == 0
    assert check_instant(LAST_INSTANT, field="at") == LAST_INSTANT
    for outside in (-1, LAST_INSTANT + 1):
        with pytest.raises(BadInput, match="1970 to 9999"):
            check_instant(outside, field="at")


def zone(name: str) -> ZoneInfo:
    try:
        return ZoneInfo(name)
    except ZoneInfoNotFoundError:
        pytest.skip("this machine has no time zone data")


def test_wall_clock_times_follow_their_zone_over_the_change_of_clocks() -> None:
    berlin = zone("Europe/Berlin")
    before = instant(datetime(2030, 3, 30, 8, tzinfo=berlin))
    after = instant(datetime(2030, 3, 31, 8, tzinfo=berlin))
    assert after - before == duration("23h")
    assert instant(datetime(2030, 3, 31, 8, tzinfo=berlin)) == instant("2030-03-31T06:00:00Z")


def test_an_hour_that_comes_twice_has_two_instants() -> None:
    berlin = zone("Europe/Berlin")
    first = instant(datetime(2030, 10, 27, 2, 30, tzinfo=berlin, fold=0))
    second = instant(datetime(2030, 10, 27, 2, 30, tzinfo=berlin, fold=1))
    assert second - first == duration("1h")


def test_an_instant_that_no_datetime_can_hold_is_shown_as_the_nearest() -> None:
    for far in (LAST_INSTANT + 1, 2**48, 2**62):
        assert as_datetime(far) == as_datetime(LAST_INSTANT)
        assert instant_text(far).startswith("9999-12-31T23:59:59.")
    assert as_datetime(-(2**62)) == as_datetime(0)


@pytest.mark.parametrize("text", [" " * 1_000_000 + "1s", "1s" + " " * 1_000_000, "no length", "1x", "9" * 81])
def test_what_is_refused_is_not_kept(text: str) -> None:
    caches = (_duration_of_text, _due_after)
    before = [cache.cache_info().currsize for cache in caches]
    with pytest.raises(BadInput, match="delay"):
        one_due(None, text, grain=1)
    with pytest.raises(BadInput, match="when"):
        due_of(text)
    assert [cache.cache_info().currsize for cache in caches] == before
