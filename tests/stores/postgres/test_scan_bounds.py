"""Under an old snapshot no scan touches what has died since, and what appears late is found all the same."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import asyncpg
import pytest
from tests.stores.postgres.test_plans import Surveyed, pages, survey
from tests.stores.sql.fixtures import OpensStore

from bide.core.instants import In
from bide.core.records import Filter, Page
from bide.stores.postgres import leasing as postgres
from bide.stores.postgres.connection import CALLS_OF_A_ROW, Call, address_of
from bide.stores.postgres.leasing import FullScan, PostgresScanBounds, ScanStart
from bide.stores.sql import leasing
from bide.testing.store_suite.base import NOW, lease, new, put_one

FULL = ScanStart([0], [0], [0], True)
LASTS = 600_000


class Clock:
    """A stopwatch that is set by hand."""

    def __init__(self) -> None:
        self.seconds = 100.0

    def __call__(self) -> float:
        return self.seconds


@pytest.fixture
def clock() -> Clock:
    return Clock()


def begins(asked: FullScan) -> bool:
    """A full scan that is begun, and never ends."""
    return True


def expensive(clock: Clock, background: Callable[[FullScan], bool] = begins) -> PostgresScanBounds:
    """After a full scan that took 20 ms, and another before which the writers were read: none."""
    known = PostgresScanBounds(used=True, background=background, clock=clock)
    assert known.start(["t"], [NOW]) == FULL
    known.scanned(["t"], 0.02, NOW, FULL, LASTS)
    assert known.watching
    known.read(NOW + 1_000, [])
    assert known.start(["t"], [NOW]) == FULL, "nothing is known of the time before"
    known.scanned(["t"], 0.02, NOW + 1_001, FULL, LASTS)
    known.emptied(["t"])
    known.ended(["t"], {}, NOW + 1_001)
    return known


def test_between_expensive_scans_one_begins_where_nothing_can_be_before(clock: Clock) -> None:
    known = expensive(clock)
    known.read(NOW + 2_000, [])
    start = known.start(["t"], [NOW + 1_900])
    assert start == ScanStart([NOW + 1_000], [NOW + 1_000], [NOW + 1_001 + LASTS], False)
    known.scanned(["t"], 0.001, NOW + 2_001, start, LASTS)
    known.emptied(["t"])
    known.ended(["t"], {"t": NOW + 9_000}, NOW + 2_001)
    start = known.start(["t"], [NOW + 1_900])
    assert start == ScanStart([NOW + 1_900], [NOW + 2_000], [NOW + 9_000], False), "a floor may lie lower"


def later(known: PostgresScanBounds, second: int) -> ScanStart:
    """A thorough scan at that second, which leaves nothing."""
    known.read(NOW + second * 1_000, [])
    start = known.start(["t", "u"], [NOW * 2, NOW * 2])
    known.scanned(["t", "u"], 0.001, NOW + second * 1_000, start, LASTS)
    known.emptied(["t"])
    return start


def test_full_scans_are_made_in_the_background_and_lower_the_bounds(clock: Clock) -> None:
    begun: list[FullScan] = []
    under_way: list[FullScan] = []

    def background(asked: FullScan) -> bool:
        if under_way:
            return False
        begun.append(asked)
        under_way.append(asked)
        return True

    known = expensive(clock, background)
    later(known, 2)
    assert not begun
    clock.seconds += 0.02 * leasing.SHARE
    later(known, 3)
    later(known, 4)
    assert begun == [FullScan(["t", "u"], NOW + 3_000)], "one at a time"
    known.found(under_way.pop(), NOW + 1_500, 0.02)
    assert later(known, 5).waiting == [NOW + 1_500, NOW + 1_500], "also where there was no bound"
    clock.seconds += 0.02 * leasing.SHARE
    later(known, 6)
    under_way.clear()
    later(known, 7)
    assert len(begun) == 3, "it came to nothing, and is begun again"
    known.on_connection(object())
    known.found(under_way.pop(), NOW, 0.02)
    assert later(known, 8).full, "with another connection nothing is known"
    known.found(begun[1], NOW, 0.02)
    clock.seconds += 100
    later(known, 9)
    known.found(begun[-1], None, 0.002)
    assert not known.watching, "it is cheap again"
    assert later(known, 10) == ScanStart([0, 0], [0, 0], [0, 0], True)


def test_who_writes_is_waited_for(clock: Clock) -> None:
    known = expensive(clock)
    for second, writers in ((2, ["3/1"]), (3, ["3/1", "4/1"]), (4, ["4/1", "3/2"]), (5, ["-1/77"]), (6, ["-1/77"])):
        known.read(NOW + second * 1_000, writers)
        known.emptied(["t"])
        bound = {2: 1, 3: 1, 4: 2, 5: 2, 6: 2}[second]
        assert known.start(["t"], [NOW * 2]).lost == [NOW + bound * 1_000], second
    known.read(NOW + 7_000, [])
    known.emptied(["t"])
    assert known.start(["t"], [NOW * 2]).lost == [NOW + 7_000]


def test_what_was_left_keeps_the_bound_back(clock: Clock) -> None:
    known = expensive(clock)
    known.read(NOW + 2_000, [])
    assert known.start(["t"], [NOW * 2]).waiting == [NOW + 1_000]
    known.emptied(["t"], NOW + 1_500)
    assert known.start(["t"], [NOW * 2]).waiting == [NOW + 1_500]
    known.note_wakes({"t": NOW + 1_200, "u": NOW})
    assert known.start(["t", "u"], [NOW * 2, NOW + 70]).waiting == [NOW + 1_200, NOW + 70]


def test_a_clock_that_is_set_back_is_begun_with_anew(clock: Clock) -> None:
    known = expensive(clock)
    known.read(NOW - 5_000, [])
    assert known.start(["t"], [NOW]) == FULL


def test_with_another_connection_a_scan_is_full(clock: Clock) -> None:
    known = expensive(clock)
    one, another = object(), object()
    for connection, full in ((one, True), (one, False), (another, True), (another, False)):
        known.on_connection(connection)
        known.read(NOW + 2_000, [])
        start = known.start(["t"], [NOW])
        assert start.full is full
        known.scanned(["t"], 0.02, NOW + 2_001, start, LASTS)


@pytest.mark.parametrize(("used", "took"), [(True, 0.002), (False, 0.5)])
def test_as_long_as_a_full_scan_is_cheap_or_bounds_are_not_used_each_is_one(
    clock: Clock, used: bool, took: float
) -> None:
    known = PostgresScanBounds(used=used, background=begins, clock=clock)
    for _ in range(3):
        assert known.start(["t"], [NOW]) == FULL
        known.scanned(["t"], took, NOW, FULL, LASTS)
        assert not known.watching


# --- on a server


@asynccontextmanager
async def snapshot(url: str) -> AsyncIterator[asyncpg.Connection[Any]]:
    """Held open by somebody."""
    connection = await asyncpg.connect(address_of(url).dsn)
    try:
        await connection.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
        await connection.fetch("SELECT count(*) FROM pg_class")
        yield connection
    finally:
        await connection.close()


@pytest.fixture
def always_expensive(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any full scan is too expensive for another; and each scan is thorough."""
    monkeypatch.setattr(postgres, "EXPENSIVE", 0.0)
    monkeypatch.setattr(leasing, "SHARE", 1_000_000_000)
    monkeypatch.setattr(leasing, "THOROUGH_EVERY", 0.0)


