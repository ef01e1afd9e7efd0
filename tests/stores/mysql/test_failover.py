"""What a replica that cannot be written to is good for, and what it is not asked."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from tests.servers.fixtures import StartsMariaDb
from tests.stores.sql.database import MySql
from tests.stores.sql.fixtures import OpensStore
from tests.waiting import until

from bide.core.errors import OutcomeUnknown
from bide.core.instants import In
from bide.core.records import Filter, Record, Ref, Result
from bide.stores.mysql.connection import address_of
from bide.stores.mysql.queries import Names
from bide.stores.mysql.schema import SCHEMA
from bide.testing.proxy import Act, FaultProxy
from bide.testing.store_suite.base import HOUR, NOW, add_all, lease, listed, look, new, put
from bide_proofs.servers.mariadb import DATABASE, USER, MariaDbServer
from bide_proofs.servers.process import HOST


async def test_a_replica_is_read_from_until_the_primary_is_back(
    database: MySql, mariadb_server: StartsMariaDb, open_store: OpensStore
) -> None:
    """Here it follows nobody any more: who stayed with it would find nothing due for ever."""
    primary, replica, url = await database.pair(mariadb_server, waits=100)
    store = await open_store(url, migrate=False, clock="server")
    await put(store, new("old", due=In(0)))
    [old] = await listed(store, Filter())
    await until(lambda: in_table(replica, url) == 1, "the replica to have it")
    await asyncio.to_thread(replica.ask, "STOP SLAVE")
    primary.kill()
    assert await look(store, old) == old, "the replica tells"
    adding = asyncio.create_task(add_all(store, [new("new", due=In(0))]))
    await asyncio.to_thread(primary.start)
    [answer] = await adding
    assert answer.result is Result.CREATED
    leased: list[Record] = []

    async def both() -> Any:
        leased.extend((await lease(store, 5, lasts=HOUR)).tasks)
        return len(leased) == 2

    await until(both, "the primary to be leased from")
    assert {one.key for one in leased} == {"old", "new"}

    async def seen() -> Any:
        return await look(store, Ref("t", "new"))

    await until(seen, "the primary to be read from")
    await store.close()


async def test_a_replica_that_is_being_made_is_not_taken_for_the_store(
    database: MySql, mariadb_server: StartsMariaDb, open_store: OpensStore
) -> None:
    """Without tables yet, it is what is reached after the answer was lost: the primary knows what was done."""
    primary, empty = mariadb_server(), mariadb_server(options={"read-only": "1"})
    async with FaultProxy(HOST, primary.port) as proxy:
        await SCHEMA.migrate(primary.url)
        url = f"mysql://{USER}@{HOST}:{proxy.port},{HOST}:{empty.port}/{DATABASE}"
        store = await open_store(url, migrate=False, clock="server")
        await put(store, new("first", due=In(0)))
        await proxy.refuse()
        lost = proxy.fault(Act.LOSE_REPLY)
        adding = asyncio.create_task(add_all(store, [new("second", due=In(0))]))
        await until(lambda: bool(lost.hits), "the call to be sent")
        proxy.cut()
        reading = asyncio.create_task(listed(store, Filter()))
        for kind in ("add", "read"):
            lane = store._open().connections[kind]
            await until(lambda lane=lane: lane.resent >= 3, "the other server to be asked")  # type: ignore[misc]
        await proxy.accept()
        assert {one.key for one in await reading} >= {"first"}, "and a read does not ask for a migration"
        [answer] = await adding
        assert answer.result is Result.CREATED
        assert {one.key for one in await listed(store, Filter())} == {"first", "second"}
        await store.close()


async def test_a_replica_is_not_asked_what_became_of_a_commit(
    database: MySql, mariadb_server: StartsMariaDb, open_store: OpensStore
) -> None:
    """It may be behind, and so the transaction would be said to have come to nothing."""
    primary, replica, _ = await database.pair(mariadb_server, waits=100)
    await asyncio.to_thread(replica.ask, "STOP SLAVE")
    async with FaultProxy(HOST, primary.port) as proxy:
        url = f"mysql://{USER}@{HOST}:{proxy.port},{HOST}:{replica.port}/{DATABASE}"
        store = await open_store(url, migrate=False, clock="server")
        lost = proxy.fault(Act.LOSE_REPLY, when=lambda data: data.endswith(b"COMMIT"))

        async def schedules() -> None:
            async with store.transaction() as joined:
                await joined.add([new("committed", due=In(0))], now=NOW)
                await proxy.refuse()
                for lane in store._open().connections.values():
                    lane.patience = 0.5

        with pytest.raises(OutcomeUnknown, match="cannot be found out"):
            await schedules()
        assert lost.hits == 1
        await proxy.accept()
        assert await look(await open_store(primary.url, clock="server"), Ref("t", "committed")) is not None
        await store.close()


def in_table(server: MariaDbServer, url: str) -> int:
    """How many tasks it has."""
    address = address_of(url)
    table = Names(address.schema, address.prefix).parts["task"]
    [(count,)] = server.ask(f"SELECT COUNT(*) FROM {table}")
    return int(count)
