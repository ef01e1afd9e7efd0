"""Recurring rules: an oracle that walks every minute, named cases of daylight saving, bounds, encoding and refusals."""

from __future__ import annotations

import gc
import tracemalloc
import zoneinfo
from bisect import bisect_right
from collections.abc import Callable
from datetime import UTC, date, datetime, timedelta
from functools import cache, partial
from importlib.util import find_spec
from itertools import pairwise, product
from pathlib import Path
from typing import Any, NamedTuple
from zoneinfo import ZoneInfo

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bide.core.errors import BadInput
from bide.core.instants import Millis, as_datetime, instant_text
from bide.core.options import LONGEST_OPTIONS, recurrence_of, with_recurrence
from bide.core.recurrence import zones
from bide.core.recurrence.cron import cron_times
from bide.core.recurrence.ical import rrule_times
from bide.core.recurrence.plan import Recurrence
from bide.core.recurrence.rules import At, Bounds, Cron, Every, RRule, RRuleRule, Rule, refresh_zones, rule_of

MINUTE, HOUR, DAY = 60_000, 3_600_000, 86_400_000
NAIVE_EPOCH = datetime(1970, 1, 1)


def ms(text: str) -> Millis:
    """The instant of ISO text with an offset; UTC without one."""
    moment = datetime.fromisoformat(text)
    return int(moment.replace(tzinfo=moment.tzinfo or UTC).timestamp() * 1000)


def walls(rule: Rule, after: str, count: int, zone: str) -> list[str]:
    """The next wall-clock times in a zone, with offsets."""
    found, at = list[str](), rule.after(ms(after))
    while at is not None and len(found) < count:
        found.append(datetime.fromtimestamp(at / 1000, ZoneInfo(zone)).strftime("%d %H:%M%z"))
        at = rule.after(at)
    return found


# --- the oracle: every minute of real time around each change of the clocks


class Minute(NamedTuple):
    at: Millis
    wall: datetime
    second: bool
    """The wall-clock time was there before."""
    repeated: bool
    skipped: tuple[datetime, ...]
    """The wall-clock minutes that the clock left out just before this instant."""


YEARS = {
    "Europe/Rome": 2020, "America/New_York": 2013, "Europe/Helsinki": 2017, "Australia/Lord_Howe": 2019,
    "Africa/Casablanca": 2022, "America/Sao_Paulo": 2017, "Pacific/Apia": 2011, "America/St_Johns": 2010,
    "Asia/Kathmandu": 1986, "Antarctica/Troll": 2021, "Africa/Cairo": 2014, "America/Havana": 2019,
    "Europe/London": 2024,
}  # fmt: skip


@cache
def minutes_of(zone: str) -> list[list[Minute]]:
    """Stretches of two days around each change of a zone in its year, from half a day before."""
    known, year = ZoneInfo(zone), YEARS[zone]
    hours = [datetime(year, 1, 1, tzinfo=UTC) + timedelta(hours=n - 36) for n in range(24 * 366 + 36)]
    changes = [b for a, b in pairwise(hours) if a.astimezone(known).utcoffset() != b.astimezone(known).utcoffset()]
    return [stretch(known, change - timedelta(hours=14), change + timedelta(hours=34)) for change in changes]


def stretch(zone: ZoneInfo, first: datetime, last: datetime) -> list[Minute]:
    found, at = list[Minute](), first
    before = (at - timedelta(minutes=1)).astimezone(zone).replace(tzinfo=None)
    while at < last:
        wall = at.astimezone(zone)
        shown = wall.replace(tzinfo=None, fold=0)
        jump = (shown - before) // timedelta(minutes=1) - 1
        skipped = tuple(before.replace(fold=0) + timedelta(minutes=1 + n) for n in range(jump))
        other = wall.replace(fold=1 - wall.fold).utcoffset()
        found.append(Minute(int(at.timestamp()) * 1000, shown, wall.fold == 1, other != wall.utcoffset(), skipped))
        before, at = shown, at + timedelta(minutes=1)
    return found


def values(text: str, low: int, high: int) -> set[int]:
    found = set[int]()
    for part in text.split(","):
        span, _, step = part.partition("/")
        first, _, last = span.partition("-")
        begin, end = (low, high) if span == "*" else (int(first), int(last or first))
        ring = list(range(begin, end + 1)) if begin <= end else [*range(begin, high + 1), *range(low, end + 1)]
        found |= set(ring[:: int(step or 1)])
    return found


def marked(text: str, minutes: list[Minute]) -> list[tuple[Minute, bool, bool]]:
    """Of each minute, whether a rule names it, and whether it names one that the clock left out just before."""
    minute, hour, day, month, weekday = text.split()
    clock = {(h, m) for h in values(hour, 0, 23) for m in values(minute, 0, 59)}
    days, months, weekdays = values(day, 1, 31), values(month, 1, 12), {n % 7 for n in values(weekday, 0, 7)}
    both = day[0] == "*" or weekday[0] == "*"

    def matches(wall: datetime) -> bool:
        if (wall.hour, wall.minute) not in clock or wall.month not in months:
            return False
        pair = wall.day in days, wall.isoweekday() % 7 in weekdays
        return all(pair) if both else any(pair)

    return [(one, matches(one.wall), any(map(matches, one.skipped))) for one in minutes]


def oracle(
    text: str, marks: list[tuple[Minute, bool, bool]], on_gap: str | None, on_repeat: str | None
) -> dict[Millis, bool]:
    """The instants at which a rule runs by the table, without anything of the code under test; true: for a gap."""
    minute, hour, *_ = text.split()
    fixed = minute[0] != "*" and hour[0] != "*"
    on_gap, on_repeat = on_gap or ("run_after" if fixed else "skip"), on_repeat or ("first" if fixed else "both")
    found = dict[Millis, bool]()
    for one, named, left_out in marks:
        for_gap = left_out and on_gap == "run_after"
        if for_gap or (named and (not one.repeated or on_repeat == "both" or one.second == (on_repeat == "second"))):
            found[one.at] = for_gap
    return found


