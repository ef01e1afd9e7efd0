"""Callers that are cancelled, apps in several loops, and processes that fork."""

from __future__ import annotations

import asyncio
import os
import signal
import sqlite3
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import pytest
from tests.cancelling import each_await
from tests.engine.conftest import stores
from tests.waiting import PATIENCE, until

from bide import Bide, NotOpen, OutcomeUnknown, SetupError, StoreError, StoreUnavailable, SystemClock, Task
from bide.core.answers import Answer
from bide.stores.memory import MemoryStore
from bide.stores.redis import RedisStore
from bide.testing.proxy import Act, FaultProxy

forks = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
quietly = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def in_a_child(work: Callable[[], bool]) -> bool:
    """Whether `work` was right in a forked child; one that hangs is killed."""
    child = os.fork()
    if child == 0:
        signal.alarm(int(PATIENCE))
        try:
            os._exit(0 if work() else 1)
        finally:
            os._exit(2)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@stores("memory", "sqlite", "redis", "postgres", "mysql")
async def test_another_loop_is_refused_and_harms_nobody(store_url: str) -> None:
    async def stranger() -> None:
        for verb in (
            lambda: app.schedule("t", key="k", delay="1h"),
            lambda: app.get("t", "k"),
            lambda: app.cancel_group("g"),
            lambda: anext(app.find()),
            app.open,
            app.close,
        ):
            with pytest.raises(SetupError, match="another event loop"):
                await verb()

    async with Bide(store_url) as app:
        await app.schedule("t", key="k", group="g", delay="1h")
        await asyncio.to_thread(asyncio.run, stranger())
        await asyncio.gather(*(app.reschedule("t", "k", delay="2h") for _ in range(10)))
        assert [answer.result for answer in await app.cancel_group("g")] == ["cancelled"]


async def test_app_sync_is_refused_on_a_running_loop_wherever_the_app_is_open() -> None:
    app = Bide("memory:")
    for call in (lambda: app.sync.schedule("t", delay="1h"), lambda: app.sync.using(None)):
        with pytest.raises(SetupError, match="await the verb"):
            call()


# --- forks


@forks
@quietly
async def test_in_a_forked_child_an_open_app_is_not_open(tmp_path: Path) -> None:
    app = Bide(f"sqlite:///{tmp_path}/tasks.db")

    def awaited() -> bool:
        with pytest.raises(NotOpen, match="forked child"):
            app.schedule("t", key="lost", delay="1h").send(None)

        async def opened_here() -> bool:
            async with app:
                return (await app.schedule("t", key="child", delay="1h")).ok

        return asyncio.run(opened_here())

    async with app:
        await app.schedule("t", key="parent", delay="1h")
        assert in_a_child(awaited)
        assert in_a_child(lambda: app.sync.schedule("t", key="sync", delay="1h").ok)
        assert sorted([task.key async for task in app.find()]) == ["child", "parent", "sync"]


@forks
@quietly
def test_a_forked_child_has_a_blocking_app_of_its_own(tmp_path: Path) -> None:
    app = Bide(f"sqlite:///{tmp_path}/tasks.db")
    app.sync.schedule("t", key="parent", delay="1h")
    assert in_a_child(lambda: app.sync.schedule("t", key="child", delay="1h").ok)
    assert sorted(task.key for task in app.sync.find(topic="t")) == ["child", "parent"]
    app.sync.close()


