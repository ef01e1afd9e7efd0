"""A handler's data and its task in one SQLite file: the effect and the end of the task are one, or neither is."""

from __future__ import annotations

import asyncio
import contextvars
import random
import signal
import sqlite3
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.programs import python
from tests.waiting import PATIENCE, forever, pause, until

from bide import Bide, Dead, Defer, Done, Fixed, Handler, LeaseLost, Result, SetupError, StoreFull, SystemClock, Task
from bide.core.outcomes import Outcome
from bide.stores.sqlite import SqliteStore
from bide.testing import ManualClock, TimeMachine

COLUMNS = "number INTEGER PRIMARY KEY, status TEXT DEFAULT 'unpaid', times INTEGER DEFAULT 0"


@dataclass
class Order:
    number: int


class Shop:
    """Orders in the tasks' own file; a handler that cancels one within its transaction, and whatever else is asked."""

    def __init__(self, path: Path) -> None:
        self.app = Bide(f"sqlite:///{path}", keep_done="0s")
        self.store = SqliteStore(path)
        self.database = sqlite3.connect(path)
        self.database.execute(f"CREATE TABLE orders ({COLUMNS})")
        self.database.execute("INSERT INTO orders (number) VALUES (1), (2)")
        self.database.commit()
        self.seen: list[Task[Order]] = []
        self.raised: list[BaseException] = []
        self.before: Callable[[Task[Order]], Awaitable[object]] | None = None
        self.inside: Callable[[Task[Order]], Awaitable[object]] | None = None
        self.after: Callable[[Task[Order]], Awaitable[object]] | None = None
        self.again: str | None = None

        @self.app.handler("order.cancel", retry=Fixed("10s", tries=5))
        async def cancel(task: Task[Order]) -> None:
            self.seen.append(task)
            if self.before is not None:
                await self.before(task)
            try:
                async with task.transaction(again_in=self.again) as conn:
                    effect = "UPDATE orders SET status = 'cancelled', times = times + 1 WHERE number = ?"
                    conn.execute(effect, (task.payload.number,))
                    if self.inside is not None:
                        await self.inside(task)
            except BaseException as error:
                self.raised.append(error)
                raise
            if self.after is not None:
                await self.after(task)

        @self.app.handler("order.close")
        async def close(task: Task[Order]) -> None:
            async with task.transaction() as conn:
                conn.execute("UPDATE orders SET status = 'closed' WHERE number = ?", (task.payload.number,))

        self.cancel: Handler[Order] = cancel
        self.close: Handler[Order] = close

    @property
    def orders(self) -> list[tuple[str, int]]:
        return list(self.database.execute("SELECT status, times FROM orders ORDER BY number"))


@pytest.fixture
def shop(tmp_path: Path) -> Iterator[Shop]:
    shop = Shop(tmp_path / "shop.db")
    yield shop
    shop.database.close()


# --- task.transaction


async def test_the_effect_and_the_end_of_the_task_are_committed_together(shop: Shop) -> None:
    async def look_from_outside(task: Task[Order]) -> None:
        seen.append(shop.orders[0])

    async def look(task: Task[Order]) -> None:
        seen.append((shop.orders[0], await shop.app.get("order.cancel", "1")))

    seen: list[Any] = []
    shop.inside, shop.after = look_from_outside, look
    async with TimeMachine(shop.app, store=shop.store) as machine:
        await shop.cancel.schedule(Order(1), key="1", delay="15m")
        fired = await machine.advance("15m")
        assert [one.outcome for one in fired] == ["done"]
        assert seen == [("unpaid", 0), (("cancelled", 1), None)], "nobody sees either before the block is left"
        assert await machine.advance("1d") == []


@pytest.mark.parametrize("error", [ConnectionError("away"), sqlite3.IntegrityError("no"), Exception()], ids=repr)
async def test_an_error_undoes_both_and_it_is_delivered_again(shop: Shop, error: Exception) -> None:
    async def fail(task: Task[Order]) -> None:
        if task.attempt < 3:
            raise error

    shop.inside = fail
    async with TimeMachine(shop.app, store=shop.store) as machine:
        await shop.cancel.schedule(Order(1), key="1", delay="15m")
        fired = await machine.advance("15m10s")
        assert shop.orders[0] == ("unpaid", 0), "two deliveries, and nothing of them is left"
        fired += await machine.advance("10s")
    assert [(one.outcome, one.attempt) for one in fired] == [("retry", 1), ("retry", 2), ("done", 3)]
    assert shop.orders[0] == ("cancelled", 1)
    assert len({task.id for task in shop.seen}) == 1, "it is the same life"
    tokens = [task.token for task in shop.seen]
    assert tokens == sorted(set(tokens)), "and a receiver can tell the newer delivery"