FORMS = [
    "30 2 * * *", "0 0 * * *", "0 3 * * *", "1 0 * * *", "15,45 1-3 * * *", "30 22-4/2 * * *", "0 12 * * 5-7",
    "5 0 1 * 0", "*/15 * * * *", "0 * * * *", "10-50/20 */2 * * *", "*/20 2 * * *", "30 */5 */2 * 1-5", "* 2 * * *",
    "59 23 30,31 * *",
]  # fmt: skip


POLICIES = ((None, None), ("skip", "second"), ("run_after", "both"), ("skip", "first"))


@pytest.mark.parametrize("zone", YEARS)
def test_every_form_runs_when_the_table_says_so(zone: str) -> None:
    """The next instant is asked for from every hour or so, under each policy from others, and often near the change."""
    assert minutes_of(zone)
    for text, minutes in product(FORMS, minutes_of(zone)):
        marks, first, last = marked(text, minutes), minutes[0].at, minutes[-1].at
        for turn, (on_gap, on_repeat) in enumerate(POLICIES):
            rule = Cron(text, zone=zone, on_gap=on_gap, on_repeat=on_repeat)  # type: ignore[arg-type]
            runs = oracle(text, marks, on_gap, on_repeat)
            wanted, told = list(runs), (text, zone, on_gap, on_repeat, instant_text(first))
            assert rule.upto(first, last, 10_000) == wanted, told
            for minute in (*minutes[13 * turn :: 52], *minutes[12 * 60 : 16 * 60 : 13]):
                place = bisect_right(wanted, minute.at)
                if place < len(wanted):
                    assert rule.after(minute.at) == wanted[place], (told, instant_text(minute.at))
            assert list(filter(rule.is_shifted, wanted)) == [at for at in wanted if runs[at]], told


# --- years of real time


@pytest.mark.parametrize(
    "zone",
    ["Europe/Rome", "America/New_York", "Australia/Lord_Howe", "America/Sao_Paulo", "Africa/Casablanca", "Asia/Tokyo"],
)
def test_twenty_years_have_each_day_once_and_each_quarter(zone: str) -> None:
    """Each quarter of a month, and of the three days around each change of the clocks."""
    first, last, known = ms("2006-01-01"), ms("2026-01-01"), ZoneInfo(zone)
    for text in ("30 2 * * *", "0 0 * * *"):
        found = Cron(text, zone=zone).upto(first, last, 10_000)
        assert all(a < b for a, b in pairwise(found))
        days = [datetime.fromtimestamp(at / 1000, known).date() for at in found]
        assert days == [days[0] + timedelta(days=n) for n in range(len(days))]
        assert first <= found[0] < first + DAY
        assert last - DAY < found[-1] <= last
    quarters = Cron("*/15 * * * *", zone=zone)
    offsets = {at: datetime.fromtimestamp(at / 1000, known).utcoffset() for at in range(first, last + 1, DAY)}
    changes = [at for at, later in pairwise(offsets) if offsets[at] != offsets[later]]
    assert len(changes) > 20 or zone == "Asia/Tokyo"
    for begin, end in [(first, first + 30 * DAY), *((at - DAY, at + 2 * DAY) for at in changes)]:
        found = quarters.upto(begin, end, 40_000)
        assert found == list(range(begin, end + 1, 15 * MINUTE))  # offsets here are whole quarters of an hour


