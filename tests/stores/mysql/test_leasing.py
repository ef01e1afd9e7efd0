"""Leases begin where the one before left off, also within one instant."""

from __future__ import annotations

import time
from typing import Any

import pytest
from tests.stores.mysql.connections import by_asyncmy
from tests.stores.mysql.test_purging import ask
from tests.stores.sql.fixtures import OpensStore
from tests.waiting import until

from bide import Bide, Task
from bide.core import lifecycle
from bide.core.instants import In
from bide.core.records import Record
from bide.stores.mysql import MySqlStore
from bide.stores.mysql.connection import Connection, address_of, connect
from bide.stores.mysql.lease_batches import BatchKey, LeaseBatch, LeasedRows, Settling
from bide.stores.sql.leasing import POLL
from bide.testing.store_suite.base import HOUR, MINUTE, NOW, done, lease, new, put, put_one, settle_all, take


async def long_due(url: str, store: MySqlStore, count: int) -> None:
    """So many tasks that were due at one instant, ten seconds ago."""
    await put(store, *[new(f"{number:03}", due=In(HOUR)) for number in range(count)])
    await ask(url, f"UPDATE {{0}}_task SET at = {int(time.time() * 1000) - 10_000}")


async def test_one_instant_is_leased_part_by_part(url: str, open_store: OpensStore) -> None:
    store = await open_store(url, clock="server")
    await long_due(url, store, 300)
    keys = []
    for _ in range(3):
        keys += [one.key for one in (await lease(store, 100, lasts=HOUR)).tasks]
    assert keys == [f"{number:03}" for number in range(300)]
    assert (await lease(store, 100)).tasks == []