@pytest.mark.parametrize("meanwhile", ["cancel", "replace"])
async def test_no_longer_ours_nothing_of_the_effect_remains(shop: Shop, meanwhile: str) -> None:
    async def interfere(task: Task[Order]) -> None:
        shop.before = None
        if meanwhile == "cancel":
            answer = await shop.cancel.cancel("1")
            assert answer.result is Result.CANCELLED_WHILE_LEASED
        else:
            answer = await shop.cancel.schedule(Order(2), key="1", delay="1h")
            assert answer.result is Result.REPLACED

    shop.before = interfere
    async with TimeMachine(shop.app, store=shop.store) as machine:
        await shop.cancel.schedule(Order(1), key="1", delay="15m")
        [refused] = await machine.advance("15m")
        assert not refused.settled, "its outcome is nobody's business any more"
        assert [type(error) for error in shop.raised] == [LeaseLost]
        assert shop.orders == [("unpaid", 0), ("unpaid", 0)]
        fired = await machine.advance("1d")
        assert [one.payload for one in fired if one.settled] == ([] if meanwhile == "cancel" else [{"number": 2}])
    assert shop.orders == [("unpaid", 0), ("unpaid", 0) if meanwhile == "cancel" else ("cancelled", 1)]


async def test_verbs_awaited_inside_join_it(shop: Shop) -> None:
    async def close_later(task: Task[Order]) -> None:
        assert (await shop.close.schedule(task.payload, key="1", group="order-1", delay="1d")).ok
        assert (await shop.app.schedule_many([shop.close.new(Order(2), key="2", delay="2d")]))[0].ok
        assert await shop.close.get("1"), "inside it is there"
        assert [answer.result for answer in await shop.app.shift("order-1", "1h")] == ["moved"]
        assert (await shop.close.cancel("2")).result == "cancelled"
        if task.attempt == 1:
            raise ConnectionError("after all of that")

    shop.inside = close_later
    async with TimeMachine(shop.app, store=shop.store) as machine:
        await shop.cancel.schedule(Order(1), key="1", delay="15m")
        await machine.advance("15m")
        assert [task.topic for task in await machine.waiting()] == ["order.cancel"], "undone with the rest"
        fired = await machine.advance("10s")
        assert [task.ref for task in fired] == [("order.cancel", "1")]
        assert [(task.topic, task.key) for task in await machine.waiting()] == [("order.close", "1")]
        begun = machine.now
        (closed,) = await machine.advance("2d")
        assert closed.at - begun == timedelta(hours=25)
    assert shop.orders[0] == ("closed", 1)


