"""Tasks on the caller's own connection: each kind that there is commits, rolls back and goes on after a failed verb."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import asyncpg
import msgspec
import psycopg
import pytest
import pytest_asyncio
import sqlalchemy
from tests.servers.fixtures import StartsPostgres
from tests.stores.postgres.conftest import OpensStore
from tests.stores.postgres.connections import (
    KINDS,
    Caller,
    by_asyncpg,
    by_django,
    by_psycopg,
    by_sqlalchemy,
    by_sqlalchemy_async,
)

from bide import BadInput, Bide, SetupError, StoreUnavailable, Task
from bide.core.records import At
from bide.stores.batches import AT_ONCE
from bide.stores.postgres import schema
from bide.stores.postgres.address import address_of
from bide.testing.store_suite.acts import NOW, new, until


class Shop:
    """A place with tasks and a table of the caller's; `app` is the caller's, `others` is somebody else's."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.app = Bide(url)
        self.others = Bide(url)
        self.orders = f'"{address_of(url).schema}".orders'

    async def rows(self) -> int:
        connection = await asyncpg.connect(address_of(self.url).dsn)
        try:
            return int(await connection.fetchval(f"SELECT count(*) FROM {self.orders}"))
        finally:
            await connection.close()

    async def keys(self) -> list[str]:
        return sorted([task.key async for task in self.others.find(topic="order.close")])


@pytest_asyncio.fixture
async def shop(url: str) -> AsyncIterator[Shop]:
    await schema.migrate(url)
    shop = Shop(url)
    connection = await asyncpg.connect(address_of(url).dsn)
    await connection.execute(f"CREATE TABLE {shop.orders} (number integer)")
    await connection.close()
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
    """One that the server has refused, which without a savepoint would be the end of the transaction."""
    names = f'"{address_of(shop.url).schema}"'
    admin = await asyncpg.connect(address_of(shop.url).dsn)
    await admin.execute(f"ALTER TABLE {names}.task ADD CONSTRAINT never CHECK (key <> 'never')")
    await admin.close()
    await caller.execute(f"INSERT INTO {shop.orders} VALUES (1)")
    with pytest.raises(StoreUnavailable, match="never"):
        await caller.verb(shop.app, "schedule", "order.close", key="never", delay="1h")
    await caller.verb(shop.app, "schedule", "order.close", key="1", delay="15m")
    await caller.commit()
    assert (await shop.rows(), await shop.keys()) == (1, ["1"])


async def test_in_a_failed_transaction_it_says_so(shop: Shop, caller: Caller) -> None:
    with pytest.raises(Exception, match="zero"):
        await caller.execute("SELECT 1 / 0")
    with pytest.raises(Exception) as raised:
        await caller.verb(shop.app, "schedule", "order.close", key="1", delay="15m")
    assert isinstance(raised.value, SetupError) or "sqlalchemy" in type(raised.value).__module__
    await caller.rollback()
    await caller.verb(shop.app, "schedule", "order.close", key="1", delay="15m")


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
    settings = "SELECT name, setting FROM pg_settings"
    before = sorted(map(tuple, await caller.execute(settings)))
    for number in range(7):  # often enough for drivers and the server to keep plans
        await caller.verb(shop.app, "schedule", "order.close", key=f"{number}", delay="15m")
        await caller.verb(shop.app, "fire_now", "order.close", f"{number}")
    assert sorted(map(tuple, await caller.execute(settings))) == before
    await caller.commit()


# --- without a transaction around it


