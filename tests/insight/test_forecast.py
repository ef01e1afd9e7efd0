"""The forecast: ranges cut by a viewer's calendar, what comes due in them, its peaks to the second, and the past."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection, Sequence
from datetime import UTC, datetime, tzinfo
from itertools import pairwise
from pathlib import Path
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.engine.conftest import stores
from tests.waiting import PATIENCE, until

from bide import BadInput, Bide
from bide.core.instants import Millis, as_datetime
from bide.core.records import Count, OutcomeKind, Tally
from bide.engine.history import History
from bide.insight.forecast import (
    BACK,
    DAY,
    HOUR,
    LEAST_UPTO,
    LONGEST,
    MINUTE,
    MOST,
    MOST_TOPICS,
    SECOND,
    SHORTEST,
    STEPS,
    Bar,
    Forecast,
    ForecastQuery,
    Range,
    Span,
    around,
    chosen,
    cuts,
    edges_of,
    highest,
    outlook,
    split,
    step_for,
)  # fmt: skip
from bide.insight.minute_log import LastDay
from bide.insight.minute_log import PastInterval as DeliveryCounts
from bide.ports import COUNTED
from bide.stores.memory import MemoryStore
from bide.testing import ManualClock

ZONES = (
    "UTC", "Europe/Berlin", "America/New_York", "America/Sao_Paulo", "America/Havana", "Australia/Lord_Howe",
    "Asia/Kathmandu", "Asia/Shanghai", "Africa/Cairo", "Pacific/Chatham", "Pacific/Apia",
)  # fmt: skip
NOW = 1_900_000_000_000 + 1_234


def millis(text: str, zone: str) -> Millis:
    return round(datetime.fromisoformat(text).replace(tzinfo=ZoneInfo(zone)).timestamp() * 1_000)


def wall(at: Millis, zone: tzinfo) -> datetime:
    return as_datetime(at).astimezone(zone).replace(tzinfo=None)


# --- ranges and steps

instants = st.integers(millis("2001-01-01", "UTC"), millis("2036-01-01", "UTC"))


@given(instants, st.integers(1, LONGEST), st.sampled_from(ZONES))
def test_a_chosen_range_is_covered_by_few_aligned_intervals(first: Millis, length: Millis, name: str) -> None:
    zone = ZoneInfo(name)
    wanted = chosen(first, first + length, first)
    edges = edges_of(wanted, zone)
    assert edges[0] <= wanted.first
    assert edges[-2] < wanted.until <= edges[-1]
    assert len(edges) <= MOST + 1
    assert all(low < high for low, high in pairwise(edges))
    if wanted.step <= HOUR:
        assert all(step_of_day(edge, zone) % wanted.step == 0 for edge in edges)
        assert all(high - low < 2 * wanted.step for low, high in pairwise(edges))
    else:
        # at a multiple of the step, or where the clock has jumped over it
        assert all(step_of_day(edge, zone) % min(wanted.step, DAY) == 0 or jumped(edge, zone) for edge in edges)


def step_of_day(at: Millis, zone: tzinfo) -> Millis:
    shown = wall(at, zone)
    return ((shown.hour * 60 + shown.minute) * 60 + shown.second) * SECOND + shown.microsecond // 1_000


def jumped(at: Millis, zone: tzinfo) -> bool:
    return as_datetime(at).astimezone(zone).utcoffset() != as_datetime(at - 1).astimezone(zone).utcoffset()


@given(st.integers(SHORTEST, LONGEST))
def test_the_step_is_the_smallest_that_is_coarse_enough(length: Millis) -> None:
    step = step_for(length)
    assert length / step <= MOST
    finer = [one for one in STEPS if one < step]
    assert not finer or length / finer[-1] > MOST - 3


def test_days_begin_at_midnight_also_when_the_clocks_change() -> None:
    berlin = ZoneInfo("Europe/Berlin")

    def edges(first: str, until: str, step: Millis) -> list[Millis]:
        return edges_of(Range(millis(first, "Europe/Berlin"), millis(until, "Europe/Berlin"), step), berlin)

    days = edges("2026-03-27 15:00", "2026-03-31 01:00", DAY)
    assert [wall(edge, berlin).isoformat(" ") for edge in days] == [
        f"2026-{day} 00:00:00" for day in ("03-27", "03-28", "03-29", "03-30", "03-31", "04-01")
    ]
    assert [(high - low) // HOUR for low, high in pairwise(days)] == [24, 24, 23, 24, 24]
    quarters = edges("2026-10-25 00:00", "2026-10-26 00:00", 6 * HOUR)
    assert [(high - low) // HOUR for low, high in pairwise(quarters)] == [7, 6, 6, 6]
    hours = edges("2026-10-25 00:00", "2026-10-25 06:00", HOUR)
    assert [wall(edge, berlin).hour for edge in hours] == [0, 1, 2, 2, 3, 4, 5, 6], "the hour that comes twice is two"
    weeks = edges_of(Range(millis("2026-11-22 15:00", "UTC"), millis("2026-12-10 00:00", "UTC"), 7 * DAY), UTC)
    assert {wall(edge, UTC).strftime("%a %H") for edge in weeks} == {"Mon 00"}


def test_half_an_hour_of_summer_time_keeps_hours_on_the_hour() -> None:
    zone = ZoneInfo("Australia/Lord_Howe")
    for day in ("2026-04-05", "2026-10-04"):
        start = millis(f"{day} 00:20", "Australia/Lord_Howe")
        edges = edges_of(Range(start, start + 8 * HOUR, HOUR), zone)
        assert {wall(edge, zone).minute for edge in edges} == {0}


def test_spans() -> None:
    lengths = {span: around(span, NOW) for span in Span}
    assert lengths[Span.MINUTE] == Range(NOW, NOW + 2 * MINUTE, SECOND)
    assert lengths[Span.HOUR] == Range(NOW - HOUR, NOW + HOUR, MINUTE)
    assert lengths[Span.DAY] == Range(NOW - 12 * HOUR, NOW + 48 * HOUR, 30 * MINUTE)
    assert lengths[Span.MONTH] == Range(NOW, NOW + 30 * DAY, 6 * HOUR)


def test_ranges_that_make_no_sense_are_refused_and_others_cut() -> None:
    last = 253_402_300_799_999
    for first, end in ((NOW, NOW), (NOW, NOW - 1), (0, NOW - BACK), (NOW, NOW + LONGEST + 1), (NOW, last)):
        with pytest.raises(BadInput) as refused:
            chosen(first, end, NOW)
        assert refused.value.field == "until"
    assert chosen(0, NOW, NOW).first == NOW - BACK
    assert chosen(NOW - 6 * MINUTE, NOW, NOW).step == MINUTE, "the past is told by the minute"
    assert chosen(NOW - MINUTE, NOW, NOW).step == SECOND
    short = chosen(NOW, NOW + 1, NOW)
    assert short.length == SHORTEST
    assert short.first <= NOW < short.until
    assert short.step == SECOND


# --- peaks


def bars(*numbers: int, start: Millis = 0, step: Millis = SECOND) -> list[Bar]:
    return [
        Bar(start + place * step, start + (place + 1) * step, {"t": Count(number)} if number else {})
        for place, number in enumerate(numbers)
    ]


@given(st.integers(0, 10**13), st.integers(1, 40 * DAY))
def test_cuts_are_whole_seconds(low: Millis, length: Millis) -> None:
    edges = cuts(low, low + length)
    assert (edges[0], edges[-1]) == (low, low + length)
    assert all(a < b for a, b in pairwise(edges))
    assert len(edges) <= 62
    assert all(edge % SECOND == 0 for edge in edges[1:-1])


async def test_a_peak_that_goes_while_it_is_looked_at_is_no_error() -> None:
    async def nothing(edges: object) -> list[Bar]:
        assert isinstance(edges, list)
        return [Bar(low, high, {}) for low, high in pairwise(edges)]

    whole = Bar(0, HOUR, {"t": Count(7)})
    top, parts = await split(whole, nothing)
    assert top is whole
    assert sum(part.total.number for part in parts) == 0


def test_neighbours_are_one_peak() -> None:
    found = highest(bars(1, 90, 100, 80, 5, 0, 60, 40, 0, 0, 7), 3)
    assert [(bar.total.number, low // SECOND, high // SECOND) for bar, low, high in found] == [
        (100, 1, 4), (60, 6, 8), (7, 10, 11),
    ]  # fmt: skip
    assert highest(bars(0, 0), 3) == []


def test_what_a_peak_needs_is_reckoned_as_a_queue() -> None:
    twenty = outlook(bars(0, 41_000, *[0] * 10), SECOND, backlog=0, rate=6_000)
    assert twenty is not None
    assert twenty.late == pytest.approx(6_833, abs=1)
    assert twenty.clear_at == pytest.approx(SECOND + 6_833, abs=1)
    assert outlook(bars(0, 41_000), SECOND, backlog=0, rate=6_000) == (6_833, None), "not within what is known"
    steady = outlook(bars(0, 500, 100, 100, 100, 100), SECOND, backlog=0, rate=200)
    assert steady is not None
    assert (steady.late, steady.clear_at) == (2_500, 5_000), "what comes after it waits behind it"
    behind = outlook(bars(0, 100, 0), SECOND, backlog=300, rate=200)
    assert behind is not None
    assert (behind.late, behind.clear_at) == (1_000, 2_000), "what is overdue goes first"
    long = outlook([*bars(600), *bars(600, 0, start=SECOND, step=10 * SECOND)], 0, backlog=0, rate=100)
    assert long is not None
    assert (long.late, long.clear_at) == (6_000, 11_000 + 1_000), "what comes evenly in between"
    assert outlook(bars(1), 5, backlog=0, rate=1) is None


# --- a store's own


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(NOW)


@pytest.fixture
async def app(store_url: str, clock: ManualClock) -> AsyncIterator[Bide]:
    async with Bide(store_url, clock=clock) as app:
        yield app


async def put(app: Bide, topic: str, *wakes: Millis) -> None:
    await app.schedule_many([app.new(topic, None, at=as_datetime(wake)) for wake in wakes])


def everything(topic: str) -> bool:
    return True


@stores("memory", "sqlite")
async def test_the_forecast_counts_by_interval_and_topic_and_finds_its_peaks(app: Bide, clock: ManualClock) -> None:
    minute = NOW - NOW % MINUTE
    eight = minute + 8 * HOUR
    await put(app, "coupon", *[eight + SECOND] * 40, eight + 30 * SECOND, NOW + 1)
    await put(app, "order", *[eight + SECOND] * 2, *(minute + 2 * HOUR + number * SECOND for number in range(20)))
    await put(app, "old", NOW, NOW + 5)
    clock.advance(2)
    forecast = Forecast(app)
    seen = await forecast.get(ForecastQuery(Span.DAY, UTC), everything)
    assert seen.due == Count(2)
    assert seen.bars[0].low == seen.counted_at == NOW + 2
    assert seen.edges[0] < NOW - 12 * HOUR + MINUTE
    assert seen.total == Count(64)
    assert seen.exact
    assert seen.topics == {"coupon", "order", "old"}
    assert all(one.high == next.low for one, next in pairwise(seen.bars))
    assert sum(bar.total.number for bar in seen.profile) == 64
    first, second, third = seen.peaks
    assert first.top.total == Count(1)
    assert (second.top.low, second.top.high) == (minute + 2 * HOUR, minute + 2 * HOUR + SECOND)
    assert third.top == Bar(eight + SECOND, eight + 2 * SECOND, {"coupon": Count(40), "order": Count(2)})

    only = await forecast.get(ForecastQuery(Span.DAY, UTC, only="order"), everything)
    assert only.total == Count(22)
    assert only.topics == seen.topics
    hidden = await forecast.get(ForecastQuery(Span.DAY, UTC, whose="anna"), lambda topic: topic == "old")
    assert (hidden.total, hidden.due, hidden.topics) == (Count(1), Count(1), frozenset({"old"}))

    tomorrow = await forecast.get(ForecastQuery(chosen(eight, eight + 10 * SECOND, NOW), UTC), everything)
    assert tomorrow.due is None
    assert [bar.total.number for bar in tomorrow.bars] == [0, 42, *[0] * 8]
    gone = await forecast.get(ForecastQuery(chosen(NOW - HOUR, NOW - MINUTE, NOW), UTC), everything)
    assert (gone.bars, gone.due) == ([], Count(2))
    await forecast.close()


@stores("memory", "sqlite")
async def test_a_look_is_shared_for_a_while(app: Bide, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bide.insight.forecast._EVERY", PATIENCE)
    forecast = Forecast(app)
    wanted = ForecastQuery(Span.HOUR, UTC)
    first = await forecast.get(wanted, everything)
    await put(app, "t", NOW + MINUTE)
    assert await forecast.get(ForecastQuery(Span.HOUR, UTC), everything) is first
    other = await forecast.get(ForecastQuery(Span.HOUR, ZoneInfo("Asia/Kathmandu")), everything)
    assert (first.total.number, other.total.number) == (0, 1)
    for number in range(40):
        await forecast.get(ForecastQuery(chosen(NOW, NOW + MINUTE + number, NOW), UTC), everything)
    assert (await forecast.get(wanted, everything)).total.number == 1, "only the last ranges are remembered"


async def test_how_far_is_counted_follows_what_a_look_costs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bide.insight.forecast._TOO_LONG", PATIENCE)
    async with Bide(f"sqlite:///{tmp_path}/tasks.db", clock=ManualClock(NOW)) as app:
        await put(app, "t", *[NOW + MINUTE] * 1_500)
        forecast = Forecast(app)
        forecast.upto = LEAST_UPTO
        seen = await forecast.get(ForecastQuery(Span.HOUR, UTC), everything)
        assert seen.peaks[0].top.total == Count(1_500), "what is high is counted further"
        assert seen.total == Count(1_500)
        forecast.upto = LEAST_UPTO
        await put(app, "u", *(NOW + number * MINUTE for number in range(1, 11) for _ in range(1_001)))
        seen = await forecast.get(ForecastQuery(Span.HOUR, UTC, whose="again"), everything)
        assert not seen.exact
        assert seen.total == Count(1_500 + 3 * 1_001 + 7 * LEAST_UPTO, exact=False)
        forecast.upto = LEAST_UPTO
        forecast.learn(PATIENCE + 1, exact=True)
        assert forecast.upto == LEAST_UPTO
        forecast.learn(0.01, exact=False)
        assert forecast.upto == 2 * LEAST_UPTO
        forecast.learn(0.01, exact=True)
        assert forecast.upto == 2 * LEAST_UPTO, "it was enough"
        assert (await forecast.get(ForecastQuery(Span.DAY, UTC), everything)).total == Count(1_500 + 10 * 1_001)
        forecast.upto = 100_000
        forecast.learn(PATIENCE + 1, exact=True)
        assert forecast.upto == 50_000


# --- the past


@stores("memory", "sqlite")
async def test_the_past_is_told_by_minute(app: Bide, clock: ManualClock) -> None:
    minute = NOW - NOW % MINUTE
    history = History(app.store, clock)
    history.began("a", [minute, minute + 1], minute + 2)
    history.ended("a", OutcomeKind.DONE)
    await history.flush()
    clock.advance(MINUTE)
    history.began("a", [minute + 5] * 120, clock.now())
    for _ in range(90):
        history.ended("a", OutcomeKind.DONE)
    history.began("b", [clock.now()], clock.now())
    history.ended("b", OutcomeKind.RETRY)
    await history.flush()
    clock.advance(MINUTE)
    history.began("a", [minute + MINUTE], clock.now())
    await history.flush()

    day = LastDay(app)
    assert not day.whole
    assert day.quarters("a") == ()
    await day.refresh()
    assert day.whole
    edges = [minute - MINUTE, minute, minute + MINUTE, clock.now()]
    assert day.between(edges, everything) == [DeliveryCounts(0, 0), DeliveryCounts(122, 1), DeliveryCounts(2, 90)]
    assert day.between(edges, "b".__eq__) == [DeliveryCounts(0, 0), DeliveryCounts(0, 0), DeliveryCounts(1, 0)]
    assert day.between([minute - HOUR, minute + HOUR], everything) == [DeliveryCounts(124, 91)]
    assert day.topics() == {"a", "b"}
    fastest = day.fastest("all", everything)
    assert fastest is not None, "there was a backlog before and after the second minute"
    assert (fastest.rate, fastest.at) == (91 / 60, minute + MINUTE)
    assert day.fastest("b", "b".__eq__) is None
    await day.close()
    await history.close()


@stores("memory", "sqlite")
async def test_a_burst_says_nothing_of_what_a_minute_can_do(app: Bide, clock: ManualClock) -> None:
    history = History(app.store, clock)
    for carried in (0, 50_000, 0):  # each minute's burst waits; some of it for the next minute
        history.began("a", [clock.now() - carried - 2_000] * 100, clock.now())
        for _ in range(100):
            history.ended("a", OutcomeKind.DONE)
        await history.flush()
        clock.advance(MINUTE)
    day = LastDay(app)
    await day.refresh()
    assert day.fastest(None, everything) is None
    await history.close()


@stores("memory", "sqlite")
async def test_what_is_told_later_is_seen_by_the_next_look(app: Bide, clock: ManualClock) -> None:
    minute = NOW - NOW % MINUTE
    first, late = History(app.store, clock), History(app.store, clock)
    day = LastDay(app)
    await day.refresh()

    async def done(history: History, advance: Millis) -> list[int]:
        history.ended("a", OutcomeKind.DONE)
        await history.flush()
        clock.advance(advance)
        await day.read()
        return [past.done for past in day.between([minute, minute + 2 * MINUTE, minute + 60 * MINUTE], everything)]

    assert await done(first, 0) == [1, 0]
    assert await done(late, 3 * MINUTE) == [2, 0]
    assert await done(first, 10 * MINUTE) == [2, 1]
    assert await done(first, 30 * MINUTE) == [2, 2]
    clock.advance(DAY - 31 * MINUTE)
    await day.read()
    assert day.topics() == {"a"}
    clock.advance(HOUR)
    await day.read()
    assert day.topics() == set(), "a day is all that is remembered"
    for history in (first, late):
        await history.close()


class Counted(MemoryStore):
    """Remembers for how many topics each interval was asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[int] = []
        self.held: asyncio.Event | None = None

    async def tally(
        self, edges: Sequence[Millis] | None = None, *, upto: int = COUNTED, topics: Collection[str] | None = None
    ) -> Tally:
        if edges is not None:
            self.asked.append(len(self._topics) if topics is None else len(topics))
            if self.held is not None:
                await self.held.wait()
        return await super().tally(edges, upto=upto, topics=topics)