@pytest.mark.parametrize(
    ("rule", "after", "zone", "wanted"),
    [
        # the gap is 02:00 to 03:00
        (Cron("30 2-23/4 * * *", zone="Australia/Sydney"), "2019-10-06T00:00+10:00", "Australia/Sydney",
         ["06 03:00+1100", "06 06:30+1100", "06 10:30+1100", "06 14:30+1100"]),
        (Cron("* * * * *", zone="Europe/Rome"), "2024-10-27T02:58+02:00", "Europe/Rome",
         ["27 02:59+0200", "27 02:00+0100", "27 02:01+0100"]),
        (Cron("0 0 31 3 *", zone="Europe/Rome"), "2024-03-30T12:00Z", "Europe/Rome",
         ["31 00:00+0100", "31 00:00+0200"]),
        (Cron("0 0 */3 * *"), "2024-01-28T12:00Z", "UTC", ["31 00:00+0000", "01 00:00+0000", "04 00:00+0000"]),
        (Cron("30 2 * * *", zone="Europe/Amsterdam"), "2025-03-29T12:00Z", "Europe/Amsterdam",
         ["30 03:00+0200", "31 02:30+0200"]),
        (Cron("0 */6 * * *", zone="Australia/Lord_Howe"), "2019-10-05T13:00Z", "Australia/Lord_Howe",
         ["06 00:00+1030", "06 06:00+1100", "06 12:00+1100"]),
        # strictly later inside a repeated hour: the second 02:30 is none for a fixed rule
        (Cron("30 2 * * *", zone="Europe/Rome"), "2024-10-27T02:10+01:00", "Europe/Rome", ["28 02:30+0100"]),
        (Cron("*/30 * * * *", zone="Europe/Rome"), "2024-10-27T02:30+02:00", "Europe/Rome",
         ["27 02:00+0100", "27 02:30+0100", "27 03:00+0100"]),
        # the last weekday of the month; the day of the gap; an interval over a change of the clocks
        (Cron("0 9 * * friL"), "2024-01-01T00:00Z", "UTC", ["26 09:00+0000", "23 09:00+0000", "29 09:00+0000"]),
        (RRule("FREQ=MONTHLY;BYDAY=MO,TU,WE,TH,FR;BYSETPOS=-1", start="2024-02-01T09:00Z"), "2024-02-01T10:00Z", "UTC",
         ["29 09:00+0000", "29 09:00+0000", "30 09:00+0000"]),
        (Cron("0 3 * * *", zone="Europe/Berlin"), "2024-03-30T12:00Z", "Europe/Berlin",
         ["31 03:00+0200", "01 03:00+0200"]),
        (Every("4h", start="2024-03-30T22:00Z"), "2024-03-30T21:59Z", "Europe/Berlin",
         ["30 23:00+0100", "31 04:00+0200", "31 08:00+0200"]),
        (Every("1d", start="2024-10-26T10:00Z"), "2024-10-26T10:00Z", "Europe/Berlin",
         ["27 11:00+0100", "28 11:00+0100"]),
        (Cron("0 8,20 * * *", zone="America/New_York"), "2024-03-09T20:30-05:00", "America/New_York",
         ["10 08:00-0400", "10 20:00-0400", "11 08:00-0400"]),
        # where another scheduler skipped a day (its bugs 529 and 606), stood still (980, 1021), ran in the gap (1059)
        (Cron("0 0 * * mon-fri", zone="America/Chicago"), "2021-03-12T00:00-06:00", "America/Chicago",
         ["15 00:00-0500"]),
        (Cron("0 0 * * *", zone="America/Los_Angeles", jitter="10s"), "2022-03-13T00:00-08:00", "America/Los_Angeles",
         ["14 00:00-0700"]),
        (Cron("0 1-23/2 * * *", zone="Europe/London"), "2024-10-27T00:30+01:00", "Europe/London",
         ["27 01:00+0100", "27 03:00+0000", "27 05:00+0000"]),
        (Cron("30 * * * *", zone="Europe/Helsinki"), "2017-10-29T03:45+02:00", "Europe/Helsinki",
         ["29 04:30+0200", "29 05:30+0200"]),
        (Cron("0 2 * * *", zone="America/New_York"), "2013-03-10T01:59-05:00", "America/New_York",
         ["10 03:00-0400", "11 02:00-0400"]),
        (Cron("0 2 * * *", zone="America/New_York", on_gap="skip"), "2013-03-10T01:59-05:00", "America/New_York",
         ["11 02:00-0400"]),
        # a whole day is skipped; two nominal times at one instant
        (Cron("0 8 * * *", zone="Pacific/Apia"), "2011-12-29T12:00-10:00", "Pacific/Apia",
         ["31 00:00+1400", "31 08:00+1400", "01 08:00+1400"]),
        (Cron("0,30 2,3 * * *", zone="Europe/Rome"), "2024-03-31T00:00Z", "Europe/Rome",
         ["31 03:00+0200", "31 03:30+0200", "01 02:00+0200"]),
        # other forms
        (Cron("*/20 59 23 L * *"), "2024-02-29T23:59:10Z", "UTC", ["29 23:59+0000", "29 23:59+0000", "31 23:59+0000"]),
        (Cron("0 0 * * fri#2"), "2024-02-01T00:00Z", "UTC", ["09 00:00+0000", "08 00:00+0000"]),
        (Cron("0 0 29 2 mon"), "2024-02-29T12:00Z", "UTC", ["03 00:00+0000", "10 00:00+0000"]),  # either
    ],
)  # fmt: skip
def test_named_cases(rule: Rule, after: str, zone: str, wanted: list[str]) -> None:
    assert walls(rule, after, len(wanted), zone) == wanted


def test_the_longest_way_to_a_next_occurrence() -> None:
    """Monday 29 February comes again after 40 years where a century without a leap day lies between."""
    assert Cron("0 0 * 2 mon#5").after(ms("2072-03-01")) == ms("2112-02-29")
    assert Cron("0 0 1 1 *").upto(ms("9998-06-01"), ms("9999-12-31"), 5) == [ms("9999-01-01")]
    assert Cron("* * * * *", zone="Pacific/Apia").after(ms("9999-12-31T23:59")) is None


# --- bounds


def test_bounds_include_their_instants() -> None:
    rule = Cron("0 8 * * *", start="2024-01-01T08:00Z", until="2024-01-04T08:00Z", except_on=["2024-01-02"])
    assert rule.upto(0, ms("2030-01-01"), 9) == [ms(f"2024-01-0{day}T08:00") for day in (1, 3, 4)]
    later = rule.between("2024-01-03T08:00Z", None)
    assert later.upto(0, ms("2030-01-01"), 9) == [ms("2024-01-03T08:00"), ms("2024-01-04T08:00")]
    assert rule.between(None, "2024-01-03T07:59:59Z").upto(0, ms("2030-01-01"), 9) == [ms("2024-01-01T08:00")]
    assert rule.upto(0, ms("2030-01-01"), 2) == [ms("2024-01-01T08:00"), ms("2024-01-03T08:00")]
    assert Every("1h", start="2024-01-01T00:10Z").after(ms("2023-01-01")) == ms("2024-01-01T00:10")
    assert Every("1h").after(ms("2024-01-01T00:10")) == ms("2024-01-01T01:00")
    assert At("2024-01-02T00:00Z", "2024-01-01T00:00Z").upto(0, ms("2030-01-01"), 9) == [
        ms("2024-01-01"),
        ms("2024-01-02"),
    ]
    late = At("2024-01-02T00:00Z", "2024-01-01T00:00Z", start="2024-01-01T12:00Z", except_on=None)
    assert late.upto(0, ms("2030-01-01"), 9) == [ms("2024-01-02")]
    local = RRule(
        "FREQ=DAILY;UNTIL=20300101T000000Z", zone="Europe/Rome", start="2024-01-01T08:00", until="2025-01-02T00:00"
    )
    assert (local.start, local.until) == (ms("2024-01-01T07:00"), ms("2025-01-01T23:00"))
    assert Cron("0 8 * * *", start=START, until="2024-01-03T00:00Z", times=9).last is None


def test_a_bound_of_none_is_none() -> None:
    """A program's declaration is compared by its bytes with the one that is stored."""
    bounds: Any = dict.fromkeys(Bounds.__annotations__)
    assert msgspec.msgpack.encode(Cron("0 8 * * *", **bounds)) == msgspec.msgpack.encode(Cron("0 8 * * *"))
    assert Cron("0 8 * * *", jitter="0s", except_on=[], zone="UTC") == Cron("0 8 * * *")


