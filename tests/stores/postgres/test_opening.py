"""The schema: made by whoever may, by one at a time, and refused with what to do where it is missing or older."""

from __future__ import annotations

import asyncio
import gc

import asyncpg
import pytest
from tests.stores.postgres.conftest import OpensStore

from bide.core.errors import StoreMismatch, StoreUnavailable
from bide.core.names import new_id
from bide.core.records import Filter
from bide.stores.postgres import PostgresStore, schema
from bide.stores.postgres.address import address_of
from bide.stores.postgres.connecting import connect
from bide.stores.postgres.queries import Names
from bide.testing.store_suite.acts import keys, listed, new, put_one


async def execute(url: str, statement: str) -> None:
    address = address_of(url)
    connection = await asyncpg.connect(address.dsn)
    try:
        await connection.execute(Names(address.schema, address.prefix).write(statement))
    finally:
        await connection.close()


async def test_a_missing_schema_is_refused_with_what_to_do(url: str) -> None:
    assert await schema.versions(url) == (0, schema.wanted())
    store = PostgresStore(url)
    with pytest.raises(StoreMismatch, match="bide migrate"):
        await store.open()
    assert await store.schema_version() == (0, schema.wanted())


async def test_an_older_schema_is_refused_and_a_newer_one_is_not(url: str, open_store: OpensStore) -> None:
    await schema.migrate(url)
    await execute(url, "UPDATE {migration} SET number = 0")
    with pytest.raises(StoreMismatch, match="bide migrate"):
        await PostgresStore(url).open()
    await execute(url, "UPDATE {migration} SET number = 1")
    await execute(url, "INSERT INTO {migration} (number, name, checksum) VALUES (999, 'later', 'x')")
    store = await open_store(url)
    await put_one(store)


async def test_a_migration_of_another_text_is_refused(url: str) -> None:
    await schema.migrate(url)
    await execute(url, "UPDATE {migration} SET checksum = 'another'")
    with pytest.raises(StoreMismatch, match="migration 1"):
        await PostgresStore(url).open()
    with pytest.raises(StoreMismatch, match="migration 1"):
        await schema.migrate(url)


async def test_twenty_may_migrate_at_once(url: str, open_store: OpensStore) -> None:
    done = await asyncio.gather(*(schema.migrate(url) for _ in range(20)))
    assert sorted(map(len, done)) == [0] * 19 + [len(schema.migrations())]
    await put_one(await open_store(url, migrate=False))


async def test_what_would_be_run_can_be_run_by_hand(url: str) -> None:
    address = address_of(url)
    connection = await asyncpg.connect(address.dsn)
    try:
        await connection.execute(f"CREATE SCHEMA {address.schema}")
        for statement in schema.statements(address):
            await connection.execute(statement)
    finally:
        await connection.close()
    assert await schema.versions(url) == (schema.wanted(), schema.wanted())
    assert await schema.migrate(url) == []
    assert schema.statements(address, schema.wanted()) == []


async def test_prefixes_keep_two_stores_of_one_schema_apart(url: str, open_store: OpensStore) -> None:
    one, two = await open_store(f"{url}&prefix=one_"), await open_store(f"{url}&prefix=two_")
    await put_one(one, new("of one"))
    await put_one(two, new("of two"))
    assert keys(await listed(one, Filter())) == ["of one"]
    assert keys(await listed(two, Filter())) == ["of two"]


async def test_names_that_are_words_of_sql_can_be_used(url: str, postgres_schema: str, open_store: OpensStore) -> None:
    store = await open_store(f"{url}_order&prefix=select_")
    await put_one(store)
    assert len(await listed(store, Filter())) == 1


@pytest.mark.parametrize(
    ("dsn", "said"),
    [
        ("postgresql://bide@127.0.0.1:1/postgres", "cannot be reached"),
        ("{url}/nowhere", "create the database"),
    ],
)
async def test_what_is_wrong_is_said(dsn: str, said: str, postgres_url: str) -> None:
    store = PostgresStore(dsn.replace("{url}", postgres_url.rpartition("/")[0]), patience=0.2)
    with pytest.raises(StoreUnavailable, match=said):
        await store.open()


async def test_whoever_may_not_use_the_tables_is_told(url: str, postgres_schema: str) -> None:
    await schema.migrate(url)
    role = f"{postgres_schema}_r"
    await execute(url, f"CREATE ROLE {role} LOGIN")
    try:
        with pytest.raises((StoreUnavailable, StoreMismatch), match=r"grant|bide migrate"):
            await PostgresStore(url.replace("//bide@", f"//{role}@"), patience=0.2).open()
    finally:
        await execute(url, f"DROP ROLE {role}")


async def test_the_least_rights_are_enough_to_run(url: str, postgres_schema: str, open_store: OpensStore) -> None:
    await schema.migrate(url)
    role = f"{postgres_schema}_r"
    await execute(url, f"CREATE ROLE {role} LOGIN")
    try:
        await execute(url, f"GRANT USAGE ON SCHEMA {{schema}} TO {role}")
        await execute(url, f"GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA {{schema}} TO {role}")
        await execute(url, f"GRANT SELECT, UPDATE ON ALL SEQUENCES IN SCHEMA {{schema}} TO {role}")
        store = await open_store(url.replace("//bide@", f"//{role}@"), migrate=False)
        await put_one(store)
        assert len(await listed(store, Filter())) == 1
        await store.close()
    finally:
        await execute(url, f"DROP OWNED BY {role}")
        await execute(url, f"DROP ROLE {role}")


async def test_a_connection_that_is_given_up_while_it_gets_its_settings_is_closed(url: str) -> None:
    """One that is left open is told of when it is collected, as a ResourceWarning, and those are errors here."""
    address, name = address_of(url), f"slow {new_id()}"
    watching = await asyncpg.connect(address.dsn)
    try:
        slow = {"application_name": f"'{name}'; SELECT pg_sleep(20)"}
        connecting = asyncio.create_task(connect(address, within=10, session=slow))
        while not await watching.fetch(
            "SELECT FROM pg_stat_activity WHERE wait_event = 'PgSleep' AND query ~ $1", name
        ):
            assert not connecting.done()
        connecting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await connecting
        del connecting
        gc.collect()
        await watching.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = $1", name
        )
    finally:
        await watching.close()