@forks
@quietly
def test_what_a_child_wrote_is_kept_though_its_parent_closes_and_others_open_the_file(tmp_path: Path) -> None:
    """SQLite must not take the parent's locks for the child's: who comes last would delete the WAL of the child."""
    url = f"sqlite:///{tmp_path}/tasks.db"
    app = Bide(url)
    app.sync.schedule("t", key="parent", delay="1h")
    (written, write), (others_left, leave) = os.pipe(), os.pipe()

    def work() -> bool:
        app.sync.schedule("t", key="first", delay="1h")
        os.write(write, b"x")
        os.read(others_left, 1)
        return app.sync.schedule("t", key="second", delay="1h").ok

    def others() -> None:
        os.read(written, 1)
        app.sync.close()
        subprocess.run([sys.executable, "-m", "bide", "--store", url, "ls"], check=True, capture_output=True)
        os.write(leave, b"x")

    thread = threading.Thread(target=others)
    thread.start()
    assert in_a_child(work)
    thread.join(PATIENCE)
    assert sorted(task.key for task in app.sync.find(topic="t")) == ["first", "parent", "second"]
    app.sync.close()


@forks
@quietly
def test_a_fork_amid_the_writes_and_reads_of_other_threads(tmp_path: Path) -> None:
    app, over = Bide(f"sqlite:///{tmp_path}/tasks.db"), threading.Event()

    def hammer(number: int) -> None:
        while not over.is_set():
            app.sync.schedule("t", key=f"{number}", delay="1h")
            assert app.sync.get("t", f"{number}")

    threads = [threading.Thread(target=hammer, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    assert [in_a_child(lambda: app.sync.schedule("t", key="child", delay="1h").ok) for _ in range(10)] == [True] * 10
    over.set()
    for thread in threads:
        thread.join(PATIENCE)
    app.sync.close()


@forks
@quietly
async def test_a_child_of_an_open_transaction_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fork does not wait for the end of a transaction that cannot end, as its event loop waits for the fork."""
    monkeypatch.setattr("bide.stores.sqlite.connection._FORK_PATIENCE", 10 * PATIENCE)
    app = Bide(f"sqlite:///{tmp_path}/tasks.db")

    def work() -> bool:
        with pytest.raises(StoreUnavailable, match="amid a transaction"):
            app.sync.schedule("t", key="child", delay="1h")
        return True

    @app.handler("t")
    async def forks(task: Task[None]) -> None:
        async with task.transaction():
            assert in_a_child(lambda: in_no_loop(work))

    async with app, app.worker() as worker:
        await forks.schedule(None, key="parent", delay="0s")
        await worker.until_empty()
        assert worker.stats.done == 1


@forks
@quietly
def test_a_fork_amid_the_use_of_sqlite_by_others_stops_no_child(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SQLite's mutexes may stay locked in the child, which then can do all but use SQLite."""
    app, over = Bide(f"sqlite:///{tmp_path}/tasks.db"), threading.Event()
    app.sync.schedule("t", key="parent", delay="1h")

    def use() -> None:
        others = sqlite3.connect(":memory:")
        numbers = "WITH RECURSIVE x (n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM x WHERE n < 5000)"
        while not over.is_set():
            others.execute(f"{numbers} SELECT count(DISTINCT hex(randomblob(20)) || n) FROM x").fetchone()
        others.close()

    threads = [threading.Thread(target=use) for _ in range(3)]
    for thread in threads:
        thread.start()
    assert [in_a_child(lambda: True) for _ in range(4)] == [True] * 4
    over.set()
    for thread in threads:
        thread.join(PATIENCE)

    def refused() -> bool:
        with pytest.raises(StoreUnavailable, match="was in SQLite"):
            app.sync.schedule("t", key="child", delay="1h")
        return True

    monkeypatch.setattr("bide.stores.sqlite.connection._close_all", threading.Event().wait)  # as if it hung
    monkeypatch.setattr("bide.stores.sqlite.connection.PATIENCE", 0.01)
    assert in_a_child(refused)
    assert in_a_child(lambda: in_a_child(refused))
    app.sync.close()


def in_no_loop(work: Callable[[], bool]) -> bool:
    with ThreadPoolExecutor(1) as threads:
        return threads.submit(work).result()


@forks
@quietly
def test_a_fork_while_another_thread_opens(tmp_path: Path) -> None:
    parent, opening, may_open = os.getpid(), threading.Event(), threading.Event()

    class Slow(MemoryStore):
        async def open(self) -> None:
            if os.getpid() == parent:
                opening.set()
                await asyncio.to_thread(may_open.wait, PATIENCE)
            await super().open()

    app = Bide(Slow())
    thread = threading.Thread(target=app.sync.schedule, args=("t",), kwargs={"delay": "1h"})
    thread.start()
    assert opening.wait(PATIENCE)
    try:
        assert in_a_child(lambda: app.sync.schedule("t", delay="1h").ok)
    finally:
        may_open.set()
        thread.join(PATIENCE)
    app.sync.close()


# --- threads


def test_threads_that_call_while_another_closes_all_get_their_answer() -> None:
    app, answered, over = Bide("memory:"), [0] * 4, threading.Event()

    def call(number: int) -> None:
        while not over.is_set():
            answered[number] += app.sync.schedule("t", key=str(number), delay="1h").ok

    threads = [threading.Thread(target=call, args=(number,), daemon=True) for number in range(4)]
    for thread in threads:
        thread.start()
    for _ in range(50):
        app.sync.close()
    over.set()
    for thread in threads:
        thread.join(PATIENCE)
    assert not any(thread.is_alive() for thread in threads)
    assert all(answered)
    assert list(app.sync.find(page=1))
    app.sync.close()


def test_threads_that_call_while_the_app_opens_and_closes_in_a_loop_get_their_answer() -> None:
    """Its store is one object, which the background loop and the app's own never have open at the same time."""
    app, wrong, over = Bide(MemoryStore()), list[Exception](), threading.Event()

    def call(key: str) -> None:
        while not over.is_set():
            try:
                assert app.sync.schedule("t", key=key, delay="1h").ok
            except OutcomeUnknown:
                pass  # the loop has ended
            except Exception as error:  # noqa: BLE001 - asserted below
                wrong.append(error)

    async def work() -> None:
        async with app:
            await app.schedule("t", delay="1h")

    with ThreadPoolExecutor(4) as threads:
        calling = [threads.submit(call, str(number)) for number in range(4)]
        for _ in range(50):
            asyncio.run(work())
        over.set()
    assert [one.exception() for one in calling] == [None] * 4
    assert wrong == []
    app.sync.close()


def test_an_opening_by_app_sync_that_ctrl_c_interrupts_is_cancelled() -> None:
    class Slow(MemoryStore):
        async def open(self) -> None:
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                cancelled.set()
                raise

    cancelled = threading.Event()
    with pytest.raises(KeyboardInterrupt):
        Bide(Slow()).sync.get("t", "1")
    assert cancelled.is_set()


@pytest.mark.parametrize("kind", ["memory", "redis"])
def test_app_sync_gives_way_to_the_app_that_opens_the_same_store_object(
    kind: str, redis_url: str, redis_namespace: str
) -> None:
    app = Bide(MemoryStore() if kind == "memory" else RedisStore(f"{redis_url}?namespace={redis_namespace}"))

    async def opened(key: str) -> None:
        async with app:
            assert await app.get("t", key)

    for key in "a", "b":
        assert app.sync.schedule("t", key=key, delay="1h").ok
        asyncio.run(opened(key))
    app.sync.close()


async def test_an_app_opens_while_calls_of_app_sync_occupy_the_threads_of_its_loop() -> None:
    app = Bide(MemoryStore())
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(2))
    await asyncio.to_thread(app.sync.schedule, "t", delay="1h")
    opening = asyncio.create_task(app.open())
    calls = [asyncio.to_thread(app.sync.schedule, "t", delay="1h") for _ in range(4)]
    assert all(answer.ok for answer in await asyncio.gather(*calls))
    await opening
    await app.close()
    await asyncio.to_thread(app.sync.schedule, "t", delay="1h")
    app.sync.close()


def test_a_thread_does_not_wait_for_a_loop_that_has_ended() -> None:
    class Stuck(MemoryStore):
        async def get(self, refs: object) -> Any:
            asked.set()
            await asyncio.Event().wait()

    app, asked, raised = Bide(Stuck()), threading.Event(), list[BaseException]()

    def call() -> None:
        try:
            app.sync.get("t", "k")
        except StoreError as error:
            raised.append(error)

    loop = asyncio.new_event_loop()
    loop.run_until_complete(app.open())
    runs = threading.Thread(target=loop.run_forever)
    runs.start()
    waits = threading.Thread(target=call, daemon=True)
    waits.start()
    assert asked.wait(PATIENCE)
    loop.call_soon_threadsafe(loop.stop)
    runs.join(PATIENCE)
    waits.join(PATIENCE)
    assert [type(error) for error in raised] == [OutcomeUnknown]
    for task in asyncio.all_tasks(loop):
        task.cancel()
    loop.run_until_complete(app.close())
    loop.close()


# --- side by side


class Counted:
    """An app whose stores are counted: made, open, and how long the next one takes to open."""

    def __init__(self) -> None:
        self.app = Bide("memory:")
        self.made = self.open = 0
        self.error: StoreUnavailable | None = None
        self.may_open = asyncio.Event()
        self.app.substitute(self._make, SystemClock())

    def _make(self) -> Any:
        self.made += 1
        outer = self

        class Store(MemoryStore):
            async def open(self) -> None:
                await outer.may_open.wait()
                if outer.error is not None:
                    raise outer.error
                outer.open += 1
                await super().open()

            async def close(self) -> None:
                outer.open -= 1
                await super().close()

        return Store()


async def test_who_opens_side_by_side_shares_one_opening() -> None:
    counted = Counted()

    async def use() -> None:
        async with counted.app as app:
            await app.schedule("t", delay="1h")

    users = [asyncio.create_task(use()) for _ in range(5)]
    await until(lambda: counted.made, "the first to begin")
    users[0].cancel()
    counted.may_open.set()
    await asyncio.wait(users)
    assert [user.cancelled() for user in users] == [True, False, False, False, False]
    assert [user.exception() for user in users[1:]] == [None] * 4
    assert (counted.made, counted.open) == (1, 0)


async def test_an_opening_that_fails_fails_for_all_and_the_next_begins_anew() -> None:
    counted = Counted()
    counted.error = StoreUnavailable("away")
    users = [asyncio.create_task(counted.app.open()) for _ in range(3)]
    counted.may_open.set()
    await asyncio.wait(users)
    assert [user.exception() for user in users] == [counted.error] * 3
    counted.error = None
    async with counted.app as app:
        await app.schedule("t", delay="1h")
    assert (counted.made, counted.open) == (2, 0)


async def test_an_opening_that_nobody_waits_for_any_more_leaves_nothing_open() -> None:
    counted = Counted()
    users = [asyncio.create_task(counted.app.open()) for _ in range(2)]
    await until(lambda: counted.made, "the first to begin")
    for user in users:
        user.cancel()
    await asyncio.wait(users)
    assert counted.app.open_in is None
    counted.may_open.set()
    async with counted.app as app:
        await app.schedule("t", delay="1h")
    assert (counted.made, counted.open) == (2, 0)


async def test_who_opens_while_the_last_closes_waits_for_that() -> None:
    closing, may_close = asyncio.Event(), asyncio.Event()

    class Slow(MemoryStore):
        async def close(self) -> None:
            closing.set()
            await may_close.wait()
            await super().close()

    app = Bide(Slow())
    await app.open()
    closes = asyncio.create_task(app.close())
    await closing.wait()
    opens = asyncio.create_task(app.open())
    closes.cancel()
    await asyncio.wait([closes])
    may_close.set()
    await opens
    await app.schedule("t", delay="1h")
    await app.close()
    with pytest.raises(NotOpen):
        await app.get("t", "k")


Verb = Callable[[Bide, str], Coroutine[Any, Any, Any]]
TOPIC = "mail"


async def schedule(app: Bide, key: str) -> Any:
    return await app.schedule(TOPIC, key, key=key, delay="1h")


async def schedule_many(app: Bide, key: str) -> Any:
    return await app.schedule_many([app.new(TOPIC, key, key=f"{key}/{n}", delay="1h") for n in range(12)])


async def reschedule(app: Bide, key: str) -> Any:
    return await app.reschedule(TOPIC, "known", delay="2h")


async def shift(app: Bide, key: str) -> Any:
    return await app.shift("family", "1h")


async def get(app: Bide, key: str) -> Any:
    return await app.get(TOPIC, "known")


async def find(app: Bide, key: str) -> Any:
    return [task async for task in app.find(group="family")]


VERBS: tuple[Verb, ...] = (schedule, schedule_many, reschedule, shift, get, find)


async def everybody_is_answered(app: Bide, key: str) -> None:
    """The next callers of each kind get their answers."""
    async with asyncio.timeout(PATIENCE):
        assert (await app.schedule(TOPIC, key, key=key, delay="1h")).ok
        many = [app.new(TOPIC, None, key=f"{key}:{n}", delay="1h") for n in range(8)]
        assert len(await app.schedule_many(many)) == 8
        assert (await app.reschedule(TOPIC, key, delay="2h")).ok
        assert await app.get(TOPIC, key) is not None


@asynccontextmanager
async def opened(url: str) -> AsyncIterator[Bide]:
    """An app with some tasks. Whatever hangs within it, its close too, ends with a TimeoutError."""
    async with asyncio.timeout(5 * PATIENCE), Bide(url) as app:
        await app.schedule(TOPIC, None, key="known", group="family", delay="1h")
        await app.schedule(TOPIC, None, key="brother", group="family", delay="1h")
        yield app


@stores("memory", "sqlite", "redis", "postgres", "mysql")
@pytest.mark.parametrize("verb", VERBS)
async def test_the_next_callers_are_answered(store_url: str, verb: Verb) -> None:
    async with opened(store_url) as app:
        for point in each_await():
            ended = await point.cancel(verb(app, f"{point}"))
            assert not isinstance(ended, Exception), f"{point}: {ended!r}"
            await everybody_is_answered(app, f"after {point}")


@stores("redis", "postgres", "mysql")
@pytest.mark.parametrize("verb", [schedule, schedule_many, find])
async def test_the_next_callers_are_answered_though_a_connection_was_lost_just_then(store_url: str, verb: Verb) -> None:
    parts = urlsplit(store_url)
    assert parts.hostname is not None
    assert parts.port is not None
    async with FaultProxy(parts.hostname, parts.port) as proxy:
        place = parts.netloc.replace(f":{parts.port}", f":{proxy.port}")
        async with opened(urlunsplit(parts._replace(netloc=place))) as app:
            for point in each_await():
                proxy.fault(Act.LOSE_REPLY)
                await point.cancel(verb(app, f"{point}"))
                await proxy.heal()
                await everybody_is_answered(app, f"after {point}")


@stores("memory", "sqlite", "redis", "postgres", "mysql")
async def test_what_they_asked_for_is_done_once_or_not_at_all(store_url: str) -> None:
    """Of callers that were cancelled somewhere in `schedule`, whose tasks are due at once."""
    async with opened(store_url) as app:
        seen: list[str] = []

        @app.handler("now")
        async def deliver(task: Task[str]) -> None:
            seen.append(task.key)

        ends = {
            f"{point}": await point.cancel(app.schedule("now", "", key=f"{point}", delay=timedelta(0)))
            for point in each_await()
        }
        async with app.worker() as worker:
            await worker.until_empty()
        assert len(seen) == len(set(seen))
        assert {key for key, ended in ends.items() if isinstance(ended, Answer)} <= set(seen)
