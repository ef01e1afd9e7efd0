"""Leasing, moving and notifications on PostgreSQL."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

import asyncpg
import pytest
from tests.stores.sql.fixtures import OpensStore
from tests.waiting import pause, until

from bide.core.answers import Answer
from bide.core.instants import At, In
from bide.core.names import new_id
from bide.core.records import Leased, Move, NewTask, Record, Result, State
from bide.ports import Store
from bide.stores.memory import MemoryStore
from bide.stores.postgres import PostgresStore, operations, wakes
from bide.stores.postgres.connection import address_of
from bide.stores.postgres.queries import Names
from bide.stores.postgres.wakes import WakeMessages
from bide.stores.sql.leasing import POLL
from bide.stores.sql.operations import WIDTH, record_of
from bide.testing.proxy import Act, FaultProxy
from bide.testing.store_suite.base import DAY, HOUR, NOW, add_all, bring, change_all, lease, new, put, put_one, see

Opens = Callable[..., Awaitable[PostgresStore]]
LEASE = 3_600_000


def _now() -> int:
    return time.time_ns() // 1_000_000


async def _flood(store: PostgresStore, count: int) -> None:
    await add_all(store, [NewTask("t", str(number), new_id(), In(0)) for number in range(count)], now=_now())
    await add_all(store, [NewTask("t", "later", new_id(), In(3_600_000))], now=_now())


async def _lease(store: PostgresStore, want: int) -> Leased:
    return await store.lease({"t": want}, now=_now(), until=_now() + LEASE, holder="w")


async def test_it_is_taken_whole_each_once(through: Opens) -> None:
    store = await through(clock="server")
    await _flood(store, 450)
    taken: list[str] = []
    tokens: list[int] = []
    for _ in range(4):
        leased = await _lease(store, 100)
        assert len(leased.tasks) == 100
        assert {record.holder for record in leased.tasks} == {"w"}
        assert all(record.attempt == 1 and record.wake_at > leased.now for record in leased.tasks)
        wakes = [record.planned_at for record in leased.tasks]
        assert wakes == sorted(wakes)
        taken += [record.key for record in leased.tasks]
        tokens.append(max(record.token for record in leased.tasks))
    last = await _lease(store, 100)
    taken += [record.key for record in last.tasks]
    assert sorted(taken, key=int) == [str(number) for number in range(450)]
    assert tokens == sorted(set(tokens)), "each lease has a higher token than the one before"
    assert last.next_wake is not None
    assert last.next_wake <= last.now + 1_000
    again = await _lease(store, 100)
    assert again.tasks == []
    assert again.next_wake is not None
    assert again.next_wake > again.now, "somebody who asks at once would never stop"


@pytest.mark.parametrize("act", [Act.CUT, Act.LOSE_REPLY], ids=["never arrived", "answer lost"])
async def test_what_is_cut_anywhere_is_taken_once(act: Act, proxy: FaultProxy, through: Opens) -> None:
    store = await through(clock="server")
    await _flood(store, 1_000)
    taken = [record.key for record in (await _lease(store, 50)).tasks]
    for place in range(20):
        fault = proxy.fault(act, skip=place)
        taken += [record.key for record in (await _lease(store, 50)).tasks]
        if not fault.hits:
            await proxy.heal()
            break
    assert place >= 1, "nothing was cut"
    while leased := (await _lease(store, 50)).tasks:
        taken += [record.key for record in leased]
    assert sorted(taken, key=int) == [str(number) for number in range(1_000)]


def shown(answer: Answer) -> tuple[Any, ...]:
    """Without what is each store's own."""
    one = answer.record
    if one is None:
        return answer.result, answer.was
    return answer.result, answer.was, one.key, one.state, one.due_at, one.wake_at, one.deadline, one.payload, one.group


