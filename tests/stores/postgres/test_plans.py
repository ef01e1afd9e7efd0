"""Every query of PostgreSQL has a name and a reason, and finds its rows by an index.

The tables are filled by the server itself. Twenty times as many rows show what grows with them; PLAN_ROWS=10000000 in
the environment asks for more.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
import pytest_asyncio

from bide.stores.postgres.connection import SESSION, address_of, connect
from bide.stores.postgres.queries import Names, queries_of
from bide.stores.postgres.schema import SCHEMA
from bide.testing.store_suite.base import NOW

ROWS = 30_000
"""Enough for a sort or a scan of all to look cheaper or dearer than an index, as it would at a million."""

_FILL = """INSERT INTO {task} (topic, key, state, at, due_at, token, planned_at, attempt, failures, losses, created_at,
    id, group_name, options, payload, keep_until)
SELECT 't' || n % 3, n::text, CASE WHEN n % 100 < 90 THEN 0 WHEN n % 100 < 95 THEN 1 ELSE 2 + n % 3 END,
    $1::bigint - 1000000 + (n * 7919::bigint) % 2000000, 0, n, 0, 0, 0, 0, 0, n::text,
    CASE WHEN n % 7 = 0 THEN 'g' END, '', '',
    CASE WHEN n % 100 >= 95 THEN $1::bigint + n END
