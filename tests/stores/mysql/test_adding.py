"""Adding, leasing, reading and purging on MySQL and MariaDB."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any
from unittest.mock import Mock, patch

import pytest
from tests.stores.sql.database import MySql
from tests.stores.sql.fixtures import OpensStore
from tests.waiting import until

from bide.core import lifecycle
from bide.core.errors import OutcomeUnknown
from bide.core.instants import At, Due, In
from bide.core.names import new_id
from bide.core.records import Cancel, Filter, Move, NewTask, OnConflict, Page, Record, Redrive, Ref, Result, State
from bide.stores import mysql
from bide.stores.mysql import MySqlStore, operations, queries
from bide.stores.mysql.connection import Connection, Rows, address_of, connect
from bide.stores.mysql.lease_batches import BatchKey, LeaseBatch, LeasedRows
from bide.stores.sql import leasing
from bide.stores.sql.leasing import POLL
from bide.testing.proxy import Act, FaultProxy
from bide.testing.store_suite.base import (
    DAY,
    HOUR,
    MINUTE,
    NOW,
    add_all,
    bring,
    change_all,
    do,
    done,
    keys,
    lease,
    listed,
    new,
    put,
    see,
    settle,
    settle_all,
    take,
)

Opens = Callable[..., Awaitable[MySqlStore]]
MANY = 600
"""Three parts."""


def _now() -> int:
    return time.time_ns() // 1_000_000


def _tasks() -> list[NewTask]:
    """Of every kind, so that each part has other columns."""
    hour = _now() + 3_600_000
    dues: list[Callable[[int], Due]] = [
        lambda n: In(5_000 + n),
        lambda n: At(hour + n),
        lambda n: At(0),
        lambda n: In(-7),
    ]
    return [
        NewTask(
            topic=f"t'{number % 3}",
            key=f"{number}é\\",
            id=new_id(),
            due=dues[number % 4](number),
            payload=b"\x00\\'\"%s" * (number % 3),
            group="g" if 100 < number < 300 and number % 2 else None,
            deadline=hour * 2 if number > 550 else None,
            options=b"o'" if number % 5 == 0 else b"",
        )
        for number in range(MANY)
    ]


def test_on_mysql_the_tokens_of_as_many_rows_are_read_as_were_inserted() -> None:
    """It knows no RETURNING, and others may have inserted behind our rows."""
    call = Mock(utc=True, quote=queries.quoted, queries=queries.queries_of("d", "bide_", mariadb=False))
    call.there = queries.Code(b"1")
    call.write = lambda query, **values: call.queries[query].write(call.quote, **values)
    statements = operations._insertion(call, [new("a"), new("b"), new("c")], None)
    assert any(b"< @bide_row + 3 * @@auto_increment_increment" in one for one in statements)


async def test_each_is_there_as_it_was_answered(through: Opens) -> None:
    store = await through(clock="server")
    tasks = _tasks()
    before = await store.time()
    answers = await add_all(store, tasks, now=_now())
    after = await store.time()
    assert [answer.result for answer in answers] == [Result.CREATED] * MANY
    records = [answer.record for answer in answers]
    assert await store.get([Ref(task.topic, task.key) for task in tasks]) == records
    for task, record in zip(tasks, records, strict=True):
        assert record is not None
        due = task.due.millis if type(task.due) is At else record.created_at + task.due.millis
        assert record.due_at == max(due, 0)
        assert record.wake_at == max(due, record.created_at)
        assert before - 1_000 <= record.created_at <= after
        assert before * 1_000 - 1_000_000 <= record.token <= (after + 1) * 1_000
    assert {record.key for record in await listed(store, Filter(group="g"))} == {
        task.key for task in tasks if task.group is not None
    }


async def test_a_key_that_is_taken_is_looked_at(through: Opens) -> None:
    store = await through(clock="server")
    tasks = _tasks()
    await add_all(store, [tasks[7], tasks[599]], now=_now())
    tasks[599] = NewTask(tasks[599].topic, tasks[599].key, new_id(), In(1), on_conflict=OnConflict.KEEP)
    results = [answer.result for answer in await add_all(store, tasks, now=_now())]
    assert (results.pop(599), results.pop(7)) == (Result.KEPT, Result.REPLACED)
    assert results == [Result.CREATED] * (MANY - 2)


@pytest.fixture
def as_on_mysql(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An insert that cannot answer with its tokens."""
    plain = queries._TEMPLATES["insert_tasks"].removesuffix(queries._RETURNING)
    assert plain != queries._TEMPLATES["insert_tasks"]
    monkeypatch.setattr(queries, "_TEMPLATES", {**queries._TEMPLATES, "insert_tasks": plain})
    queries.queries_of.cache_clear()
    yield
    queries.queries_of.cache_clear()


