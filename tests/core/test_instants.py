"""Instants, durations, and the times of retries."""

from __future__ import annotations

import random
from datetime import UTC, date, datetime, timedelta, timezone
from decimal import Decimal
from typing import Any
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

import pytest
from hypothesis import given
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
    instant,
    instant_text,
    one_due,
)
from bide.core.retry import FOREVER, PRESETS, Exponential, ExponentialPolicy, Fixed, Ladder, RetryPolicy, policy

offsets = st.integers(-23 * 60 - 59, 23 * 60 + 59).map(lambda minutes: timezone(timedelta(minutes=minutes)))
moments = st.datetimes(min_value=datetime(1971, 1, 1), max_value=datetime(9998, 12, 31), timezones=offsets)


@pytest.mark.parametrize(
    ("text", "millis"),
    [
        ("15m", 900_000), ("1h30m", 5_400_000), ("1h 30m", 5_400_000), ("30m1h", 5_400_000), (" 250ms ", 250),
        ("1.5s", 1_500), ("0.1s", 100), ("2d", 172_800_000), ("1w", 604_800_000), ("0s", 0), ("+5s", 5_000),
        ("PT15M", 900_000), ("PT1H30M", 5_400_000), ("P1DT12H", 129_600_000), ("P2W", 1_209_600_000), ("PT0.5S", 500),
        ("0.0001ms", 1), ("0.0001s0.4ms", 1),
    ],
)  # fmt: skip
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


@given(moments)
def test_an_instant_means_the_same_as_text(moment: datetime) -> None:
    assert instant(moment.isoformat()) == instant(moment)


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


MERCHANT = ["15s", "15s", "30s", "3m", "10m", "20m", "30m", "1h", "2h", "6h", "15h"]


def pauses(policy: RetryPolicy, chance: float = 0.0) -> list[int]:
    """Every pause until it gives up."""
    found: list[int] = []
    while (pause := policy.delay(len(found) + 1, lambda: chance)) is not None:
        found.append(pause)
    return found


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        (Fixed("30s", tries=5), [30_000] * 4),
        (Fixed("30s", tries=1), []),
        (PRESETS["never"], []),
        (Ladder("15s", "15s", "30s", "3m"), [15_000, 15_000, 30_000, 180_000]),
        (PRESETS["merchant-notify"], [duration(rung) for rung in MERCHANT]),
        (Exponential("1s", factor=2, longest="10s", tries=7, jitter=0), [1_000, 2_000, 4_000, 8_000, 10_000, 10_000]),
    ],
)
def test_a_policy_pauses_between_so_many_deliveries(policy: RetryPolicy, expected: list[int]) -> None:
    assert pauses(policy) == expected


def test_jitter_only_ever_shortens() -> None:
    growing = Exponential("1s", longest="1m", tries=9, jitter=0.25)
    longest, shortest = pauses(growing, 0.0), pauses(growing, 1.0)
    assert shortest == [int(pause * 0.75) for pause in longest]


@given(
    first=st.integers(0, LONGEST),
    factor=st.floats(1, 100),
    longest=st.integers(0, LONGEST),
    jitter=st.floats(0, 1),
    failures=st.integers(1, FOREVER - 1),
    seed=st.integers(),
)
def test_exponential_keeps_its_bounds_however_often_it_failed(
    first: int, factor: float, longest: int, jitter: float, failures: int, seed: int
) -> None:
    growing = ExponentialPolicy(first, factor, longest, FOREVER, jitter)
    pause = growing.delay(failures, random.Random(seed).random)
    most = growing.delay(failures, lambda: 0.0)
    assert pause is not None
    assert most is not None
    assert int(most * (1 - jitter)) - 1 <= pause <= most <= longest
    before = growing.delay(failures - 1, lambda: 0.0) if failures > 1 else 0
    assert before is not None
    assert before <= most
    assert growing.delay(FOREVER, lambda: 0.0) is None


def test_at_once_stays_at_once() -> None:
    assert Exponential("0s", tries=FOREVER).delay(100_000) == 0


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_found_by_name_and_ends(name: str) -> None:
    preset = policy(name)
    assert preset is PRESETS[name]
    assert len(pauses(preset)) < 50


def test_no_policy_is_the_default_one() -> None:
    assert policy(None) is PRESETS["default"]
    mine = Fixed("1s", tries=2)
    assert policy(mine) is mine


@pytest.mark.parametrize("value", ["Merchant-Notify", "", 5, [1, 2], Fixed, object()])
def test_an_unknown_policy_is_refused_with_the_names_that_there_are(value: Any) -> None:
    with pytest.raises(BadInput, match="merchant-notify"):
        policy(value)


@pytest.mark.parametrize("tries", [0, -1, FOREVER + 1, 2.5, 5.0, float("nan"), float("inf"), "5", None, True])
def test_bad_tries_are_refused(tries: Any) -> None:
    with pytest.raises(BadInput, match="tries"):
        Fixed("1s", tries=tries)
    with pytest.raises(BadInput, match="tries"):
        Exponential("1s", tries=tries)


@pytest.mark.parametrize(
    ("field", "value"),
    [*(("factor", factor) for factor in (0.5, -2, 101, float("nan"), float("inf"), "2", None, True)),
     *(("jitter", jitter) for jitter in (-0.1, 1.1, float("nan"), "0.5", None))],
)  # fmt: skip
def test_bad_factors_and_jitter_are_refused(field: str, value: Any) -> None:
    with pytest.raises(BadInput, match=field):
        Exponential("1s", **{field: value})


def test_bad_pauses_are_refused_by_the_name_of_their_place() -> None:
    with pytest.raises(BadInput, match=r"rungs\[1\]"):
        Ladder("15s", "soon")
    with pytest.raises(BadInput, match="at least one pause"):
        Ladder()
    with pytest.raises(BadInput, match="pause"):
        Fixed("-1s", tries=2)
