"""An open transaction of the application's keeps a task locked: nobody waits for that but who asked for that task."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from tests.stores.sql.database import WAITS, Database
from tests.stores.sql.fixtures import OpensStore
from tests.waiting import pause, until

from bide import Bide, PartlyFailed, StoreUnavailable, Task
from bide.core.instants import At
from bide.core.records import Cancel, Lease, Move, Ref, Result
from bide.ports import Pending
from bide.stores.mysql import connection
from bide.stores.mysql.connection import MYSQL, meaning
from bide.stores.sql.dialect import LockTimeout
from bide.testing.proxy import Act, FaultProxy
from bide.testing.store_suite.base import (
    HOUR,
    LEASE,
    NOW,
    add_all,
    change_all,
    done,
    lease,
    look,
    new,
    put,
    retry,
    see,
    settle_all,
)

COUNT = 100
NAMES = [f"{number:03}" for number in range(COUNT)]


@pytest.fixture
def url(database: Database, fresh_url: str) -> str:
    """New tables: who locks a task in MySQL locks what lies beside it too, where a deleted one is not purged yet."""
    database.migrate(fresh_url)
    return fresh_url


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[BaseException]:
    """Errors of statements that waited for a lock as long as a connection to MySQL does, which is a second."""
    waited: list[BaseException] = []

    def noted(error: BaseException, where: str, *, adding: bool = False) -> Exception:
        found = meaning(error, where, adding=adding)
        if isinstance(found, LockTimeout) and error not in waited:
            waited.append(error)
        return found

    monkeypatch.setattr(connection.MySqlConnection, "_dialect", MYSQL._replace(meaning=noted))
    return waited


def tasks(**more: Any) -> list[Any]:
    return [new(name, due=At(NOW), **more) for name in NAMES]


ALL_OF: dict[str, Any] = {"add": add_all, "change": change_all, "settle": settle_all, "retry": settle_all}


async def batch_of(store: Any, verb: str, names: list[str]) -> tuple[list[Any], Any]:
    """Calls on tasks that are there now, and how each is answered."""
    await put(store, *(new(name, due=At(NOW)) for name in names))
    if verb == "change":
        return [Move("t", name, At(NOW + HOUR)) for name in names], Result.MOVED
    if verb == "add":
        return [new(name, due=At(NOW + HOUR)) for name in names], Result.REPLACED
    held = sorted((await lease(store, len(names))).tasks, key=lambda one: one.key)
    return [done(one) if verb == "settle" else retry(one, At(NOW + HOUR)) for one in held], True


async def of_the_others(store: Any, batch: list[Any], verb: str) -> list[Any]:
    """What a batch is answered although one task of it is held up, whose answer is still to come."""
    answers: list[Any] = await getattr(store, verb)(batch, now=NOW)
    late = [answer for answer in answers if isinstance(answer, Pending)]
    assert len(late) == 1
    assert not late[0].done()
    assert isinstance(answers[50], Pending)
    return answers


@pytest.mark.parametrize("verb", ALL_OF)
async def test_the_others_of_a_batch_are_answered(
    database: Database, url: str, waits: list[BaseException], verb: str, store: Any
) -> None:
    batch, expected = await batch_of(store, verb, NAMES)
    async with database.holding(url, "050"):
        answers = await of_the_others(store, batch, "settle" if verb == "retry" else verb)
        found = {getattr(answer, "result", answer) for answer in answers if not isinstance(answer, Pending)}
        assert found == {expected}
        if verb == "change":
            assert len(waits) == (database.name == "mysql"), "of all statements one"
            [again] = await change_all(store, [Cancel("t", "001")])
            assert again.result is Result.CANCELLED, "and the next call does not wait either"
    late = await answers[50]
    assert getattr(late, "result", late) is expected
    if expected is True:
        assert await settle_all(store, batch) == [False] * COUNT, "each was done once"


@pytest.mark.parametrize("database", ["postgres"], indirect=True)
async def test_what_a_change_moves_beside_it_is_told_of(database: Database, url: str, open_store: OpensStore) -> None:
    """What was to be told with the statement that came upon the lock is told with the next."""
    store, other = await open_store(url), await open_store(url)
    await put(store, *(new(name, due=At(NOW + HOUR)) for name in "ab"))
    heard: list[int] = []
    listening = await other.listen(["t"], lambda topic, wake: heard.append(wake))
    async with database.holding(url, "b"):
        moved, later = await store.change([Move("t", name, At(NOW + 400)) for name in "ab"], now=NOW)
        assert (moved.result, later.done()) == (Result.MOVED, False)
        await until(lambda: NOW + 400 in heard, "notifications of the task that was moved")
        assert not later.done()
    assert (await later).result is Result.MOVED
    await listening.close()


@pytest.mark.parametrize("database", ["postgres"], indirect=True)
async def test_a_change_reaches_the_version_that_it_waited_for(database: Database, url: str, store: Any) -> None:
    """It is written where it was locked, which is where the transaction before it left it."""
    await put(store, *(new(name, due=At(NOW + HOUR)) for name in "ab"))
    async with Bide(url) as app, database.somebody(url) as own:
        for name in "ab":
            await own.verb(app, "reschedule", "t", name, delay="2h")
        changing = asyncio.create_task(change_all(store, [Cancel("t", "a"), Move("t", "b", At(NOW + 3 * HOUR))]))

        async def waits() -> bool:
            return changing.done() or bool(await own.execute("SELECT 1 FROM pg_locks WHERE NOT granted"))

        await until(waits, "the lock to be waited for")
        await own.commit()
        assert [answer.result for answer in await changing] == [Result.CANCELLED, Result.MOVED]
    assert await look(store, Ref("t", "a")) is None
    assert (await see(store, Ref("t", "b"))).due_at == NOW + 3 * HOUR


@pytest.mark.parametrize("ending", ["commit", "rollback"])
async def test_a_schedule_of_a_key_that_is_being_inserted(
    database: Database, url: str, ending: str, store: Any
) -> None:
    app = Bide(url)
    async with app, database.somebody(url) as own:
        await own.verb(app, "schedule", "t", key="050", delay="1h")
        answers = await of_the_others(store, tasks(payload=b"new"), "add")
        assert {answer.result for answer in answers if not isinstance(answer, Pending)} == {Result.CREATED}
        await (own.commit() if ending == "commit" else own.rollback())
        assert (await answers[50]).result is (Result.REPLACED if ending == "commit" else Result.CREATED)


async def test_leases_of_the_others_are_extended(database: Database, url: str, store: Any) -> None:
    await put(store, *tasks())
    held = sorted((await lease(store, COUNT)).tasks, key=lambda one: one.key)
    leases = [Lease(one.topic, one.key, one.token) for one in held]
    async with database.holding(url, "050"):
        with pytest.raises(PartlyFailed) as raised:
            await store.extend(leases, now=NOW + 1000, until=NOW + 1000 + LEASE)
    answers = raised.value.answers
    assert isinstance(answers[50], StoreUnavailable)
    assert [answer for answer in answers if answer is True] == [True] * (COUNT - 1)
    for number in (0, 49, 51, 99):
        assert (await see(store, held[number])).wake_at == NOW + 1000 + LEASE
    assert await store.extend(leases, now=NOW + 2000, until=NOW + 2000 + LEASE) == [True] * COUNT


@pytest.mark.parametrize("database", ["postgres"], indirect=True)
async def test_a_lock_on_the_whole_table_is_waited_for(database: Database, url: str, store: Any) -> None:
    """As whoever makes an index takes it, or vacuum where it gives pages back."""
    await put(store, *tasks())
    held = sorted((await lease(store, 2)).tasks, key=lambda one: one.key)
    async with database.somebody(url) as own:
        await own.execute(database.write(url, "LOCK TABLE {task} IN SHARE MODE"))
        writing: list[asyncio.Future[Any]] = [
            asyncio.ensure_future(one)
            for one in (
                change_all(store, [Move("t", "050", At(NOW + HOUR)), Move("t", "051", At(NOW + HOUR))]),
                change_all(store, [Cancel("t", "052")]),
                settle_all(store, [done(held[0]), retry(held[1], At(NOW + HOUR))]),
                add_all(store, [new("fresh", due=At(NOW)), new("060", due=At(NOW))]),
            )
        ]
        await pause(0.5, why="none of them is to be answered, or to fail")
        assert not any(one.done() for one in writing)
        await own.rollback()
        moved, cancelled, settled, added = await asyncio.gather(*writing)
    assert [answer.result for answer in moved] == [Result.MOVED, Result.MOVED]
    assert [answer.result for answer in cancelled] == [Result.CANCELLED]
    assert settled == [True, True]
    assert [answer.result for answer in added] == [Result.CREATED, Result.REPLACED]


async def test_when_patience_is_over_that_task_alone_fails(
    database: Database, url: str, open_store: OpensStore
) -> None:
    store = await open_store(url, patience=0.5)
    await put(store, *tasks())
    async with database.holding(url, "050"):
        with pytest.raises(PartlyFailed) as raised:
            await change_all(store, [Cancel("t", f"{number:03}") for number in range(COUNT)])
    failed = [one for one in raised.value.answers if isinstance(one, Exception)]
    assert [type(one) for one in failed] == [StoreUnavailable]
    assert "keeps the task locked" in str(failed[0])
    assert await look(store, Ref("t", "050")) is not None
    assert await look(store, Ref("t", "049")) is None


async def test_a_worker_goes_on_settling_the_others(database: Database, url: str) -> None:
    app = Bide(database.Store(url, **{**WAITS, "clock": "server"}), lease="10m")
    running, finish = asyncio.Semaphore(0), asyncio.Event()

    @app.handler("t", concurrency=20)
    async def handle(task: Task[None]) -> None:
        running.release()
        await finish.wait()

    async with app, app.worker() as worker:
        await app.schedule_many([app.new("t", key=f"{number:03}", delay="0s") for number in range(20)])
        for _ in range(20):
            await running.acquire()
        async with database.holding(url, "007"):
            finish.set()
            await until(lambda: worker.stats.done == 19, "the others to be settled")
            await handle.schedule(None, key="late", delay="0s")
            await until(lambda: worker.stats.done == 20, "another")
            assert [task.key async for task in app.find(topic="t", state="leased")] == ["007"]
        await until(lambda: worker.stats.done == 21, "the one that was held up to be settled too")
        assert worker.stats.lost == 0


@pytest.mark.parametrize("database", ["postgres"], indirect=True)  # MySQL waits a second for each lock
@pytest.mark.parametrize(
    ("verb", "act"),
    [("settle", Act.CUT), *((verb, Act.LOSE_REPLY) for verb in ("change", "settle", "retry", "add"))],
    ids=lambda one: one if isinstance(one, str) else one.value,
)
async def test_cut_anywhere_each_is_done_once_also_the_one_that_is_held_up(
    database: Database, url: str, verb: str, act: Act, proxy: FaultProxy, through: Callable[..., Any]
) -> None:
    """The batch goes past what is locked, and its connection breaks at each message in turn."""
    store = await through()
    count = 5
    for place in range(40):
        names = [f"{place}-{number}" for number in range(count)]
        batch, expected = await batch_of(store, verb, names)
        async with database.holding(url, names[2]):
            fault = proxy.fault(act, skip=place)
            answering = asyncio.ensure_future(ALL_OF[verb](store, batch))
            await pause(0.15, why="it goes past what is locked")
            assert not answering.done()
        answers = await answering
        hits = fault.hits
        await proxy.heal()
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
