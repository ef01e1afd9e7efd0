"""Every kind of connection that a caller may have to PostgreSQL, each to be used in the same way by a test."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

import asyncpg
import psycopg
from psycopg.rows import dict_row
from tests.stores.sql.callers import Caller, Makes, by_django, by_sqlalchemy, by_sqlalchemy_async, fetched, in_thread


def _plain(url: str) -> str:
    """Without what is bide's own."""
    return url.partition("?")[0]


@asynccontextmanager
async def by_asyncpg(url: str) -> AsyncIterator[Caller]:
    connection = await asyncpg.connect(_plain(url))
    transaction = connection.transaction()
    await transaction.start()
    try:
        yield Caller(connection, connection.fetch, transaction.commit, transaction.rollback, connection.close)
    finally:
        connection.terminate()


@asynccontextmanager
async def by_asyncpg_alone(url: str) -> AsyncIterator[Caller]:
    """Without a transaction."""
    connection = await asyncpg.connect(_plain(url))

    async def nothing() -> None: ...

    yield Caller(connection, connection.fetch, nothing, nothing, connection.close)
    await connection.close()


@asynccontextmanager
async def by_asyncpg_pool(url: str) -> AsyncIterator[Caller]:
    async with asyncpg.create_pool(_plain(url), min_size=1, max_size=1) as pool, pool.acquire() as connection:
        transaction = connection.transaction()
        await transaction.start()
        yield Caller(connection, connection.fetch, transaction.commit, transaction.rollback, connection.close)


def by_psycopg(**options: Any) -> Makes:
    @asynccontextmanager
    async def make(url: str) -> AsyncIterator[Caller]:
        async with in_thread(lambda: psycopg.connect(_plain(url), **options)) as (thread, one):
            caller = Caller(
                one, lambda text: fetched(one.execute(text)), one.commit, one.rollback, one.close, thread=thread
            )
            yield caller
            await caller.close()

    return make


def by_psycopg_async(**options: Any) -> Makes:
    @asynccontextmanager
    async def make(url: str) -> AsyncIterator[Caller]:
        one = await psycopg.AsyncConnection.connect(_plain(url), **options)

        async def execute(text: str) -> Any:
            cursor = await one.execute(text)
            return await cursor.fetchall() if cursor.description else []

        try:
            yield Caller(one, execute, one.commit, one.rollback, one.close)
        finally:
            await one.close()

    return make


def sqlalchemys(driver: str) -> Callable[[str], str]:
    """What SQLAlchemy calls the place, by way of that driver."""
    return lambda url: _plain(url).replace("postgresql:", f"postgresql+{driver}:")


def djangos(url: str) -> dict[str, Any]:
    parts = urlsplit(url)
    return {
        "ENGINE": "django.db.backends.postgresql", "NAME": parts.path[1:], "USER": parts.username,
        "PASSWORD": parts.password or "", "HOST": parts.hostname, "PORT": str(parts.port),
    }  # fmt: skip


KINDS: dict[str, Makes] = {
    "asyncpg": by_asyncpg,
    "asyncpg pool": by_asyncpg_pool,
    "psycopg": by_psycopg(),
    "psycopg with dicts": by_psycopg(row_factory=dict_row),
    "psycopg that never prepares": by_psycopg(prepare_threshold=None),
    "psycopg that always prepares": by_psycopg(prepare_threshold=0),
    "psycopg async": by_psycopg_async(),
    "SQLAlchemy Connection": by_sqlalchemy(sqlalchemys("psycopg"), session=False),
    "SQLAlchemy Session": by_sqlalchemy(sqlalchemys("psycopg"), session=True),
    "SQLAlchemy AsyncConnection, asyncpg": by_sqlalchemy_async(sqlalchemys("asyncpg"), session=False),
    "SQLAlchemy AsyncSession, asyncpg": by_sqlalchemy_async(sqlalchemys("asyncpg"), session=True),
    "SQLAlchemy AsyncConnection, psycopg": by_sqlalchemy_async(sqlalchemys("psycopg"), session=False),
    "SQLAlchemy AsyncSession, psycopg": by_sqlalchemy_async(sqlalchemys("psycopg"), session=True),
    "Django": by_django(djangos, alias=False),
    "Django, by alias": by_django(djangos, alias=True),
}
"""In a transaction, or about to begin one with the first statement."""