Sent = dict[str, tuple[Any, ...]]


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> Sent:
    """The arguments of the last of each statement that says what time it is."""
    seen: Sent = {}
    timed = Call.timed

    async def noting(call: Call, query: str, *arguments: Any) -> list[Any]:
        seen[query] = arguments
        return await timed(call, query, *arguments)

    monkeypatch.setattr(Call, "timed", noting)
    return seen


_BORN = """INSERT INTO {task} (topic, key, state, at, due_at, token, planned_at, attempt, failures, losses, created_at,
    id, options, payload)
SELECT 't', 'dead' || n, 0, $1::bigint - 60000 - n % 20000, 0, n, 0, 0, 0, 0, 0, n::text, '', '' FROM
    generate_series(1, $2::integer) AS n"""
_DIED = (
    "UPDATE {task} SET state = 1, at = at + 30000 WHERE key LIKE 'dead%'",
    "UPDATE {task} SET at = at + 350000 WHERE key LIKE 'dead%'",
    "DELETE FROM {task} WHERE key LIKE 'dead%'",
)
"""Leased for half a minute, which is over; for longer, which is not for five minutes; and done."""


async def cost(surveyed: Surveyed, sent: Sent, query: str) -> int:
    """Pages that a statement touches with the arguments that the store gave it last."""
    arguments = sent[query]
    if query.startswith("lease"):
        arguments = (arguments[0], "c", 1, *arguments[3:])
    if query not in surveyed.prepared:
        await surveyed.prepare(query)
    return pages(await surveyed.explained(surveyed.executed(query, arguments)))


