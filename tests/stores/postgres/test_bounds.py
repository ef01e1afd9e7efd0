"""Under an old snapshot no look touches what has died since, and what appears late is found all the same."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import asyncpg
import pytest
from tests.stores.postgres.test_plans import pages
from tests.stores.postgres.test_queries import Surveyed, survey
from tests.stores.sql.fixtures import OpensStore

from bide.core.records import Filter, In, Page
from bide.stores.postgres import leasing as postgres
from bide.stores.postgres.connection import CALLS_OF_A_ROW, Call, address_of
from bide.stores.postgres.leasing import Asked, Bounds, Reach
from bide.stores.sql import leasing
from bide.testing.store_suite.base import NOW, lease, new, put_one

WHOLE = Reach([0], [0], [0], True)
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


def begins(asked: Asked) -> bool:
    """A whole look that is begun, and never ends."""
    return True


def dear(clock: Clock, beside: Callable[[Asked], bool] = begins) -> Bounds:
    """After a whole look that took 20 ms, and another before which it was read who writes: nobody."""
    known = Bounds(used=True, background=beside, clock=clock)
    assert known.reach(["t"], [NOW]) == WHOLE
    known.looked(["t"], 0.02, NOW, WHOLE, LASTS)
    assert known.watching
    known.read(NOW + 1_000, [])
    assert known.reach(["t"], [NOW]) == WHOLE, "nothing is known of the time before"
    known.looked(["t"], 0.02, NOW + 1_001, WHOLE, LASTS)
    known.emptied(["t"])
    known.ended(["t"], None, NOW + 1_001)
    return known


def test_as_long_as_a_whole_look_is_cheap_each_is_one(clock: Clock) -> None:
    known = Bounds(used=True, background=begins, clock=clock)
    for _ in range(3):
        clock.seconds += 1
        assert known.reach(["t"], [NOW]) == WHOLE
        known.looked(["t"], 0.002, NOW, WHOLE, LASTS)
        known.emptied(["t"])
        assert not known.watching


def test_between_dear_looks_one_begins_where_nothing_can_be_before(clock: Clock) -> None:
    known = dear(clock)
    known.read(NOW + 2_000, [])
    reach = known.reach(["t"], [NOW + 1_900])
    assert reach == Reach([NOW + 1_000], [NOW + 1_000], [NOW + 1_001 + LASTS], False)
    known.looked(["t"], 0.001, NOW + 2_001, reach, LASTS)
    known.emptied(["t"])
    known.ended(["t"], NOW + 9_000, NOW + 2_001)
    reach = known.reach(["t"], [NOW + 1_900])
    assert reach == Reach([NOW + 1_900], [NOW + 2_000], [NOW + 9_000], False), "a floor may lie lower"


def later(known: Bounds, second: int) -> Reach:
    """A thorough look at that second, which leaves nothing."""
    known.read(NOW + second * 1_000, [])
    reach = known.reach(["t", "u"], [NOW * 2, NOW * 2])
    known.looked(["t", "u"], 0.001, NOW + second * 1_000, reach, LASTS)
    known.emptied(["t"])
    return reach


def test_whole_looks_are_made_beside_and_lower_the_bounds(clock: Clock) -> None:
    begun: list[Asked] = []

    def beside(asked: Asked) -> bool:
        begun.append(asked)
        return True

    known = dear(clock, beside)
    later(known, 2)
    assert not begun
    clock.seconds += 0.02 * leasing.SHARE
    later(known, 3)
    later(known, 4)
    assert begun == [Asked(["t", "u"], NOW + 3_000)], "one at a time"
    known.found(begun[0], NOW + 1_500, 0.02)
    assert later(known, 5).waiting == [NOW + 1_500, NOW + 1_500], "also where there was no bound"
    clock.seconds += 0.02 * leasing.SHARE
    later(known, 6)
    known.lost_sight(begun[1])
    later(known, 7)
    assert len(begun) == 3, "it came to nothing, and is begun again"
    known.on(object())
    known.found(begun[2], NOW, 0.02)
    assert later(known, 8).whole, "with another connection nothing is known"
    known.found(begun[1], NOW, 0.02)
    clock.seconds += 100
    later(known, 9)
    known.found(begun[-1], None, 0.002)
    assert not known.watching, "it is cheap again"
    assert later(known, 10) == Reach([0, 0], [0, 0], [0, 0], True)


def test_who_writes_is_waited_for(clock: Clock) -> None:
    known = dear(clock)
    for second, writers in ((2, ["3/1"]), (3, ["3/1", "4/1"]), (4, ["4/1", "3/2"]), (5, ["-1/77"]), (6, ["-1/77"])):
        known.read(NOW + second * 1_000, writers)
        known.emptied(["t"])
        bound = {2: 1, 3: 1, 4: 2, 5: 2, 6: 2}[second]
        assert known.reach(["t"], [NOW * 2]).lost == [NOW + bound * 1_000], second
    known.read(NOW + 7_000, [])
    known.emptied(["t"])
    assert known.reach(["t"], [NOW * 2]).lost == [NOW + 7_000]


def test_what_was_left_keeps_the_bound_back(clock: Clock) -> None:
    known = dear(clock)
    known.read(NOW + 2_000, [])
    assert known.reach(["t"], [NOW * 2]).waiting == [NOW + 1_000]
    known.emptied(["t"], NOW + 1_500)
    assert known.reach(["t"], [NOW * 2]).waiting == [NOW + 1_500]
    known.told({"t": NOW + 1_200, "u": NOW})
    assert known.reach(["t", "u"], [NOW * 2, NOW + 70]).waiting == [NOW + 1_200, NOW + 70]


def test_who_wrote_before_the_first_reading_makes_no_look_dearer(clock: Clock) -> None:
    known = Bounds(used=True, background=begins, clock=clock)
    known.looked(["t"], 0.02, NOW, WHOLE, LASTS)
    known.read(NOW + 1_000, ["9/9"])
    reach = known.reach(["t"], [NOW + 900])
    assert reach == Reach([NOW + 900], [NOW - leasing.SLACK], [0], False)
    known.read(NOW + 2_000, [])
    assert known.reach(["t"], [NOW + 900]) == WHOLE, "now there can be a bound"


def test_a_clock_that_is_set_back_is_begun_with_anew(clock: Clock) -> None:
    known = dear(clock)
    known.read(NOW - 5_000, [])
    assert known.reach(["t"], [NOW]) == WHOLE


def test_with_another_connection_a_look_is_whole(clock: Clock) -> None:
    known = dear(clock)
    one, another = object(), object()
    for connection, whole in ((one, True), (one, False), (another, True), (another, False)):
        known.on(connection)
        known.read(NOW + 2_000, [])
        reach = known.reach(["t"], [NOW])
        assert reach.whole is whole
        known.looked(["t"], 0.02, NOW + 2_001, reach, LASTS)


def test_where_it_is_not_used_every_look_is_whole(clock: Clock) -> None:
    known = Bounds(used=False, background=begins, clock=clock)
    for _ in range(3):
        assert known.reach(["t"], [NOW]) == WHOLE
        known.looked(["t"], 0.5, NOW, WHOLE, LASTS)
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
def always_dear(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any whole look is too dear for another; and each look is thorough."""
    monkeypatch.setattr(postgres, "DEAR", 0.0)
    monkeypatch.setattr(leasing, "SHARE", 1_000_000_000)
    monkeypatch.setattr(leasing, "THOROUGH", 0.0)


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


