"""A server that is killed, that may only be read, that ends connections, that chooses a victim: nothing is lost."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from tests.servers.fixtures import StartsMariaDb
from tests.servers.mariadb_server import ask
from tests.stores.mysql.conftest import OpensStore

from bide.core.errors import PartlyFailed, StoreUnavailable
from bide.core.records import At, Filter, In, Move, Result
from bide.stores.mysql.address import address_of
from bide.stores.mysql.connecting import Connection, connect
from bide.stores.mysql.queries import Names
from bide.testing.store_suite.acts import HOUR, NOW, done, keys, lease, listed, new, put, put_one, take

pytestmark = pytest.mark.faults


@asynccontextmanager
async def somebody(url: str) -> AsyncIterator[Connection]:
    """A connection of another program's, in a transaction."""
    connection = await connect(address_of(url), within=5)
    await connection.ask("SET SESSION innodb_lock_wait_timeout = 10; BEGIN")
    try:
        yield connection
    finally:
        await connection.close(within=5)


def locking(url: str, key: str) -> str:
    address = address_of(url)
    table = Names(address.schema, address.prefix).parts["task"]
    return f"SELECT token FROM {table} WHERE topic = 't' AND `key` = '{key}' FOR UPDATE"


async def test_what_was_acknowledged_survives_a_kill_of_the_server(
    mariadb_server: StartsMariaDb, open_store: OpensStore
) -> None:
    server = mariadb_server()
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
    mariadb_server: StartsMariaDb, open_store: OpensStore
) -> None:
    server = mariadb_server()
    store = await open_store(server.url, patience=0.5)
    await put_one(store)
    server.ask("SET GLOBAL read_only = 1")
    with pytest.raises(StoreUnavailable, match="read-only"):
        await store.add([new("other")], now=NOW)
    assert keys(await listed(store, Filter())) == ["k"], "what only reads goes on"
    adding = asyncio.create_task(store.add([new("other")], now=NOW))
    await asyncio.sleep(0.1)
    server.ask("SET GLOBAL read_only = 0")
    [answer] = await adding
    assert answer.result is Result.CREATED


async def test_connections_that_the_server_ends_are_made_again(
    mariadb_server: StartsMariaDb, open_store: OpensStore
) -> None:
    server = mariadb_server()
    store = await open_store(server.url)
    await put(store, *(new(str(number)) for number in range(10)))
    for number in range(10):
        for (connection,) in server.ask("SELECT id FROM information_schema.processlist WHERE user = 'bide'"):
            server.ask(f"KILL {connection}")
        held = await take(store)
        assert held.attempt == 1
        assert await store.settle([done(held)], now=NOW) == [True]
        await put_one(store, new(f"more {number}", due=At(NOW + HOUR)))
    assert len(await listed(store, Filter())) == 10


async def test_a_cancelled_call_leaves_nothing_out_of_step(url: str, open_store: OpensStore) -> None:
    store = await open_store(url)
    await put(store, *(new(str(number)) for number in range(100)))
    for number in range(40):
        moving = asyncio.create_task(store.change([Move("t", str(n), At(NOW + HOUR)) for n in range(100)], now=NOW))
        listing = asyncio.create_task(listed(store, Filter(topic="t")))
        await asyncio.sleep(number / 5_000)
        moving.cancel()
        listing.cancel()
        await asyncio.gather(moving, listing, return_exceptions=True)
    answers = await store.change([Move("t", str(n), At(NOW + 1)) for n in range(100)], now=NOW)
    assert [answer.result for answer in answers] == [Result.MOVED] * 100
    assert {one.wake_at for one in await listed(store, Filter(topic="t"))} == {NOW + 1}


async def test_the_victim_of_a_deadlock_tries_again(url: str, open_store: OpensStore) -> None:
    store = await open_store(url)
    await put(store, new("a"), new("b"), *(new(str(number), topic="u") for number in range(100)))
    address = address_of(url)
    table = Names(address.schema, address.prefix).parts["task"]
    async with somebody(url) as other:
        # who has written less is the victim: that shall not be this one
        await other.ask(f"UPDATE {table} SET created_at = created_at + 1 WHERE topic = 'u'")
        await other.ask(locking(url, "b"))
        moving = asyncio.create_task(store.change([Move("t", "a", In(5)), Move("t", "b", In(5))], now=NOW))
        await asyncio.sleep(0.05)  # it has "a" now, and waits for "b"
        await other.ask(locking(url, "a"))
        await other.ask("COMMIT")
        answers = await moving
    assert [answer.result for answer in answers] == [Result.MOVED, Result.MOVED]


async def test_what_somebody_has_locked_for_long_holds_up_nobody_else(url: str, open_store: OpensStore) -> None:
    store = await open_store(url)
    await put(store, new("locked", due=At(NOW - HOUR)), new("free"))
    async with somebody(url) as other:
        await other.ask(locking(url, "locked"))
        leased = await lease(store, 5)
        assert keys(leased.tasks) == ["free"]
        assert leased.next_wake is not None
        assert NOW < leased.next_wake <= NOW + 20, "soon again, and no busy loop"
        assert (await lease(store, 5)).tasks == []
        await other.ask("COMMIT")
        assert keys((await lease(store, 5)).tasks) == ["locked"]


async def test_a_task_that_the_server_does_not_take_is_refused_alone(
    mariadb_server: StartsMariaDb, open_store: OpensStore
) -> None:
    server = mariadb_server(options={"max-allowed-packet": "1M"})
    store = await open_store(server.url)
    large = new("large", payload=b"'" * 600_000)
    with pytest.raises(StoreUnavailable, match="max_allowed_packet is 1048576"):
        await store.add([large], now=NOW)
    with pytest.raises(PartlyFailed) as failed:
        await store.add([new("a"), large, new("b")], now=NOW)
    first, refused, last = failed.value.answers
    assert isinstance(refused, StoreUnavailable)
    assert [getattr(one, "result", None) for one in (first, last)] == [Result.CREATED] * 2
    assert sorted(keys(await listed(store, Filter()))) == ["a", "b"]
    await put(store, *(new(f"half {number}", payload=b"x" * 500_000) for number in range(8)))
    assert len(await listed(store, Filter())) == 10
    held = (await lease(store, 10)).tasks
    assert len(held) == 10
    [(most,)] = ask(server.url, "SELECT @@max_allowed_packet")
    assert most == 1_048_576
