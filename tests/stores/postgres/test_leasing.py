"""Leasing, moving, notifications and batches on PostgreSQL."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import asyncpg
import psycopg
import pytest
from tests.stores.sql.database import Postgres
from tests.stores.sql.fixtures import OpensStore
from tests.waiting import pause, until

from bide.core.instants import At, Due, In
from bide.core.records import Move, NewTask, Record, Ref, Result
from bide.ports import Verbs
from bide.stores.postgres import PostgresStore, wakes
from bide.stores.postgres.connection import address_of
from bide.stores.postgres.queries import Names
from bide.stores.postgres.wakes import WakeMessages
from bide.stores.sql.leasing import POLL
from bide.testing.proxy import FaultProxy
from bide.testing.store_suite.base import DAY, HOUR, NOW, add_all, change_all, lease, new, put, put_one

Opens = Callable[..., Awaitable[PostgresStore]]


async def test_it_is_taken_whole_each_once(through: Opens) -> None:
    store = await through(clock="server")
    await put(store, *(new(str(number), due=In(0)) for number in range(450)), new("later", due=In(HOUR)))
    leases = [await lease(store, 100, lasts=HOUR) for _ in range(5)]
    assert [len(leased.tasks) for leased in leases] == [100] * 4 + [50]
    for leased in leases:
        assert all((record.holder, record.attempt) == ("w", 1) for record in leased.tasks)
        assert all(record.wake_at > leased.now for record in leased.tasks)
        wakes = [record.planned_at for record in leased.tasks]
        assert wakes == sorted(wakes)
    taken = [record.key for leased in leases for record in leased.tasks]
    assert sorted(taken, key=int) == [str(number) for number in range(450)]
    tokens = [max(record.token for record in leased.tasks) for leased in leases]
    assert tokens == sorted(set(tokens)), "each lease has a higher token than the one before"
    last = leases[-1]
    assert last.next_wake is not None
    assert last.next_wake <= last.now + 1_000
    again = await lease(store, 100, lasts=HOUR)
    assert again.tasks == []
    assert again.next_wake is not None
    assert again.next_wake > again.now, "somebody who asks at once would never stop"


async def test_what_somebody_changes_just_then_is_looked_at_again(database: Postgres, url: str, store: Any) -> None:
    """The statement sees the task as it was, waits for who has it, and must not answer from what it saw."""
    await put(store, new("a", due=At(NOW + HOUR)), new("b", due=At(NOW + HOUR)), new("c", due=At(NOW + HOUR)))
    theirs, own = [await asyncpg.connect(address_of(url).dsn) for _ in range(2)]
    schema = address_of(url).schema
    async with own.transaction():
        transaction = theirs.transaction()
        await transaction.start()
        await theirs.execute(f"UPDATE \"{schema}\".task SET at = at + 5, due_at = due_at + 5 WHERE key = 'a'")
        await theirs.execute(f"DELETE FROM \"{schema}\".task WHERE key = 'b'")
        moves = [Move("t", key, At(NOW + 2 * HOUR)) for key in "abc"]
        moved = asyncio.create_task(store.using(own).change(moves, now=NOW))  # waits for a lock as long as it takes
        waits = f"SELECT FROM pg_locks WHERE NOT granted AND pid = {own.get_server_pid()}"

        await until(lambda: database.ask(url, waits), "it to wait for the lock")
        await transaction.commit()
        answers = await moved
    assert [(one.result, one.was) for one in answers] == [
        (Result.MOVED, NOW + HOUR + 5), (Result.NOT_FOUND, None), (Result.MOVED, NOW + HOUR),
    ]  # fmt: skip
    there = await store.get([Ref("t", key) for key in "abc"])
    assert [one and one.due_at for one in there] == [NOW + 2 * HOUR, None, NOW + 2 * HOUR]
    await own.close()
    await theirs.close()


def test_what_listeners_have_just_heard_is_not_told_again() -> None:
    telling = WakeMessages(cap=60_000)
    assert telling.messages({"t": NOW + 5_000}, NOW)
    assert telling.messages({"t": NOW + 5_000}, NOW) == [], "they will look then anyhow"
    assert telling.messages({"t": NOW + 6_000}, NOW + 10) == []
    assert telling.messages({"t": NOW + 4_000}, NOW + 20), "earlier"
    assert telling.messages({"t": NOW + 6_000}, NOW + 200), "some may have looked since, and found nothing"
    assert telling.messages({"t": NOW + 6_000}, NOW + 5_900), "they may look before this is committed"
    assert telling.messages({"t": NOW}, NOW)
    assert telling.messages({"t": NOW}, NOW), "what is due now is told each time"
    assert telling.messages({"t": NOW + 5_000}, NOW)
    telling.forget(["t"])
    assert telling.messages({"t": NOW + 5_000}, NOW), "it was not told after all"


def test_many_topics_are_told_in_messages_that_the_server_takes() -> None:
    said = WakeMessages(cap=60_000).messages({f"{number:0200}": NOW for number in range(100)}, NOW)
    assert len(said) == 100
    assert all(len(one.encode()) < 8_000 for one in said)


async def test_a_batch_sends_one_message(url: str, store: Any) -> None:
    address = address_of(url)
    heard: list[str] = []
    connection = await asyncpg.connect(address.dsn)
    try:
        channel = Names(address.schema, address.prefix).channel
        await connection.add_listener(channel, lambda *said: heard.append(said[3]))
        await put(store, *(new(str(number)) for number in range(1_000)))
        await put(store, *(new(f"far {number}", due=In(DAY)) for number in range(10)))
        await until(lambda: bool(heard), "a message")
        await pause(0.05, why="no other message is to come")
        assert heard == [f'{{"t":{NOW}}}']
    finally:
        await connection.close()


async def test_a_deaf_subscription_is_replaced(
    through: Callable[..., Any], proxy: FaultProxy, url: str, open_store: OpensStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wakes, "ECHO_EVERY", 0.3)
    store, other = await through(), await open_store(url)
    heard: list[tuple[str, int]] = []
    listening = await store.listen(["t"], lambda topic, wake: heard.append((topic, wake)))

    async def told() -> Any:
        await put_one(other)
        return heard

    await until(told, "a message")
    proxy.hold()
    opened = store._opened
    await until(lambda: opened.notifications.replaced > 0 and opened.look_every, "it to be found deaf")
    monkeypatch.setattr(wakes, "ECHO_EVERY", 60.0)
    await proxy.heal()
    proxy.cut()  # what is held stays so
    await until(lambda: opened.look_every is None, "another")
    heard.clear()
    await until(told, "a message after that")
    await listening.close()


async def test_doctor_listens_to_itself(store: Any) -> None:
    assert [one.ok for one in await store.diagnose() if "LISTEN" in one.what] == [True]


async def test_behind_a_pooling_proxy_workers_poll(url: str, open_store: OpensStore) -> None:
    store = await open_store(f"{url}&pooler=transaction", clock="server")
    listening = await store.listen(["t"], lambda topic, wake: None)
    leased = await lease(store)
    assert leased.again_by is not None
    assert leased.again_by <= leased.now + POLL
    found = [one for one in await store.diagnose() if "pooling" in one.what]
    assert found
    assert not found[0].ok
    await listening.close()


async def test_a_worker_that_is_notified_need_not_poll(url: str, open_store: OpensStore) -> None:
    store = await open_store(url, clock="server")
    unnotified = await lease(store)
    assert unnotified.again_by is not None
    assert unnotified.again_by <= unnotified.now + POLL
    listening = await store.listen(["t"], lambda topic, wake: None)
    notified = await lease(store)
    assert notified.again_by is None
    await listening.close()


# --- batches as the arrays that statements take: of any length, with what is alike and what is not

Makes = Callable[[int], list[NewTask]]
LENGTHS = (1, 2, 12, 13, 100)
"""Without divisors and with them."""


def mixed(length: int) -> list[NewTask]:
    """Tasks of which no field is the same throughout, and each that may be null is so for some."""

    def due(number: int) -> Due:
        return At(NOW + number) if number % 2 else In(HOUR + number)

    return [
        new(
            f"{number * 7 % length}", topic=f"t{number % 3}", due=due(number), payload=bytes([number, 0]),
            group=f"g{number}" if number % 3 else None, deadline=NOW + 9 * HOUR if number % 5 else None,
            options=bytes([number]) if number % 4 else b"",
        )
        for number in range(length)
    ]  # fmt: skip


def alike(length: int) -> list[NewTask]:
    return [new(f"{number}", due=In(HOUR), payload=bytes([number, 0])) for number in range(length)]


async def check(verbs: Verbs, tasks: list[NewTask]) -> None:
    """Schedule them, and read back what was asked for; move them, which takes arrays too."""
    answers = await add_all(verbs, tasks)
    assert [answer.result for answer in answers] == [Result.CREATED] * len(tasks)
    there = await verbs.get([Ref(one.topic, one.key) for one in tasks])
    assert there == [answer.record for answer in answers]
    for one, record in zip(tasks, there, strict=True):
        assert isinstance(record, Record)
        assert (record.topic, record.key, record.id, record.group) == (one.topic, one.key, one.id, one.group)
        assert (record.due_at, record.deadline) == (one.due.resolve(NOW), one.deadline)
        assert (record.payload, record.options) == (one.payload, one.options)
    moved = await change_all(verbs, [Move(one.topic, one.key, At(NOW + HOUR)) for one in tasks])
    assert [answer.result for answer in moved] == [Result.MOVED] * len(tasks)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("make", [mixed, alike])
async def test_a_batch_of_any_length(url: str, open_store: OpensStore, make: Makes, length: int) -> None:
    await check(await open_store(url), make(length))


@pytest.mark.parametrize("make", [mixed, alike])
async def test_a_batch_on_a_callers_connection(url: str, make: Makes, store: Any) -> None:
    own = await asyncpg.connect(address_of(url).dsn)
    for length in LENGTHS:
        async with own.transaction():
            await check(store.using(own), make(length))
            await own.execute(f'DELETE FROM "{address_of(url).schema}".task')
    await own.close()
    async with await psycopg.AsyncConnection.connect(address_of(url).dsn) as theirs:
        for length in LENGTHS:
            await check(store.using(theirs), make(length))
            await theirs.rollback()