async def test_no_scan_touches_what_has_died_under_a_snapshot(
    fresh_url: str, open_store: OpensStore, always_expensive: None, sent: Sent, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with survey(fresh_url) as surveyed, snapshot(fresh_url):
        store = await open_store(fresh_url, clock="server")
        found: dict[int, dict[str, int]] = {}
        for count in (0, 2_000, 20_000):
            at = int(time.time() * 1000)
            if count:
                await surveyed.execute(_BORN, at, count)
                for statement in _DIED:
                    await surveyed.execute(statement)
            costs: dict[str, int] = {}
            for _ in range(20):  # until a scan in the background has ended, after which there are bounds
                for _ in range(4):
                    await lease(store, 5, lasts=LASTS)
                    await lease(store, 0, lasts=LASTS)
                costs = {"thorough": await cost(surveyed, sent, "lease_16"),
                         "for the wake": await cost(surveyed, sent, "heads")}  # fmt: skip
                if all(found[0][what] * 2 + 20 >= touched for what, touched in costs.items() if found):
                    break
            assert sent["lease_16"][8] is True
            monkeypatch.setattr(leasing, "THOROUGH_EVERY", 1_000.0)
            await lease(store, 5, lasts=LASTS)
            costs["ordinary"] = await cost(surveyed, sent, "lease_16")
            assert sent["lease_16"][8] is False
            monkeypatch.setattr(leasing, "THOROUGH_EVERY", 0.0)
            found[count] = costs
        for what, few in found[0].items():
            assert found[20_000][what] <= few * 2 + 20, (what, found)
        sent["lease_16"] = (*sent["lease_16"][:7], [0], True, [0], [0], 1_500)
        assert await cost(surveyed, sent, "lease_16") > 40_000, "a full scan steps over all of it"


def test_a_full_scan_that_was_cut_short_may_take_longer(clock: Clock) -> None:
    known = PostgresScanBounds(used=True, background=begins, clock=clock)

    def fail(took: float, *, full: bool) -> None:
        with suppress(TimeoutError), known.timed(full=full):
            clock.seconds += took
            raise TimeoutError

    fail(10.0, full=False)
    assert known.patience == 0.0
    for took, patience in ((10.0, 20.0), (20.0, 40.0), (0.001, 40.0), (400.0, 600.0)):
        fail(took, full=True)
        known.on_connection(object())
        assert known.start(["t"], [NOW]) == FULL
        assert known.patience == patience
    known.scanned(["t"], 90.0, NOW, FULL, LASTS)
    assert known.patience == 0.0


async def test_the_row_of_a_caller_has_no_long_past(fresh_url: str, open_store: OpensStore) -> None:
    """Each call updates it, and under a snapshot no version of it goes away."""
    async with survey(fresh_url) as surveyed, snapshot(fresh_url):
        store = await open_store(fresh_url, clock="server")
        for number in range(2 * CALLS_OF_A_ROW + 20):
            await put_one(store, new(str(number), due=In(3_600_000)))
        names = await surveyed.connection.fetch(surveyed.names.write("SELECT name FROM {caller} WHERE name <> 'c'"))
        [name] = [row[0] for row in names]
        assert name.endswith(f".{2 * CALLS_OF_A_ROW + 2}"), "the rows before it were let go of"
        plan = await surveyed.explained(surveyed.names.write(f"SELECT number FROM {{caller}} WHERE name = '{name}'"))
        assert pages(plan) <= 10
        found = await store.find(Filter(topic="t"), Page(limit=1_000))
        assert len(found.tasks) == 2 * CALLS_OF_A_ROW + 20, "each was done once"


async def test_nor_has_the_row_of_a_transaction(fresh_url: str, open_store: OpensStore) -> None:
    async with survey(fresh_url) as surveyed:
        store = await open_store(fresh_url, clock="server")
        for _ in range(CALLS_OF_A_ROW + 5):
            async with store.transaction():
                pass
        rows = await surveyed.connection.fetch(
            surveyed.names.write("SELECT number FROM {caller} WHERE name LIKE '%:transaction1%' ORDER BY number")
        )
        assert [row[0] for row in rows] == [CALLS_OF_A_ROW - 1, CALLS_OF_A_ROW + 5]


async def test_purging_goes_on_where_it_left_off(fresh_url: str, open_store: OpensStore) -> None:
    async with survey(fresh_url) as surveyed:
        store = await open_store(fresh_url, clock="server")
        assert await store.purge(now=0, limit=100) == 0
        await surveyed.fill(1_000)
        at = int(time.time() * 1000)
        await surveyed.execute("UPDATE {task} SET keep_until = $1::bigint - 100 + row % 50 WHERE state >= 2", at)
        ended = await surveyed.connection.fetchval(
            surveyed.names.write("SELECT count(*) FROM {task} WHERE keep_until IS NOT NULL")
        )
        pages_of = [await store.purge(now=0, limit=20) for _ in range(4)]
        assert pages_of == [20, 20, ended - 40, 0]