def test_times_count_what_is_left_after_exceptions() -> None:
    rules: list[Rule] = [
        Cron("0 8 * * *", start="2024-01-01T00:00Z", times=3, except_on=[date(2024, 1, 2)]),
        Every("1d", start="2024-01-01T08:00Z", times=3, except_on=[date(2024, 1, 2)]),
        RRule("FREQ=DAILY", start="2024-01-01T08:00Z", times=3, except_on=[date(2024, 1, 2)]),
        RRule("DTSTART:20240101T080000\nRRULE:FREQ=DAILY", times=3, except_on="2024-01-02"),
    ]
    for rule in rules:
        assert rule.upto(0, ms("2030-01-01"), 9) == [ms(f"2024-01-0{day}T08:00") for day in (1, 3, 4)]
        assert rule.after(ms("2024-01-04T08:00")) is None
    assert len(Every("1s", start="2024-01-01T00:00Z", times=100_000).upto(0, ms("2030-01-01"), 200_000)) == 100_000


@pytest.mark.parametrize(
    "bounds",
    [
        {"start": "2024-10-27T02:30+01:00", "times": 3},  # the second 02:30, which is none of a daily rule
        {"start": "2024-03-30T02:30+01:00", "times": 1_000, "except_on": ["2024-04-01"]},
        {"start": "2024-03-30T02:30+01:00", "times": 900, "on_gap": "skip", "on_repeat": "both"},
    ],
)
@pytest.mark.parametrize("text", ["30 2 * * *", "0 */5 * * sat", "every 7h", "FREQ=DAILY", "FREQ=HOURLY;BYDAY=SU"])
def test_the_last_of_the_counted_times_is_the_last_of_as_many_steps(text: str, bounds: dict[str, Any]) -> None:
    """Also as a COUNT, which counts excepted dates too, and after another start."""
    if "every" in text:
        bounds = {name: value for name, value in bounds.items() if name[:3] != "on_"}
    times, free = bounds["times"], bounds | {"times": None}
    endless = rule_of(text, zone="Europe/Rome", **free)
    rule = rule_of(text, zone="Europe/Rome", **bounds)
    assert rule.upto(0, ms("2100-01-01"), 2_000) == endless.upto(0, ms("2100-01-01"), times)
    later, free_later = (one.between("2024-10-28T12:00Z", None) for one in (rule, endless))
    assert later.upto(0, ms("2100-01-01"), 2_000) == free_later.upto(0, ms("2100-01-01"), times)
    if text[:4] == "FREQ":
        counted = RRule(f"{text};COUNT={times}", zone="Europe/Rome", **free)
        all_days = RRule(text, zone="Europe/Rome", **free | {"except_on": ()}).upto(0, ms("2100-01-01"), times)
        assert counted.upto(0, ms("2100-01-01"), 2_000) == endless.upto(0, all_days[-1], 2_000)
        if times > 3:
            cut = counted.between("2024-10-28T12:00Z", None)
            assert cut.upto(0, ms("2100-01-01"), 2_000) == free_later.upto(0, all_days[-1], 2_000)


def test_a_count_begins_with_a_start_before_1970() -> None:
    rule = RRule("DTSTART:19650614T080000Z\nRRULE:FREQ=YEARLY;COUNT=7")
    assert rule.upto(0, ms("2100-01-01"), 9) == [ms("1970-06-14T08:00"), ms("1971-06-14T08:00")]
    with pytest.raises(BadInput, match="fires"):
        RRule("DTSTART:19650614T080000Z\nRRULE:FREQ=YEARLY;COUNT=5")


def test_the_last_of_the_counted_times_is_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    rule = RRule("FREQ=DAILY", start="2024-01-01T08:00Z", times=5_000)
    encoded, steps = msgspec.msgpack.encode(rule), 0
    next_step = zones.next_step

    def counted(*arguments: Any) -> Millis | None:
        nonlocal steps
        steps += 1
        return next_step(*arguments)

    monkeypatch.setattr(zones, "next_step", counted)
    refresh_zones()
    back: RRuleRule = msgspec.msgpack.Decoder(RRuleRule).decode(encoded)
    assert back.after(ms("2024-01-01T08:00")) == ms("2024-01-02T08:00")
    assert steps == 1


@pytest.mark.parametrize(
    ("text", "times", "field"),
    [
        ("0 8 * * *", 10_001, "times"), ("0 8 29 2 *", 5_000, "times"), ("FREQ=DAILY", 10_001, "times"),
        ("FREQ=MINUTELY;BYYEARDAY=1;BYHOUR=0;BYMINUTE=0", 500, "times"),
        ("FREQ=WEEKLY;INTERVAL=3;COUNT=10000", None, "COUNT"),
        ("FREQ=DAILY;BYYEARDAY=366;BYDAY=MO;COUNT=10000", None, "COUNT"),
        ("FREQ=SECONDLY;INTERVAL=61;BYSECOND=0;BYMINUTE=0;BYHOUR=3;COUNT=10000", None, "COUNT"),
    ],
)  # fmt: skip
def test_times_that_take_too_long_to_count_are_refused(text: str, times: int | None, field: str) -> None:
    with pytest.raises(BadInput) as caught:
        rule_of(text, start=START, times=times)
    assert caught.value.field == field


