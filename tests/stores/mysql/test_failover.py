"""The server is gone for good, and its replica is promoted: clients that know both go on, and nothing is lost."""

from __future__ import annotations

import asyncio

import pytest
from tests.servers.fixtures import StartsMariaDb
from tests.servers.mariadb_server import DATABASE, HOST, USER
from tests.servers.waiting import wait_until
from tests.stores.mysql.conftest import OpensStore

from bide.core.records import Filter, In, Result
from bide.stores.mysql import schema
from bide.testing.store_suite.acts import NOW, done, lease, listed, new, put

pytestmark = pytest.mark.faults


async def test_a_promoted_replica_goes_on(mariadb_server: StartsMariaDb, open_store: OpensStore) -> None:
    log = {"log-bin": "binlog", "gtid-strict-mode": "1"}
    primary = mariadb_server(options={**log, "server-id": "1", "rpl-semi-sync-master-enabled": "1"})
    replica = mariadb_server(options={**log, "server-id": "2", "rpl-semi-sync-slave-enabled": "1"}, follows=primary)

    def connected() -> bool:
        return bool(primary.ask("SHOW STATUS LIKE 'Rpl_semi_sync_master_clients'")[0][1] == "1")

    await asyncio.to_thread(wait_until, connected, "the replica to follow")  # what is acknowledged is there too
    url = f"mysql://{USER}@{HOST}:{primary.port},{HOST}:{replica.port}/{DATABASE}"
    await schema.migrate(url)
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