@pytest.mark.parametrize("clock", ["server", "caller"])
@pytest.mark.parametrize("count", [3, 300])
async def test_where_an_insert_does_not_answer_its_tokens_are_read(
    url: str, open_store: OpensStore, as_on_mysql: None, clock: str, count: int
) -> None:
    store = await open_store(url, clock=clock)
    tasks = [new(f"{number:03}", due=In(HOUR), group="g" if number % 2 else None) for number in range(count)]
    records = await put(store, *tasks)
    assert [record.token for record in records] == [(await see(store, record)).token for record in records]
    assert len(await listed(store, Filter(group="g"))) == count // 2
    assert len(set(await put(store, *tasks))) == count, "replaced, each with a higher token"
    for record in records:
        assert (await see(store, record)).token > record.token


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
    monkeypatch.setattr(leasing, "THOROUGH_EVERY", 600.0)
    monkeypatch.setattr(mysql.leasing, "EXPENSIVE", 600.0)
    store = await open_store(url, clock="server")
    await put(store, new(due=In(HOUR)))
    await lease(store)
    with patch.object(Connection, "ask", autospec=True, side_effect=Connection.ask) as asked:
        for _ in range(10):
            polled = await lease(store)
            assert polled.again_by is not None
            assert polled.again_by <= polled.now + POLL
    sent = [str(call.args[1]) for call in asked.call_args_list]
    assert len(sent) == 10
    assert not any(word in packet for packet in sent for word in ("UPDATE", "BEGIN"))


async def test_what_was_locked_when_its_instant_was_passed_comes_with_a_thorough_look(
    database: MySql, url: str, open_store: OpensStore
) -> None:
    store = await open_store(url, clock="server")
    await long_due(url, store, 300)
    async with database.holding(url, "005"):
        keys = [one.key for _ in range(2) for one in (await lease(store, 100, lasts=HOUR)).tasks]
        assert "005" not in keys

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
    await put(store, new("4"), new("5"))
    four, five = (await lease(store, 2)).tasks
    assert await settle_all(store, [done(four), done(four), done(five)]) == [True, False, True]


async def test_what_is_gone_at_the_end_of_a_range_does_not_hold_up_the_rest(
    database: MySql, url: str, open_store: OpensStore
) -> None:
    """The row behind the range is then somebody else's, who has it locked."""
    store = await open_store(url, clock="server")
    await long_due(url, store, 11)
    held = (await lease(store, 10, lasts=HOUR)).tasks
    await ask(url, "DELETE FROM {0}_task WHERE `key` = '009'")
    async with database.holding(url, "010"):
        assert await settle_all(store, [done(one) for one in held]) == [True] * 9 + [False]


async def test_what_fails_meanwhile_leaves_no_answer_to_another_question(url: str) -> None:
    connection = await connect(address_of(url), within=10)
    meanwhile: list[int] = []
    assert await connection.ask("SELECT 1; SELECT 2", lambda: meanwhile.append(1)) == [((1,),), ((2,),)]
    assert meanwhile == [1]
    assert connection.usable
    with pytest.raises(IndexError):
        await connection.ask("SELECT 3", lambda: meanwhile.__delitem__(2))
    assert not connection.usable


async def ask(url: str, text: str) -> list[Rows]:
    """What each statement answers, on a connection of its own; {0} is what the names of the tables begin with."""
    address = address_of(url)
    connection = await connect(address, within=10)
    try:
        return await connection.ask(text.format(f"`{address.schema}`.bide"))
    finally:
        await connection.end(within=5)


async def lines(url: str) -> int:
    [[(count,)]] = await ask(url, "SELECT COUNT(*) FROM {0}_kept")
    return int(count)


