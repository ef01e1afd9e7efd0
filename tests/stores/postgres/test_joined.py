"""Tasks on the caller's own connection to PostgreSQL: what its drivers and its transactions alone can do."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from typing import Any

import asyncpg
import psycopg
import pytest
from tests.stores.postgres.connections import KINDS, by_asyncpg, by_psycopg, sqlalchemys
from tests.stores.sql.callers import by_sqlalchemy_async
from tests.stores.sql.database import Postgres
from tests.stores.sql.shop import Shop
from tests.waiting import pause, until

from bide import BadInput, Bide, SetupError, StoreUnavailable, Task
from bide.stores.postgres.connection import address_of


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


async def test_the_server_was_started_again_and_the_connection_is_newer_than_what_is_known(
    database: Postgres, own_server: Any, own_url: str
) -> None:
    database.migrate(own_url)
    app = Bide(own_url)
    async with app:
        own_server.kill()
        own_server.start()
        async with by_asyncpg(own_url) as caller:
            await caller.verb(app, "schedule", "order.close", key="1", delay="1h")
            await caller.commit()
        assert await app.get("order.close", "1") is not None


async def test_codecs_that_change_our_values_are_refused(shop: Shop) -> None:
    async with by_asyncpg(shop.url) as caller, shop.app:
        await caller.given.set_type_codec("json", schema="pg_catalog", encoder=str, decoder=str)
        await caller.verb(shop.app, "schedule", "order.close", key="1", delay="1h")
    async with by_asyncpg(shop.url) as caller, shop.app:
        await caller.given.set_type_codec("int8", schema="pg_catalog", encoder=str, decoder=str, format="text")
        with pytest.raises(BadInput, match="codecs"):
            await caller.verb(shop.app, "schedule", "order.close", key="1", delay="1h")


@pytest.mark.parametrize("kind", ["asyncpg", "psycopg async", "SQLAlchemy AsyncSession, asyncpg"])
async def test_a_verb_that_is_cancelled_leaves_the_transaction_usable(
    database: Postgres, shop: Shop, kind: str
) -> None:
    await shop.others.schedule("order.close", key="held", delay="1h")
    async with KINDS[kind](shop.url) as caller, by_asyncpg(shop.url) as holder, shop.app:
        await holder.verb(shop.app, "fire_now", "order.close", "held")
        await caller.execute(f"INSERT INTO {shop.orders} VALUES (1)")
        waiting = asyncio.ensure_future(caller.verb(shop.app, "cancel", "order.close", "held"))
        await until(lambda: database.ask(shop.url, "SELECT FROM pg_locks WHERE NOT granted"), "it to wait for the lock")
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await caller.verb(shop.app, "schedule", "order.close", key="1", delay="1h")
        await caller.commit()
        await holder.rollback()
    assert (await shop.rows(), await shop.keys()) == (1, ["1", "held"])


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


def test_a_synchronous_block_runs_in_the_callers_thread(shop: Shop) -> None:
    with psycopg.connect(address_of(shop.url).dsn) as own:
        with shop.app.sync.using(own) as verbs:
            shop.app.sync.schedule("order.close", key="1", delay="1h")
            verbs.schedule("order.close", key="2", delay="1h")
            assert sorted(task.key for task in shop.app.sync.find(topic="order.close")) == ["1", "2"]
        assert list(shop.app.sync.find(topic="order.close")) == []
    assert len(list(shop.app.sync.find(topic="order.close"))) == 2


# --- wakes


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
            await pause(0.2, why="nobody is to hear of it before it is committed")
            assert not started.is_set()
            await ending()
        await until(started.is_set, "the worker to hear of it")


async def test_a_rolled_back_wake_does_not_swallow_the_next(shop: Shop) -> None:
    async with by_sqlalchemy_async(sqlalchemys("asyncpg"), session=False)(shop.url) as caller, shop.app:
        heard: list[str] = []
        listening = await shop.others.store.listen(["order.close"], lambda topic, wake: heard.append(topic))  # type: ignore[attr-defined]
        await caller.verb(shop.app, "schedule", "order.close", key="1", delay="500ms")
        await caller.rollback()
        await shop.app.schedule("order.close", key="1", delay="500ms")
        await until(lambda: bool(heard), "notifications of what was scheduled after all")
        await listening.close()