FROM generate_series($2::integer, $3::integer) AS n"""

NAMES = (["t0", "t1"], ["3", "1"])
NEW = (["t0", "t1"], ["new-3", "new-1"])
INSERTED: tuple[Any, ...] = ([0, 0], [True, True], [], ["x", "y"], [], [b"", b""], [b"", b""], [])
ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "insert_tasks": (NOW, "c", 1, *NAMES, *INSERTED),
    "insert_tasks_all_new": (NOW, "c", 1, *NEW, *INSERTED),
    "move_tasks": (NOW, "c", 1, *NAMES, [NOW, 5], [False, True], [None, 1], [], []),
    "lock_tasks": (NOW, "c", 1, *NAMES),
    "lock_tasks_past": (NOW, "c", 1, *NAMES),
    "write_tasks": (["(0,1)"], ["x"], [None], [0], [1], [1], [0], [0], [0], [0], [1], [None], [b""], [b""],
                    [None], [None], [0], [None], [None], ["(0,2)"], [1], [1], [1], [None], ["(0,3)"],
                    "c", 1, NOW, b"", []),
    **{
        f"lease_{most}": (NOW, "c", 1, ["t0", "t1", "t2"], [most, 5, 0], 1_000, "w", [0, NOW - 500_000, 0], True,
                          [0, NOW - 500_000, 0], [0, NOW + 100_000, 0], 1_500)
        for most in (16, 256)
    },
    **{f"lease_more_{most}": (NOW, "c", 1, "t0", most, 1_000, "w", NOW - 500_000) for most in (16, 256)},
    "leased_then": (["t0", "t1"], NOW + 1_000, 5, "w"),
    "heads": (NOW, ["t0", "t1"], [0, NOW], True, [0, NOW], [0, NOW + 100_000], 1_500),
    "writers": (),
    "extend_leases": (NOW, 5, *NAMES, [1, 2]),
    "extend_leases_past": (NOW, 5, *NAMES, [1, 2]),
    "settle_done": (NOW, "c", 1, *NAMES, [1, 2]),
    "settle_done_past": (NOW, "c", 1, *NAMES, [1, 2]),
    "purge": (NOW, 100, 0),
    "tasks_by_names": NAMES,
    "page_by_name": ("t0", "", 100),
    "page_by_group": ("g", 1, "t0", "", 20),
    **{f"page_of_state_{state}": (f"t{max(0, state - 2)}", NOW - 900_000, 5, 2**62, 100) for state in range(5)},
    "next_topic": ("",),
    "next_topic_of_group": ("g", 0, ""),
    **{f"next_topic_of_state_{state}": ("",) for state in range(5)},
    "counts": (100, "", 100, None),
    "forecast": (100, ["t0"], [0], [2**62]),
}  # fmt: skip
"""Every statement that touches the table of tasks."""

TABLES = {"task"}


@asynccontextmanager
async def survey(url: str) -> AsyncIterator[Surveyed]:
    """A connection as the store has it, to tables that are empty and that nobody analyzes."""
    await SCHEMA.migrate(url)
    address = address_of(url)
    made = await connect(address, within=10)
    names = Names(address.schema, address.prefix)
    await made.execute(names.write("ALTER TABLE {task} SET (autovacuum_enabled = off)"))
    made_queries = queries_of(address.schema, address.prefix)
    await made.execute(made_queries["new_caller"].replace("$1", "'c'"))
    try:
        yield Surveyed(made, made_queries, names)
    finally:
        await made.close()


@pytest_asyncio.fixture
async def surveyed(fresh_url: str) -> AsyncIterator[Surveyed]:
    async with survey(fresh_url) as made:
        yield made


class Surveyed:
    """A connection, and how its statements would be carried out."""

    def __init__(self, connection: Any, queries: Any, names: Names) -> None:
        self.connection = connection
        self.queries = queries
        self.names = names
        self.prepared: set[str] = set()

    async def fill(self, rows: int = ROWS, *, after: int = 0) -> None:
        """So many rows in all, of which `after` are there already."""
        await self.execute(_FILL, NOW, after + 1, rows)

    async def execute(self, statement: str, *arguments: Any) -> None:
        """With the names of the tables written out."""
        await self.connection.execute(self.names.write(statement), *arguments)

    async def prepare(self, query: str) -> None:
        """Once, and carried out once, so that its plan is kept."""
        text = re.sub(r"\$(\d+)", r"$\1", self.queries[query])
        await self.connection.execute(f"PREPARE {query} AS {text}")
        self.prepared.add(query)
        await self.plan(query)

    async def forget(self) -> None:
        """All plans."""
        for query in self.prepared:
            await self.connection.execute(f"DEALLOCATE {query}")
        self.prepared.clear()

    async def plan(self, query: str) -> dict[str, Any]:
        """Carried out and undone: the plan with what came of it."""
        if query not in self.prepared:
            await self.prepare(query)
        return await self.explained(self.executed(query, ARGUMENTS[query]))

    def executed(self, query: str, arguments: Sequence[Any]) -> str:
        """The statement, with these arguments."""
        given = ", ".join(literal(one) for one in arguments)
        return f"EXECUTE {query} ({given})" if arguments else f"EXECUTE {query}"

    async def explained(self, statement: str) -> dict[str, Any]:
        transaction = self.connection.transaction()
        await transaction.start()
        try:
            text = await self.connection.fetchval(f"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) {statement}")
        finally:
            await transaction.rollback()
        found: dict[str, Any] = json.loads(text)[0]["Plan"]
        return found


def literal(value: Any) -> str:
    """As SQL."""
    if value is None:
        return "NULL"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, bytes):
        return f"'\\x{value.hex()}'"
    if isinstance(value, list):
        return f"'{{{', '.join('NULL' if one is None else element(one) for one in value)}}}'"
    return f"'{value}'"


def element(value: Any) -> str:
    return f'"\\\\x{value.hex()}"' if isinstance(value, bytes) else f'"{value}"'


def nodes(plan: dict[str, Any]) -> list[dict[str, Any]]:
    return [plan, *(node for part in plan.get("Plans", ()) for node in nodes(part))]


def offences(plan: dict[str, Any]) -> list[str]:
    """What reads more of the table than it should: scans of all, and sorts of many."""
    found = []
    for node in nodes(plan):
        kind, table = node["Node Type"], node.get("Relation Name")
        rows = node["Actual Rows"] * node["Actual Loops"]
        if table in TABLES and rows > 5_000:
            found.append(f"{kind} of {table} reads {rows} rows")
        if table in TABLES and "Index" not in kind and kind not in ("Tid Scan", "ModifyTable"):
            found.append(f"{kind} of {table}")
        if kind in ("Sort", "Incremental Sort") and rows > 1_000:
            found.append(f"a sort of {rows} rows")
        if table in TABLES and node.get("Rows Removed by Filter", 0) * node["Actual Loops"] > 100:
            found.append(f"{kind} of {table} throws {node['Rows Removed by Filter']} rows away")
        if node.get("Rows Removed by Join Filter", 0) * node["Actual Loops"] > 100:
            found.append(f"{kind} throws {node['Rows Removed by Join Filter']} pairs away")
    return found


async def check_all(surveyed: Surveyed) -> None:
    wrong = {query: found for query in ARGUMENTS if (found := offences(await surveyed.plan(query)))}
    assert not wrong


@pytest.mark.parametrize("analyzed", [False, True], ids=["not analyzed", "analyzed"])
async def test_a_lease_is_right_for_a_planner_that_may_do_all(surveyed: Surveyed, analyzed: bool) -> None:
    await surveyed.fill()
    if analyzed:
        await surveyed.execute("ANALYZE {task}")
    for name in SESSION:
        if name.startswith("enable_"):
            await surveyed.connection.execute(f"RESET {name}")
            await surveyed.connection.execute(f"SET {name} = on")
    for query in ("lease_16", "tasks_by_names", "insert_tasks", "lock_tasks", "heads"):
        assert offences(await surveyed.plan(query)) == [], query


async def test_every_query_of_the_table_is_looked_at(url: str) -> None:
    address = address_of(url)
    names = Names(address.schema, address.prefix)
    about = {name for name, text in queries_of(address.schema, address.prefix).items() if names.parts["task"] in text}
    assert {name for name in about if not name.startswith("lease_")} == {
        name for name in ARGUMENTS if not name.startswith("lease_")
    }


FEW = 10_000
"""Enough for a full page of every list, and for each lease to find all that it wants."""
MANY = int(os.environ.get("PLAN_ROWS", "200000"))
FLOOD = 50_000
"""Due tasks of a topic that nobody works on."""
DEEPER = 1.5
"""How many times the pages a statement may touch in the large table: indexes are a level deeper, or two."""
_DUE = """INSERT INTO {task} (topic, key, state, at, due_at, token, planned_at, attempt, failures, losses, created_at,
    id, options, payload)
