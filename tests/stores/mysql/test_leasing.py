"""Leases begin where the one before left off, also within one instant."""

from __future__ import annotations

import asyncio
import time

import pytest
from tests.stores.mysql.conftest import OpensStore
from tests.stores.mysql.connections import by_asyncmy
from tests.stores.mysql.test_keeping import ask

from bide.core import lifecycle
from bide.core.records import In, Record
from bide.stores.mysql import MySqlStore
from bide.stores.mysql.address import address_of
from bide.stores.mysql.connecting import connect
from bide.stores.mysql.leased_rows import LeasedRows
from bide.testing.store_suite.acts import HOUR, MINUTE, NOW, done, lease, new, put, take


async def long_due(url: str, store: MySqlStore, count: int) -> None:
    """So many tasks that were due at one instant, ten seconds ago."""
    await put(store, *[new(f"{number:03}", due=In(HOUR)) for number in range(count)])
    await ask(url, f"UPDATE {{0}}_task SET at = {int(time.time() * 1000) - 10_000}")


async def test_one_instant_is_leased_part_by_part(url: str, open_store: OpensStore) -> None:
    store = await open_store(url, clock="server")
    await long_due(url, store, 300)
    keys = []
    for _ in range(3):
        keys += [one.key for one in (await lease(store, 100, lasts=MINUTE)).tasks]
    assert keys == [f"{number:03}" for number in range(300)]
    assert (await lease(store, 100)).tasks == []


@pytest.mark.real_time
async def test_what_was_locked_when_its_instant_was_passed_comes_within_a_second(
    url: str, open_store: OpensStore
) -> None:
    store = await open_store(url, clock="server")
    await long_due(url, store, 300)
    async with by_asyncmy(url) as caller:
        table = f"`{address_of(url).schema}`.bide_task"
        await caller.execute(f"UPDATE {table} SET created_at = created_at + 1 WHERE topic = 't' AND `key` = '005'")
        keys = [one.key for _ in range(2) for one in (await lease(store, 100, lasts=MINUTE)).tasks]
        assert "005" not in keys
        await caller.rollback()
    ends = time.monotonic() + 2
    while "005" not in keys and time.monotonic() < ends:
        keys += [one.key for one in (await lease(store, 20, lasts=MINUTE)).tasks]
        await asyncio.sleep(0.05)
    assert "005" in keys
    assert len(set(keys)) == len(keys)


def leased(key: str, token: int, group: str | None = None) -> Record:
    task = lifecycle.schedule(new(key, group=group), None, NOW, token - 1).record
    assert task is not None
    return lifecycle.lease(task, NOW, NOW + MINUTE, "w", token)


def test_rows_are_remembered_until_they_are_settled() -> None:
    rows, one, two = LeasedRows(), leased("1", 5), leased("2", 5, group="g")
    rows.leased([8, 7], [one, two])
    assert rows.of([done(one), done(two)]) == [(7, 5, True), (8, 5, False)]
    assert rows.of([done(one)]) is None
    rows.leased([8], [one])
    assert rows.of([done(leased("1", 6))]) is None, "by another token"
    rows.leased([8, 7], [one, two])
    assert rows.of([done(one), done(one)]) is None, "twice"


def test_what_is_never_settled_here_is_forgotten_in_the_end() -> None:
    rows = LeasedRows()
    for number in range(30_000):
        rows.leased([number], [leased(str(number), 5)])
    assert rows.of([done(leased("1", 5))]) is None
    assert rows.of([done(leased("29999", 5))]) == [(29_999, 5, False)]


async def test_two_leases_and_one_of_another_process_are_settled_together(url: str, open_store: OpensStore) -> None:
    store, other = await open_store(url), await open_store(url)
    await put(store, new("1"), new("2"), new("3"))
    ours = (await lease(store, 2)).tasks
    theirs = await take(other)
    assert await store.settle([done(one) for one in (*ours, theirs)], now=NOW) == [True] * 3
    assert await store.settle([done(one) for one in (*ours, theirs)], now=NOW) == [False] * 3


async def test_what_is_gone_at_the_end_of_a_range_does_not_hold_up_the_rest(url: str, open_store: OpensStore) -> None:
    """The row behind the range is then somebody else's, who has it locked."""
    store = await open_store(url, clock="server")
    await long_due(url, store, 11)
    held = (await lease(store, 10, lasts=MINUTE)).tasks
    await ask(url, "DELETE FROM {0}_task WHERE `key` = '009'")
    async with by_asyncmy(url) as caller:
        table = f"`{address_of(url).schema}`.bide_task"
        await caller.execute(f"SELECT 1 FROM {table} WHERE topic = 't' AND `key` = '010' FOR UPDATE")
        assert await store.settle([done(one) for one in held], now=NOW) == [True] * 9 + [False]
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
