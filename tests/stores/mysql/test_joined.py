"""Tasks on the caller's own connection: each kind that there is commits, rolls back and goes on after a failed verb."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import asyncmy
import msgspec
import pytest
import pytest_asyncio
import sqlalchemy
from tests.servers.fixtures import StartsMariaDb
from tests.servers.mariadb_server import ask
from tests.stores.mysql.conftest import OpensStore
from tests.stores.mysql.connections import KINDS, Caller, account, by_asyncmy, by_django, by_pymysql, by_sqlalchemy

from bide import BadInput, Bide, SetupError, StoreUnavailable, Task
from bide.core.records import At
from bide.stores.mysql import MySqlStore, schema
from bide.stores.mysql.address import address_of
from bide.stores.mysql.joined import _AT_ONCE as AT_ONCE
from bide.testing.proxy import Act, FaultProxy
from bide.testing.store_suite.acts import NOW, done, lease, new, put


class Shop:
    """A place with tasks and a table of the caller's; `app` is the caller's, `others` is somebody else's."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.app = Bide(url)
        self.others = Bide(url)
        self.orders = f"`{address_of(url).schema}`.orders"

    async def rows(self) -> int:
        [(count,)] = ask(self.url, f"SELECT COUNT(*) FROM {self.orders}")
        return int(count)

    async def keys(self) -> list[str]:
        return sorted([task.key async for task in self.others.find(topic="order.close")])


@pytest_asyncio.fixture
async def shop(url: str) -> AsyncIterator[Shop]:
    await schema.migrate(url)
    shop = Shop(url)
    ask(url, f"CREATE TABLE {shop.orders} (number integer) ENGINE = InnoDB")
    async with shop.others:
        yield shop
    await asyncio.to_thread(shop.app.sync.close)


@pytest_asyncio.fixture(params=KINDS)
async def caller(request: pytest.FixtureRequest, shop: Shop) -> AsyncIterator[Caller]:
    async with KINDS[request.param](shop.url) as made, AsyncExitStack() as opened:
        if not made.synchronous:
            await opened.enter_async_context(shop.app)
        yield made


async def test_a_commit_brings_both(shop: Shop, caller: Caller) -> None:
    await caller.execute(f"INSERT INTO {shop.orders} VALUES (1)")
    answer = await caller.verb(shop.app, "schedule", "order.close", {"n": 1}, key="1", group="ann", delay="15m")
    assert answer.result == "created"
    found = await caller.verb(shop.app, "get", "order.close", "1")
    assert found.payload == {"n": 1}
    assert found.token == answer.task.token
    assert (await shop.rows(), await shop.keys()) == (0, []), "nobody else sees either"
    await caller.commit()
    assert (await shop.rows(), await shop.keys()) == (1, ["1"])


async def test_a_rollback_takes_both_back(shop: Shop, caller: Caller) -> None:
    before = (await shop.others.schedule("order.close", key="old", delay="1h")).record
    await caller.execute(f"INSERT INTO {shop.orders} VALUES (1)")
    assert (await caller.verb(shop.app, "schedule", "order.close", key="1", delay="15m")).result == "created"
    assert (await caller.verb(shop.app, "cancel", "order.close", "old")).result == "cancelled"
    await caller.rollback()
    assert (await shop.rows(), await shop.keys()) == (0, ["old"])
    after = await shop.others.get("order.close", "old")
    assert after is not None
    assert after.record == before


async def test_the_first_thing_in_a_transaction_may_be_a_verb(shop: Shop, caller: Caller) -> None:
    """Wrappers begin with the first statement of theirs, and know nothing of ours."""
    await caller.verb(shop.app, "schedule", "order.close", key="1", delay="15m")
    await caller.rollback()
    assert await shop.keys() == []


async def test_every_verb(shop: Shop, caller: Caller) -> None:
    app = shop.app

    async def verb(name: str, *args: Any, **kwargs: Any) -> Any:
        answers = await caller.verb(app, name, *args, **kwargs)
        if isinstance(answers, list):
            return [str(one.result) if hasattr(one, "result") else one for one in answers]
        return str(answers.result)

    new = [app.new("order.close", key=key, group="g", delay="1h") for key in "abc"]
    assert await verb("schedule_many", new) == ["created"] * 3
    assert await verb("schedule", "order.close", key="a", delay="2h") == "replaced"
    assert await verb("schedule", "order.close", key="a", delay="3h", on_conflict="keep") == "kept"
    assert await verb("schedule", "order.close", key="a", delay="3h", on_conflict="refuse") == "refused"
    assert await verb("reschedule", "order.close", "a", delay="3h") == "moved"
    assert await verb("fire_now", "order.close", "a") == "moved"
    assert await verb("reschedule_many", [(("order.close", "a"), "1h")]) == ["moved"]
    assert await verb("fire_many", [("order.close", "a")]) == ["moved"]
    assert await verb("shift", "g", "1h") == ["moved", "moved"]
    assert await verb("redrive", "order.close", "z") == "not_found"
    assert await verb("cancel_group", "g") == ["cancelled", "cancelled"]
    assert await verb("cancel_many", [("order.close", "a"), ("order.close", "z")]) == ["cancelled", "not_found"]
    assert await verb("get_many", [("order.close", "a")]) == [None]
    await caller.commit()
    assert await shop.keys() == []