def test_the_search_of_a_step_is_bounded() -> None:
    """In months and periods, however many dates are excepted; days without times cost nothing, nor do excepted ones."""
    leap = RRule("FREQ=DAILY;BYYEARDAY=366;BYDAY=MO", start=START)
    assert leap.after(0) == ms("2040-12-31")
    latest = RRule("FREQ=DAILY;BYMONTH=2;BYMONTHDAY=29;BYHOUR=8,9;BYSETPOS=-1", start=START)
    assert latest.after(ms("2096-03-01")) == ms("2104-02-29T09:00")
    excepted = [f"{year}-12-31" for year in range(2024, 9999) if date(year, 12, 31).timetuple().tm_yday == 366]
    with pytest.raises(BadInput, match="fires"):
        RRule("FREQ=DAILY;BYYEARDAY=366;BYDAY=MO", start=START, except_on=excepted)
    tuesday = ms("2024-01-02")
    for times in (cron_times("0 0 30 2 *"), rrule_times("FREQ=DAILY;INTERVAL=7;BYDAY=MO", tuesday)):
        looks = iter(range(100))
        assert times.first(looks, tuesday) is None
        assert next(looks, None) is None
    closed = [date(2024, 6, 1) + timedelta(number) for number in range(2_000)]
    for text in ("FREQ=DAILY", "FREQ=HOURLY", "0 * * * *"):
        rule = rule_of(text, start=START, zone="Europe/Rome", except_on=closed)
        assert walls(rule, "2024-05-31T23:00", 1, "Europe/Rome")[0][:2] == "22", text  # November 2029


def test_a_rule_of_each_second_is_small_in_memory() -> None:
    """Since the parsed rules of many tasks are kept, and people of a service choose them."""
    hours = ",".join(map(str, range(23)))
    for make in (
        partial(cron_times, "* * * 3 3 *"),
        partial(rrule_times, f"FREQ=SECONDLY;INTERVAL=7;BYHOUR={hours}", 0),
    ):
        gc.collect()
        tracemalloc.start()
        kept = make()
        size, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert kept is not None
        assert size < 100_000


def test_exceptions_are_dates_of_the_zone() -> None:
    """And an interval goes past a date at once, however short it is, also one of 25 or 23 hours."""
    every = Every("1s", zone="Europe/Rome", except_on=["2024-10-27"])
    assert every.after(ms("2024-10-26T23:59:59+02:00")) == ms("2024-10-28T00:00+01:00")
    every = Every("1s", zone="Europe/Rome", except_on=["2024-03-31"])
    assert every.after(ms("2024-03-30T23:59:59+01:00")) == ms("2024-04-01T00:00+02:00")
    shifted = Cron("0 8 * * *", zone="Pacific/Apia", except_on=["2011-12-30"])
    assert shifted.after(ms("2011-12-30T00:00-10:00")) == ms("2011-12-31T08:00+14:00")
    assert Cron("30 2 * * *", zone="Europe/Rome").is_shifted(ms("2024-03-31T01:00"))
    assert not Cron("30 2 * * *", zone="Europe/Rome", except_on=["2024-03-31"]).is_shifted(ms("2024-03-31T01:00"))
    assert not Cron("0 3 * * *", zone="Europe/Rome").is_shifted(ms("2024-03-31T01:00"))


# --- RFC 5545


@pytest.mark.parametrize(
    ("text", "start", "zone", "wanted"),
    [
        ("FREQ=DAILY", "2024-03-30T02:30+01:00", "Europe/Rome", ["30 02:30+0100", "31 03:00+0200", "01 02:30+0200"]),
        ("DTSTART:20240331T023000\nRRULE:FREQ=DAILY", None, "Europe/Rome", ["31 03:00+0200", "01 02:30+0200"]),
        ("DTSTART;TZID=Europe/Rome:20240331T023000 FREQ=DAILY", None, "UTC", ["31 03:00+0200", "01 02:30+0200"]),
        ("FREQ=HOURLY", "2024-03-31T00:30Z", "Europe/Rome", ["31 01:30+0100", "31 03:30+0200"]),
        ("FREQ=HOURLY", "2024-10-27T00:30Z", "Europe/Rome", ["27 02:30+0200", "27 02:30+0100", "27 03:30+0100"]),
        ("FREQ=WEEKLY;BYDAY=MO", "2024-01-03T08:00Z", "UTC", ["08 08:00+0000", "15 08:00+0000"]),  # no Wednesday
        ("FREQ=WEEKLY;INTERVAL=2;BYDAY=MO,WE", "2024-01-03T08:00Z", "UTC", ["03 08:00+0000", "15 08:00+0000"]),
        ("FREQ=MONTHLY", "2024-01-31T08:00Z", "UTC", ["31 08:00+0000", "31 08:00+0000", "31 08:00+0000"]),
        ("FREQ=DAILY;COUNT=2", "2024-01-01T08:00Z", "UTC", ["01 08:00+0000", "02 08:00+0000", "end"]),
        ("FREQ=DAILY;UNTIL=20240102T080000Z", "2024-01-01T08:00Z", "UTC", ["01 08:00+0000", "02 08:00+0000", "end"]),
        ("FREQ=DAILY;UNTIL=20240102", "2024-01-01T08:00Z", "UTC", ["01 08:00+0000", "02 08:00+0000", "end"]),
        ("FREQ=DAILY;UNTIL=20240102T080000", "2024-01-01T07:00Z", "Europe/Rome",
         ["01 08:00+0100", "02 08:00+0100", "end"]),
    ],
)  # fmt: skip
def test_recurrence_rules(text: str, start: str | None, zone: str, wanted: list[str]) -> None:
    rule = RRule(text, start=start, zone=zone)
    found = walls(rule, "2023-01-01", len([one for one in wanted if one != "end"]) + ("end" in wanted), rule.zone)
    assert [*found, *["end"] * ("end" in wanted)] == wanted