async def test_the_line_of_an_ended_task_goes_when_its_task_lives_again_and_with_it(url: str, store: Any) -> None:
    await bring(store, State.DEAD, "k", keep_until=NOW + HOUR)
    await do(store, Redrive("t", "k", new_id(), At(NOW)))
    assert await lines(url) == 1
    assert await store.purge(now=NOW + HOUR, limit=10) == 0
    assert await lines(url) == 0
    assert await settle(store, done(await take(store), keep_until=NOW + DAY))
    assert await store.purge(now=NOW + HOUR, limit=10) == 0
    assert len(await listed(store, Filter(topic="t", state=State.DONE))) == 1
    assert await store.purge(now=NOW + DAY, limit=10) == 1
    assert await lines(url) == 0


async def test_more_than_go_at_once_and_members_of_groups(url: str, store: Any) -> None:
    count = 1_500
    await put(store, *[new(str(number), group="g" if number % 3 else None) for number in range(count)])
    held = (await lease(store, count)).tasks
    assert await settle_all(store, [done(one, keep_until=NOW + HOUR) for one in held]) == [True] * count
    assert await store.purge(now=NOW + HOUR, limit=1_200) == 1_200
    assert await store.purge(now=NOW + HOUR, limit=1_200) == 300
    assert await listed(store, Filter(group="g")) == []
    [[(left,)]] = await ask(url, "SELECT (SELECT COUNT(*) FROM {0}_kept) + (SELECT COUNT(*) FROM {0}_grouped)")
    assert left == 0


async def test_what_somebody_has_locked_is_forgotten_later(database: MySql, url: str, store: Any) -> None:
    await put(store, new("1"), new("2"))
    held = (await lease(store, 2)).tasks
    await settle_all(store, [done(one, keep_until=NOW + HOUR) for one in held])
    async with database.holding(url, "1"):
        assert await store.purge(now=NOW + HOUR, limit=10) == 1
    assert await store.purge(now=NOW + HOUR, limit=10) == 1
    assert await lines(url) == 0


async def test_what_is_cancelled_while_a_page_is_read_is_on_it(
    url: str, open_store: OpensStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, other = await open_store(url), await open_store(url)
    await put(store, new("a", topic="t0"), new("b", topic="t1"))
    everything, page = Filter(), Page(limit=10)
    assert keys((await store.find(everything, page)).tasks) == ["a", "b"]
    packets: list[tuple[Connection, bytes | str]] = []
    ask = Connection.ask

    async def asked(self: Connection, packet: bytes | str, meanwhile: Callable[[], None] | None = None) -> list[Rows]:
        packets.append((self, packet))
        first = len(packets) == 1
        answer = await ask(self, packet, meanwhile)
        if first:
            await change_all(other, [Cancel("t1", "b")])
        return answer

    monkeypatch.setattr(Connection, "ask", asked)
    assert keys((await store.find(everything, page)).tasks) == ["a", "b"], "as it was when the page was asked for"
    ours = [packet for connection, packet in packets if connection is packets[0][0] and isinstance(packet, bytes)]
    assert len(ours) == 3 + 2 + 1, "a question for each topic and one more, two pages, and the end of it"
    assert b"START TRANSACTION" in ours[0]
    assert b"SELECT" in ours[0]
    assert keys((await store.find(everything, page)).tasks) == ["a"]


async def test_an_answer_that_fills_a_packet_is_not_kept(through: Opens, proxy: FaultProxy) -> None:
    """It has the payloads of all changed tasks, escaped. If it is lost, that is said."""
    store = await through()
    tasks = [new(str(number), payload=b"'" * 2**18, due=At(NOW + DAY)) for number in range(40)]
    await put(store, *tasks)
    answers = await change_all(store, [Move("t", task.key, At(NOW + HOUR)) for task in tasks])
    assert [answer.record and (answer.record.wake_at, answer.record.payload) for answer in answers] == [
        (NOW + HOUR, task.payload) for task in tasks
    ]
    lost = proxy.fault(Act.LOSE_REPLY, skip=1)
    with pytest.raises(OutcomeUnknown, match="too large to be kept"):
        await change_all(store, [Move("t", task.key, At(NOW)) for task in tasks])
    assert lost.hits
    assert {task.wake_at for task in await listed(store, Filter())} == {NOW}