async def test_a_verb_that_fails_leaves_the_transaction_usable(shop: Shop, caller: Caller) -> None:
    await caller.execute(f"INSERT INTO {shop.orders} VALUES (1)")
    both = [shop.app.new("order.close", key=key, delay="1h") for key in ("ok", "ok?")]
    both[1] = msgspec.structs.replace(both[1], key="a\ud800")
    with pytest.raises(BadInput):
        await caller.verb(shop.app, "schedule_many", both)
    await caller.verb(shop.app, "schedule", "order.close", key="1", delay="15m")
    await caller.commit()
    assert (await shop.rows(), await shop.keys()) == (1, ["1"]), "and of the failed one nothing is left"


async def test_a_refused_statement_leaves_the_transaction_usable(shop: Shop, caller: Caller) -> None:
    """One that the server has refused: what the verb did before it is undone."""
    table = f"`{address_of(shop.url).schema}`.bide_task"
    ask(shop.url, f"ALTER TABLE {table} ADD CONSTRAINT never CHECK (`key` <> 'never')")
    await caller.execute(f"INSERT INTO {shop.orders} VALUES (1)")
    with pytest.raises(StoreUnavailable, match="never"):
        await caller.verb(shop.app, "schedule", "order.close", key="never", delay="1h")
    await caller.verb(shop.app, "schedule", "order.close", key="1", delay="15m")
    await caller.commit()
    assert (await shop.rows(), await shop.keys()) == (1, ["1"])


async def test_a_closed_connection_is_refused_unless_it_opens_again(
    shop: Shop, caller: Caller, request: pytest.FixtureRequest
) -> None:
    name = request.node.callspec.params["caller"]
    await caller.close()
    if "Session" in name or "Django" in name:  # these open another by themselves
        await caller.verb(shop.app, "schedule", "order.close", key="1", delay="15m")
        return
    with pytest.raises((SetupError, BadInput)):
        await caller.verb(shop.app, "schedule", "order.close", key="1", delay="15m")


async def test_the_connection_is_left_as_it_was(shop: Shop, caller: Caller) -> None:
    settings = "SHOW SESSION VARIABLES"
    moving = {"timestamp", "last_insert_id", "identity", "insert_id", "in_transaction", "warning_count", "statement_id"}
    before = sorted(map(tuple, await caller.execute(settings)))
    for number in range(3):
        await caller.verb(shop.app, "schedule", "order.close", key=f"{number}", delay="15m")
        await caller.verb(shop.app, "fire_now", "order.close", f"{number}")
    after = sorted(map(tuple, await caller.execute(settings)))
    changed = {str(name) for name, *value in set(after) - set(before)}
    assert {name for name in changed - moving if "gtid" not in name and "rand_seed" not in name} == set()
    await caller.commit()


# --- without a transaction around it


@pytest.mark.parametrize("kind", ["asyncmy", "pymysql", "sqlalchemy", "django"])
async def test_without_a_transaction_each_verb_is_one(shop: Shop, kind: str) -> None:
    if kind == "asyncmy":
        async with by_asyncmy(shop.url, autocommit=True) as caller, shop.app:
            assert (await shop.app.using(caller.given).schedule("order.close", key="1", delay="1h")).result == "created"
            assert await shop.keys() == ["1"]
            assert (await shop.app.using(caller.given).cancel("order.close", "1")).result == "cancelled"
    else:
        makes = {
            "pymysql": by_pymysql(autocommit=True),
            "sqlalchemy": by_sqlalchemy(session=False, level="AUTOCOMMIT"),
            "django": by_django(proxy=False),
        }
        async with makes[kind](shop.url) as caller:
            if kind == "django":
                await caller.run(caller.given.set_autocommit, True)
            await caller.verb(shop.app, "schedule", "order.close", key="1", delay="1h")
            assert await shop.keys() == ["1"]
            await caller.verb(shop.app, "cancel", "order.close", "1")
    assert await shop.keys() == []


# --- what is refused


async def test_a_connection_to_another_server_is_refused(shop: Shop, mariadb_server: StartsMariaDb) -> None:
    elsewhere = mariadb_server()
    foreign: Any = await asyncmy.connect(**account(elsewhere.url))
    async with shop.app:
        with pytest.raises(BadInput, match="another server"):
            await shop.app.using(foreign).schedule("order.close", key="1", delay="1h")
        await foreign.query("SELECT 1")
    await foreign.ensure_closed()


