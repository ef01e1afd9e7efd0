"""Every kind of connection that a caller may have to PostgreSQL, each to be used in the same way by a test."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

import asyncpg
import django
import django.conf
import psycopg
import sqlalchemy
from django.db.utils import ConnectionHandler
from django.utils.connection import ConnectionProxy
from psycopg.rows import dict_row
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from bide import Bide


class Caller:
    """A caller with a connection: begins a transaction with the first statement unless it is in autocommit.

    A synchronous one has a thread of its own, and does everything in it.
    """

    def __init__(
        self,
        given: Any,
        execute: Callable[[str], Any],
        commit: Callable[[], Any],
        rollback: Callable[[], Any],
        close: Callable[[], Any],
        *,
        thread: ThreadPoolExecutor | None = None,
    ) -> None:
        self.given = given
        self._thread = thread
        self._execute, self._commit, self._rollback, self._close = execute, commit, rollback, close

    @property
    def synchronous(self) -> bool:
        return self._thread is not None

    async def run(self, call: Callable[..., Any], *args: Any) -> Any:
        if self._thread is not None:
            return await asyncio.get_running_loop().run_in_executor(self._thread, call, *args)
        return await call(*args)

    async def execute(self, statement: str) -> Any:
        return await self.run(self._execute, statement)

    async def commit(self) -> None:
        await self.run(self._commit)

    async def rollback(self) -> None:
        await self.run(self._rollback)

    async def close(self) -> None:
        await self.run(self._close)

    async def verb(self, app: Bide, name: str, *args: Any, **kwargs: Any) -> Any:
        """`app.using(connection).name(...)`, or the same of `app.sync`."""
        if self.synchronous:
            return await self.run(lambda: getattr(app.sync.using(self.given), name)(*args, **kwargs))
        return await getattr(app.using(self.given), name)(*args, **kwargs)


@asynccontextmanager
async def in_thread(make: Callable[[], Any]) -> AsyncIterator[tuple[ThreadPoolExecutor, Any]]:
    """A thread, and what was made in it."""
    with ThreadPoolExecutor(1) as thread:
        yield thread, await asyncio.get_running_loop().run_in_executor(thread, make)


Makes = Callable[[str], AbstractAsyncContextManager[Caller]]


def _fetched(result: Any) -> Any:
    """The rows, if there are any."""
    if getattr(result, "returns_rows", False) or getattr(result, "description", None):
        return [tuple(one.values()) if isinstance(one, dict) else tuple(one) for one in result.fetchall()]
    return []


def _plain(url: str) -> str:
    """Without what is bide's own."""
    return url.partition("?")[0]


@asynccontextmanager
async def by_asyncpg(url: str) -> AsyncIterator[Caller]:
    connection = await asyncpg.connect(_plain(url))
    transaction = connection.transaction()
    await transaction.start()
    yield Caller(connection, connection.fetch, transaction.commit, transaction.rollback, connection.close)
    connection.terminate()


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
                one, lambda text: _fetched(one.execute(text)), one.commit, one.rollback, one.close, thread=thread
            )
            yield caller
            await caller.close()

    return make


@asynccontextmanager
async def by_psycopg_async(url: str) -> AsyncIterator[Caller]:
    one = await psycopg.AsyncConnection.connect(_plain(url))

    async def execute(text: str) -> Any:
        cursor = await one.execute(text)
        return await cursor.fetchall() if cursor.description else []

    yield Caller(one, execute, one.commit, one.rollback, one.close)
    await one.close()


def by_sqlalchemy(*, session: bool, level: str | None = None) -> Makes:
    @asynccontextmanager
    async def make(url: str) -> AsyncIterator[Caller]:
        address = _plain(url).replace("postgresql:", "postgresql+psycopg:")
        engine = sqlalchemy.create_engine(address, **({"isolation_level": level} if level else {}))
        async with in_thread(lambda: Session(engine) if session else engine.connect()) as (thread, one):
            caller = Caller(
                one, lambda text: _fetched(one.execute(sqlalchemy.text(text))), one.commit, one.rollback, one.close,
                thread=thread,
            )  # fmt: skip
            yield caller
            await caller.close()
            await caller.run(engine.dispose)

    return make


def by_sqlalchemy_async(driver: str, *, session: bool) -> Makes:
    @asynccontextmanager
    async def make(url: str) -> AsyncIterator[Caller]:
        engine = create_async_engine(_plain(url).replace("postgresql:", f"postgresql+{driver}:"))
        one: Any = AsyncSession(engine) if session else await engine.connect()

        async def execute(text: str) -> Any:
            return _fetched(await one.execute(sqlalchemy.text(text)))

        yield Caller(one, execute, one.commit, one.rollback, one.close)
        await one.close()
        await engine.dispose()

    return make


def by_django(*, proxy: bool) -> Makes:
    @asynccontextmanager
    async def make(url: str) -> AsyncIterator[Caller]:
        if not django.conf.settings.configured:
            django.conf.settings.configure()
            django.setup()
        parts = urlsplit(url)
        place = {
            "ENGINE": "django.db.backends.postgresql", "NAME": parts.path[1:], "USER": parts.username,
            "PASSWORD": parts.password or "", "HOST": parts.hostname, "PORT": str(parts.port),
        }  # fmt: skip
        handler = ConnectionHandler({"default": {}, "shop": place})

        def execute(text: str) -> Any:
            with handler["shop"].cursor() as cursor:
                cursor.execute(text)
                return _fetched(cursor)

        async with in_thread(lambda: handler["shop"]) as (thread, wrapper):
            given = ConnectionProxy(handler, "shop") if proxy else wrapper
            caller = Caller(given, execute, wrapper.commit, wrapper.rollback, wrapper.close, thread=thread)
            await caller.run(wrapper.set_autocommit, False)  # as within atomic()
            yield caller
            await caller.close()

    return make


KINDS: dict[str, Makes] = {
    "asyncpg": by_asyncpg,
    "asyncpg pool": by_asyncpg_pool,
    "psycopg": by_psycopg(),
    "psycopg with dicts": by_psycopg(row_factory=dict_row),
    "psycopg that never prepares": by_psycopg(prepare_threshold=None),
    "psycopg async": by_psycopg_async,
    "SQLAlchemy Connection": by_sqlalchemy(session=False),
    "SQLAlchemy Session": by_sqlalchemy(session=True),
    "SQLAlchemy AsyncConnection, asyncpg": by_sqlalchemy_async("asyncpg", session=False),
    "SQLAlchemy AsyncSession, asyncpg": by_sqlalchemy_async("asyncpg", session=True),
    "SQLAlchemy AsyncConnection, psycopg": by_sqlalchemy_async("psycopg", session=False),
    "SQLAlchemy AsyncSession, psycopg": by_sqlalchemy_async("psycopg", session=True),
    "Django": by_django(proxy=False),
    "Django, by alias": by_django(proxy=True),
}
"""In a transaction, or about to begin one with the first statement."""
