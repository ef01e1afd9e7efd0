"""The server is gone for good, and its replica is promoted: clients that know both go on, and nothing is lost."""

from __future__ import annotations

import asyncio

import pytest
from tests.servers.fixtures import StartsMariaDb
from tests.servers.mariadb_server import DATABASE, HOST, USER, MariaDbServer
from tests.servers.waiting import wait_until
from tests.stores.mysql.conftest import OpensStore

from bide.core.errors import OutcomeUnknown
from bide.core.records import Filter, In, Record, Ref, Result
from bide.stores.mysql import schema
from bide.stores.mysql.address import address_of
from bide.stores.mysql.queries import Names
from bide.testing.proxy import Act, FaultProxy
from bide.testing.store_suite.acts import NOW, done, lease, listed, look, new, put, until

pytestmark = pytest.mark.faults


async def pair(start: StartsMariaDb, *, waits: int = 10_000) -> tuple[MariaDbServer, MariaDbServer, str]:
    """A primary, a replica that has what was acknowledged, and the URL of both, with tables.

    `waits`: milliseconds that a commit waits for the replica before it is acknowledged without.
    """
    log = {"log-bin": "binlog", "gtid-strict-mode": "1"}
    semi = {"rpl-semi-sync-master-enabled": "1", "rpl-semi-sync-master-timeout": str(waits)}
    primary = start(options={**log, **semi, "server-id": "1"})
    replica = start(options={**log, "server-id": "2", "rpl-semi-sync-slave-enabled": "1"}, follows=primary)

    def connected() -> bool:
        return bool(primary.ask("SHOW STATUS LIKE 'Rpl_semi_sync_master_clients'")[0][1] == "1")

    await asyncio.to_thread(wait_until, connected, "the replica to follow")
    url = f"mysql://{USER}@{HOST}:{primary.port},{HOST}:{replica.port}/{DATABASE}"
    await schema.migrate(url)
    return primary, replica, url


async def test_a_promoted_replica_goes_on(mariadb_server: StartsMariaDb, open_store: OpensStore) -> None:
    primary, replica, url = await pair(mariadb_server)
    store = await open_store(url, migrate=False, clock="server", patience=20.0)
    await put(store, *(new(str(number), due=In(0)) for number in range(30)))
    held = (await lease(store, 10)).tasks
    assert len(held) == 10
    assert await store.settle([done(one) for one in held[:5]], now=NOW) == [True] * 5
    primary.kill()
    adding = asyncio.create_task(store.add([new("meanwhile", due=In(0))], now=NOW))
    await asyncio.sleep(0.3)
    await asyncio.to_thread(replica.promote)
    [answer] = await adding
    assert answer.result is Result.CREATED
    assert await store.settle([done(one) for one in held[5:]], now=NOW) == [True] * 5
    left = await listed(store, Filter())
    assert {one.key for one in left} == {str(n) for n in range(30)} - {one.key for one in held} | {"meanwhile"}
    taken = (await lease(store, 50)).tasks
    assert len(taken) == 21
    assert min(one.token for one in taken) > max(one.token for one in held)
    await store.close()


async def test_a_replica_is_read_from_until_the_primary_is_back(
    mariadb_server: StartsMariaDb, open_store: OpensStore
) -> None:
    """Here it follows nobody any more: who stayed with it would find nothing due for ever."""
    primary, replica, url = await pair(mariadb_server, waits=100)
    store = await open_store(url, migrate=False, clock="server", patience=20.0)
    await put(store, new("old", due=In(0)))
    [old] = await listed(store, Filter())
    await asyncio.to_thread(wait_until, lambda: in_table(replica, url) == 1, "the replica to have it")
    await asyncio.to_thread(replica.ask, "STOP SLAVE")
    primary.kill()
    assert await look(store, old) == old, "the replica tells"
    adding = asyncio.create_task(store.add([new("new", due=In(0))], now=NOW))
    await asyncio.to_thread(primary.start)
    [answer] = await adding
    assert answer.result is Result.CREATED
    leased: list[Record] = []
    async with asyncio.timeout(10):
        while len(leased) < 2:
            leased += (await lease(store, 5)).tasks
            await asyncio.sleep(0.05)
    assert {one.key for one in leased} == {"old", "new"}
    found: Record | None = None
    async with asyncio.timeout(10):
        while found is None:
            found = await look(store, Ref("t", "new"))
    await store.close()


async def test_a_replica_that_is_being_made_is_not_taken_for_the_store(
    mariadb_server: StartsMariaDb, open_store: OpensStore
) -> None:
    """Without tables yet, it is what is reached after the answer was lost: the primary knows what was done."""
    primary, empty = mariadb_server(), mariadb_server(options={"read-only": "1"})
    async with FaultProxy(HOST, primary.port) as proxy:
        await schema.migrate(primary.url)
        url = f"mysql://{USER}@{HOST}:{proxy.port},{HOST}:{empty.port}/{DATABASE}"
        store = await open_store(url, migrate=False, clock="server", patience=20.0)
        await put(store, new("first", due=In(0)))
        await proxy.refuse()
        lost = proxy.fault(Act.LOSE_REPLY)
        adding = asyncio.create_task(store.add([new("second", due=In(0))], now=NOW))
        await until(lambda: bool(lost.hits), "the call to be sent")
        proxy.cut()
        reading = asyncio.create_task(listed(store, Filter()))
        for kind in ("add", "read"):
            await until(lambda kind=kind: store._open().lanes[kind].resent >= 3, "the other server to be asked")  # type: ignore[misc]
        await proxy.accept()
        assert {one.key for one in await reading} >= {"first"}, "and a read does not ask for a migration"
        [answer] = await adding
        assert answer.result is Result.CREATED
        assert {one.key for one in await listed(store, Filter())} == {"first", "second"}
        await store.close()


async def test_a_replica_is_not_asked_what_became_of_a_commit(
    mariadb_server: StartsMariaDb, open_store: OpensStore
) -> None:
    """It may be behind, and so the transaction would be said to have come to nothing."""
    primary, replica, _ = await pair(mariadb_server, waits=100)
    await asyncio.to_thread(replica.ask, "STOP SLAVE")
    async with FaultProxy(HOST, primary.port) as proxy:
        url = f"mysql://{USER}@{HOST}:{proxy.port},{HOST}:{replica.port}/{DATABASE}"
        store = await open_store(url, migrate=False, clock="server", patience=0.5)
        lost = proxy.fault(Act.LOSE_REPLY, when=lambda data: data.endswith(b"COMMIT"))

        async def schedules() -> None:
            async with store.transaction() as joined:
                await joined.add([new("committed", due=In(0))], now=NOW)
                await proxy.refuse()

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
