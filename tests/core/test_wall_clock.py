"""Wall-clock times against the time zone database, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, date, datetime, time, timedelta
from functools import cache
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from bide.core.errors import BadInput
from bide.core.instants import At, as_datetime, due_later, due_of, instant, instant_text, one_due, resolved
from bide.core.recurrence.rules import Cron, RRule

ZONES = (
    "Europe/Rome", "America/New_York", "America/St_Johns", "Australia/Lord_Howe", "Antarctica/Troll", "Asia/Tehran",
    "Africa/Casablanca", "Pacific/Apia", "Asia/Shanghai", "America/Sao_Paulo",
)  # fmt: skip
DAY, HOUR, MINUTE = timedelta(days=1), timedelta(hours=1), timedelta(minutes=1)
DAYS = ("monday", "tuesday", "wednesday", "thursday", "friday", "saturday", "sunday")
NOW = instant("2026-11-26T21:00:00Z")
"""A Thursday."""


@cache
def first_shown(shown: datetime, zone: str) -> datetime:
    """Read the clocks of a zone minute by minute: the first instant that shows a time, or is past the gap over it."""
    info = ZoneInfo(zone)
    at = shown.replace(tzinfo=UTC) - 27 * HOUR
    offsets = {(at + hours * HOUR).astimezone(info).utcoffset() or timedelta() for hours in range(54)}
    exact = [at for offset in offsets if read((at := shown.replace(tzinfo=UTC) - offset), info) == shown]
    if exact:
        return min(exact)
    before = shown.replace(tzinfo=UTC) - max(offsets)  # the clocks were set forward over it, to the larger offset
    while read(before, info) < shown:
        before += MINUTE
    return before


def read(at: datetime, zone: ZoneInfo) -> datetime:
    return at.astimezone(zone).replace(tzinfo=None)


def changes(zone: str) -> Iterator[date]:
    """The days around which the clocks of a zone change, in years with rare changes and with usual ones."""
    info = ZoneInfo(zone)
    for year in (2011, 2026, 2030):
        noon = datetime(year, 1, 1, 12, tzinfo=UTC)
        for _ in range(365):
            if noon.astimezone(info).utcoffset() != (noon + DAY).astimezone(info).utcoffset():
                yield noon.date()
            noon += DAY


@pytest.mark.parametrize("zone", ZONES)
def test_every_half_hour_around_changes_of_the_clocks(zone: str) -> None:
    for day in [*changes(zone), date(2026, 7, 1)]:
        shown = datetime.combine(day, time()) - DAY
        for _ in range(4 * 48):
            meant = first_shown(shown, zone)
            assert as_datetime(instant(f"{shown:%Y-%m-%d %H:%M} {zone}")) == meant, shown
            assert as_datetime(instant(shown.isoformat(), zone=zone)) == meant, shown
            assert as_datetime(instant(shown, zone=zone)) == meant, shown
            shown += 30 * MINUTE


@pytest.mark.parametrize("zone", ZONES)
def test_the_next_one_as_seen_from_every_hour_around_changes_of_the_clocks(zone: str) -> None:
    info = ZoneInfo(zone)
    for day in list(changes(zone))[-2:]:
        now = datetime.combine(day, time(), UTC) - DAY
        for _ in range(4 * 24):
            today = read(now, info).date()
            for at in (time(0), time(0, 1), time(1, 30), time(2, 30), time(3), time(23, 30)):
                days = [datetime.combine(today + number * DAY, at) for number in range(15)]
                ahead = next(found for shown in days if (found := first_shown(shown, zone)) > now)
                assert read_text(f"{at:%H:%M}", zone, now) == ahead
                assert read_text(f"today {at:%H:%M}", zone, now) == first_shown(days[0], zone)
                assert read_text(f"tomorrow {at:%H:%M}", zone, now) == first_shown(days[1], zone)
                week = [shown for shown in days if shown.weekday() == day.weekday()]
                ahead = next(found for shown in week if (found := first_shown(shown, zone)) > now)
                assert read_text(f"{DAYS[day.weekday()]} {at:%H:%M}", zone, now) == ahead
            now += HOUR


def read_text(text: str, zone: str, now: datetime) -> datetime:
    return as_datetime(instant(f"{text} {zone}", now=lambda: instant(now)))


@example(shown=datetime(2026, 3, 29, 2, 30), zone="Europe/Rome")
@example(shown=datetime(2026, 10, 25, 2, 30), zone="Europe/Rome")
@example(shown=datetime(2011, 12, 30, 8), zone="Pacific/Apia")
@given(
    shown=st.datetimes(datetime(1971, 1, 1), datetime(2100, 1, 1)).map(
        lambda one: one.replace(second=0, microsecond=0)
    ),
    zone=st.sampled_from(ZONES),
)
def test_a_wall_clock_time_is_that_of_the_rule_for_it(shown: datetime, zone: str) -> None:
    """A rule that is due once, at the same time of that day, runs at the same instant."""
    at = instant(f"{shown:%Y-%m-%dT%H:%M} {zone}")
    assert as_datetime(at) == first_shown(shown, zone)
    rule = Cron(f"{shown.minute} {shown.hour} {shown.day} {shown.month} *", zone=zone)
    assert rule.after(at - 1) == at


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("08:00 Asia/Shanghai", "2026-11-27T00:00:00.000Z"),
        ("22:30 Europe/Rome", "2026-11-26T21:30:00.000Z"),
        ("22:00 Europe/Rome", "2026-11-27T21:00:00.000Z"),  # now is not ahead
        ("8:00 UTC", "2026-11-27T08:00:00.000Z"),
        (" 08:00:30  UTC ", "2026-11-27T08:00:30.000Z"),
        ("08:00:30.0001 UTC", "2026-11-27T08:00:30.001Z"),
        ("today 20:00 Europe/Rome", "2026-11-26T19:00:00.000Z"),  # past
        ("today 20:00 Asia/Shanghai", "2026-11-27T12:00:00.000Z"),  # where it is tomorrow
        ("Tomorrow 20:00 Europe/Rome", "2026-11-27T19:00:00.000Z"),
        ("mon 09:00 Europe/Rome", "2026-11-30T08:00:00.000Z"),
        ("Monday 09:00:15 Europe/Rome", "2026-11-30T08:00:15.000Z"),
        ("thu 21:00 UTC", "2026-12-03T21:00:00.000Z"),
        ("thu 21:01 UTC", "2026-11-26T21:01:00.000Z"),
        ("2030-01-31 08:00 Europe/Rome", "2030-01-31T07:00:00.000Z"),
        ("2030-01-31T08:00:05.25 Europe/Rome", "2030-01-31T07:00:05.250Z"),
        ("2026-03-29 02:30 Europe/Rome", "2026-03-29T01:00:00.000Z"),  # skipped: the first instant after the gap
        ("2026-10-25 02:30 Europe/Rome", "2026-10-25T00:30:00.000Z"),  # repeated: the first
        ("2030-01-31 08:00 Etc/GMT+5", "2030-01-31T13:00:00.000Z"),
    ],
)  # fmt: skip
def test_what_is_meant(text: str, meant: str) -> None:
    assert instant_text(instant(text, now=lambda: NOW)) == meant
    shown, _, zone = text.strip().rpartition(" ")
    assert instant_text(instant(shown, now=lambda: NOW, zone=zone)) == meant
    assert one_due(text, None, now=lambda: NOW, zone=zone) == At(instant(meant))
    assert due_of(text, now=lambda: NOW) == At(instant(meant))


@pytest.mark.parametrize(
    ("value", "zone", "why"),
    [
        *((value, None, "without a zone") for value in (
            "08:00", "tomorrow 20:00", "2030-01-31 08:00", datetime(2030, 1, 31, 8),
        )),
        ("08:00 Nowhere/Town", None, "IANA time zone database"), ("08:00 europe", None, "IANA time zone database"),
        ("08:00 UTC", "Europe/Rome", "not UTC and Europe/Rome"), ("2030-02-30 08:00 UTC", None, "day"),
        *((text, "UTC", "ISO 8601") for text in ("2030-01-31", "20300131T080000", "tomorrow")),
        *((text, None, "ISO 8601") for text in (
            "24:00 UTC", "08:60 UTC", "8 UTC", "8am UTC", "today UTC", "someday 08:00 UTC", "mon 2030-01-31 08:00 UTC",
            "08:00 Europe/Rome UTC", "08:00 ../UTC", "08:00 +01:00", "０８:00 UTC", "08:00 UTC\x00", "08:00 UTC\n",
            "08:00 " + "U" * 75,
        )),
        *((text, None, "1970 to 9999") for text in (
            "9999-12-31 23:59 America/New_York", "1970-01-01 00:00 Asia/Tokyo", "0001-01-01 00:00 Asia/Tokyo",
        )),
        (datetime(9999, 12, 31, 23, 59), "America/New_York", "1970 to 9999"),
    ],
)  # fmt: skip
def test_what_is_refused(value: Any, zone: str | None, why: str) -> None:
    with pytest.raises(BadInput, match=why) as caught:
        instant(value, field="deadline", now=lambda: NOW, zone=zone)
    assert caught.value.field == "deadline"
    assert caught.value.value == value


@pytest.mark.parametrize("name", ["", "Nowhere", "../UTC", "/etc/passwd", "a\x00", "Europe", "x" * 5_000])
def test_a_zone_that_is_none_is_refused_by_its_name(name: str) -> None:
    for at, delay in (("08:00", None), ("2030-01-31T08:00:00Z", None), (None, "1h")):
        with pytest.raises(BadInput) as caught:
            one_due(at, delay, now=lambda: NOW, zone=name)
        assert (caught.value.field, caught.value.value) == ("zone", name)


def test_what_has_an_offset_is_not_read_in_the_zone() -> None:
    for given_at in ("2030-01-31T08:00:00+01:00", datetime(2030, 1, 31, 7, tzinfo=UTC)):
        assert instant(given_at, zone="Asia/Shanghai") == instant("2030-01-31T07:00:00Z")


def test_without_a_clock_the_text_has_a_date() -> None:
    for text in ("08:00 UTC", "tomorrow 08:00 UTC", "mon 08:00 UTC"):
        with pytest.raises(BadInput, match="here with its date"):
            instant(text)
    assert instant("2030-01-31 08:00 UTC") == instant("2030-01-31T08:00:00Z")


def test_a_time_of_an_outcome_waits_for_the_clock_but_is_checked_at_once() -> None:
    kept = due_later("tomorrow 20:00 Europe/Rome", None)
    assert resolved(kept, NOW) == At(instant("2026-11-27T19:00:00Z"))
    assert due_later("2030-01-31 08:00 UTC", None) == At(instant("2030-01-31T08:00:00Z"))
    for text in ("tomorrow 20:00", "tomorrow 20:00 Nowhere", "someday 20:00 UTC", "tomorrow 25:00 UTC"):
        with pytest.raises(BadInput, match="again_at"):
            due_later(text, None, at_field="again_at")
    with pytest.raises(BadInput, match="only one"):
        due_later("tomorrow 20:00 UTC", "1h")


def test_the_bounds_of_a_rule() -> None:
    wanted = instant("2030-01-31T07:00:00Z")
    for start in ("2030-01-31 08:00", "2030-01-31 08:00 Europe/Rome", datetime(2030, 1, 31, 8)):
        assert Cron("@daily", zone="Europe/Rome", start=start).start == wanted
        assert RRule("FREQ=DAILY", zone="Europe/Rome", start=start).start == wanted
        assert Cron("@daily", zone="Europe/Rome").between(start, None).start == wanted
    assert Cron("@daily", until="2030-01-31 08:00 Europe/Rome").until == wanted
    for start in ("2030-01-31 08:00", datetime(2030, 1, 31, 8)):  # UTC is what a rule has that names none
        with pytest.raises(BadInput, match="without a zone"):
            Cron("@daily", start=start)
    with pytest.raises(BadInput, match="here with its date"):
        Cron("@daily", zone="Europe/Rome", start="tomorrow 08:00")
    with pytest.raises(BadInput, match="not UTC and Europe/Rome"):
        Cron("@daily", zone="Europe/Rome", start="2030-01-31 08:00 UTC")
