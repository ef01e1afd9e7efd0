"""Batches of leases on MySQL and MariaDB, and a primary that changes."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest
from tests.servers.fixtures import StartsMariaDb
from tests.stores.mysql.test_adding import ask
from tests.stores.sql.database import MySql
from tests.stores.sql.fixtures import OpensStore
from tests.waiting import until

from bide.core.errors import OutcomeUnknown, StoreError
from bide.core.instants import At, In
from bide.core.records import Cancel, Filter, Move, Page, Record, Ref, Result, State
from bide.stores.mysql import MySqlStore, lease_batches
from bide.stores.mysql.connection import address_of
from bide.stores.mysql.queries import Names
from bide.stores.mysql.schema import SCHEMA
from bide.testing.proxy import Act, FaultProxy
from bide.testing.store_suite.base import (
    HOUR,
    MINUTE,
    NOW,
    SECOND,
    add_all,
    counted,
    do,
    done,
    extend,
    keys,
    lease,
    listed,
    look,
    new,
    put,
    retry,
    see,
    settle_all,
)
from bide_proofs.servers.mariadb import DATABASE, USER, MariaDbServer
from bide_proofs.servers.process import HOST


async def noted(url: str) -> list[tuple[int, int]]:
    """Until when each batch is, and of how many tasks."""
    [rows] = await ask(url, "SELECT until, tasks FROM {0}_lease")
    return sorted((until, len(msgspec.msgpack.decode(tasks))) for until, tasks in rows)


async def five(store: MySqlStore) -> list[Record]:
    """Leased for a minute, together."""
    await put(store, *[new(str(number)) for number in range(5)])
    tasks = sorted((await lease(store, 5, lasts=MINUTE)).tasks, key=lambda task: task.key)
    assert keys(tasks) == list("01234")
    return tasks


async def test_a_batch_is_there_as_long_as_one_of_its_tasks_is_leased(url: str, store: Any) -> None:
    tasks = await five(store)
    assert await noted(url) == [(NOW + MINUTE, 5)]
    assert await settle_all(store, [done(task) for task in tasks[:2]]) == [True] * 2
    assert await settle_all(store, [retry(tasks[2], At(NOW + HOUR)), done(tasks[3], keep_until=NOW + HOUR)]) == (
        [True] * 2
    )
    assert await noted(url) == [(NOW + MINUTE, 5)]
    assert await settle_all(store, [done(tasks[4])]) == [True]
    assert await noted(url) == []


async def test_a_batch_ends_also_with_an_outcome_that_has_to_be_decided(url: str, store: Any) -> None:
    tasks = await five(store)
    assert await settle_all(store, [retry(task, At(NOW + HOUR)) for task in tasks]) == [True] * 5
    assert await noted(url) == []


async def test_what_is_lost_is_found_by_its_file(url: str, open_store: OpensStore) -> None:
    store, other = await open_store(url), await open_store(url)
    tasks = await five(store)
    await settle_all(store, [done(tasks[0])])
    await do(store, Cancel("t", "1", keep_until=NOW + HOUR))
    assert (await lease(other, 9, now=NOW + MINUTE - 1)).tasks == []
    found = await lease(other, 2, now=NOW + MINUTE, lasts=HOUR)
    assert [(task.losses, task.planned_at) for task in found.tasks] == [(1, tasks[2].planned_at)] * 2
    assert await noted(url) == [(NOW + MINUTE, 1), (NOW + MINUTE + HOUR, 2)], "the rest waits for who has room"
    rest = await lease(other, 2, now=NOW + MINUTE, lasts=HOUR)
    assert (len(rest.tasks), sorted(keys([*found.tasks, *rest.tasks]))) == (1, list("234"))
    assert await noted(url) == [(NOW + MINUTE + HOUR, 1), (NOW + MINUTE + HOUR, 2)]


async def test_what_is_lost_comes_before_what_became_due_later(store: Any) -> None:
    await five(store)
    await put(store, new("before", due=At(NOW + MINUTE - 1)), new("after", due=At(NOW + MINUTE + 1)))
    leased = await lease(store, 6, now=NOW + HOUR)
    first, *lost = keys(leased.tasks)
    assert (first, sorted(lost)) == ("before", list("01234"))


async def test_an_extended_lease_is_written_anew_when_its_batch_expires(url: str, store: Any) -> None:
    tasks = await five(store)
    for task in tasks[:3]:
        assert await extend(store, task, until=NOW + HOUR)
    assert await extend(store, tasks[3], until=NOW + 2 * HOUR)
    assert await noted(url) == [(NOW + MINUTE, 5)], "to extend costs a batch nothing"
    assert keys((await lease(store, 9, now=NOW + MINUTE, lasts=MINUTE)).tasks) == ["4"]
    assert await noted(url) == [(NOW + 2 * MINUTE, 1), (NOW + HOUR, 4)]
    found = await lease(store, 9, now=NOW + HOUR, lasts=HOUR)
    first, *later = keys(found.tasks)
    assert (first, sorted(later)) == ("4", list("012"))
    assert await noted(url) == [(NOW + 2 * HOUR, 1), (NOW + 2 * HOUR, 4)]


async def test_a_lease_can_be_made_to_end_sooner(url: str, store: Any) -> None:
    tasks = await five(store)
    for _ in range(2):
        assert await extend(store, tasks[3], until=NOW + SECOND)
    assert await noted(url) == [(NOW + SECOND, 1), (NOW + MINUTE, 5)]
    assert (await lease(store, 0)).next_wake == NOW + SECOND
    [lost] = (await lease(store, 9, now=NOW + SECOND, lasts=HOUR)).tasks
    assert (lost.key, lost.losses) == ("3", 1)
    assert sorted(keys((await lease(store, 9, now=NOW + MINUTE)).tasks)) == list("0124")


async def test_a_task_may_be_on_batch_twice(url: str, store: Any) -> None:
    """One batch is of the lease, the other of the time when it was to end sooner."""
    [task] = (await five(store))[:1]
    for end in (NOW + SECOND, NOW + HOUR):
        assert await extend(store, task, until=end)
    assert (await lease(store, 0, now=NOW + SECOND)).next_wake == NOW + SECOND
    assert (await lease(store, 9, now=NOW + SECOND)).tasks == []
    assert sorted(keys((await lease(store, 9, now=NOW + MINUTE, lasts=2 * HOUR)).tasks)) == list("1234")
    assert await noted(url) == [(NOW + HOUR, 1), (NOW + HOUR, 1), (NOW + MINUTE + 2 * HOUR, 4)]
    assert keys((await lease(store, 9, now=NOW + HOUR, lasts=2 * HOUR)).tasks) == ["0"]
    assert len(await noted(url)) == 2


async def test_what_somebody_has_locked_stays_noted(database: MySql, url: str, store: Any) -> None:
    await five(store)
    async with database.holding(url, "1"), database.holding(url, "3"):
        found = await lease(store, 9, now=NOW + MINUTE, lasts=HOUR)
        assert sorted(keys(found.tasks)) == ["0", "2", "4"]
        assert await noted(url) == [(NOW + MINUTE, 2), (NOW + MINUTE + HOUR, 3)]
        assert (await lease(store, 9, now=NOW + MINUTE)).tasks == []
    assert sorted(keys((await lease(store, 9, now=NOW + MINUTE)).tasks)) == ["1", "3"]


async def test_more_batches_than_one_look_takes(
    url: str, open_store: OpensStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease_batches, "AT_ONCE", 2)
    store = await open_store(url)
    await put(store, *[new(str(number)) for number in range(5)])
    for _ in range(5):
        assert len((await lease(store, 1, lasts=MINUTE)).tasks) == 1
    assert await noted(url) == [(NOW + MINUTE, 1)] * 5
    found = [await lease(store, 9, now=NOW + MINUTE, lasts=HOUR) for _ in range(3)]
    assert [len(leased.tasks) for leased in found] == [2, 2, 1]
    assert found[0].next_wake is not None
    assert found[0].next_wake <= NOW + MINUTE + SECOND, "there is more"


async def test_more_tasks_than_one_batch_takes(
    url: str, open_store: OpensStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease_batches, "_LARGEST", 2)
    store = await open_store(url)
    tasks = await five(store)
    assert await noted(url) == [(NOW + MINUTE, 1), (NOW + MINUTE, 2), (NOW + MINUTE, 2)]
    for task in tasks:
        await extend(store, task, until=NOW + HOUR)
    assert (await lease(store, 9, now=NOW + MINUTE)).tasks == []
    assert await noted(url) == [(NOW + HOUR, 1), (NOW + HOUR, 2), (NOW + HOUR, 2)]
    page = await store.find(Filter(topic="t", state=State.LEASED), Page(limit=9))
    assert keys(page.tasks) == list("01234")
    assert sorted(keys((await lease(store, 9, now=NOW + HOUR)).tasks)) == list("01234")


async def test_several_topics_are_in_batches_apart(url: str, store: Any) -> None:
    await put(store, *[new(str(number), topic=f"t{number % 2}") for number in range(6)])
    leased = await store.lease({"t0": 9, "t1": 2}, now=NOW, until=NOW + MINUTE, holder="w")
    assert sorted(keys(leased.tasks)) == list("01234")
    assert sorted(count for _, count in await noted(url)) == [2, 3]
    ours = [task for task in leased.tasks if task.topic == "t1"]
    assert await settle_all(store, [done(task) for task in ours]) == [True, True]
    assert await noted(url) == [(NOW + MINUTE, 3)]
    lost = await store.lease({"t0": 9, "t1": 9}, now=NOW + MINUTE, until=NOW + HOUR, holder="w")
    assert sorted(keys(lost.tasks)) == ["0", "2", "4", "5"]


async def test_a_settlement_that_is_undone_leaves_the_file(database: MySql, url: str, open_store: OpensStore) -> None:
    """Somebody has the task locked for longer than a call goes on; its worker is gone when he lets go."""
    store, other = await open_store(url, patience=0.5), await open_store(url)
    await put(store, new("a"), new("b"))
    a, b = (await lease(store, 2, lasts=MINUTE)).tasks
    async with database.holding(url, "a"):
        with pytest.raises(StoreError):
            await settle_all(store, [done(a)])
        assert await settle_all(store, [done(b)]) == [True]
    assert await noted(url) == [(NOW + MINUTE, 2)]
    assert (await see(store, a)).state is State.LEASED
    assert keys((await lease(other, 9, now=NOW + MINUTE)).tasks) == ["a"]


async def test_batches_of_what_is_over_are_taken_away_when_they_expire(url: str, open_store: OpensStore) -> None:
    store, other = await open_store(url), await open_store(url)
    tasks = await five(store)
    assert await settle_all(other, [done(task) for task in tasks]) == [True] * 5
    assert await look(other, tasks[0]) is None
    assert await noted(url) == [(NOW + MINUTE, 5)]
    assert (await lease(other, 9, now=NOW + MINUTE)).tasks == []
    assert await noted(url) == []


async def test_a_key_that_lives_again_is_not_lost_with_its_old_lease(store: Any) -> None:
    tasks = await five(store)
    await do(store, Cancel("t", "0", keep_until=NOW + HOUR))
    await put(store, new("0", due=At(NOW + 1)))
    [held] = (await lease(store, 9, now=NOW + 1, lasts=HOUR)).tasks
    assert held.key == "0"
    assert sorted(keys((await lease(store, 9, now=NOW + MINUTE, lasts=HOUR)).tasks)) == list("1234")
    assert await settle_all(store, [done(held), done(tasks[0])], now=NOW + MINUTE) == [True, False]
    assert (await do(store, Move("t", "1", At(NOW)))).result == "under_way"


async def test_what_was_settled_in_a_transaction_is_taken_off_the_batch_with_the_next_lease(
    url: str, store: Any
) -> None:
    tasks = await five(store)
    for task in tasks:
        async with store.transaction() as joined:
            assert await joined.settle([done(task)], now=NOW) == [True]
    assert await noted(url) == [(NOW + MINUTE, 5)]
    await put(store, new("next"))
    assert keys((await lease(store, lasts=HOUR)).tasks) == ["next"]
    assert await noted(url) == [(NOW + HOUR, 1)]


async def test_what_a_transaction_has_not_settled_stays_noted(url: str, store: Any) -> None:
    tasks = await five(store)
    assert await settle_all(store, [done(task) for task in tasks[1:]]) == [True] * 4

    async def fail() -> None:
        async with store.transaction() as joined:
            assert await joined.settle([done(tasks[0])], now=NOW) == [True]
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await fail()
    await put(store, new("next"))
    assert keys((await lease(store, lasts=HOUR)).tasks) == ["next"]
    assert await noted(url) == [(NOW + MINUTE, 5), (NOW + HOUR, 1)]
    assert keys((await lease(store, 9, now=NOW + MINUTE)).tasks) == ["0"]


async def test_several_who_look_at_once_find_each_lost_task_once(url: str, open_store: OpensStore) -> None:
    store, others = await open_store(url), [await open_store(url) for _ in range(4)]
    await put(store, *[new(f"{number:03}") for number in range(100)])
    for _ in range(10):
        assert len((await lease(store, 10, lasts=MINUTE)).tasks) == 10
    found: list[str] = []

    async def look_on(other: MySqlStore) -> None:
        for _ in range(20):
            found.extend(keys((await lease(other, 7, now=NOW + MINUTE, lasts=HOUR)).tasks))

    await asyncio.gather(*map(look_on, others))
    assert sorted(found) == [f"{number:03}" for number in range(100)]
    assert sum(count for _, count in await noted(url)) == 100


async def test_a_batch_that_cannot_be_read_holds_nobody_up(
    url: str, caplog: pytest.LogCaptureFixture, store: Any
) -> None:
    await five(store)
    await put(store, new("b", due=At(NOW + 1)))
    assert keys((await lease(store, now=NOW + 1, lasts=MINUTE)).tasks) == ["b"]
    await ask(url, f"UPDATE {{0}}_lease SET tasks = 'no list' WHERE until = {NOW + MINUTE}")
    assert counted(await store.tally(), "t", State.LEASED) == (6, True), "by the tasks themselves"
    assert (await lease(store, now=NOW + MINUTE)).tasks == []
    assert "cannot be read" in caplog.text
    assert await noted(url) == [(NOW + MINUTE + 1, 1)]
    assert keys((await lease(store, now=NOW + MINUTE + 1)).tasks) == ["b"]
    assert (await do(store, Cancel("t", "1", keep_until=NOW + HOUR))).result == "cancelled_while_leased"


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
        for kind in ("write", "read"):
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
