"""A server that is killed, that may only be read, that ends connections, that chooses a victim: nothing is lost."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from tests.stores.sql.database import Database
from tests.stores.sql.fixtures import OpensStore
from tests.waiting import pause, until

from bide.core.errors import PartlyFailed, StoreUnavailable
from bide.core.instants import At, In
from bide.core.records import Filter, Move, Result
from bide.testing.store_suite.base import (
    HOUR,
    NOW,
    add_all,
    change_all,
    done,
    keys,
    lease,
    listed,
    new,
    put,
    put_one,
    settle_all,
    take,
)


async def test_what_was_acknowledged_survives_a_kill_of_the_server(
    own_server: Any, own_url: str, open_store: OpensStore
) -> None:
    store = await open_store(own_url, clock="server")
    await put(store, *(new(str(number), due=In(0)) for number in range(50)))
    held = (await lease(store, 20, lasts=HOUR)).tasks
    assert len(held) == 20
    assert all(await settle_all(store, [done(one) for one in held[:10]]))
    own_server.kill()
    adding = asyncio.create_task(add_all(store, [new("meanwhile")]))
    await until(lambda: store._open().connections["write"].resent >= 1, "the call to be sent again")
    await asyncio.to_thread(own_server.start)
    [answer] = await adding
    assert answer.result is Result.CREATED
    left = {one.key: one for one in await listed(store, Filter())}
    assert set(left) == {str(number) for number in range(50)} - {one.key for one in held[:10]} | {"meanwhile"}
    assert answer.record is not None
    assert answer.record.token > max(one.token for one in left.values() if one.key != "meanwhile")


READ_ONLY = {
    # of every new connection: as after a failover, when the address leads to a replica for a while
    "postgres": (
        "ALTER DATABASE postgres SET default_transaction_read_only = on",
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid() AND usename = 'bide'",
    ),
    "mysql": ("SET GLOBAL read_only = 1",),
}
WRITABLE = {
    "postgres": (
        "SET default_transaction_read_only = off",
        "ALTER DATABASE postgres RESET default_transaction_read_only",
    ),
    "mysql": ("SET GLOBAL read_only = 0",),
}


async def test_a_read_only_server_is_unavailable_and_tried_again(
    database: Database, own_server: Any, own_url: str, open_store: OpensStore
) -> None:
    store = await open_store(own_url)
    await put_one(store)
    database.administer(own_server, *READ_ONLY[database.name])
    lane = store._open().connections["write"]
    lane.patience = 0.5
    if database.name == "postgres":
        await until(lambda: lane._connection.is_closed(), "the end of its connection to be noticed")
    try:
        with pytest.raises(StoreUnavailable, match="read-only"):
            await add_all(store, [new("other")])
        assert keys(await listed(store, Filter())) == ["k"], "what only reads goes on"
        lane.patience, lane.resent = 45.0, 0
        adding = asyncio.create_task(add_all(store, [new("other")]))
        await until(lambda: lane.resent >= 1, "the call to be sent again")
    finally:
        database.administer(own_server, *WRITABLE[database.name])
    [answer] = await adding
    assert answer.result is Result.CREATED


async def test_connections_that_the_server_ends_are_made_again(
    database: Database, own_server: Any, own_url: str, open_store: OpensStore
) -> None:
    store = await open_store(own_url)
    await put(store, *(new(str(number)) for number in range(10)))
    for number in range(10):
        assert database.end_connections(own_server) > 0
        held = await take(store)
        assert held.attempt == 1
        assert await settle_all(store, [done(held)]) == [True]
        await put_one(store, new(f"more {number}", due=At(NOW + HOUR)))
    assert len(await listed(store, Filter())) == 10


async def test_the_victim_of_a_deadlock_tries_again(database: Database, url: str, store: Any) -> None:
    await put(store, new("a"), new("b"), *(new(str(number), topic="u") for number in range(100)))
    async with database.somebody(url) as other:
        # PostgreSQL's victim is who has waited longer for a circle, MySQL's is who has written less: not this one
        if database.name == "postgres":
            await other.execute("SET deadlock_timeout = '10min'")
        await other.execute(database.write(url, "UPDATE {task} SET created_at = created_at + 1 WHERE topic = 'u'"))
        await database.lock(other, url, "b")
        moving = asyncio.create_task(change_all(store, [Move("t", "a", In(5)), Move("t", "b", In(5))]))
        await pause(0.05, why='it has "a" by then, and waits for "b"')
        await database.lock(other, url, "a")
        await other.commit()
        answers = await moving
    assert [answer.result for answer in answers] == [Result.MOVED, Result.MOVED]


async def test_what_somebody_has_locked_for_long_holds_up_nobody_else(database: Database, url: str, store: Any) -> None:
    await put(store, new("locked", due=At(NOW - HOUR)), new("free"))
    async with database.somebody(url) as other:
        await database.lock(other, url, "locked")
        leased = await lease(store, 5)
        assert keys(leased.tasks) == ["free"]
        assert leased.next_wake is not None
        assert NOW < leased.next_wake <= NOW + 20, "soon again, and no busy loop"
        assert (await lease(store, 5)).tasks == []
        await other.commit()
        assert keys((await lease(store, 5)).tasks) == ["locked"]


@pytest.mark.parametrize("database", ["mysql"], indirect=True)
async def test_a_task_that_the_server_does_not_take_is_refused_alone(
    own_server: Any, own_url: str, open_store: OpensStore
) -> None:
    own_server.ask("SET GLOBAL max_allowed_packet = 1048576")
    try:
        store = await open_store(own_url)
        large = new("large", payload=b"'" * 600_000)
        with pytest.raises(StoreUnavailable, match="max_allowed_packet is 1048576"):
            await add_all(store, [large])
        with pytest.raises(PartlyFailed) as failed:
            await add_all(store, [new("a"), large, new("b")])
        first, refused, last = failed.value.answers
        assert isinstance(refused, StoreUnavailable)
        assert [getattr(one, "result", None) for one in (first, last)] == [Result.CREATED] * 2
        assert sorted(keys(await listed(store, Filter()))) == ["a", "b"]
        await put(store, *(new(f"half {number}", payload=b"x" * 500_000) for number in range(8)))
        assert len(await listed(store, Filter())) == 10
        assert len((await lease(store, 10)).tasks) == 10
    finally:
        own_server.ask("SET GLOBAL max_allowed_packet = DEFAULT")
