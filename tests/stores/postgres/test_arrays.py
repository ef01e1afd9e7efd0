"""Batches as the arrays that statements take: of any length, with what is alike and what is not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import asyncpg
import psycopg
import pytest
from tests.stores.sql.fixtures import OpensStore

from bide.core.instants import At, Due, In
from bide.core.records import Move, NewTask, Record, Ref, Result
from bide.ports import Verbs
from bide.stores.postgres.connection import address_of
from bide.stores.postgres.operations import nested, packed
from bide.testing.store_suite.base import HOUR, NOW, add_all, change_all, new

Makes = Callable[[int], list[NewTask]]
LENGTHS = (1, 2, 12, 13, 100)
"""Without divisors and with them."""


def test_the_parts_of_a_column_are_alike_and_hold_all_of_it() -> None:
    for length in range(1, 200):
        column: list[Any] = list(range(length))
        parts = nested(column)
        if parts != column:
            assert [one for part in parts for one in part] == column
            assert {len(part) for part in parts} == {len(parts[0])}
            assert len(parts[0]) > 1


def test_what_is_the_same_throughout_is_sent_once_and_what_is_null_not_at_all() -> None:
    columns: list[list[Any]] = [["t"] * 3, [None] * 3, [None, "g", None], ["t", "u", "t"], ["x"] * 3]
    assert packed(columns, (0, 3)) == [["t"], [], [None, "g", None], ["t", "u", "t"], ["x"] * 3]


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
async def test_a_batch_on_a_callers_connection(url: str, open_store: OpensStore, make: Makes) -> None:
    store = await open_store(url)
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
