"""An open transaction of the application's keeps a task locked: nobody waits for that but who asked for that task."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import asyncpg
import pytest
from tests.stores.postgres.conftest import OpensStore

from bide import Bide, PartlyFailed, StoreUnavailable, Task, Worker
from bide.core.records import At, Cancel, Lease, Move, Ref, Result
from bide.stores.postgres import PostgresStore, schema
from bide.stores.postgres.address import address_of
from bide.testing.proxy import Act, FaultProxy
from bide.testing.store_suite.acts import HOUR, LEASE, NOW, done, lease, look, new, put, retry, see, until

COUNT = 100
pytestmark = pytest.mark.real_time


@asynccontextmanager
async def holding(url: str, key: str) -> AsyncIterator[Any]:
    """A transaction that has changed the task and is open; rolled back."""
    address = address_of(url)
    connection = await asyncpg.connect(address.dsn)
    transaction = connection.transaction()
    await transaction.start()
    await connection.execute(f'UPDATE "{address.schema}".task SET token = token WHERE key = $1', key)
    try:
        yield transaction
        await transaction.rollback()
    finally:
        connection.terminate()


def tasks(**more: Any) -> list[Any]:
    return [new(f"{number:03}", due=At(NOW), **more) for number in range(COUNT)]


async def of_the_others(store: PostgresStore, batch: list[Any], verb: str) -> list[Any]:
    """What a batch is answered at once; the one that is held up is still to come."""
    begun = time.monotonic()
    answers: list[Any] = await getattr(store, f"{verb}_apart")(batch, now=NOW)
    assert time.monotonic() - begun < 1.5
    late = [answer for answer in answers if isinstance(answer, asyncio.Future)]
    assert len(late) == 1
    assert not late[0].done()
    assert isinstance(answers[50], asyncio.Future)
    return answers


async def test_a_change(url: str, open_store: OpensStore) -> None:
    store = await open_store(url)
    await put(store, *tasks())
    moves = [Move("t", f"{number:03}", At(NOW + HOUR)) for number in range(COUNT)]
    async with holding(url, "050"):
        answers = await of_the_others(store, moves, "change")
        assert {answer.result for answer in answers if not isinstance(answer, asyncio.Future)} == {Result.MOVED}
        [again] = await store.change([Cancel("t", "001")], now=NOW)
        assert again.result is Result.CANCELLED, "and the next call does not wait either"
    assert (await answers[50]).result is Result.MOVED


async def test_what_a_change_moves_beside_it_is_told_of(url: str, open_store: OpensStore) -> None:
    """What was to be told with the statement that came upon the lock is told with the next."""
    store, other = await open_store(url), await open_store(url)
    await put(store, *(new(name, due=At(NOW + HOUR)) for name in "ab"))
    heard: list[int] = []
    listening = await other.listen(["t"], lambda topic, wake: heard.append(wake))
    async with holding(url, "b"):
        moved, later = await store.change_apart([Move("t", name, At(NOW + 400)) for name in "ab"], now=NOW)
        assert (moved.result, later.done()) == (Result.MOVED, False)
        await until(lambda: NOW + 400 in heard, "tidings of the task that was moved")
        assert not later.done()
    assert (await later).result is Result.MOVED
    await listening.close()


@pytest.mark.parametrize("how", ["done", "retry"])
async def test_settling(url: str, open_store: OpensStore, how: str) -> None:
    store = await open_store(url)
    await put(store, *tasks())
    held = (await lease(store, COUNT)).tasks
    held.sort(key=lambda one: one.key)
    outcomes = [done(one) if how == "done" else retry(one, At(NOW + HOUR)) for one in held]
    async with holding(url, "050"):
        answers = await of_the_others(store, outcomes, "settle")
        assert {answer for answer in answers if not isinstance(answer, asyncio.Future)} == {True}
    assert await answers[50] is True
    assert await store.settle(outcomes, now=NOW) == [False] * COUNT, "each was done once"


async def test_a_schedule_of_a_key_that_is_there(url: str, open_store: OpensStore) -> None:
    store = await open_store(url)
    await put(store, *tasks())
    async with holding(url, "050"):
        answers = await of_the_others(store, tasks(payload=b"new"), "add")
        assert {answer.result for answer in answers if not isinstance(answer, asyncio.Future)} == {Result.REPLACED}
    assert (await answers[50]).result is Result.REPLACED


@pytest.mark.parametrize("ending", ["commit", "rollback"])
async def test_a_schedule_of_a_key_that_is_being_inserted(url: str, open_store: OpensStore, ending: str) -> None:
    store = await open_store(url)
    app = Bide(url)
    own = await asyncpg.connect(address_of(url).dsn)
    async with app:
        transaction = own.transaction()
        await transaction.start()
        await app.using(own).schedule("t", key="050", delay="1h")
        answers = await of_the_others(store, tasks(payload=b"new"), "add")
        assert {answer.result for answer in answers if not isinstance(answer, asyncio.Future)} == {Result.CREATED}
        await (transaction.commit() if ending == "commit" else transaction.rollback())
        assert (await answers[50]).result is (Result.REPLACED if ending == "commit" else Result.CREATED)
    await own.close()


async def test_leases_of_the_others_are_extended(url: str, open_store: OpensStore) -> None:
    store = await open_store(url)
    await put(store, *tasks())
    held = sorted((await lease(store, COUNT)).tasks, key=lambda one: one.key)
    leases = [Lease(one.topic, one.key, one.token) for one in held]
    begun = time.monotonic()
    async with holding(url, "050"):
        with pytest.raises(PartlyFailed) as raised:
            await store.extend(leases, now=NOW + 1000, until=NOW + 1000 + LEASE)
        assert time.monotonic() - begun < 1.5
    answers = raised.value.answers
    assert isinstance(answers[50], StoreUnavailable)
    assert [answer for answer in answers if answer is True] == [True] * (COUNT - 1)
    for number in (0, 49, 51, 99):
        assert (await see(store, held[number])).wake_at == NOW + 1000 + LEASE
    assert await store.extend(leases, now=NOW + 2000, until=NOW + 2000 + LEASE) == [True] * COUNT


async def test_a_lock_on_the_whole_table_is_waited_for(url: str, open_store: OpensStore) -> None:
    """As whoever makes an index takes it, or vacuum where it gives pages back."""
    store = await open_store(url)
    await put(store, *tasks())
    held = sorted((await lease(store, 2)).tasks, key=lambda one: one.key)
    address = address_of(url)
    connection = await asyncpg.connect(address.dsn)
    transaction = connection.transaction()
    await transaction.start()
    await connection.execute(f'LOCK TABLE "{address.schema}".task IN SHARE MODE')
    writing: list[asyncio.Future[Any]] = [
        asyncio.ensure_future(one)
        for one in (
            store.change([Move("t", "050", At(NOW + HOUR)), Move("t", "051", At(NOW + HOUR))], now=NOW),
            store.change([Cancel("t", "052")], now=NOW),
            store.settle([done(held[0]), retry(held[1], At(NOW + HOUR))], now=NOW),
            store.add([new("fresh", due=At(NOW)), new("060", due=At(NOW))], now=NOW),
        )
    ]
    try:
        _, pending = await asyncio.wait(writing, timeout=0.5)
        assert len(pending) == len(writing)
        await transaction.rollback()
        moved, cancelled, settled, added = await asyncio.wait_for(asyncio.gather(*writing), 10)
    finally:
        connection.terminate()
    assert [answer.result for answer in moved] == [Result.MOVED, Result.MOVED]
    assert [answer.result for answer in cancelled] == [Result.CANCELLED]
    assert settled == [True, True]
    assert [answer.result for answer in added] == [Result.CREATED, Result.REPLACED]


async def test_when_patience_is_over_that_task_alone_fails(url: str, open_store: OpensStore) -> None:
    store = await open_store(url, patience=0.5)
    await put(store, *tasks())
    async with holding(url, "050"):
        with pytest.raises(PartlyFailed) as raised:
            await store.change([Cancel("t", f"{number:03}") for number in range(COUNT)], now=NOW)
    failed = [one for one in raised.value.answers if isinstance(one, Exception)]
    assert [type(one) for one in failed] == [StoreUnavailable]
    assert "keeps the task locked" in str(failed[0])
    assert await look(store, Ref("t", "050")) is not None
    assert await look(store, Ref("t", "049")) is None


async def test_callers_do_not_wait_for_one_another(url: str) -> None:
    """Through the app, where a hundred coroutines are one batch."""
    await schema.migrate(url)
    app = Bide(url)
    async with app:
        await app.schedule_many([app.new("t", key=f"{number:03}", delay="1h") for number in range(COUNT)])
        calls: list[asyncio.Task[Any]] = []
        async with holding(url, "050"):
            begun = time.monotonic()
            calls = [asyncio.ensure_future(app.cancel("t", f"{number:03}")) for number in range(COUNT)]
            await asyncio.wait([call for number, call in enumerate(calls) if number != 50])
            assert time.monotonic() - begun < 1.5
            assert (await app.schedule("t", key="other", delay="1h")).ok
            await asyncio.sleep(max(0.0, begun + 3 - time.monotonic()))
            assert not calls[50].done()
        assert (await calls[50]).result == "cancelled"


async def _done(worker: Worker, count: int) -> None:
    while worker.stats.done < count:  # noqa: ASYNC110 - nobody tells
        await asyncio.sleep(0.01)


async def test_a_worker_goes_on_settling_the_others(url: str) -> None:
    await schema.migrate(url)
    app, running, finish = Bide(url), asyncio.Semaphore(0), asyncio.Event()

    @app.handler("t", concurrency=20)
    async def handle(task: Task[None]) -> None:
        running.release()
        await finish.wait()

    async with app, app.worker() as worker:
        await app.schedule_many([app.new("t", key=f"{number:03}", delay="0s") for number in range(20)])
        for _ in range(20):
            await running.acquire()
        async with holding(url, "007"):
            finish.set()
            async with asyncio.timeout(5):
                await _done(worker, 19)
            await handle.schedule(None, key="late", delay="0s")
            async with asyncio.timeout(5):
                await _done(worker, 20)
            assert [task.key async for task in app.find(topic="t")] == ["007"]
        async with asyncio.timeout(10):
            await worker.until_empty()
        assert (worker.stats.done, worker.stats.lost) == (21, 0)


@pytest.mark.faults
@pytest.mark.parametrize(
    ("verb", "act"),
    [("settle", Act.CUT), *((verb, Act.LOSE_REPLY) for verb in ("change", "settle", "retry", "add"))],
    ids=lambda one: one if isinstance(one, str) else one.value,
)
async def test_cut_anywhere_each_is_done_once_also_the_one_that_is_held_up(
    url: str, verb: str, act: Act, proxy: FaultProxy, through: Callable[..., Any]
) -> None:
    """The batch goes past what is locked, and its connection breaks at each message in turn."""
    store: PostgresStore = await through()
    count = 5
    for place in range(40):
        names = [f"{place}-{number}" for number in range(count)]
        await put(store, *(new(name, due=At(NOW)) for name in names))
        batch: list[Any]
        if verb in ("settle", "retry"):
            held = sorted((await lease(store, count)).tasks, key=lambda one: one.key)
            batch = [done(one) if verb == "settle" else retry(one, At(NOW + HOUR)) for one in held]
        elif verb == "change":
            batch = [Move("t", name, At(NOW + HOUR)) for name in names]
        else:
            batch = [new(name, due=At(NOW + HOUR)) for name in names]
        async with holding(url, names[2]):
            fault = proxy.fault(act, skip=place)
            answering = asyncio.ensure_future(getattr(store, "settle" if verb == "retry" else verb)(batch, now=NOW))
            await asyncio.wait([answering], timeout=0.15)
            assert not answering.done()
        answers = await answering
        hits = fault.hits
        await proxy.heal()
        expected = {"change": Result.MOVED, "add": Result.REPLACED}.get(verb, True)
        assert [getattr(answer, "result", answer) for answer in answers] == [expected] * count, f"at message {place}"
        there = await store.get([Ref("t", name) for name in names])
        if verb == "settle":
            assert there == [None] * count
        else:
            assert [one is not None and one.wake_at for one in there] == [NOW + HOUR] * count
            assert len({one.failures for one in there if one is not None}) == 1
        if not hits:
            break
    else:
        raise AssertionError("it has no end")
    assert place >= 3
