"""The schema: made by whoever may, by one at a time, and refused with what to do where it is missing or older."""

from __future__ import annotations

import asyncio

import pytest
from tests.servers.fixtures import StartsMariaDb
from tests.servers.mariadb_server import ask
from tests.stores.mysql.conftest import OpensStore

from bide.core.errors import StoreMismatch, StoreUnavailable
from bide.core.records import Filter
from bide.stores.mysql import MySqlStore, schema
from bide.stores.mysql.address import address_of
from bide.stores.mysql.queries import Names
from bide.testing.store_suite.acts import keys, listed, new, put_one


def execute(url: str, statement: str) -> None:
    address = address_of(url)
    ask(url, Names(address.schema, address.prefix).write(statement))


async def test_a_missing_schema_is_refused_with_what_to_do(url: str) -> None:
    assert await schema.versions(url) == (0, schema.wanted())
    store = MySqlStore(url)
    with pytest.raises(StoreMismatch, match="bide migrate"):
        await store.open()
    assert await store.schema_version() == (0, schema.wanted())


async def test_an_older_schema_is_refused_and_a_newer_one_is_not(url: str, open_store: OpensStore) -> None:
    await schema.migrate(url)
    execute(url, "UPDATE {migration} SET number = 0")
    with pytest.raises(StoreMismatch, match="bide migrate"):
        await MySqlStore(url).open()
    execute(url, "UPDATE {migration} SET number = 1")
    execute(url, "INSERT INTO {migration} (number, name, checksum) VALUES (999, 'later', 'x')")
    store = await open_store(url)
    await put_one(store)


async def test_a_migration_of_another_text_is_refused(url: str) -> None:
    await schema.migrate(url)
    execute(url, "UPDATE {migration} SET checksum = 'another'")
    with pytest.raises(StoreMismatch, match="migration 1"):
        await MySqlStore(url).open()
    with pytest.raises(StoreMismatch, match="migration 1"):
        await schema.migrate(url)


async def test_twenty_may_migrate_at_once(url: str, open_store: OpensStore) -> None:
    made = await asyncio.gather(*(schema.migrate(url) for _ in range(20)))
    assert sorted(map(len, made)) == [0] * 19 + [len(schema.migrations())]
    await put_one(await open_store(url, migrate=False))


async def test_a_migration_that_was_cut_short_is_begun_again(url: str, open_store: OpensStore) -> None:
    address = address_of(url)
    ask(url, f"CREATE DATABASE `{address.schema}`")
    for statement in schema.statements(address)[:3]:
        ask(url, statement)
    assert await schema.versions(url) == (0, schema.wanted())
    await put_one(await open_store(url))


async def test_what_would_be_run_can_be_run_by_hand(url: str) -> None:
    address = address_of(url)
    made, *planned = await schema.plan(url)
    assert made.startswith(f"CREATE DATABASE IF NOT EXISTS `{address.schema}`")
    ask(url, made)
    assert await schema.plan(url) == planned == schema.statements(address)
    for statement in planned:
        ask(url, statement)
    assert await schema.versions(url) == (schema.wanted(), schema.wanted())
    assert await schema.migrate(url) == []
    assert await schema.plan(url) == []


async def test_prefixes_keep_two_stores_of_one_database_apart(url: str, open_store: OpensStore) -> None:
    one, two = await open_store(f"{url}&prefix=one_"), await open_store(f"{url}&prefix=two_")
    await put_one(one, new("of one"))
    await put_one(two, new("of two"))
    assert keys(await listed(one, Filter())) == ["of one"]
    assert keys(await listed(two, Filter())) == ["of two"]


async def test_names_that_are_words_of_sql_can_be_used(url: str, open_store: OpensStore) -> None:
    store = await open_store(f"{url}-order&prefix=select_")
    await put_one(store)
    assert len(await listed(store, Filter())) == 1


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("mysql://bide@127.0.0.1:1/bide", "cannot be reached"),
        ("{url}?ssl_mode=required", "TLS|SSL"),
    ],
)
async def test_what_is_wrong_is_said(url: str, said: str, mariadb_server: StartsMariaDb) -> None:
    if "{url}" in url:
        url = url.replace("{url}", mariadb_server(options={"skip-ssl": "1"}).url)
    store = MySqlStore(url, patience=0.2)
    with pytest.raises(StoreUnavailable, match=said):
        await store.open()


async def test_a_database_that_is_not_there_is_to_be_made(mysql_url: str) -> None:
    with pytest.raises(StoreMismatch, match="bide migrate"):
        await MySqlStore(f"{mysql_url.rpartition('/')[0]}/nowhere", patience=0.2).open()


async def test_the_least_rights_are_enough_to_migrate(mariadb_server: StartsMariaDb) -> None:
    server = mariadb_server()
    server.ask("CREATE USER builder@'%'")
    server.ask("GRANT SELECT, INSERT, UPDATE, CREATE, INDEX, ALTER ON bide.* TO builder@'%'")
    assert await schema.migrate(server.url.replace("//bide@", "//builder@")) == ["0001 tasks"]
