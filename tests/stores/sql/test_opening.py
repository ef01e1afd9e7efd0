"""The schema: made by whoever may, by one at a time, and refused with what to do where it is missing or older."""

from __future__ import annotations

import asyncio
from unittest.mock import Mock

import pytest
from tests.stores.sql.database import WAITS, Database
from tests.stores.sql.fixtures import OpensStore
from tests.waiting import until

from bide import Bide, Task
from bide.core.errors import StoreMismatch
from bide.core.records import Filter
from bide.testing.store_suite.base import keys, listed, new, put_one


async def test_a_missing_schema_is_refused_with_what_to_do(database: Database, fresh_url: str) -> None:
    assert await database.schema.versions(fresh_url) == (0, database.schema.wanted)
    store = database.Store(fresh_url)
    with pytest.raises(StoreMismatch, match="bide migrate"):
        await store.open()
    assert await store.schema_version() == (0, database.schema.wanted)


async def test_an_older_schema_is_refused_and_a_newer_one_is_not(
    database: Database, fresh_url: str, open_store: OpensStore
) -> None:
    await database.schema.migrate(fresh_url)
    database.ask(fresh_url, "UPDATE {migration} SET number = 0")
    with pytest.raises(StoreMismatch, match="bide migrate"):
        await database.Store(fresh_url).open()
    database.ask(fresh_url, "UPDATE {migration} SET number = 1")
    database.ask(fresh_url, "INSERT INTO {migration} (number, name, checksum) VALUES (999, 'later', 'x')")
    store = await open_store(fresh_url)
    await put_one(store)


async def test_a_migration_of_another_text_is_refused(database: Database, fresh_url: str) -> None:
    await database.schema.migrate(fresh_url)
    database.ask(fresh_url, "UPDATE {migration} SET checksum = 'another'")
    with pytest.raises(StoreMismatch, match="migration 1"):
        await database.Store(fresh_url).open()
    with pytest.raises(StoreMismatch, match="migration 1"):
        await database.schema.migrate(fresh_url)


async def test_twenty_may_migrate_at_once(database: Database, fresh_url: str, open_store: OpensStore) -> None:
    urls = [fresh_url, *(f"{fresh_url}&prefix={name}_" for name in ("a", "b", "c"))]  # in a schema that is not there
    done = await asyncio.gather(*(database.schema.migrate(url) for _ in range(5) for url in urls))
    assert sorted(map(len, done)) == [0] * 16 + [len(database.schema.known)] * 4
    await put_one(await open_store(fresh_url, migrate=False))


async def test_what_would_be_run_can_be_run_by_hand(database: Database, fresh_url: str) -> None:
    made, *planned = await database.schema.plan(fresh_url)
    assert made.startswith("CREATE ")
    in_no_schema = fresh_url.partition("?")[0]
    database.ask(in_no_schema, made)
    assert await database.schema.plan(fresh_url) == planned == database.statements(fresh_url)
    for statement in planned:
        database.ask(in_no_schema, statement)
    assert await database.schema.versions(fresh_url) == (database.schema.wanted,) * 2
    assert await database.schema.migrate(fresh_url) == []
    assert await database.schema.plan(fresh_url) == []
    assert database.statements(fresh_url, database.schema.wanted) == []


@pytest.mark.parametrize("database", ["mysql"], indirect=True)  # PostgreSQL does all of it or nothing
async def test_a_migration_that_was_cut_short_is_begun_again(
    database: Database, fresh_url: str, open_store: OpensStore
) -> None:
    for statement in (await database.schema.plan(fresh_url))[:4]:
        database.ask(fresh_url.partition("?")[0], statement)
    assert await database.schema.versions(fresh_url) == (0, database.schema.wanted)
    await put_one(await open_store(fresh_url))


async def test_prefixes_keep_two_stores_of_one_schema_apart(
    database: Database, fresh_url: str, open_store: OpensStore
) -> None:
    words_of_sql = [f"{fresh_url}_order&prefix={name}_" for name in ("select", "from")]
    one, two = [await open_store(url) for url in words_of_sql]
    await put_one(one, new("of one"))
    await put_one(two, new("of two"))
    assert keys(await listed(one, Filter())) == ["of one"]
    assert keys(await listed(two, Filter())) == ["of two"]


async def test_two_who_open_at_once_open_it_once(
    database: Database, fresh_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two that had connected one would never be closed."""
    await database.schema.migrate(fresh_url)
    store = database.Store(fresh_url)
    made = Mock(wraps=store._runtime)
    monkeypatch.setattr(store, "_runtime", made)
    try:
        await asyncio.gather(store.open(), store.open())
        assert made.call_count == 1
        await put_one(store)
    finally:
        await store.close()


async def test_a_database_that_is_not_there_is_to_be_made(database: Database) -> None:
    store = database.Store(f"{database.url.rpartition('/')[0]}/nowhere", **WAITS)
    what, said = database.no_database
    with pytest.raises(what, match=said):
        await store.open()


async def test_a_client_opens_two_connections_and_a_worker_two_more(url: str, open_store: OpensStore) -> None:
    """Beside the one that listens, where the server has notifications."""
    store = await open_store(url, clock="server")
    app = Bide(store)

    def opened() -> set[str]:
        return {name for name, one in store._open().connections.items() if one._connection is not None}

    @app.handler("t")
    async def work(task: Task[None]) -> None: ...

    async with app:
        await app.schedule("t", None, key="k", delay="1h")
        await app.reschedule("t", "k", delay="2h")
        assert await app.get("t", "k") is not None
        assert opened() == {"write", "read"}
        async with app.worker() as worker:
            await app.fire_now("t", "k")
            await until(lambda: worker.stats.done == 1, "its outcome to be stored")
            await worker._lease_extender._announce()
            assert opened() - {"scan"} == {"write", "read", "settle", "lease"}, "one more where scans take long"
