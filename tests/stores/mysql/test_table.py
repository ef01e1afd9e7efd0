"""Watched tables in MySQL and MariaDB: odd types of ids and times, indexes that come and go, handlers that commit."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from tests.tables.conftest import START, Mysql
from tests.waiting import until

from bide import Row, SetupError
from bide.testing.clock import ManualClock


@pytest_asyncio.fixture
async def place(mysql_url: str, mysql_schema: str) -> AsyncIterator[Mysql]:
    made = Mysql(mysql_url, mysql_schema)
    async with made.exits:
        await made.create()
        yield made


@pytest.mark.parametrize("kind", ["float", "bit(3)"])
async def test_ids_by_which_no_row_is_found_again_are_refused(place: Mysql, kind: str) -> None:
    table = f"{place.own}.odd"
    await place.run(f"CREATE TABLE {table} (id {kind} PRIMARY KEY, status int, due datetime)")
    app = await place.app()
    app.watch(place.source(table=table, columns=[], changes={"status": 3}))
    [loop] = app.table_loops()
    with pytest.raises(SetupError, match="cannot be looked up exactly"):
        await loop.open()


@pytest.mark.parametrize(("kind", "identity"), [("uuid", "4a1f1c6e-0000-4000-8000-000000000001"), ("inet6", "::1")])
async def test_ids_of_types_that_are_no_numbers(place: Mysql, kind: str, identity: str) -> None:
    [(version,)] = await place.run("SELECT version()")
    if "MariaDB" not in version:
        pytest.skip("a type of MariaDB's")
    table = f"{place.own}.odd"
    await place.run(f"CREATE TABLE {table} (id {kind} PRIMARY KEY, status int, due datetime)")
    await place.run(f"INSERT INTO {table} VALUES ($1, 2, $2)", identity, place.time(START - 1))
    loop = await place.watched(ManualClock(START), table=table, columns=[], changes={"status": 3})
    assert await loop.run_once() == (1, None)


@pytest.mark.parametrize("date", ["0000-00-00", "2020-00-00"])
async def test_a_date_that_is_none_is_left_out_and_named_once(
    place: Mysql, date: str, caplog: pytest.LogCaptureFixture
) -> None:
    clock = ManualClock(START)
    loop = await place.watched(clock)
    await place.run("SET SESSION sql_mode = ''")
    await place.run(f"INSERT INTO {place.table} (id, status, due) VALUES (1, 2, '{date}')")
    await place.add(2, START - 1)
    for _ in range(3):
        await loop.run_once()
        clock.advance(60_000)
    assert await place.states() == {1: (2, 0), 2: (3, 1)}
    assert caplog.text.count("cannot be read") == 1


async def test_where_rows_have_to_be_sorted_only_those_that_are_taken_are_locked(place: Mysql) -> None:
    app = await place.app()
    watch = app.watch(place.source(where="status IN (2, 5)"), concurrency=3)
    both, go = asyncio.Barrier(4), asyncio.Event()

    @watch.handler
    async def publish(row: Row) -> None:
        await both.wait()
        await go.wait()

    for number in range(1, 11):
        await place.add(number, number)
    async with app.worker() as worker:
        await asyncio.wait_for(both.wait(), 60)
        await place.run("SET SESSION innodb_lock_wait_timeout = 1")
        await place.run(f"UPDATE {place.table} SET status = 1 WHERE id > 3")
        go.set()
        await worker.until_empty()
    assert [status for status, _ in (await place.states()).values()] == [3] * 3 + [1] * 7


async def test_an_index_that_is_replaced_is_found_anew(place: Mysql) -> None:
    app = await place.app()
    app.watch(place.source(look_every="20ms"))
    async with app.worker() as worker:
        await until(lambda: worker.tables[0].stats.looks, "the first look")
        await place.run(f"ALTER TABLE {place.table} ADD KEY beta (status, due), DROP KEY by_due")
        await place.add(1, 0)
        await worker.until_empty()
    assert await place.states() == {1: (3, 1)}


async def test_a_handler_that_commits_is_told_so(place: Mysql, caplog: pytest.LogCaptureFixture) -> None:
    app = await place.app(clock=ManualClock(START))
    watch = app.watch(place.source())

    @watch.handler
    async def publish(row: Row) -> None:
        await row.connection.commit()

    loop = await place.loop(app)
    await place.add(1, START)
    await loop.run_once()
    assert "the handler ended the transaction of its row" in caplog.text
    assert loop.stats.fired == 0
