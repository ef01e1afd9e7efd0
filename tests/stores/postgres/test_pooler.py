"""Behind a proxy that gives each transaction another connection: everything works but listening."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import asyncpg
import psycopg
import pytest
from tests.servers.fixtures import not_installed
from tests.servers.pooler import PostgresPooler
from tests.stores.sql.fixtures import OpensStore

from bide.core.instants import In
from bide.core.records import Cancel, Filter, Move, Ref, Result
from bide.stores.postgres import PostgresStore
from bide.testing.store_suite.base import NOW, add_all, do, done, extend, lease, listed, new, retry, settle
from bide_proofs.servers.process import ServerMissing


@pytest.fixture
def pooled(tmp_path: Path, url: str) -> Iterator[str]:
    """The place of the test, by way of the proxy."""
    try:
        with PostgresPooler(tmp_path / "pooler", url) as pooler:
            yield f"{pooler.url}?{url.partition('?')[2]}&pooler=transaction"
    except ServerMissing as error:
        not_installed(error)


async def test_every_verb_works(url: str, pooled: str, open_store: OpensStore) -> None:
    store = await open_store(pooled, migrate=False)
    other = await open_store(pooled, migrate=False)

    async def live(store: PostgresStore, topic: str) -> None:
        answers = await add_all(store, [new(str(n), topic=topic) for n in range(10)] + [new("0", topic=topic)])
        assert [answer.result for answer in answers] == [Result.CREATED] * 10 + [Result.REPLACED]
        assert (await do(store, Move(topic, "1", In(5)))).result is Result.MOVED
        assert (await do(store, Cancel(topic, "2"))).result is Result.CANCELLED
        held = (await lease(store, 20, topic=topic)).tasks
        assert len(held) == 8
        assert await extend(store, held[0], until=NOW + 50_000)
        assert await settle(store, done(held[0]))
        assert await settle(store, retry(held[1], In(7)))
        assert (await store.get([Ref(topic, "2")])) == [None]
        assert len(await listed(store, Filter(topic=topic), limit=3)) == 8
        assert (await store.tally([NOW, NOW + 10])).number(topic) == 8
        assert await store.purge(now=NOW, limit=10) == 0

    for number in range(5):  # what is prepared once more, or on another's connection, would fail now
        await asyncio.gather(*(live(one, f"{name}{number}") for one, name in ((store, "a"), (other, "b"))))


async def test_tasks_join_transactions(url: str, pooled: str, open_store: OpensStore) -> None:
    """The caller's connection, and a handler's, may be another with each transaction."""
    store = await open_store(pooled, migrate=False)
    plain = pooled.partition("?")[0]
    by_asyncpg = await asyncpg.connect(plain, statement_cache_size=0)
    by_psycopg = await psycopg.AsyncConnection.connect(plain, prepare_threshold=None)
    for number in range(5):
        async with by_asyncpg.transaction():
            await store.using(by_asyncpg).add([new(f"a{number}")], now=NOW)
        await store.using(by_psycopg).add([new(f"p{number}")], now=NOW)
        await by_psycopg.commit()
        async with store.transaction() as joined:
            await joined.add([new(f"t{number}")], now=NOW)
            await joined.connection.execute("SELECT 1")
    assert len(await listed(store, Filter())) == 15
    await by_asyncpg.close()
    await by_psycopg.close()
