"""Many new tasks at once, by the server's clock: said in plain values and in parts."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterator
from unittest.mock import Mock

import pytest
from tests.stores.sql.fixtures import OpensStore

from bide.core.answers import Answer
from bide.core.errors import PartlyFailed, StoreUnavailable
from bide.core.instants import At, Due, In
from bide.core.names import new_id
from bide.core.records import Cancel, Filter, NewTask, OnConflict, Ref, Result
from bide.stores.mysql import MySqlStore, operations, queries
from bide.testing.proxy import Act, FaultProxy
from bide.testing.store_suite.base import HOUR, add_all, change_all, listed, new, put, see

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
            key=f"{number}\\",
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


@pytest.mark.parametrize("name", ["plain", "quote'", "back\\slash", "é"])
@pytest.mark.parametrize("payload", [b"", bytes(set(range(256)) - set(b"'\\")), bytes(range(256))])
@pytest.mark.parametrize("options", [b"", b"\xff'\\"])
async def test_names_and_bytes_are_kept_as_they_are(through: Opens, name: str, payload: bytes, options: bytes) -> None:
    """What needs no escaping in a part of a batch is not escaped; the last task is in the second part."""
    store = await through(clock="server")
    tasks = [NewTask("t", f"{name}{number}", new_id(), In(HOUR), payload=payload) for number in range(70)]
    tasks.append(NewTask(f"t{name}", "last", new_id(), In(HOUR), payload=b"'", options=options, group=name))
    answers = await add_all(store, tasks, now=_now())
    found = await store.get([Ref(task.topic, task.key) for task in tasks])
    assert found == [answer.record for answer in answers]
    assert [(one.key, one.id, one.payload, one.options, one.group) for one in found if one is not None] == [
        (task.key, task.id, task.payload, task.options, task.group) for task in tasks
    ]


async def test_a_key_that_is_taken_is_looked_at(through: Opens) -> None:
    store = await through(clock="server")
    tasks = _tasks()
    await add_all(store, [tasks[7], tasks[599]], now=_now())
    tasks[599] = NewTask(tasks[599].topic, tasks[599].key, new_id(), In(1), on_conflict=OnConflict.KEEP)
    results = [answer.result for answer in await add_all(store, tasks, now=_now())]
    assert (results.pop(599), results.pop(7)) == (Result.KEPT, Result.REPLACED)
    assert results == [Result.CREATED] * (MANY - 2)


async def test_a_new_life_has_a_higher_token(through: Opens) -> None:
    store = await through(clock="server")
    tokens: list[int] = []
    for _ in range(20):
        tasks = [NewTask("t", str(number), new_id(), In(60_000)) for number in range(40)]
        added = [answer.record for answer in await add_all(store, tasks, now=_now())]
        gone = [
            answer.record for answer in await change_all(store, [Cancel("t", one.key) for one in tasks], now=_now())
        ]
        for records in (added, gone):
            highest = [record.token for record in records if record is not None]
            assert len(highest) == 40
            assert min(highest) > max(tokens, default=0)
            tokens = highest


@pytest.mark.parametrize("act", [Act.CUT, Act.LOSE_REPLY], ids=["never arrived", "answer lost"])
async def test_what_is_cut_anywhere_is_done_once(act: Act, proxy: FaultProxy, through: Opens) -> None:
    store = await through(clock="server")
    await add_all(store, _tasks()[:1], now=_now())  # the lane is connected
    for place in range(50):
        there = await listed(store, Filter())
        await change_all(store, [Cancel(one.topic, one.key) for one in there], now=_now())
        tasks = _tasks()
        fault = proxy.fault(act, skip=place)
        answers = await add_all(store, tasks, now=_now())
        hits = fault.hits
        if not hits:
            await proxy.heal()
        assert [answer.result for answer in answers] == [Result.CREATED] * MANY, f"cut at message {place}"
        assert await store.get([Ref(task.topic, task.key) for task in tasks]) == [answer.record for answer in answers]
        if not hits:
            break
    assert place >= 3, "a message that reads the clock, and three parts"


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


async def test_a_task_that_makes_too_large_a_packet_fails_alone(url: str, open_store: OpensStore) -> None:
    store = await open_store(url)
    large = new("large", payload=b"x" * 200_000)
    store._open().connections["read"].largest = 100_000
    with pytest.raises(PartlyFailed) as failed:
        await add_all(store, [new("a"), large, new("b")])
    first, refused, last = failed.value.answers
    assert isinstance(first, Answer)
    assert isinstance(last, Answer)
    assert (first.result, last.result) == (Result.CREATED, Result.CREATED)
    assert isinstance(refused, StoreUnavailable)
    with pytest.raises(StoreUnavailable, match="max_allowed_packet is 100000"):
        await add_all(store, [large])