@pytest.mark.parametrize(
    "text",
    [
        "FREQ=YEARLY;INTERVAL=3", "FREQ=YEARLY;BYMONTH=2,11;BYDAY=1SU,-1FR", "FREQ=YEARLY;BYWEEKNO=1,53;BYDAY=MO",
        "FREQ=MONTHLY;INTERVAL=5;BYMONTHDAY=-1,31", "FREQ=MONTHLY;BYDAY=MO,TU,WE,TH,FR;BYSETPOS=1,-1;BYHOUR=7,21",
        "FREQ=WEEKLY;INTERVAL=3;BYDAY=SU,TH;WKST=SU", "FREQ=DAILY;INTERVAL=17", "FREQ=DAILY;BYMONTH=2;BYMONTHDAY=29",
        "FREQ=HOURLY;INTERVAL=7;BYDAY=MO", "FREQ=MINUTELY;INTERVAL=1001;BYMONTH=6", "FREQ=YEARLY;COUNT=40",
        "FREQ=MONTHLY;BYHOUR=8;COUNT=300", "FREQ=SECONDLY;INTERVAL=40;BYMONTH=2;BYMONTHDAY=29;BYHOUR=3;BYMINUTE=0",
        "FREQ=YEARLY;INTERVAL=2;BYDAY=20MO,-1FR,53TU,-53SU", "FREQ=YEARLY;BYYEARDAY=-1,-366,60,300,366",
        "FREQ=YEARLY;BYWEEKNO=-1,-20;BYDAY=MO", "FREQ=MONTHLY;BYMONTHDAY=-31,-1,15",
        "FREQ=HOURLY;INTERVAL=5;BYHOUR=7,9", "FREQ=WEEKLY;INTERVAL=2;BYDAY=MO,TH,SU;BYSETPOS=-1,2;WKST=SU",
    ],
)  # fmt: skip
def test_windows_make_no_difference(text: str) -> None:
    """The stream, which is expanded in windows, is what the library expands from the beginning on."""
    from dateutil.rrule import rrulestr

    begin, last = datetime(2001, 3, 30, 10, 20, 30), datetime(2044, 1, 1)
    stop = "" if "COUNT" in text else ";UNTIL=20440101T000000"
    whole = [at for at in rrulestr(text + stop, dtstart=begin) if at <= last]
    wanted = [int((at - NAIVE_EPOCH) / timedelta(milliseconds=1)) for at in whole]
    assert len(wanted) > 5
    rule = RRule(text, start="2001-03-30T10:20:30Z")
    assert rule.upto(0, int((last - NAIVE_EPOCH) / timedelta(milliseconds=1)), len(wanted) + 1) == wanted
    for place in range(0, len(wanted) - 1, 7):
        assert rule.after(wanted[place]) == wanted[place + 1]


# --- laws

KINDS: list[Rule] = [
    Cron("*/20 1-5 * * *", zone="Europe/Rome", jitter="30m"),
    Cron("30 2 * * *", zone="America/New_York", on_gap="skip", on_repeat="both", except_on=["2024-03-11"], jitter="1d"),
    Cron("*/7 * * * * *", start="2024-01-01T00:00Z", until="2030-01-01T00:00Z", jitter="1h"),
    Every("90m", start="2024-01-01T00:00:00.123Z", times=50_000, jitter="2h"),
    RRule("FREQ=MONTHLY;BYDAY=-1FR", start="2020-01-31T08:00Z", zone="Asia/Kathmandu", jitter="1d"),
    RRule("DTSTART;TZID=America/Havana:20200101T003000\nRRULE:FREQ=DAILY;INTERVAL=3"),
    At(["2024-01-01T00:00Z", "2024-01-01T00:00:01Z", "2029-01-01T00:00Z"], jitter="1m"),
]
kinds, times = st.sampled_from(KINDS), st.integers(ms("2019-12-30"), ms("2030-01-02"))


@given(kinds, times, st.floats(0, 1))
def test_after_is_strictly_later_and_nothing_lies_between(rule: Rule, at: Millis, part: float) -> None:
    found = rule.after(at)
    if found is not None:
        assert found > at
        assert rule.after(at + int((found - at - 1) * part)) == found
        assert rule.upto(at + 1, found, 2) == rule.latest(at + 1, found, 2) == [found]
        assert rule.latest(at + 1, found - 1, 2) == []
        ahead = rule.upto(found, ms("2040-01-01"), 9)
        assert rule.latest(at, ahead[-1], 4) == ahead[-4:]


@given(kinds, times, st.text(max_size=8))
def test_a_key_fires_at_its_own_time_before_the_next(rule: Rule, at: Millis, key: str) -> None:
    nominal = rule.after(at)
    if nominal is None:
        return
    due, following = rule.fires_at(nominal, key), rule.after(nominal)
    assert nominal <= due < nominal + max(rule.jitter, 1)
    assert following is None or due < following
    assert rule.nominal(due, key) == nominal
    is_next = following is not None and rule.fires_at(following, key) == due + 1
    assert rule.nominal(due + 1, key) == (following if is_next else due + 1)


def test_keys_are_spread_over_the_jitter() -> None:
    rule = Every("1h", jitter="10m")
    late = [rule.fires_at(ms("2024-01-01"), f"user-{n}") - ms("2024-01-01") for n in range(1000)]
    assert min(late) < MINUTE
    assert max(late) > 9 * MINUTE
    assert len(set(late)) > 900


def test_the_instant_before_is_found_in_few_steps_however_many_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    rule = RRule("FREQ=SECONDLY;BYDAY=TH", start="2026-01-01T00:00Z", jitter="1d")
    steps, step = list[Millis](), RRuleRule.step

    def counted(rule: RRuleRule, after: Millis) -> Millis | None:
        steps.append(after)
        return step(rule, after)

    monkeypatch.setattr(RRuleRule, "step", counted)
    assert rule.coming(ms("2027-06-04T12:00"), "42") == ms("2027-06-03T23:59:59")
    assert len(steps) < 100


@pytest.mark.parametrize("rule", KINDS, ids=lambda rule: rule.words)
def test_a_rule_is_the_same_after_a_trip(rule: Rule) -> None:
    decoder: msgspec.msgpack.Decoder[Rule] = msgspec.msgpack.Decoder(Rule)
    encoded = msgspec.msgpack.encode(rule)
    back = decoder.decode(encoded)
    assert back == rule
    assert hash(back) == hash(rule)
    assert type(back) is type(rule)
    assert back.upto(0, ms("2040-01-01"), 50) == rule.upto(0, ms("2040-01-01"), 50)
    assert len(encoded) < 140
    assert len(msgspec.msgpack.encode(Cron("0 8 * * *"))) < 32


