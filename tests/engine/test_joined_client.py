"""`app.using(connection)` has every verb, `app.sync.using(connection)` too, in the thread that calls it."""

from __future__ import annotations

import asyncio
import contextvars
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import django
import django.conf
import pytest
import sqlalchemy
from django.db.utils import ConnectionHandler
from sqlalchemy.orm import Session
from tests.engine.test_loops_and_forks import forks, in_a_child, quietly
from tests.waiting import PATIENCE

from bide import BadInput, BadPayload, Bide, Handler, NotOpen, Result, SetupError, StoreError, Task


class Shop:
    """An app on a file, and the caller's own connection to it, which belongs to the thread that made it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.app = Bide(f"sqlite:///{path}", actor="ann")

        @self.app.handler("order.close")
        async def close(task: Task[int]) -> None: ...

        self.close: Handler[int] = close
        self.app.sync.schedule("other", key="there", delay="1h")
        self.own = sqlite3.connect(path, check_same_thread=False)
        self.own.execute("CREATE TABLE orders (number INTEGER)")
        self.own.commit()

    def keys(self) -> list[str]:
        with closing(sqlite3.connect(self.path)) as other:
            found = other.execute("SELECT key FROM bide_task WHERE topic = 'order.close' ORDER BY key")
            return [key for (key,) in found]

    def orders(self) -> int:
        with closing(sqlite3.connect(self.path)) as other:
            return int(other.execute("SELECT count(*) FROM orders").fetchone()[0])


@pytest.fixture
def shop(tmp_path: Path) -> Iterator[Shop]:
    shop = Shop(tmp_path / "shop.db")
    yield shop
    shop.own.close()
    shop.app.sync.close()


def test_no_verb_is_done_if_its_event_undoes_the_transaction(shop: Shop) -> None:
    """As SQLite may if the disk is full, or MySQL after a deadlock; then the caller's commit commits nothing."""
    shop.own.execute(
        "CREATE TRIGGER full BEFORE INSERT ON bide_event WHEN new.key = '1' "
        "BEGIN SELECT RAISE(ROLLBACK, 'the disk is full'); END"
    )
    shop.own.commit()
    with pytest.raises(StoreError):
        shop.app.sync.using(shop.own).schedule("other", key="1", delay="1h")
    assert not shop.own.in_transaction


def test_each_verb_by_itself(shop: Shop) -> None:
    verbs = shop.app.sync.using(shop.own)
    results = [
        verbs.schedule("order.close", 1, key="1", group="g", delay="1h").result,
        verbs.schedule_new(verbs.new("order.close", 2, key="2", group="g", delay="1h")).result,
        *(one.result for one in verbs.schedule_many([shop.close.new(3, key="3", delay="1h")])),
        verbs.reschedule("order.close", "1", delay="2h").result,
        *(one.result for one in verbs.reschedule_many([(("order.close", "1"), "3h")])),
        verbs.fire_now("order.close", "1").result,
        *(one.result for one in verbs.fire_many([("order.close", "2")])),
        *(one.result for one in verbs.shift("g", "1h", topic="order.close")),
        verbs.cancel("order.close", "3").result,
        *(one.result for one in verbs.cancel_group("g")),
        *(one.result for one in verbs.cancel_many([("order.close", "1")])),
        verbs.redrive("order.close", "1").result,
        *(one.result for one in verbs.redrive_many([("order.close", "1")])),
    ]
    assert results == ["created"] * 3 + ["moved"] * 6 + ["cancelled"] * 3 + ["finished"] * 3
    assert verbs.get("other", "there") is not None
    there = verbs.get_many([("order.close", "1"), ("other", "there")])
    assert [task.state for task in there if task is not None] == ["cancelled", "waiting"]
    assert [task.key for task in verbs.find(state="waiting")] == ["there"]
    shop.own.rollback()
    assert shop.keys() == []


