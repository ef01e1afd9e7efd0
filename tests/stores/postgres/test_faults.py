"""A server that is killed, that may only be read, that ends connections, that chooses a victim: nothing is lost."""

from __future__ import annotations

import asyncio

import asyncpg
import pytest
from tests.servers.fixtures import StartsPostgres
from tests.stores.postgres.conftest import OpensStore

from bide.core.errors import StoreUnavailable
from bide.core.records import At, Filter, In, Move, Result
from bide.stores.postgres.address import address_of
from bide.stores.postgres.queries import Names
from bide.testing.store_suite.acts import HOUR, NOW, done, keys, lease, listed, new, put, put_one, take

pytestmark = pytest.mark.faults


async def test_what_was_acknowledged_survives_a_kill_of_the_server(
    postgres_server: StartsPostgres, open_store: OpensStore
) -> None:
    server = postgres_server()
    store = await open_store(server.url, clock="server", patience=20.0)
    await put(store, *(new(str(number), due=In(0)) for number in range(50)))
    held = (await lease(store, 20)).tasks
    assert len(held) == 20
    assert all(await store.settle([done(one) for one in held[:10]], now=NOW))
    server.kill()
    adding = asyncio.create_task(store.add([new("meanwhile")], now=NOW))
    await asyncio.sleep(0.2)
    await asyncio.to_thread(server.start)
    [answer] = await adding
    assert answer.result is Result.CREATED
    left = {one.key: one for one in await listed(store, Filter())}
    assert set(left) == {str(number) for number in range(50)} - {one.key for one in held[:10]} | {"meanwhile"}
    assert answer.record is not None
    assert answer.record.token > max(one.token for one in left.values() if one.key != "meanwhile")
    await store.close()


async def test_a_read_only_server_is_unavailable_and_tried_again(
    postgres_server: StartsPostgres, open_store: OpensStore
) -> None:
    server = postgres_server()
    store = await open_store(server.url, patience=0.5)
    await put_one(store)

    async def set_read_only(word: str) -> None:
        # Of every new connection: as after a failover, when the address leads to a replica for a while
        connection = await asyncpg.connect(server.url)
        await connection.execute(f"ALTER ROLE bide SET default_transaction_read_only = {word}")
        await connection.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid() AND usename = 'bide'"
        )
        await connection.close()

    await set_read_only("on")
    await asyncio.sleep(0.1)  # until it is noticed that the connections have ended
    with pytest.raises(StoreUnavailable, match="read-only"):
        await store.add([new("other")], now=NOW)
    assert keys(await listed(store, Filter())) == ["k"], "what only reads goes on"
    connection = await asyncpg.connect(server.url)
    await connection.execute("SET default_transaction_read_only = off")
    await connection.execute("ALTER ROLE bide RESET default_transaction_read_only")
    await connection.close()
    await put_one(store, new("other"))


async def test_connections_that_the_server_ends_are_made_again(url: str, open_store: OpensStore) -> None:
    address = address_of(url)
    store = await open_store(url)
    await put(store, *(new(str(number)) for number in range(10)))
    connection = await asyncpg.connect(address.dsn)
    try:
        for number in range(10):
            assert await connection.fetch(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid() AND query ~ $1",
                address.schema,  # others use the server too
            )
            held = await take(store)
            assert (held.attempt, held.key) == (1, held.key)
            assert await store.settle([done(held)], now=NOW) == [True]
            await put_one(store, new(f"more {number}", due=At(NOW + HOUR)))
    finally:
        await connection.close()
    assert len(await listed(store, Filter())) == 10


async def test_the_victim_of_a_deadlock_tries_again(url: str, open_store: OpensStore) -> None:
    store = await open_store(url)
    address = address_of(url)
    table = Names(address.schema, address.prefix).parts["task"]
    await put(store, new("a"), new("b"))
    lock = f"SELECT FROM {table} WHERE key = $1 FOR UPDATE"
    # whoever has waited longer for a circle is its victim: the other one shall not be
    connection = await asyncpg.connect(address.dsn, server_settings={"deadlock_timeout": "10s"})
    try:
        transaction = connection.transaction()
        await transaction.start()
        await connection.execute(lock, "b")
        moving = asyncio.create_task(store.change([Move("t", "a", In(5)), Move("t", "b", In(5))], now=NOW))
        await asyncio.sleep(0.05)  # it has "a" now, and waits for "b"
        await connection.execute(lock, "a")
        await transaction.commit()
        answers = await moving
    finally:
        await connection.close()
    assert [answer.result for answer in answers] == [Result.MOVED, Result.MOVED]


async def test_what_somebody_has_locked_for_long_holds_up_nobody_else(url: str, open_store: OpensStore) -> None:
    store = await open_store(url)
    address = address_of(url)
    table = Names(address.schema, address.prefix).parts["task"]
    await put(store, new("locked", due=At(NOW - HOUR)), new("free"))
    connection = await asyncpg.connect(address.dsn)
    try:
        transaction = connection.transaction()
        await transaction.start()
        await connection.execute(f"SELECT FROM {table} WHERE key = 'locked' FOR UPDATE")
        leased = await lease(store, 5)
        assert keys(leased.tasks) == ["free"]
        assert leased.next_wake is not None
        assert NOW < leased.next_wake <= NOW + 20, "soon again, and no busy loop"
        assert (await lease(store, 5)).tasks == []
        await transaction.commit()
        assert keys((await lease(store, 5)).tasks) == ["locked"]
    finally:
        await connection.close()