def test_what_is_stored_can_be_read_back() -> None:
    """Also a rule from the past; policies of other types are refused rather than stored as a task without a rule."""
    for begin, first in (("00010101", "2029-01-01T00:00+01:00"), ("19650614", "2029-06-14T00:00+02:00")):
        rule = RRule(f"DTSTART;VALUE=DATE:{begin}\nRRULE:FREQ=YEARLY", zone="Europe/Rome")
        assert recurrence_of(with_recurrence(b"", Recurrence(rule=rule))) == Recurrence(rule=rule)
        assert rule.after(ms("2028-12-01")) == ms(first)
    for wrong in (None, 1, "no"):
        with pytest.raises(BadInput, match="rule"):
            with_recurrence(b"", Recurrence(rule=Every("1h"), end_when_dead=wrong))  # type: ignore[arg-type]


def test_what_can_be_stored_can_be_paused() -> None:
    """Whatever its length: 3 bytes more with each excepted date, and 9 with each instant."""
    first, stored = ms("2030-01-01"), 0
    for number, more in product(range(900, 912), range(3)):
        instants = [as_datetime(first + DAY * place) for place in range(number)]
        rule = At(instants, except_on=[date(2040, 1, 1 + place) for place in range(more)])
        try:
            options = with_recurrence(b"", Recurrence(rule=rule))
        except BadInput:
            continue
        stored = max(stored, len(options))
        assert len(with_recurrence(options, Recurrence(rule=rule, paused=True))) <= LONGEST_OPTIONS
    assert stored > LONGEST_OPTIONS - 12


def test_damaged_bytes_are_no_rule() -> None:
    decoder: msgspec.msgpack.Decoder[Rule] = msgspec.msgpack.Decoder(Rule)
    for fields in ({"type": "every", "length": 0}, {"type": "cron"}, {"type": "at", "instants": [-1]}, {"type": "x"}):
        with pytest.raises(msgspec.ValidationError):
            decoder.decode(msgspec.msgpack.encode(fields))


def test_a_changed_database_is_read_anew(tmp_path: Path) -> None:
    """A zone file that is replaced counts from `refresh_zones` on."""
    rule, before = Cron("0 8 * * *", zone="Europe/Rome"), zoneinfo.TZPATH
    assert rule.after(ms("2024-01-01")) == ms("2024-01-01T07:00")
    path = next(Path(folder) for folder in [*before, tzdata_folder()] if (Path(folder) / "Asia/Tokyo").exists())
    (tmp_path / "Europe").mkdir()
    (tmp_path / "Europe/Rome").write_bytes((path / "Asia/Tokyo").read_bytes())
    try:
        zoneinfo.reset_tzpath(to=[str(tmp_path)])
        assert rule.after(ms("2024-01-01")) == ms("2024-01-01T07:00")
        refresh_zones()
        assert rule.after(ms("2024-01-01")) == ms("2024-01-01T23:00")
    finally:
        zoneinfo.reset_tzpath(to=before)
        refresh_zones()
    assert rule.after(ms("2024-01-01")) == ms("2024-01-01T07:00")


def tzdata_folder() -> str:
    spec = find_spec("tzdata")
    return str(Path(spec.origin).parent / "zoneinfo") if spec and spec.origin else "."


# --- text


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("0 8 * * mon-fri", "at 08:00 on Monday to Friday, Asia/Shanghai"),
        ("30 8,20 * * 0", "at 08:30, 20:30 on Sunday, Asia/Shanghai"),
        ("@hourly", "every hour, Asia/Shanghai"),
        ("*/15 * * * *", "every 15 minutes, Asia/Shanghai"),
        ("* * * * *", "every minute, Asia/Shanghai"),
        ("0 */6 * * SAT,7", "every 6 hours on Saturday, Sunday, Asia/Shanghai"),
        ("0 9 15 * *", "at 09:00 on day 15 of the month, Asia/Shanghai"),
        ("@Monthly", "at 00:00 on day 1 of the month, Asia/Shanghai"),
        ("0 9 l * *", "at 09:00 on the last day of the month, Asia/Shanghai"),
        ("0 9 1 * mon", 'cron "0 9 1 * mon" in Asia/Shanghai'),
        ("0 9 * * fri#2", 'cron "0 9 * * fri#2" in Asia/Shanghai'),
        ("*/7 * * * *", 'cron "*/7 * * * *" in Asia/Shanghai'),
        ("every  90m", "every 1h30m"),
        ("FREQ=DAILY", 'rrule "FREQ=DAILY" in Asia/Shanghai'),
        ("rrule:freq=weekly;byday=mo", 'rrule "FREQ=WEEKLY;BYDAY=MO" in Asia/Shanghai'),
    ],
)
def test_words(text: str, words: str) -> None:
    assert rule_of(text, zone="Asia/Shanghai", start="2024-01-01T00:00Z").words == words


START = "2024-01-01T00:00Z"