def test_in_a_block_every_verb_of_the_app_takes_part(shop: Shop) -> None:
    before = shop.app.sync.events()
    with shop.app.sync.using(shop.own) as verbs:
        shop.app.sync.schedule("order.close", 1, key="1", delay="1h")
        verbs.schedule("order.close", 2, key="2", delay="1h")
        assert [task.key for task in shop.app.sync.find(topic="order.close")] == ["1", "2"]
        assert list(shop.app.sync.tally().counts) == [("other", "waiting")], "what is committed"
        assert shop.app.sync.events() == before
    assert list(shop.app.sync.find(topic="order.close")) == []
    shop.own.rollback()
    assert shop.keys() == []
    with pytest.raises(ZeroDivisionError), shop.app.sync.using(shop.own):
        raise ZeroDivisionError
    assert shop.app.sync.schedule("order.close", 3, key="3", delay="1h").ok, "the block is over after an error too"
    assert shop.keys() == ["3"]


def test_other_threads_go_their_own_way(shop: Shop) -> None:
    with shop.app.sync.using(shop.own):
        thread = threading.Thread(target=lambda: shop.app.sync.schedule("order.close", 1, key="1", delay="1h"))
        thread.start()
        thread.join()
    assert shop.keys() == ["1"], "committed by itself"


def test_payloads_are_checked_and_what_was_done_is_noted(shop: Shop) -> None:
    with pytest.raises(BadPayload):
        shop.app.sync.using(shop.own).schedule("order.close", "no number", delay="1h")
    shop.app.sync.using(shop.own).schedule("order.close", 1, key="1", delay="1h")
    shop.own.commit()
    shop.app.sync.using(shop.own).cancel("order.close", "1")
    shop.own.rollback()
    assert [(event.who, event.what) for event in shop.app.sync.events("order.close", "1")] == [
        ("ann", "schedule: created")
    ], "and nothing that was undone"


