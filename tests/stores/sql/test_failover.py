"""The server is gone for good, and its replica is promoted: clients that know both go on, and nothing is lost."""

from __future__ import annotations

import asyncio
from typing import Any

from tests.stores.sql.database import Database
from tests.stores.sql.fixtures import OpensStore
from tests.waiting import until

from bide.core.instants import In
from bide.core.records import Filter, Result
from bide.testing.store_suite.base import HOUR, add_all, done, lease, listed, new, put, settle_all


async def test_a_promoted_replica_goes_on(database: Database, starts: Any, open_store: OpensStore) -> None:
    primary, replica, url = await database.pair(starts)
    store = await open_store(url, clock="server")
    await put(store, *(new(str(number), due=In(0)) for number in range(30)))
    held = (await lease(store, 10, lasts=HOUR)).tasks
    assert len(held) == 10
    assert await settle_all(store, [done(one) for one in held[:5]]) == [True] * 5
    primary.kill()
    adding = asyncio.create_task(add_all(store, [new("meanwhile", due=In(0))]))
    await until(lambda: store._open().connections["add"].resent >= 1, "the call to be sent again")
    await asyncio.to_thread(replica.promote)
    [answer] = await adding
    assert answer.result is Result.CREATED
    assert await settle_all(store, [done(one) for one in held[5:]]) == [True] * 5
    left = await listed(store, Filter())
    assert {one.key for one in left} == {str(n) for n in range(30)} - {one.key for one in held} | {"meanwhile"}
    taken = (await lease(store, 50)).tasks
    assert len(taken) == 21
    assert min(one.token for one in taken) > max(one.token for one in held)