async def test_a_verb_from_outside_waits_its_turn(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    """A coroutine that is not inside must not join: it goes through the store's own connection, after the commit."""

    async def hurry(task: Task[Order]) -> None:
        outside.append(context.run(asyncio.ensure_future, shop.close.schedule(Order(2), key="2", delay="1d")))
        await pause(0.05, why="one that did not wait would be done by now")
        assert not outside[0].done()

    monkeypatch.setattr("bide.stores.sqlite.connection.PATIENCE", PATIENCE)
    context = contextvars.copy_context()
    outside: list[asyncio.Task[Any]] = []
    shop.inside = hurry
    async with TimeMachine(shop.app, store=shop.store) as machine:
        await shop.cancel.schedule(Order(1), key="1", delay="0s")
        await machine.advance("0s")
        assert (await outside[0]).result == "created"


async def test_it_begins_again_within_the_transaction(shop: Shop) -> None:
    async def fail_once(task: Task[Order]) -> None:
        if len(shop.seen) == 2:
            raise ConnectionError("in the second life")

    shop.again, shop.inside = "30d", fail_once
    async with TimeMachine(shop.app, store=shop.store) as machine:
        await shop.cancel.schedule(Order(1), key="1", group="ann", delay="30d")
        begun = machine.now
        fired = await machine.advance("65d")
        assert [(one.outcome, one.attempt, round((one.at - begun) / timedelta(days=1), 3)) for one in fired] == [
            ("done", 1, 30), ("retry", 1, 60), ("done", 2, 60),
        ]  # fmt: skip
        assert shop.orders[0] == ("cancelled", 2)
        first, second, third = shop.seen
        assert first.id != second.id == third.id
        assert first.token < second.token < third.token
        (waiting,) = await machine.waiting()
        assert (waiting.key, waiting.group, waiting.attempt, waiting.failures) == ("1", "ann", 0, 0)
        assert waiting.payload == {"number": 1}


async def test_scheduling_its_own_key_inside_says_what_to_do_instead(shop: Shop) -> None:
    async def own(task: Task[Order]) -> None:
        if task.attempt == 1:
            await shop.cancel.schedule(task.payload, key=task.key, delay="1d")

    shop.inside = own
    async with TimeMachine(shop.app, store=shop.store) as machine:
        await shop.cancel.schedule(Order(1), key="1", delay="0s")
        fired = await machine.advance("10s")
        assert [type(error) for error in shop.raised] == [LeaseLost]
        assert "again_in=" in str(shop.raised[0])
        assert [one.outcome for one in fired] == ["retry", "done"], "the mistake is undone, too, and is a failure"
        assert shop.orders[0] == ("cancelled", 1)


async def test_where_there_is_no_common_database_it_says_so() -> None:
    app = Bide("memory:")

    @app.handler("work", retry="never")
    async def work(task: Task[Any]) -> None:
        async with task.transaction():
            raise AssertionError

    async with TimeMachine(app) as machine:
        await work.schedule(None, delay="0s")
        [fired] = await machine.advance("0s")
    assert "SetupError" in (fired.error or "")
    assert "shares no database" in (fired.error or "")


@pytest.mark.parametrize("grouped", [False, True])
async def test_done_raised_inside_is_a_failure_since_it_undoes_the_effect(shop: Shop, *, grouped: bool) -> None:
    async def done(task: Task[Order]) -> None:
        if task.attempt == 1:
            raise ExceptionGroup("of a task group", [Done()]) if grouped else Done

    shop.inside = done
    async with TimeMachine(shop.app, store=shop.store) as machine:
        await shop.cancel.schedule(Order(1), key="1", delay="0s")
        fired = await machine.advance("10s")
    assert [one.outcome for one in fired] == ["retry", "done"]
    assert "leave the block instead" in str(shop.raised[0])
    assert shop.orders[0] == ("cancelled", 1)


@pytest.mark.parametrize("ended", [Defer("1h"), Dead("no"), Done(again_in="1h"), ValueError("no mail")], ids=repr)
@pytest.mark.parametrize("inside", [True, False], ids=["in the block", "after it"])
async def test_what_comes_too_late_for_the_commit_is_in_the_log(
    shop: Shop, ended: Exception, caplog: pytest.LogCaptureFixture, *, inside: bool
) -> None:
    @shop.app.handler("order.pay")
    async def pay(task: Task[Order]) -> Any:
        async with task.transaction():
            if inside and isinstance(ended, Outcome):
                return ended
        raise ended

    async with TimeMachine(shop.app, store=shop.store) as machine:
        await pay.schedule(Order(1), key="1", delay="0s")
        assert [one.outcome for one in await machine.advance("2h")] == ["done"]
    [record] = [one for one in caplog.records if "is discarded" in one.message]
    assert record.message.startswith("order.pay/1: ")
    assert f"{type(ended).__name__}: {ended}" in record.message
    assert bool(record.exc_info) is isinstance(ended, ValueError)


async def test_done_after_the_block_says_nothing(shop: Shop, caplog: pytest.LogCaptureFixture) -> None:
    async def done(task: Task[Order]) -> None:
        raise Done

    shop.after = done
    async with TimeMachine(shop.app, store=shop.store) as machine:
        await shop.cancel.schedule(Order(1), key="1", delay="0s")
        assert [one.outcome for one in await machine.advance("2h")] == ["done"]
    assert not [one for one in caplog.records if one.name == "bide.worker"]


async def test_an_extension_inside_is_refused_and_does_not_wait_for_its_own_lock(shop: Shop) -> None:
    async def extend(task: Task[Order]) -> None:
        assert await task.extend("1m")

    async def extend_once(task: Task[Order]) -> None:
        if task.attempt == 1:
            await extend(task)

    shop.before, shop.inside = extend, extend_once
    async with TimeMachine(shop.app, store=shop.store) as machine:
        await shop.cancel.schedule(Order(1), key="1", delay="0s")
        assert [one.outcome for one in await machine.advance("10s")] == ["retry", "done"]
    assert [type(error) for error in shop.raised] == [SetupError]


async def test_a_time_out_inside_undoes_everything(tmp_path: Path) -> None:
    app = Bide(f"sqlite:///{tmp_path}/shop.db")
    with closing(sqlite3.connect(tmp_path / "shop.db")) as database:
        database.execute(f"CREATE TABLE orders ({COLUMNS})")

        @app.handler("slow", timeout="100ms", retry=Fixed("1ms", tries=100))
        async def slow(task: Task[Any]) -> None:
            async with task.transaction() as conn:
                conn.execute("INSERT INTO orders (number) VALUES (1)")
                await (forever() if task.attempt == 1 else asyncio.sleep(0))

        async with app, app.worker() as worker:
            await slow.schedule(None, key="k", delay="0s")
            await worker.until_empty()
            assert (worker.stats.retried > 0, worker.stats.done) == (True, 1)
        assert database.execute("SELECT count(*) FROM orders").fetchone() == (1,)


class SlowAnswers(SqliteStore):
    """The answer to a commit takes so long that its worker extends the leases before it."""

    extend_leases: Callable[[], Awaitable[None]]

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[Any]:
        async with super().transaction() as joined:
            yield joined
        await self.extend_leases()


async def test_no_extension_touches_what_is_being_committed(tmp_path: Path) -> None:
    """Between the commit and its answer the lease is gone: to ask for its extension would end the handler."""
    path, after = tmp_path / "shop.db", list[str]()
    app, store = Bide(f"sqlite:///{path}", lease="1h"), SlowAnswers(path)

    @app.handler("work")
    async def work(task: Task[Any]) -> None:
        async with task.transaction():
            pass
        await worker._lease_extender.extend()
        after.append(task.key)

    app.substitute(lambda: store, app.clock)
    async with app, app.worker() as worker:
        store.extend_leases = worker._lease_extender.extend
        await work.schedule(None, key="k", delay="0s")
        await worker.until_empty()
        assert (worker.stats.done, worker.stats.lost) == (1, 0)
    assert after == ["k"]


class FullOnce(SqliteStore):
    """The disk is full at the first commit."""

    refused = 0

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[Any]:
        async with super().transaction() as joined:
            yield joined
            if not self.refused:
                self.refused += 1
                raise StoreFull("no room for this commit")


async def test_a_failed_commit_is_a_failure_like_any_other(tmp_path: Path) -> None:
    app = Bide(f"sqlite:///{tmp_path}/shop.db")

    @app.handler("work", retry=Fixed("10s", tries=2))
    async def work(task: Task[Any]) -> None:
        async with task.transaction():
            pass

    async with TimeMachine(app, store=FullOnce(tmp_path / "shop.db")) as machine:
        await work.schedule(None, delay="0s")
        assert [one.outcome for one in await machine.advance("10s")] == ["retry", "done"]


# --- app.using


async def test_a_commit_of_the_callers_wakes_the_worker_in_the_same_process(tmp_path: Path) -> None:
    """Nobody tells us of that commit; the file's own notifications do, long before the longest sleep is over."""
    app, ran = Bide(f"sqlite:///{tmp_path}/shop.db", max_sleep="1h"), list[int]()

    @app.handler("order.cancel")
    async def cancel(task: Task[int]) -> None:
        ran.append(task.payload)

    with closing(sqlite3.connect(tmp_path / "shop.db")) as own:
        async with app, app.worker():
            for number in range(5):
                await pause(0.03, why="the worker sleeps by then")
                with own:
                    async with app.using(own):
                        await cancel.schedule(number, key=f"{number}", delay="0s")
                await until(partial(ran.__contains__, number), "the handler to run")


async def test_paid_or_cancelled_and_never_both(tmp_path: Path) -> None:
    """Orders and payments on one's own connection, while handlers have their transactions: in real time, in a rush."""
    orders, chance = 60, random.Random(11)
    app = Bide(f"sqlite:///{tmp_path}/shop.db")
    own = sqlite3.connect(tmp_path / "shop.db", isolation_level=None, check_same_thread=False, timeout=PATIENCE)
    own.execute(f"CREATE TABLE orders ({COLUMNS})")
    turn = asyncio.Lock()
    called_off: dict[int, list[str]] = {}
    handled = set[int]()
    never, always = 0, 1
    """Two orders that end the same on any machine: one is paid before it is due, and one after it was cancelled."""

    @app.handler("order.cancel")
    async def cancel(task: Task[Order]) -> None:
        async with task.transaction() as conn:
            sql = "UPDATE orders SET status = 'cancelled', times = times + 1 WHERE number = ? AND status = 'unpaid'"
            conn.execute(sql, (task.payload.number,))
            await asyncio.sleep(0)
        handled.add(task.payload.number)

    async def place_and_pay(number: int) -> None:
        async with turn:
            await asyncio.to_thread(own.execute, "BEGIN IMMEDIATE")  # a wait for a handler must not stop its loop
            own.execute("INSERT INTO orders (number) VALUES (?)", (number,))
            async with app.using(own):
                delay = timedelta(hours=1) if number == never else timedelta(seconds=chance.uniform(0, 0.3))
                await cancel.schedule(Order(number), key=f"{number}", group=f"order-{number}", delay=delay)
            own.execute("COMMIT")
        await pause(chance.uniform(0, 0.3), why="some are due before they are paid, and some after")
        if number == always:
            await until(lambda: number in handled, "the order to be cancelled")
        async with turn:
            await asyncio.to_thread(own.execute, "BEGIN IMMEDIATE")
            pay = "UPDATE orders SET status = 'paid' WHERE number = ? AND status = 'unpaid'"
            if own.execute(pay, (number,)).rowcount:
                async with app.using(own):
                    called_off[number] = [answer.result for answer in await app.cancel_group(f"order-{number}")]
            own.execute("COMMIT")

    async with app, app.worker() as worker:
        await asyncio.gather(*map(place_and_pay, range(orders)))
        await worker.until_empty()
    outcome = dict(own.execute("SELECT number, status || ' ' || times FROM orders"))
    own.close()
    assert set(outcome.values()) == {"paid 0", "cancelled 1"}, "each is one of the two, and cancelled once at most"
    assert {number for number, status in outcome.items() if status == "paid 0"} == set(called_off)
    assert {result for results in called_off.values() for result in results} <= {"cancelled", "cancelled_while_leased"}


# --- kill -9

MORTAL = """
import asyncio, os, signal, sys
from bide import Bide, Task

path, where = sys.argv[1:]
app = Bide(f"sqlite:///{path}", lease="1h")

@app.handler("order.cancel")
async def cancel(task: Task[int]) -> None:
    print(task.id, task.token, flush=True)
    async with task.transaction() as conn:
        conn.execute("UPDATE orders SET times = times + 1 WHERE number = ?", (task.payload,))
        await app.schedule("order.close", task.payload, key=str(task.payload), delay="1d")
        if where == "inside":
            os.kill(os.getpid(), signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)

async def main():
    async with app, app.worker() as worker:
        await worker.until_empty()

asyncio.run(main())
"""


async def work_later(path: Path) -> list[tuple[str, int, int]]:
    """What another worker does after the leases of the first: id, token and attempt of its deliveries."""
    app, seen = Bide(f"sqlite:///{path}", clock=ManualClock(SystemClock().now() + 7_200_000)), list[Task[int]]()

    @app.handler("order.cancel")
    async def cancel(task: Task[int]) -> None:
        seen.append(task)
        async with task.transaction() as conn:
            conn.execute("UPDATE orders SET times = times + 1 WHERE number = ?", (task.payload,))
            await app.schedule("order.close", task.payload, key=str(task.payload), delay="1d")

    async with app, app.worker() as worker:
        await worker.until_empty()
    return [(task.id, task.token, task.attempt) for task in seen]


@pytest.mark.parametrize("where", ["inside", "after"])
def test_killed_at_the_worst_moment_it_loses_neither_and_doubles_neither(tmp_path: Path, where: str) -> None:
    path = tmp_path / "shop.db"
    app = Bide(f"sqlite:///{path}")
    with closing(sqlite3.connect(path)) as database:
        database.execute(f"CREATE TABLE orders ({COLUMNS})")
        database.execute("INSERT INTO orders (number) VALUES (1)")
        database.commit()
        app.sync.schedule("order.cancel", 1, key="1", delay="0s")

        died = python("-c", MORTAL, path, where, code=-signal.SIGKILL)
        (times,) = database.execute("SELECT times FROM orders").fetchone()
        task, follow_up = app.sync.get("order.cancel", "1"), app.sync.get("order.close", "1")
        found = (times, task and task.state, follow_up is not None)
        assert found == ((0, "leased", False) if where == "inside" else (1, "done", True)), "all of it or nothing"

        later = asyncio.run(work_later(path))
        assert database.execute("SELECT times FROM orders").fetchone() == (1,)
        assert app.sync.get("order.close", "1") is not None
        if where == "inside":
            [(life, token, attempt)] = later
            first_life, first_token = died.stdout.split()
            assert (life, attempt) == (first_life, 2)
            assert token > int(first_token)
        else:
            assert later == []
    app.sync.close()