@pytest.mark.parametrize(
    ("text", "field"),
    [
        *((f"{part} * * * *", "minute") for part in (
            "60", "-1", "5/20", "*/0", "*/60", "0-10/20", "1,,2", "a", "1-", "*,5", "5,*", "L", "1.5", "?", "100"
        )),
        ("0 24 * * *", "hour"), ("0 */24 * * *", "hour"), ("0 8/2 * * *", "hour"),
        ("0 0 0 * *", "day of month"), ("0 0 32 * *", "day of month"), ("0 0 15W * *", "day of month"),
        ("0 0 L-3 * *", "day of month"), ("0 0 ? * *", "day of month"),
        ("0 0 * 13 *", "month"), ("0 0 * mon *", "month"), ("0 0 * janu *", "month"),
        ("0 0 * * 8", "day of week"), ("0 0 * * fri#6", "day of week"), ("0 0 * * L", "day of week"),
        ("0 0 * * jan", "day of week"), ("0 0 * * 8L", "day of week"),
        ("61 0 0 * * *", "second"), ("5/10 0 0 * * *", "second"),
        ("0 0 * *", "cron"), ("0 0 * * * * *", "cron"), ("@reboot", "cron"), ("٣ 0 * * *", "cron"),
        ("0 0 30 2 *", "cron"), ("0 0 31 4,6 *", "cron"), ("0 0 * 2 fri#5,sat" + "," * 999, "cron"),
        (" ", "rule"), ("hello", "rule"), ("15m", "rule"),
        ("every 500ms", "every"), ("every day", "every"), ("every -5m", "every"),
        *((f"FREQ={part}", "rrule") for part in (
            "NEVER", "DAILY;INTERVAL=0", "DAILY;COUNT=0", "DAILY;COUNT=100001", "DAILY;COUNT=2;UNTIL=20300101",
            "DAILY;BYHOUR=24",
            "DAILY;BYDAY=1MO", "DAILY;BYDAY=XX", "DAILY;FREQ=DAILY", "MONTHLY;BYMONTHDAY=0", "DAILY;BYMONTH=13",
            "DAILY;BYEASTER=0",
            "DAILY;UNTIL=2030", "DAILY;UNTIL=20301301", "DAILY;", "DAILY;WKST=X", "YEARLY;BYMONTH=2;BYMONTHDAY=30",
            "DAILY;BYMONTH=2;BYMONTHDAY=30", "DAILY;UNTIL=20231231", "HOURLY;INTERVAL=2;BYHOUR=1",
            "DAILY;BYSETPOS=1;BYHOUR=0,1,2,3,4,5,6,7,8,9;BYMINUTE=0,1,2,3,4,5,6,7,8,9",
        )),
        ("FREQ=DAILY;UNTIL=20231231T000000Z", "until"),
        ("RRULE:INTERVAL=2;FREQ=DAILY", "rrule"), ("DTSTART:20240101", "rrule"), ("DTSTART:2024 FREQ=DAILY", "rrule"),
        ("FREQ=DAILY EXDATE:20240101", "rrule"), ("DTSTART:20240102T000000 FREQ=DAILY", "start"),
        ("DTSTART;TZID=Nowhere:20240101T000000 FREQ=DAILY", "zone"),
    ],
)  # fmt: skip
def test_a_refusal_names_the_field(text: str, field: str) -> None:
    with pytest.raises(BadInput) as caught:
        rule_of(text, start=START)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("bounds", "field"),
    [
        ({"zone": "Mars/Base"}, "zone"), ({"zone": "../etc/passwd"}, "zone"), ({"zone": "Europe"}, "zone"),
        ({"zone": ""}, "zone"), ({"zone": "a\0b"}, "zone"), ({"zone": 5}, "zone"),
        ({"zone": "localtime"}, "zone"), ({"zone": "posixrules"}, "zone"), ({"zone": "right/UTC"}, "zone"),
        ({"times": 2}, "times"), ({"times": 0, "start": START}, "times"), ({"times": True, "start": START}, "times"),
        ({"times": 100_001, "start": START}, "times"),
        ({"jitter": "25h"}, "jitter"), ({"jitter": "soon"}, "jitter"), ({"jitter": "-1s"}, "jitter"),
        ({"start": "2024-01-01T00:00"}, "start"), ({"until": datetime(2024, 1, 1)}, "until"),
        ({"start": START, "until": "2023-12-31T00:00Z"}, "until"),
        ({"start": START, "until": "2024-01-01T07:00Z"}, "cron"),
        ({"on_gap": "before"}, "on_gap"), ({"on_repeat": "never"}, "on_repeat"),
        ({"except_on": ["2024-02-30"]}, "except_on"), ({"except_on": [datetime(2024, 1, 1)]}, "except_on"),
        ({"except_on": [5]}, "except_on"), ({"except_on": 5}, "except_on"), ({"zona": "UTC"}, "zona"),
        ({"start": START, "until": "2024-01-02T09:00Z", "except_on": ["2024-01-01", "2024-01-02"]}, "cron"),
    ],
)  # fmt: skip
def test_a_refused_bound_is_named(bounds: dict[str, Any], field: str) -> None:
    with pytest.raises(BadInput) as caught:
        Cron("0 8 * * *", **bounds)
    assert caught.value.field == field


def test_other_refusals() -> None:
    wrong: dict[str, Callable[[], Rule]] = {
        "on_gap, on_repeat": lambda: Every("1h", on_gap="skip"),
        "at": lambda: At([]),
        "start": lambda: RRule("FREQ=DAILY"),
        "zone": lambda: RRule("DTSTART:20240101T000000Z FREQ=DAILY", zone="Europe/Rome"),
    }
    for field, make in wrong.items():
        with pytest.raises(BadInput) as caught:
            make()
        assert caught.value.field == field
    with pytest.raises(BadInput, match="start"):
        Cron("0 8 * * *", until="2024-01-01T09:00Z").between("2024-01-02T00:00Z", None)
    assert RRule("DTSTART:20240101T000000 FREQ=DAILY", start=START).after(0) == ms("2024-01-01")


@pytest.mark.parametrize("given", [None, 5, [], {}, object(), b"0 8 * * *"])
def test_what_is_no_text_is_refused(given: Any) -> None:
    at: Any = At
    for make in (Cron, RRule, at, rule_of, partial(Cron, "0 8 * * *", zone=given), partial(at, START, zone=given)):
        with pytest.raises(BadInput):
            make() if isinstance(make, partial) else make(given)


def test_a_rule_that_shifts_against_the_day_goes_straight_to_its_time() -> None:
    rule = RRule("FREQ=MINUTELY;INTERVAL=1439;BYHOUR=3;BYMINUTE=7", start="2030-01-01T03:07Z")
    times, looks = rrule_times(rule.text, rule.begin), iter(range(9))
    assert times.first(looks, rule.begin + 1) == rule.begin + 1440 * 1439 * MINUTE
    assert next(looks) < 4
    with pytest.raises(BadInput, match="an interval that meets its times of day"):
        RRule("FREQ=MINUTELY;INTERVAL=1440;BYHOUR=3", start="2030-01-01T04:07Z")
