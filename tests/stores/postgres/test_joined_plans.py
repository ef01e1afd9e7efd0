"""Statements on a caller's connection go by the indexes too, although nothing is set for the planner there."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import asyncpg
import pytest_asyncio
from tests.stores.postgres.test_queries import ARGUMENTS, Surveyed, offences
from tests.stores.sql.fixtures import OpensStore

from bide.stores.postgres.connection import address_of
from bide.stores.postgres.queries import Names, queries_of
from bide.stores.postgres.schema import SCHEMA

ROWS = 200_000
JOINED = (
    "insert_tasks", "move_tasks", "lock_tasks", "write_tasks", "settle_done", "tasks_by_names", "page_by_name",
    "page_by_group", "page_of_state_0", "next_topic", "next_topic_of_group",
)  # fmt: skip
"""What a joined verb may run."""


@pytest_asyncio.fixture
async def callers(own_url: str) -> AsyncIterator[Any]:
    """A connection as it is when nobody has set anything, to empty tables that nobody will analyze by himself.

    To a server where nobody else is: after many changes of its catalogs a server makes every plan anew.
    """
    await SCHEMA.migrate(own_url)
    address = address_of(own_url)
    made = await asyncpg.connect(address.dsn)
    names = Names(address.schema, address.prefix)
    await made.execute(names.write("ALTER TABLE {task} SET (autovacuum_enabled = off)"))
    yield Surveyed(made, queries_of(address.schema, address.prefix, joined=True), names)
    await made.close()


async def test_no_statement_scans_the_table(callers: Surveyed) -> None:
    await callers.fill(ROWS)
    for statement in ("SELECT", "ANALYZE {task}"):
        await callers.execute(statement)
        await callers.forget()
        wrong = {query: found for query in JOINED if (found := offences(await callers.plan(query)))}
        assert not wrong, statement


async def test_plans_are_not_kept_from_an_empty_table(callers: Surveyed) -> None:
    """The server keeps one plan for all arguments, once it has planned five times; a verb wants none of these."""
    kept = ("write_tasks", "settle_done")
    for query in kept:
        for _ in range(8):
            await callers.plan(query)
    await callers.fill(ROWS)
    for query in kept:
        assert offences(await callers.plan(query)), "else there was no need"
    await callers.connection.execute("SET plan_cache_mode = force_custom_plan")
    wrong = {query: found for query in JOINED if (found := offences(await callers.plan(query)))}
    assert not wrong


async def test_a_verb_plans_anew_and_leaves_that_setting_as_it_was(url: str, open_store: OpensStore) -> None:
    store = await open_store(url)
    own = await asyncpg.connect(address_of(url).dsn)
    modes: list[str] = []
    joined = store.using(own)

    async def look(call: Any) -> None:
        modes.extend(await own.fetchval("SELECT ARRAY[current_setting('plan_cache_mode')]"))

    for before in ("auto", "force_generic_plan"):
        await own.execute(f"SET plan_cache_mode = {before}")
        async with own.transaction():
            await joined.read(look)
            assert await own.fetchval("SHOW plan_cache_mode") == before
        assert await own.fetchval("SHOW plan_cache_mode") == before
    assert modes == ["force_custom_plan"] * 2
    await own.close()


def test_what_a_joined_verb_runs_is_all_looked_at() -> None:
    assert set(JOINED) <= set(ARGUMENTS)
