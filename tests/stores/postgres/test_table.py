"""Watched tables in PostgreSQL: lost connections, a pooling proxy, plans on a table without statistics, references."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import asyncpg
import pytest
import pytest_asyncio
from tests.servers.child import ServerMissing
from tests.servers.fixtures import not_installed
from tests.servers.postgres_pooler import PostgresPooler
from tests.tables.conftest import START, Postgres
from tests.waiting import until

from bide import Bide, SetupError
from bide.testing.clock import ManualClock


@pytest_asyncio.fixture
async def place(postgres_url: str, postgres_schema: str) -> AsyncIterator[Postgres]:
    made = Postgres(postgres_url, postgres_schema)
    async with made.exits:
        await made.create()
        yield made


async def test_connections_that_break_are_replaced(place: Postgres) -> None:
    app = Bide("memory:")
    name = place.own
    watch = app.watch(place.source(database=f"{place.plain}?application_name={name}", look_every="50ms"))
    async with app.worker() as worker:
        loop = worker.tables[0]
        await place.add(1, 0)
        await until(lambda: loop.stats.fired == 1, "the first row to be fired")
        ended = await place.run(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid() AND query LIKE $1",
            f"%{name}%",
        )
        assert ended
        await place.add(2, 0)
        watch.look()
        await until(lambda: loop.stats.fired == 2, "the second row to be fired")
    assert await place.states() == {1: (3, 1), 2: (3, 1)}


async def test_a_row_that_is_only_referred_to_is_not_held(place: Postgres) -> None:
    app = await place.app(clock=ManualClock(START))
    app.watch(place.source())
    loop = await place.loop(app)
    await place.run(f"CREATE TABLE {place.own}.comment (post bigint REFERENCES {place.table})")
    await place.add(1, START)
    writer = await asyncpg.connect(place.plain)
    place.exits.push_async_callback(writer.close)
    async with writer.transaction():
        await writer.execute(f"INSERT INTO {place.own}.comment VALUES (1)")
        assert (await loop.run_once())[0] == 1
    assert await place.states() == {1: (3, 1)}


async def test_every_statement_uses_the_index_on_a_table_without_statistics(place: Postgres) -> None:
    count = 20_000
    await place.run(f"ALTER TABLE {place.table} SET (autovacuum_enabled = off)")
    await place.run(
        f"INSERT INTO {place.table} (id, title, status, due) SELECT n, 'out', 3, $1 FROM generate_series(1, $2) AS n",
        place.time(START - 1), count,
    )  # fmt: skip
    await place.add_many(count + 1, 500, START + 1_000)
    app = await place.app(clock=ManualClock(START))
    app.watch(place.source())
    loop = await place.loop(app)
    assert await loop.run_once() == (0, START + 1_000)
    table: Any = loop._table
    for query in ("head", "head_beyond", "take"):
        limit = {"limit": 100} if query == "take" else {}
        text, arguments = table._write(query, START, (), **limit)
        connection = await table._connections.looker()
        plan = "\n".join(row[0] for row in await connection.fetch(f"EXPLAIN {text}", *arguments))
        assert "using posts_due" in plan, plan
        assert "Seq Scan" not in plan, plan
        # with locks the condition is asked again, of the rows that the index has led to
        assert query == "take" or "Filter" not in plan, plan
        assert "Sort" not in plan, plan


@pytest.fixture
def pooled(tmp_path: Path, postgres_url: str) -> Iterator[str]:
    """The shared server by way of a proxy."""
    try:
        with PostgresPooler(tmp_path / "pooler", postgres_url) as pooler:
            yield f"{pooler.url}?pooler=transaction"
    except ServerMissing as error:
        not_installed(error)


async def test_behind_a_pooling_proxy(place: Postgres, pooled: str) -> None:
    app = Bide("memory:", clock=ManualClock(START))
    app.watch(place.source(database=pooled))
    async with app:
        loop = await place.loop(app)
        await place.add(1, START)
        await place.add(2, START + 5)
        assert await loop.run_once() == (1, START + 5)
        await loop.stop(0)
    assert await place.states() == {1: (3, 1), 2: (2, 0)}


@pytest.mark.parametrize("options", [{"due": "title"}, {"due": "stamp"}, {"due_is": "seconds"}])
async def test_a_column_that_cannot_hold_such_times(place: Postgres, options: dict[str, str]) -> None:
    app = await place.app()
    app.watch(place.source(**options))
    [loop] = app.table_loops()
    with pytest.raises(SetupError, match="is of type"):
        await loop.open()
