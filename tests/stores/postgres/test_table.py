"""Watched tables in PostgreSQL: lost connections, a pooling proxy, plans on a table without statistics, references."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import asyncpg
import pytest
import pytest_asyncio
from tests.servers.fixtures import running
from tests.servers.pooler import PostgresPooler
from tests.tables.conftest import START, Postgres
from tests.waiting import until

from bide import Bide, Row, SetupError, Sql, StoreUnavailable
from bide.testing.clock import ManualClock
from bide.testing.proxy import FaultProxy


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
    loop = await place.watched(ManualClock(START))
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
    loop = await place.watched(ManualClock(START))
    assert await loop.run_once() == (0, START + 1_000)
    table: Any = loop._table
    some: list[tuple[str, dict[str, int]]] = [("head", {}), ("head", {"beyond": True}), ("take", {"limit": 100})]
    for query, more in some:
        text, arguments = table._write(query, START, **more)
        connection = await table._connections.poller()
        plan = "\n".join(row[0] for row in await connection.fetch(f"EXPLAIN {text}", *arguments))
        assert "using posts_due" in plan, plan
        assert "Seq Scan" not in plan, plan
        # a row that the index has led to is asked for its id alone; with locks for the condition again
        assert query == "take" or "Filter" not in plan.replace("Filter: (id IS NOT NULL)", ""), plan
        assert "Sort" not in plan, plan


@pytest.fixture
def pooled(tmp_path: Path, postgres_url: str) -> Iterator[str]:
    """The shared server by way of a proxy."""
    with running(PostgresPooler(tmp_path / "pooler", postgres_url)) as pooler:
        yield f"{pooler.url}?pooler=transaction"


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


@pytest.mark.parametrize(
    "options", [{"due": "title"}, {"due": "stamp"}, {"due_is": "seconds"}, {"due": "short", "due_is": "seconds"}]
)
async def test_a_column_that_cannot_hold_such_times(place: Postgres, options: dict[str, str]) -> None:
    await place.run(f"ALTER TABLE {place.table} ADD COLUMN short real")
    app = await place.app()
    app.watch(place.source(**options))
    [loop] = app.table_loops()
    with pytest.raises(SetupError, match="is of type"):
        await loop.open()


@pytest.mark.parametrize(("kind", "identity"), [("char(36)", "4f1c"), ("bit(8)", asyncpg.BitString("00000101"))])
async def test_ids_of_a_type_with_a_length(place: Postgres, kind: str, identity: Any) -> None:
    table = f"{place.own}.lengths"
    await place.run(f"CREATE TABLE {table} (id {kind} PRIMARY KEY, title text, status int, due timestamptz)")
    await place.run(f"INSERT INTO {table} VALUES ($1, 'x', 2, $2)", identity, place.time(START - 1))
    loop = await place.watched(ManualClock(START), table=table, changes={"status": 3})
    assert await loop.run_once() == (1, None)


REFUSALS = [
    # two rows where one is wanted; a right that the row denies; a date that the driver cannot read
    "UPDATE {table} SET title = 'two' WHERE id = 1",
    "UPDATE {table} SET wall = '0044-03-15 BC' WHERE id = 1",
]


@pytest.mark.parametrize("page", [100, 1])
@pytest.mark.parametrize("spoil", REFUSALS)
async def test_an_error_that_nobody_thought_of_is_of_one_row(place: Postgres, spoil: str, page: int) -> None:
    two = "(SELECT CASE title WHEN 'two' THEN (SELECT n FROM generate_series(1, 2) AS n) ELSE 3 END)"
    loop = await place.watched(ManualClock(START), changes={"status": Sql(two)}, columns=["title", "wall"], page=page)
    for number in (1, 2, 3):
        await place.add(number, START - 10 + number)
    await place.run(spoil.format(table=place.table))
    await loop.run_once()
    assert {number: status for number, (status, _) in (await place.states()).items()} == {1: 2, 2: 3, 3: 3}


async def test_a_row_whose_trigger_needs_a_missing_table_holds_up_nobody(place: Postgres) -> None:
    """It fails as all rows do of a table that was altered: so that is examined once more, and then it is the row."""
    loop = await place.watched(ManualClock(START))
    await place.run(
        f"CREATE FUNCTION {place.own}.audit() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN "
        "IF OLD.id = 1 THEN INSERT INTO nowhere VALUES (1); END IF; RETURN NEW; END $$"
    )
    await place.run(
        f"CREATE TRIGGER audit BEFORE UPDATE ON {place.table} FOR EACH ROW EXECUTE FUNCTION {place.own}.audit()"
    )
    for number in (1, 2, 3):
        await place.add(number, START - 5 + number)
    with pytest.raises(StoreUnavailable, match="nowhere"):
        await loop.run_once()
    await loop.run_once()
    assert {number: status for number, (status, _) in (await place.states()).items()} == {1: 2, 2: 3, 3: 3}


async def test_a_policy_of_the_table_costs_only_that_row(place: Postgres) -> None:
    await place.run(f"ALTER TABLE {place.table} ENABLE ROW LEVEL SECURITY, FORCE ROW LEVEL SECURITY")
    await place.run(f"CREATE POLICY p ON {place.table} USING (true) WITH CHECK (title <> 'theirs' OR status = 2)")
    [(superuser,)] = await place.run("SELECT rolsuper FROM pg_roles WHERE rolname = current_user")
    if superuser:
        await place.run(f"CREATE ROLE {place.own} LOGIN")
        for drop in ("DROP ROLE", "DROP OWNED BY"):
            place.exits.push_async_callback(place.run, f"{drop} {place.own}")
        await place.run(f"GRANT ALL ON SCHEMA {place.own} TO {place.own}")
        await place.run(f"GRANT ALL ON {place.table} TO {place.own}")
    app = Bide("memory:", clock=ManualClock(START))
    app.watch(place.source(database=place.plain.replace("//bide@", f"//{place.own}@"), changes={"status": 3}))
    async with app:
        loop = await place.loop(app)
        await place.add(1, START - 2, title="theirs")
        await place.add(2, START - 1)
        await loop.run_once()
        await loop.stop(0)
    assert {number: status for number, (status, _) in (await place.states()).items()} == {1: 2, 2: 3}


@pytest.mark.parametrize("due", ["-infinity", "0044-03-15 BC", "0001-01-01"])
async def test_times_of_long_ago_have_come(place: Postgres, due: str) -> None:
    loop = await place.watched(ManualClock(START))
    await place.run(f"INSERT INTO {place.table} (id, status, due) VALUES (1, 2, '{due}'), (2, 2, '19999-01-01')")
    fired, wake = await loop.run_once()
    assert fired == 1
    assert wake is not None
    assert wake > START


async def test_what_one_handler_sets_is_not_the_next_one_s(place: Postgres) -> None:
    app = await place.app()
    watch = app.watch(place.source())
    seen: list[Any] = []

    @watch.handler
    async def publish(row: Row) -> None:
        connection = row.connection
        seen.append(await connection.fetchval("SELECT current_setting('search_path') || current_user"))
        await connection.execute(f"SET search_path = other; SET ROLE pg_monitor; SELECT pg_advisory_lock({START})")

    for number in (1, 2, 3):
        await place.add(number, 0)
    async with app.worker() as worker:
        await worker.until_empty()
        assert await place.run("SELECT FROM pg_locks WHERE locktype = 'advisory' AND objid = $1", START % 2**32) == []
    assert len(seen) == 3
    assert len(set(seen)) == 1


async def test_a_half_open_connection_holds_up_nothing(place: Postgres, monkeypatch: pytest.MonkeyPatch) -> None:
    """A firewall has forgotten the connections that are there; new ones are let through."""
    monkeypatch.setattr("bide.stores.sql.server_table.SOON", 0.2)
    monkeypatch.setattr("bide.stores.postgres.watched_table.SILENCE", 1.0)
    parts = urlsplit(place.plain)
    async with FaultProxy(parts.hostname or "", parts.port or 5432) as proxy:
        app = Bide("memory:", grace="500ms")
        url = place.plain.replace(f":{parts.port}", f":{proxy.port}")
        watch = app.watch(place.source(database=url, look_every="50ms", changes={"status": 3}), concurrency=2)

        @watch.handler
        async def publish(row: Row) -> None:
            """Nothing."""

        async with app.worker() as worker:
            await place.add(1, 0)
            await until(lambda: worker.tables[0].stats.fired == 1, "the first row to be fired")
            for link in proxy._links:
                link.held = True
            for number in (2, 3, 4):
                await place.add(number, 0)
            await until(lambda: worker.tables[0].stats.fired == 4, "the others to be fired")
            proxy.hold()
    assert {status for status, _ in (await place.states()).values()} == {3}


async def test_a_connection_that_listens_is_missed_when_it_ends(place: Postgres) -> None:
    app = Bide("memory:")
    url = f"{place.plain}?application_name={place.own}"
    app.watch(place.source(database=url, look_every="1h", channel=place.own))
    async with app.worker() as worker:
        loop = worker.tables[0]
        await until(lambda: loop.stats.looks, "the first look")
        looks = loop.stats.looks
        await place.run(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'bide' AND pid IN "
            f"(SELECT pid FROM pg_stat_activity WHERE query LIKE '%{place.own}%' AND pid <> pg_backend_pid())"
        )
        await until(lambda: loop.stats.looks > looks, "the next look")
        await place.add(1, 0)
        await until(lambda: _notified(place, loop.stats.fired), "the row to be fired")


async def _notified(place: Postgres, fired: int) -> bool:
    await place.run(f"NOTIFY {place.own}")
    return fired == 1


async def test_a_table_that_is_altered_is_examined_anew(place: Postgres) -> None:
    table = f"{place.own}.narrow"
    await place.run(f"CREATE TABLE {table} (id int PRIMARY KEY, status int, due timestamptz)")
    app = await place.app()
    app.watch(place.source(table=table, changes={"status": 3}, columns=[], look_every="20ms"))
    async with app.worker() as worker:
        await until(lambda: worker.tables[0].stats.looks, "the first look")
        await place.run(f"ALTER TABLE {table} ALTER id TYPE bigint")
        await place.run(f"INSERT INTO {table} VALUES (1, 2, '2020-01-01'), ({2**40}, 2, '2020-01-01')")
        await worker.until_empty()
    assert await place.run(f"SELECT DISTINCT status FROM {table}") == [(3,)]