def test_while_others_write_it_waits_without_a_loop(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bide.stores.sqlite.transactions.PATIENCE", PATIENCE)
    with closing(sqlite3.connect(shop.path, isolation_level=None, check_same_thread=False)) as other:
        other.execute("BEGIN IMMEDIATE")
        timer = threading.Timer(0.2, other.execute, ["COMMIT"])
        timer.start()
        assert shop.app.sync.using(shop.own).schedule("order.close", 1, key="1", delay="1h").result is Result.CREATED
        timer.join()


def test_what_cannot_be_joined_is_refused_at_once(shop: Shop) -> None:
    for wrong in (object(), None, sqlite3.connect(":memory:")):
        with pytest.raises(BadInput, match="connection"):
            shop.app.sync.using(wrong)
    memory = Bide("memory:")
    with pytest.raises(SetupError, match="sqlite:, postgresql: and mysql: can"):
        memory.sync.using(shop.own)
    memory.sync.close()


async def test_it_needs_an_open_app(shop: Shop) -> None:
    with pytest.raises(NotOpen):
        shop.app.using(shop.own)


async def test_the_same_awaited(shop: Shop) -> None:
    async with shop.app:
        verbs = shop.app.using(shop.own)
        assert (await verbs.schedule("order.close", 1, key="1", group="g", delay="1h")).ok
        assert [answer.result for answer in await verbs.cancel_group("g")] == ["cancelled"]
        async with verbs as within:
            assert within is verbs
            await shop.close.schedule(2, key="2", delay="1h")
            async with shop.app.using(shop.own):
                await shop.close.schedule(3, key="3", delay="1h")
            await shop.close.schedule(4, key="4", delay="1h")
            assert [task.key async for task in verbs.find(topic="order.close", state="waiting")] == ["2", "3", "4"]
        assert shop.keys() == []
        shop.own.commit()
        assert shop.keys() == ["1", "2", "3", "4"]


async def test_a_task_that_outlives_its_block_is_refused(shop: Shop) -> None:
    over = asyncio.Event()

    async def later() -> None:
        await over.wait()
        await shop.close.schedule(1, key="lost", delay="1h")

    async with shop.app:
        async with shop.app.using(shop.own):
            outliving = asyncio.create_task(later())
        shop.own.execute("INSERT INTO orders VALUES (1)")
        over.set()
        with pytest.raises(SetupError, match="was created is over"):
            await outliving
        shop.own.rollback()


async def test_one_client_may_be_entered_within_itself_and_by_two_tasks(shop: Shop) -> None:
    async def helper(number: int) -> None:
        async with verbs:
            await shop.close.schedule(number, key=str(number), delay="1h")
            await asyncio.sleep(0)
            await shop.close.schedule(number, key=f"{number} again", delay="1h")

    async with shop.app:
        verbs = shop.app.using(shop.own)
        async with verbs:
            await helper(1)
            await shop.close.schedule(2, key="2", delay="1h")
            await asyncio.gather(helper(3), helper(4))
            await shop.close.schedule(5, key="5", delay="1h")
        shop.own.rollback()
        await shop.close.schedule(6, key="6", delay="1h")
    assert shop.keys() == ["6"]


def test_the_synchronous_one_too(shop: Shop) -> None:
    verbs = shop.app.sync.using(shop.own)
    with verbs:
        with verbs:
            shop.app.sync.schedule("order.close", 1, key="1", delay="1h")
        shop.app.sync.schedule("order.close", 2, key="2", delay="1h")
        within = contextvars.copy_context()
    shop.own.rollback()
    with pytest.raises(SetupError, match="was created is over"):
        within.run(shop.app.sync.schedule, "order.close", 3, key="3", delay="1h")
    assert shop.keys() == []


async def test_blocks_of_two_apps_stand_in_each_other(shop: Shop, tmp_path: Path) -> None:
    other = await asyncio.to_thread(Shop, tmp_path / "other.db")
    async with shop.app, other.app:
        async with shop.app.using(shop.own), other.app.using(other.own):
            await shop.close.schedule(1, key="1", delay="1h")
            await other.close.schedule(2, key="2", delay="1h")
        assert (shop.keys(), other.keys()) == ([], [])
        shop.own.rollback()
        other.own.rollback()
    other.own.close()
    await asyncio.to_thread(other.app.sync.close)


@forks
@quietly
def test_a_forked_child_and_a_closed_app_begin_anew(shop: Shop) -> None:
    def scheduled() -> bool:
        with closing(sqlite3.connect(shop.path)) as own, own:
            return shop.app.sync.using(own).schedule("order.close", 1, key="child", delay="1h").ok

    assert in_a_child(scheduled)
    shop.app.sync.close()
    assert shop.app.sync.using(shop.own).get("order.close", "child") is not None


# --- wrappers over sqlite3


@pytest.mark.parametrize("session", [False, True], ids=["Connection", "Session"])
def test_sqlalchemy(shop: Shop, session: bool) -> None:
    engine = sqlalchemy.create_engine(f"sqlite:///{shop.path}")
    with Session(engine) if session else engine.connect() as own:
        for number, ending in enumerate((own.rollback, own.commit)):
            shop.app.sync.using(own).schedule("order.close", 1, key="1", delay="1h")
            own.execute(sqlalchemy.text("INSERT INTO orders VALUES (1)"))
            shop.app.sync.using(own).schedule("order.close", 1, key="2", delay="1h")
            assert shop.app.sync.using(own).get("order.close", "1") is not None
            assert shop.keys() == []
            ending()
            assert (shop.orders(), shop.keys()) == (number, ["1", "2"] * number)
    engine.dispose()


def test_django(shop: Shop) -> None:
    if not django.conf.settings.configured:
        django.conf.settings.configure()
        django.setup()
    place = {"ENGINE": "django.db.backends.sqlite3", "NAME": str(shop.path)}
    own: Any = ConnectionHandler({"default": {}, "shop": place})["shop"]
    shop.app.sync.using(own).schedule("order.close", 1, key="0", delay="1h")
    assert shop.keys() == ["0"], "in autocommit a verb is committed by itself"
    own.set_autocommit(False, force_begin_transaction_with_broken_autocommit=True)  # as within atomic()
    shop.app.sync.using(own).schedule("order.close", 1, key="1", delay="1h")
    own.rollback()
    assert shop.keys() == ["0"]
    own.set_autocommit(False, force_begin_transaction_with_broken_autocommit=True)
    shop.app.sync.using(own).schedule("order.close", 1, key="1", delay="1h")
    own.commit()
    assert shop.keys() == ["0", "1"]
    own.close()
