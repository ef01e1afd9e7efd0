"""What each statement touches does not grow with the table: by EXPLAIN, and by the pages that it reads.

The tables are filled by the server itself. Twenty times as many rows show what grows with them; PLAN_ROWS=10000000 in
the environment asks for more.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Mapping
from typing import Any

import pytest_asyncio
from tests.stores.postgres.test_queries import ARGUMENTS, Surveyed, check_all, nodes, survey

from bide.testing.store_suite.base import NOW

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


@pytest_asyncio.fixture
async def surveyed(fresh_url: str) -> AsyncIterator[Surveyed]:
    async with survey(fresh_url) as made:
        yield made


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
    """By statement; the second time, when what its first use leaves in the caches of a connection is there."""
    found = {}
    for query in ARGUMENTS:
        await surveyed.plan(query)
        found[query] = pages(await surveyed.plan(query))
    return found


async def test_no_statement_touches_more_of_a_large_table(surveyed: Surveyed) -> None:
    """Freshly filled and never analyzed, then analyzed, then with a flood; the plans are those of an empty table."""
    for query in ARGUMENTS:
        await surveyed.prepare(query)
    await surveyed.fill(FEW)
    few = await touched(surveyed)
    await surveyed.fill(MANY, after=FEW)
    await check_all(surveyed)
    grown = {"filled": await touched(surveyed)}
    await surveyed.execute("ANALYZE {task}")
    await check_all(surveyed)
    grown["analyzed"] = await touched(surveyed)
    await surveyed.execute(_DUE, NOW, FLOOD)
    await check_all(surveyed)
    grown["flooded"] = await touched(surveyed)
    wrong = {
        (when, query): (few[query], now)
        for when, by_query in grown.items()
        for query, now in by_query.items()
        if now > few[query] * DEEPER + 10
    }
    assert not wrong


async def test_what_is_planned_for_a_full_table_is_no_worse(surveyed: Surveyed) -> None:
    """A store that is opened when all is there plans then; and by what the planner knows then, or does not."""
    await surveyed.fill(FEW * 10)
    await surveyed.execute(_DUE, NOW, FLOOD)
    await check_all(surveyed)
    unknown = await touched(surveyed)
    await surveyed.execute("ANALYZE {task}")
    await surveyed.forget()
    await check_all(surveyed)
    known = await touched(surveyed)
    assert {query: pages for query, pages in known.items() if pages > unknown[query] * DEEPER + 10} == {}


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