async def test_no_look_touches_what_has_died_under_a_snapshot(
    fresh_url: str, open_store: OpensStore, always_dear: None, sent: Sent, monkeypatch: pytest.MonkeyPatch
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
            for _ in range(4):
                await lease(store, 5, lasts=LASTS)
                await lease(store, 0, lasts=LASTS)
            costs = {"thorough": await cost(surveyed, sent, "lease_16"),
                     "for the wake": await cost(surveyed, sent, "look_for_wake")}  # fmt: skip
            assert sent["lease_16"][8] is True
            monkeypatch.setattr(leasing, "THOROUGH", 1_000.0)
            await lease(store, 5, lasts=LASTS)
            costs["ordinary"] = await cost(surveyed, sent, "lease_16")
            assert sent["lease_16"][8] is False
            monkeypatch.setattr(leasing, "THOROUGH", 0.0)
            found[count] = costs
        for what, few in found[0].items():
            assert found[20_000][what] <= few * 2 + 20, (what, found)
        sent["lease_16"] = (*sent["lease_16"][:7], [0], True, [0], [0], 1_500)
        assert await cost(surveyed, sent, "lease_16") > 40_000, "a whole look steps over all of it"


def test_a_whole_look_that_was_cut_short_may_take_longer(clock: Clock) -> None:
    known = Bounds(used=True, background=begins, clock=clock)
    known.failed(10.0, whole=False)
    assert known.patience == 0.0
    for took, patience in ((10.0, 20.0), (20.0, 40.0), (0.001, 40.0), (400.0, 600.0)):
        known.failed(took, whole=True)
        known.on(object())
        assert known.reach(["t"], [NOW]) == WHOLE
        assert known.patience == patience
    known.looked(["t"], 90.0, NOW, WHOLE, LASTS)
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