async def test_of_many_topics_the_fullest_are_counted_by_interval_and_the_others_are_one_number() -> None:
    store = Counted()
    async with Bide(store) as app:
        few = [app.new(f"t.{number}", key="1", delay="1h") for number in range(3 * MOST_TOPICS)]
        await app.schedule_many([*few, *(app.new("full", key=str(key), delay="2h") for key in range(5))])
        forecast = Forecast(app)
        seen = await forecast.get(ForecastQuery(Span.DAY, UTC), lambda _: True)
        assert max(store.asked) == MOST_TOPICS
        assert seen.beyond == Count(2 * MOST_TOPICS + 1)
        assert seen.total == Count(MOST_TOPICS - 1 + 5), "the fullest one among them"
        assert len(seen.topics) == 3 * MOST_TOPICS + 1
        store.asked.clear()
        one = await forecast.get(ForecastQuery(Span.DAY, UTC, "t.0"), lambda _: True)
        assert (set(store.asked), one.total, one.beyond) == ({1}, Count(1), None)
        await forecast.close()


async def test_a_look_that_nobody_waits_for_any_more_ends() -> None:
    store = Counted()
    async with Bide(store) as app:
        await app.schedule("t", None, key="1", delay="1h")
        store.held = asyncio.Event()
        forecast = Forecast(app)
        wanted = ForecastQuery(Span.DAY, UTC)
        one, two = (asyncio.ensure_future(forecast.get(wanted, lambda _: True)) for _ in range(2))
        await until(lambda: store.asked, "the look to count")
        one.cancel()
        await asyncio.wait([one])
        [query] = forecast._queries.values()
        assert query._running is not None, "the other waits for it"
        two.cancel()
        await asyncio.wait([two])
        await until(lambda: query._running is None, "the look to end")
        store.held = None
        assert (await forecast.get(wanted, lambda _: True)).total == Count(1), "who comes back begins a new one"
        await forecast.close()