@pytest.mark.parametrize("kind", ["asyncpg", "psycopg", "sqlalchemy", "django"])
async def test_without_a_transaction_each_verb_is_one(shop: Shop, kind: str) -> None:
    if kind == "asyncpg":
        own = await asyncpg.connect(address_of(shop.url).dsn)
        async with shop.app:
            assert (await shop.app.using(own).schedule("order.close", key="1", delay="1h")).result == "created"
            assert await shop.keys() == ["1"]
            assert (await shop.app.using(own).cancel("order.close", "1")).result == "cancelled"
        await own.close()
    else:
        makes = {
            "psycopg": by_psycopg(autocommit=True),
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


async def test_within_a_pipeline_of_psycopg_it_says_what_to_do(shop: Shop) -> None:
    async with by_psycopg()(shop.url) as caller:

        def work() -> None:
            with caller.given.pipeline():
                caller.given.execute(f"INSERT INTO {shop.orders} VALUES (1)")
                with pytest.raises(SetupError, match="pipeline"):
                    shop.app.sync.using(caller.given).schedule("order.close", key="1", delay="1h")
            shop.app.sync.using(caller.given).schedule("order.close", key="1", delay="1h")
            caller.given.commit()

        await caller.run(work)
    assert (await shop.rows(), await shop.keys()) == (1, ["1"])


async def test_a_psycopg_that_has_no_raw_cursor_yet(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(psycopg, "RawCursor")
    async with by_psycopg()(shop.url) as caller:
        new = [shop.app.new("order.close", "100 % of $1, %s", key=key, delay="1h") for key in ("1", "a%(p1)s $2")]
        assert [answer.result for answer in await caller.verb(shop.app, "schedule_many", new)] == ["created"] * 2
        assert (await caller.verb(shop.app, "fire_now", "order.close", "1")).result == "moved"
        await caller.commit()
    found = await shop.others.get("order.close", "a%(p1)s $2")
    assert found is not None
    assert found.payload == "100 % of $1, %s"


# --- what is refused


async def test_a_connection_to_another_database_is_refused(
    shop: Shop, url: str, postgres_server: StartsPostgres
) -> None:
    elsewhere = postgres_server()
    await schema.migrate(f"{elsewhere.url}?schema={address_of(url).schema}")
    server = await asyncpg.connect(elsewhere.url)
    await server.execute("CREATE DATABASE other")
    await server.close()
    async with shop.app:
        for address in (elsewhere.url, elsewhere.url.replace("/postgres", "/other")):
            foreign = await asyncpg.connect(address)
            async with foreign.transaction():
                with pytest.raises(BadInput, match="another database"):
                    await shop.app.using(foreign).schedule("order.close", key="1", delay="1h")
                assert await foreign.fetchval("SELECT 1") == 1, "and its transaction goes on"
            await foreign.close()


async def test_the_server_was_started_again_and_the_connection_is_newer_than_what_is_known(
    postgres_server: StartsPostgres,
) -> None:
    server = postgres_server()
    await schema.migrate(server.url)
    app = Bide(server.url)
    async with app:
        server.kill()
        server.start()
        async with by_asyncpg(server.url) as caller:
            await caller.verb(app, "schedule", "order.close", key="1", delay="1h")
            await caller.commit()
        assert await app.get("order.close", "1") is not None


async def test_the_wrong_kind_is_refused(shop: Shop) -> None:
    async with shop.app:
        wrong: Any
        for wrong in (sqlite3.connect(":memory:"), sqlalchemy.create_engine("sqlite://").connect()):
            with pytest.raises(BadInput, match="psycopg"):
                await shop.app.using(wrong).schedule("order.close", delay="1h")
            wrong.close()
        for wrong in (object(), None, "connection", sqlalchemy.create_engine("sqlite://")):
            with pytest.raises(BadInput, match="psycopg"):
                shop.app.using(wrong)


async def test_an_asynchronous_connection_is_not_for_synchronous_verbs(shop: Shop) -> None:
    async with by_asyncpg(shop.url) as caller:
        await caller.execute("SELECT 1")
        with pytest.raises(SetupError, match="await"):
            shop.app.sync.using(caller.given).schedule("order.close", key="1", delay="1h")


async def test_codecs_that_change_our_values_are_refused(shop: Shop) -> None:
    async with by_asyncpg(shop.url) as caller, shop.app:
        await caller.given.set_type_codec("json", schema="pg_catalog", encoder=str, decoder=str)
        await caller.verb(shop.app, "schedule", "order.close", key="1", delay="1h")
    async with by_asyncpg(shop.url) as caller, shop.app:
        await caller.given.set_type_codec("int8", schema="pg_catalog", encoder=str, decoder=str, format="text")
        with pytest.raises(BadInput, match="codecs"):
            await caller.verb(shop.app, "schedule", "order.close", key="1", delay="1h")


@pytest.mark.real_time
@pytest.mark.parametrize("kind", ["asyncpg", "psycopg async", "SQLAlchemy AsyncSession, asyncpg"])
async def test_a_verb_that_is_cancelled_leaves_the_transaction_usable(shop: Shop, kind: str) -> None:
    await shop.others.schedule("order.close", key="held", delay="1h")
    async with KINDS[kind](shop.url) as caller, by_asyncpg(shop.url) as holder, shop.app:
        await holder.verb(shop.app, "fire_now", "order.close", "held")
        await caller.execute(f"INSERT INTO {shop.orders} VALUES (1)")
        waiting = asyncio.ensure_future(caller.verb(shop.app, "cancel", "order.close", "held"))
        await asyncio.sleep(0.3)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await caller.verb(shop.app, "schedule", "order.close", key="1", delay="1h")
        await caller.commit()
        await holder.rollback()
    assert (await shop.rows(), await shop.keys()) == (1, ["1", "held"])


async def test_a_read_only_transaction_is_refused(shop: Shop) -> None:
    async with by_asyncpg(shop.url) as caller, shop.app:
        await caller.execute("SET TRANSACTION READ ONLY")
        with pytest.raises(SetupError, match="read-only"):
            await caller.verb(shop.app, "schedule", "order.close", key="1", delay="1h")


@pytest.mark.parametrize("level", ["REPEATABLE READ", "SERIALIZABLE"])
async def test_at_a_stricter_level_what_somebody_has_changed_since_is_refused(shop: Shop, level: str) -> None:
    await shop.others.schedule("order.close", key="1", delay="1h")
    async with by_asyncpg(shop.url) as caller, shop.app:
        await caller.execute(f"SET TRANSACTION ISOLATION LEVEL {level}")
        assert await caller.verb(shop.app, "get", "order.close", "1") is not None
        await shop.others.reschedule("order.close", "1", delay="2h")
        await shop.others.schedule("order.close", key="2", delay="2h")
        with pytest.raises(StoreUnavailable, match="begin the transaction anew") as raised:
            await caller.verb(shop.app, "cancel", "order.close", "1")
        assert getattr(raised.value.__cause__, "sqlstate", None) == "40001"
        with pytest.raises(StoreUnavailable, match="begin the transaction anew"):
            await caller.verb(shop.app, "schedule", "order.close", key="2", delay="1h")
        assert (await caller.verb(shop.app, "schedule", "order.close", key="3", delay="1h")).result == "created"
        await caller.commit()
    assert await shop.keys() == ["1", "2", "3"]


async def test_among_several_processes_the_verbs_of_many_callers_lose_nothing(shop: Shop) -> None:
    """Two hundred transactions of one task each, twenty at a time, on keys that meet: each commit is there."""
    async with shop.app, asyncpg.create_pool(address_of(shop.url).dsn, min_size=1, max_size=20) as pool:

        async def place(number: int) -> None:
            async with pool.acquire() as own, own.transaction():
                await own.execute(f"INSERT INTO {shop.orders} VALUES ({number})")
                await shop.app.using(own).schedule("order.close", number, key=f"{number % 50}", delay="1h")

        await asyncio.gather(*map(place, range(200)))
    assert await shop.rows() == 200
    assert await shop.keys() == sorted(f"{number}" for number in range(50))


# --- around a block


async def test_a_block_lends_the_connection_to_every_verb(shop: Shop) -> None:
    @shop.app.handler("order.close")
    async def close(task: Task[int]) -> None: ...

    async with by_asyncpg(shop.url) as caller, shop.app:
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


def test_a_synchronous_block_runs_in_the_callers_thread(shop: Shop) -> None:
    with psycopg.connect(address_of(shop.url).dsn) as own:
        with shop.app.sync.using(own) as verbs:
            shop.app.sync.schedule("order.close", key="1", delay="1h")
            verbs.schedule("order.close", key="2", delay="1h")
            assert sorted(task.key for task in shop.app.sync.find(topic="order.close")) == ["1", "2"]
        assert list(shop.app.sync.find(topic="order.close")) == []
    assert len(list(shop.app.sync.find(topic="order.close"))) == 2


# --- wakes


@pytest.mark.real_time
@pytest.mark.parametrize("kind", ["SQLAlchemy AsyncSession, asyncpg", "psycopg", "Django"])
async def test_a_worker_elsewhere_hears_of_it_at_the_commit(shop: Shop, kind: str) -> None:
    """It sleeps for a minute, and is woken by the commit: not before, and not by a rollback."""
    started = asyncio.Event()

    @shop.others.handler("order.close")
    async def close(task: Task[Any]) -> None:
        started.set()

    async with KINDS[kind](shop.url) as caller, AsyncExitStack() as opened:
        if not caller.synchronous:
            await opened.enter_async_context(shop.app)
        await opened.enter_async_context(shop.others.worker())
        for ending in (caller.rollback, caller.commit):
            await caller.verb(shop.app, "schedule", "order.close", key="1", delay="0s")
            await asyncio.sleep(0.2)
            assert not started.is_set()
            await ending()
        async with asyncio.timeout(5):
            await started.wait()


async def test_of_many_tasks_the_earliest_is_told(url: str, open_store: OpensStore) -> None:
    """They are written in parts, of which the first has it."""
    store = await open_store(url)
    tasks = [new(str(number), due=At(NOW + number)) for number in range(AT_ONCE + 1)]
    async with store.transaction() as joined:
        await joined.add(tasks, now=NOW)
        assert joined.wakes == {"t": NOW}


async def test_a_rolled_back_wake_does_not_swallow_the_next(shop: Shop) -> None:
    async with by_sqlalchemy_async("asyncpg", session=False)(shop.url) as caller, shop.app:
        heard: list[str] = []
        listening = await shop.others.store.listen(["order.close"], lambda topic, wake: heard.append(topic))  # type: ignore[attr-defined]
        await caller.verb(shop.app, "schedule", "order.close", key="1", delay="500ms")
        await caller.rollback()
        await shop.app.schedule("order.close", key="1", delay="500ms")
        await until(lambda: bool(heard), "tidings of what was scheduled after all")
        await listening.close()