async def test_a_batch_means_the_same_as_one_by_one(url: str, open_store: OpensStore) -> None:
    """What applies, what does not for each reason there is, and one task three times."""

    async def told(store: Store) -> list[list[tuple[Any, ...]]]:
        await bring(store, State.DEAD, key="dead")
        await bring(store, State.LEASED, key="leased")
        names = ("a", "b", "late", "conditional", "kept")
        first = await put(store, *(new(name, payload=name.encode(), deadline=NOW + 5 * HOUR) for name in names))
        token = {one.key: one.token for one in first}
        moves = [
            Move("t", "b", At(NOW + HOUR)),
            Move("t", "nobody", In(0)),
            Move("t", "a", In(HOUR)),
            Move("t", "late", At(NOW + 6 * HOUR)),
            Move("t", "a", At(-(1 << 62)), deadline=NOW + 2 * HOUR),
            Move("t", "conditional", In(5), token["conditional"]),
            Move("t", "kept", In(5), token["kept"] - 1),
            Move("t", "leased", In(0)),
            Move("t", "a", In(1 << 62)),
            Move("t", "dead", In(0)),
            Move("other", "a", In(0)),
        ]
        return [
            [shown(answer) for answer in await change_all(store, moves)],
            [shown(answer) for answer in await change_all(store, [moves[1], moves[3]])],
        ]

    there = await told(await open_store(url))
    memory = MemoryStore()
    await memory.open()
    assert there == await told(memory)
    await memory.close()
    results = [row[0] for row in there[0]]
    assert results.count(Result.MOVED) == 4
    assert {Result.NOT_FOUND, Result.REFUSED, Result.STALE_TOKEN, Result.UNDER_WAY, Result.FINISHED} < set(results)


async def test_the_answer_that_is_kept_is_the_one_that_was_given(url: str, open_store: OpensStore) -> None:
    """For a caller who did not get it; by then the task may be gone."""
    store = await open_store(url)
    every_byte = bytes(range(256)) * 3
    tasks = [
        new("plain", due=At(NOW + HOUR)),
        new("\u00e9\u4efb\"'\\\n\U0001f600", payload=every_byte, options=every_byte, group="g", deadline=9 * NOW),
    ]
    await put(store, *tasks)
    answers = await change_all(store, [Move("t", one.key, In(5), deadline=one.deadline) for one in tasks])
    [kept] = await rows_of(url, "SELECT answer FROM {schema}.caller WHERE answer IS NOT NULL")
    given = {(answer.record, answer.was) for answer in answers}
    assert len(given) == 2
    assert {(record_of(row[2 : 2 + WIDTH]), row[1]) for row in operations._moves_kept(kept["answer"])} == given
    await change_all(store, [Move("t", "nobody", In(5))])
    assert operations._moves_kept(None) == []


async def test_what_somebody_changes_just_then_is_looked_at_again(url: str, open_store: OpensStore) -> None:
    """The statement sees the task as it was, waits for who has it, and must not answer from what it saw."""
    store = await open_store(url)
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

        async def waiting() -> Any:
            return await rows_of(url, waits)

        await until(waiting, "it to wait for the lock")
        await transaction.commit()
        answers = await moved
    assert [(one.result, one.was) for one in answers] == [
        (Result.MOVED, NOW + HOUR + 5), (Result.NOT_FOUND, None), (Result.MOVED, NOW + HOUR),
    ]  # fmt: skip
    assert [await due(store, answer.record) for answer in answers if answer.record] == [NOW + 2 * HOUR] * 2
    await own.close()
    await theirs.close()


async def due(store: PostgresStore, record: Record) -> int:
    return (await see(store, record)).due_at


async def rows_of(url: str, statement: str) -> list[Any]:
    """Of a connection of its own."""
    address = address_of(url)
    connection = await asyncpg.connect(address.dsn)
    try:
        rows: list[Any] = await connection.fetch(statement.replace("{schema}", f'"{address.schema}"'))
        return rows
    finally:
        await connection.close()


def test_only_what_wakes_before_the_cap_is_told() -> None:
    telling = WakeMessages(cap=1_000)
    assert telling.messages({"t": NOW + 1_001}, NOW) == []
    assert telling.messages({"t": NOW + 1_000, "u": NOW + 2_000}, NOW) == [f'{{"t":{NOW + 1_000}}}']


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


async def test_a_batch_sends_one_message(url: str, open_store: OpensStore) -> None:
    store = await open_store(url)
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


async def test_doctor_listens_to_itself(url: str, open_store: OpensStore) -> None:
    store = await open_store(url)
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