SELECT 'flood', n::text, 0, $1::bigint - n, 0, n, 0, 0, 0, 0, 0, n::text, '', ''
FROM generate_series(1, $2::integer) AS n"""


def pages(plan: Mapping[str, Any]) -> int:
    """Pages touched by a plan with all its parts.

    A part that writes and that nobody reads is carried out at the end, beside the rest: what each node touched by
    itself is added up.
    """
    touched = 0
    for node in nodes(dict(plan)):
        within = sum(_touched(part) for part in node.get("Plans", ()))
        touched += max(0, _touched(node) - within)
    return touched


def _touched(node: Mapping[str, Any]) -> int:
    return int(node["Shared Hit Blocks"]) + int(node["Shared Read Blocks"])


async def touched(surveyed: Surveyed) -> dict[str, int]:
    """By statement; the second time, when what its first use leaves in the caches of a connection is there.

    None reads more of the table than it should.
    """
    found, wrong = {}, {}
    for query in ARGUMENTS:
        await surveyed.plan(query)
        plan = await surveyed.plan(query)
        found[query] = pages(plan)
        if offended := offences(plan):
            wrong[query] = offended
    assert not wrong
    return found


async def test_no_statement_touches_more_of_a_large_table(surveyed: Surveyed) -> None:
    """Freshly filled and never analyzed, then analyzed, then with a flood.

    With the plans of an empty table, and with those of a store that is opened when all is there.
    """
    for query in ARGUMENTS:
        await surveyed.prepare(query)
    await surveyed.fill(FEW)
    few = await touched(surveyed)
    await surveyed.fill(MANY, after=FEW)
    grown = {"filled": await touched(surveyed)}
    await surveyed.forget()
    grown["planned without statistics"] = await touched(surveyed)
    await surveyed.execute("ANALYZE {task}")
    grown["analyzed"] = await touched(surveyed)
    await surveyed.execute(_DUE, NOW, FLOOD)
    grown["flooded"] = await touched(surveyed)
    await surveyed.forget()
    grown["planned with statistics"] = await touched(surveyed)
    wrong = {
        (when, query): (few[query], now)
        for when, by_query in grown.items()
        for query, now in by_query.items()
        if now > few[query] * DEEPER + 10
    }
    assert not wrong


@pytest.mark.parametrize("few", [0, 1, 200])
async def test_the_statistics_of_an_almost_empty_table_lead_to_the_same_plans(surveyed: Surveyed, few: int) -> None:
    """Between two bursts, autovacuum finds a table that is almost empty: what is planned then, or in the next burst."""
    await surveyed.fill(FEW)
    await surveyed.execute("DELETE FROM {task} WHERE row > $1", few)
    await surveyed.execute("VACUUM ANALYZE {task}")
    for query in ARGUMENTS:
        await surveyed.prepare(query)
    await surveyed.fill(FEW * 10, after=FEW)
    await surveyed.execute(_DUE, NOW, FLOOD)
    await check_all(surveyed)
    await surveyed.forget()
    await check_all(surveyed)


_EVENTS = """INSERT INTO {event} (at, topic, key, id, kind, attempt, what)
SELECT n, 't' || n % 3, n::text, '', 'retry', 1, '' FROM generate_series($1::integer, $2::integer) AS n"""
OF_EVENTS: Mapping[str, str] = {
    "events": "100",
    "events_by_name": "'t1', '1', 100",
    "event_span": "",
    "trim_events": "50",
}


async def test_the_log_of_events_is_read_by_its_indexes(surveyed: Surveyed) -> None:
    """It is capped; a cap may be set high."""
    for query, given in OF_EVENTS.items():
        await surveyed.connection.execute(f"PREPARE {query} AS {surveyed.queries[query]}")
        await surveyed.explained(f"EXECUTE {query} ({given})" if given else f"EXECUTE {query}")
    found: dict[str, int] = {}
    for first, last in ((1, 1_000), (1_001, 100_000)):
        await surveyed.execute(_EVENTS, first, last)
        for query, given in OF_EVENTS.items():
            plan = await surveyed.explained(f"EXECUTE {query} ({given})" if given else f"EXECUTE {query}")
            assert "Seq Scan" not in {node["Node Type"] for node in nodes(plan)}, query
            before = found.setdefault(query, pages(plan))
            assert pages(plan) <= before * DEEPER + 10, query
