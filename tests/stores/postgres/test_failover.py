"""The server is gone for good, and its replica is promoted: clients that know both go on, and nothing is lost."""

from __future__ import annotations

import asyncio

import pytest
from tests.servers.fixtures import StartsPostgres
from tests.servers.postgres_server import DATABASE, HOST, USER
from tests.stores.postgres.conftest import OpensStore

from bide.core.records import Filter, In, Result
from bide.stores.postgres import schema
from bide.testing.store_suite.acts import NOW, done, lease, listed, new, put

pytestmark = pytest.mark.faults


async def test_a_promoted_replica_goes_on(postgres_server: StartsPostgres, open_store: OpensStore) -> None:
    primary = postgres_server()
    replica = postgres_server(follows=primary)
    primary.ask("ALTER SYSTEM SET synchronous_standby_names = '*'")  # what is acknowledged is there too
    primary.ask("SELECT pg_reload_conf()")
    url = f"postgresql://{USER}@{HOST}:{primary.port},{HOST}:{replica.port}/{DATABASE}?target_session_attrs=read-write"
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
