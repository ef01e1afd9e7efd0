"""Every kind of connection that a caller may have to MySQL, each to be used in the same way by a test."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

import aiomysql
import asyncmy
import django
import django.conf
import pymysql
import sqlalchemy
from django.db.utils import ConnectionHandler
from django.utils.connection import ConnectionProxy
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from bide import Bide
from bide.stores.mysql.address import address_of


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


def account(url: str) -> dict[str, Any]:
    """For drivers; the connection is in no database, since all names are whole."""
    parts = urlsplit(url)
    return {
        "host": parts.hostname, "port": parts.port or 3306, "user": parts.username, "password": parts.password or "",
    }  # fmt: skip


def _address(url: str, driver: str) -> str:
    parts = urlsplit(url)
    return f"mysql+{driver}://{parts.netloc}/{address_of(url).schema}"


@asynccontextmanager
async def by_asyncmy(url: str, **options: Any) -> AsyncIterator[Caller]:
    connection = await asyncmy.connect(**account(url), **options)

    async def execute(text: str) -> Any:
        async with connection.cursor() as cursor:
            await cursor.execute(text)
            return await cursor.fetchall() if cursor.description else []

    try:
        yield Caller(connection, execute, connection.commit, connection.rollback, connection.ensure_closed)
    finally:
        connection.close()


def by_aiomysql(**options: Any) -> Makes:
    @asynccontextmanager
    async def make(url: str) -> AsyncIterator[Caller]:
        connection = await aiomysql.connect(**account(url), **options)

        async def execute(text: str) -> Any:
            async with connection.cursor() as cursor:
                await cursor.execute(text)
                return await cursor.fetchall() if cursor.description else []

        try:
            yield Caller(connection, execute, connection.commit, connection.rollback, connection.ensure_closed)
        finally:
            connection.close()

    return make


def by_pymysql(**options: Any) -> Makes:
    @asynccontextmanager
    async def make(url: str) -> AsyncIterator[Caller]:
        async with in_thread(lambda: pymysql.connect(**account(url), **options)) as (thread, one):

            def execute(text: str) -> Any:
                with one.cursor() as cursor:
                    cursor.execute(text)
                    return _fetched(cursor)

            def close() -> None:
                if one.open:
                    one.close()

            caller = Caller(one, execute, one.commit, one.rollback, close, thread=thread)
            yield caller
            await caller.close()

    return make


def by_sqlalchemy(*, session: bool, level: str | None = None) -> Makes:
    @asynccontextmanager
    async def make(url: str) -> AsyncIterator[Caller]:
        engine = sqlalchemy.create_engine(_address(url, "pymysql"), **({"isolation_level": level} if level else {}))
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
        engine = create_async_engine(_address(url, driver))
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
        pymysql.install_as_MySQLdb()
        if not django.conf.settings.configured:
            django.conf.settings.configure()
            django.setup()
        parts = urlsplit(url)
        place = {
            "ENGINE": "django.db.backends.mysql", "NAME": address_of(url).schema, "USER": parts.username,
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
    "asyncmy": by_asyncmy,
    "aiomysql": by_aiomysql(),
    "aiomysql with dicts": by_aiomysql(cursorclass=aiomysql.DictCursor),
    "PyMySQL": by_pymysql(),
    "PyMySQL, latin1 without backslashes": by_pymysql(
        charset="latin1", init_command="SET sql_mode = 'NO_BACKSLASH_ESCAPES', time_zone = '+05:00'"
    ),
    "PyMySQL with dicts": by_pymysql(cursorclass=pymysql.cursors.DictCursor),
    "SQLAlchemy Connection": by_sqlalchemy(session=False),
    "SQLAlchemy Session": by_sqlalchemy(session=True),
    "SQLAlchemy AsyncConnection, asyncmy": by_sqlalchemy_async("asyncmy", session=False),
    "SQLAlchemy AsyncSession, aiomysql": by_sqlalchemy_async("aiomysql", session=True),
    "Django": by_django(proxy=False),
    "Django, by alias": by_django(proxy=True),
}
"""In a transaction, or about to begin one with the first statement."""
