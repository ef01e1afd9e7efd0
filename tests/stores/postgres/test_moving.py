"""Moves as one statement: what it answers, keeps and leaves to whoever looks first."""

from __future__ import annotations

import asyncio
from typing import Any

import asyncpg
from tests.stores.sql.fixtures import OpensStore
from tests.waiting import until

from bide.core.answers import Answer
from bide.core.instants import At, In
from bide.core.records import Move, Record, Result, State
from bide.ports import Store
from bide.stores.memory import MemoryStore
from bide.stores.postgres import PostgresStore, operations
from bide.stores.postgres.connection import address_of
from bide.stores.sql.rows import WIDTH, record_of
from bide.testing.store_suite.base import HOUR, NOW, bring, change_all, new, put, see


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