async def test_a_worker_polls_by_one_packet_that_only_reads(
    url: str, open_store: OpensStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = await open_store(url, clock="server")
    await put(store, new(due=In(HOUR)))
    await lease(store)
    sent: list[str] = []
    ask_server = Connection.ask

    async def ask_and_note(connection: Connection, packet: Any, *rest: Any) -> Any:
        sent.append(str(packet))
        return await ask_server(connection, packet, *rest)

    monkeypatch.setattr(Connection, "ask", ask_and_note)
    for _ in range(10):
        polled = await lease(store)
        assert polled.again_by is not None
        assert polled.again_by <= polled.now + POLL
    assert len(sent) == 10
    assert not any(word in packet for packet in sent for word in ("UPDATE", "BEGIN"))


async def test_a_worker_that_has_nothing_to_do_finds_what_another_process_schedules(
    url: str, open_store: OpensStore
) -> None:
    app, other = Bide(MySqlStore(url), max_sleep="1h"), await open_store(url, clock="server")
    handled: list[str] = []

    @app.handler("t")
    async def handle(task: Task[Any]) -> None:
        handled.append(task.key)

    async with app, app.worker():
        for count in (1, 2):  # the second finds a worker that sleeps
            await put_one(other, new(str(count), due=In(0)))
            await until(lambda: len(handled) == count, "the task to be done")  # noqa: B023 - awaited at once


async def test_what_was_locked_when_its_instant_was_passed_comes_with_a_thorough_look(
    url: str, open_store: OpensStore
) -> None:
    store = await open_store(url, clock="server")
    await long_due(url, store, 300)
    async with by_asyncmy(url) as caller:
        table = f"`{address_of(url).schema}`.bide_task"
        await caller.execute(f"UPDATE {table} SET created_at = created_at + 1 WHERE topic = 't' AND `key` = '005'")
        keys = [one.key for _ in range(2) for one in (await lease(store, 100, lasts=HOUR)).tasks]
        assert "005" not in keys
        await caller.rollback()

    async def comes() -> Any:
        keys.extend(one.key for one in (await lease(store, 20, lasts=HOUR)).tasks)
        return "005" in keys

    await until(comes, "what was locked")
    assert len(set(keys)) == len(keys)


def leased(key: str, token: int, group: str | None = None) -> Record:
    task = lifecycle.schedule(new(key, group=group), None, NOW, token - 1).record
    assert task is not None
    return lifecycle.lease(task, NOW, NOW + MINUTE, "w", token)


def a_batch(left: int, topic: str = "t") -> LeaseBatch:
    return LeaseBatch(BatchKey(topic, NOW, 1, 5, "w"), left)


def test_rows_are_remembered_until_they_are_settled() -> None:
    rows, one, two, batch = LeasedRows(), leased("1", 5), leased("2", 5, group="g"), a_batch(9)
    rows.leased([8, 7], [one, two], [batch, batch])
    assert rows.of([done(one), done(two)]) == Settling(
        [(7, 5, True, batch), (8, 5, False, batch)], True, {batch: 2}, []
    )
    assert rows.of([done(one)]) == Settling([], False, {}, [])
    rows.leased([8], [one], [batch])
    assert rows.of([done(leased("1", 6))]) == Settling([], False, {}, []), "by another token"
    rows.leased([7], [two], [batch])
    assert rows.of([done(one), done(one), done(two)]).complete is False, "twice"
    assert rows.of([done(one), done(two)]) == Settling([], False, {}, [])


def test_a_batch_ends_with_the_settlement_of_its_last_task() -> None:
    rows, tasks, batch = LeasedRows(), [leased(key, 5) for key in "123"], a_batch(3)
    rows.leased([1, 2, 3], tasks, [batch] * 3)
    first = rows.of([done(tasks[0])])
    assert first.emptied == []
    rest = rows.of([done(tasks[1]), done(tasks[2])])
    assert rest.emptied == [], "the first may turn out not to be settled"
    first.settled()
    rows.leased([2, 3], tasks[1:], [batch] * 2)
    assert rows.of([done(tasks[1]), done(tasks[2]), done(leased("x", 5))]).emptied == [batch.name]


def test_a_settlement_that_came_to_nothing_leaves_its_batch() -> None:
    rows, tasks, batch = LeasedRows(), [leased(key, 5) for key in "12"], a_batch(2)
    rows.leased([1, 2], tasks, [batch] * 2)
    rows.of([done(tasks[0])])
    last = rows.of([done(tasks[1])])
    last.settled()
    assert (last.emptied, batch.left) == ([], 1)


def test_what_is_never_settled_here_is_forgotten_in_the_end() -> None:
    rows, batch = LeasedRows(), a_batch(30_000)
    for number in range(30_000):
        rows.leased([number], [leased(str(number), 5)], [batch])
    assert rows.of([done(leased("1", 5))]).rows == []
    assert rows.of([done(leased("29999", 5))]).rows == [(29_999, 5, False, batch)]


async def test_two_leases_and_one_of_another_process_are_settled_together(url: str, open_store: OpensStore) -> None:
    store, other = await open_store(url), await open_store(url)
    await put(store, new("1"), new("2"), new("3"))
    ours = (await lease(store, 2)).tasks
    theirs = await take(other)
    assert await settle_all(store, [done(one) for one in (*ours, theirs)]) == [True] * 3
    assert await settle_all(store, [done(one) for one in (*ours, theirs)]) == [False] * 3


async def test_what_is_gone_at_the_end_of_a_range_does_not_hold_up_the_rest(url: str, open_store: OpensStore) -> None:
    """The row behind the range is then somebody else's, who has it locked."""
    store = await open_store(url, clock="server")
    await long_due(url, store, 11)
    held = (await lease(store, 10, lasts=HOUR)).tasks
    await ask(url, "DELETE FROM {0}_task WHERE `key` = '009'")
    async with by_asyncmy(url) as caller:
        table = f"`{address_of(url).schema}`.bide_task"
        await caller.execute(f"SELECT 1 FROM {table} WHERE topic = 't' AND `key` = '010' FOR UPDATE")
        assert await settle_all(store, [done(one) for one in held]) == [True] * 9 + [False]
        await caller.rollback()


async def test_what_fails_meanwhile_leaves_no_answer_to_another_question(url: str) -> None:
    connection = await connect(address_of(url), within=10)
    meanwhile: list[int] = []
    assert await connection.ask("SELECT 1; SELECT 2", lambda: meanwhile.append(1)) == [((1,),), ((2,),)]
    assert meanwhile == [1]
    assert connection.usable
    with pytest.raises(IndexError):
        await connection.ask("SELECT 3", lambda: meanwhile.__delitem__(2))
    assert not connection.usable