async def test_the_wrong_kind_is_refused(shop: Shop) -> None:
    async with shop.app:
        wrong: Any
        for wrong in (sqlite3.connect(":memory:"), sqlalchemy.create_engine("sqlite://").connect()):
            with pytest.raises(BadInput, match="PyMySQL"):
                await shop.app.using(wrong).schedule("order.close", delay="1h")
            wrong.close()
        for wrong in (object(), None, "connection", sqlalchemy.create_engine("sqlite://")):
            with pytest.raises(BadInput, match="PyMySQL"):
                shop.app.using(wrong)


async def test_an_asynchronous_connection_is_not_for_synchronous_verbs(shop: Shop) -> None:
    async with by_asyncmy(shop.url) as caller:
        await caller.execute("SELECT 1")
        with pytest.raises(SetupError, match="await"):
            await asyncio.to_thread(
                lambda: shop.app.sync.using(caller.given).schedule("order.close", key="1", delay="1h")
            )


async def test_a_read_only_transaction_is_refused(shop: Shop) -> None:
    async with by_asyncmy(shop.url) as caller, shop.app:
        await caller.execute("START TRANSACTION READ ONLY")
        with pytest.raises(SetupError, match="read-only"):
            await caller.verb(shop.app, "schedule", "order.close", key="1", delay="1h")


# --- around a block


async def test_a_block_lends_the_connection_to_every_verb(shop: Shop) -> None:
    @shop.app.handler("order.close")
    async def close(task: Task[int]) -> None: ...

    async with by_asyncmy(shop.url) as caller, shop.app:
        async with shop.app.using(caller.given) as verbs:
            await close.schedule(1, key="1", delay="1h")
            await shop.app.schedule("order.close", 2, key="2", delay="1h")
            await verbs.schedule("order.close", 3, key="3", delay="1h")
            together = [close.schedule(number, key=f"{number}", delay="1h") for number in range(4, 10)]
            await asyncio.gather(*together)
            assert len([task async for task in shop.app.find(topic="order.close")]) == 9
        assert await shop.keys() == []
        await caller.commit()
        assert len(await shop.keys()) == 9


# --- transactions of our own


async def test_a_handlers_transaction_knows_nothing_of_the_one_before(shop: Shop) -> None:
    async with shop.app:
        store = shop.app.store
        assert isinstance(store, MySqlStore)
        async with store.transaction() as joined:
            await joined.connection.query("SET SESSION sql_mode = '', time_zone = '+03:00', @mine = 1")
            first = joined.connection
        async with store.transaction() as joined:
            assert joined.connection is first
            async with joined.connection.cursor() as cursor:
                await cursor.execute("SELECT @@time_zone, @mine, 'ä'")
                assert await cursor.fetchall() == (("+00:00", None, "ä"),)
        with pytest.raises(SetupError, match="inside its block"):
            async with store.transaction() as joined:
                await joined.connection.commit()


@pytest.mark.faults
@pytest.mark.parametrize("act", [Act.CUT, Act.LOSE_REPLY], ids=["never arrived", "answer lost"])
async def test_a_commit_that_was_cut_is_known_to_be_done_or_not(
    act: Act, proxy: FaultProxy, through: Any, url: str
) -> None:
    store = await through()
    ask(url, f"CREATE TABLE `{address_of(url).schema}`.orders (number integer) ENGINE = InnoDB")
    for place in range(40):
        await put(store, new(f"k{place}"))
        [held] = (await lease(store, 1)).tasks
        fault = None
        try:
            async with store.transaction() as joined:
                fault = proxy.fault(act, skip=place)
                await joined.connection.query(f"INSERT INTO `{address_of(url).schema}`.orders VALUES ({place})")
                assert await joined.settle([done(held)], now=NOW) == [True]
            committed = True
        except (StoreUnavailable, asyncmy.errors.OperationalError):
            committed = False
        assert fault is not None
        hits = fault.hits
        await proxy.heal()
        effects = ask(url, f"SELECT number FROM `{address_of(url).schema}`.orders WHERE number = {place}")
        assert len(effects) == committed
        assert (await store.get([held.ref]) == [None]) is committed
        if not committed:
            assert await store.settle([done(held)], now=NOW) == [True]
        if not hits:
            break
    else:
        raise AssertionError("the story has no end")
    assert place >= 2


async def test_of_many_tasks_the_earliest_is_told(url: str, open_store: OpensStore) -> None:
    """They are written in parts, of which the first has it."""
    store = await open_store(url)
    tasks = [new(str(number), due=At(NOW + number)) for number in range(AT_ONCE + 1)]
    async with store.transaction() as joined:
        await joined.add(tasks, now=NOW)
        assert joined.wakes == {"t": NOW}
