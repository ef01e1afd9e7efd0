"""Connections that a caller may have, each to be used in the same way by a test; and what their kinds share."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, TypeVar

import django
import django.conf
import sqlalchemy
from django.db.utils import ConnectionHandler
from django.utils.connection import ConnectionProxy
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from bide import Bide

T = TypeVar("T")


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


Makes = Callable[[str], AbstractAsyncContextManager[Caller]]
"""At the URL of a store."""


def in_a_loop(work: Callable[[], Awaitable[T]]) -> T:
    """What a coroutine comes to in a thread of its own, since the caller may be on a loop."""

    async def working() -> T:
        return await work()

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(lambda: asyncio.run(working())).result()


@asynccontextmanager
async def in_thread(make: Callable[[], Any]) -> AsyncIterator[tuple[ThreadPoolExecutor, Any]]:
    """A thread, and what was made in it."""
    with ThreadPoolExecutor(1) as thread:
        yield thread, await asyncio.get_running_loop().run_in_executor(thread, make)


def fetched(result: Any) -> Any:
    """The rows, if there are any."""
    if getattr(result, "returns_rows", False) or getattr(result, "description", None):
        return [tuple(one.values()) if isinstance(one, dict) else tuple(one) for one in result.fetchall()]
    return []


def by_sqlalchemy(address: Callable[[str], str], *, session: bool, level: str | None = None) -> Makes:
    """`address`: what SQLAlchemy calls the place of a URL."""

    @asynccontextmanager
    async def make(url: str) -> AsyncIterator[Caller]:
        engine = sqlalchemy.create_engine(address(url), **({"isolation_level": level} if level else {}))
        async with in_thread(lambda: Session(engine) if session else engine.connect()) as (thread, one):
            caller = Caller(
                one, lambda text: fetched(one.execute(sqlalchemy.text(text))), one.commit, one.rollback, one.close,
                thread=thread,
            )  # fmt: skip
            yield caller
            await caller.close()
            await caller.run(engine.dispose)

    return make


def by_sqlalchemy_async(address: Callable[[str], str], *, session: bool) -> Makes:
    @asynccontextmanager
    async def make(url: str) -> AsyncIterator[Caller]:
        engine = create_async_engine(address(url))
        one: Any = AsyncSession(engine) if session else await engine.connect()

        async def execute(text: str) -> Any:
            return fetched(await one.execute(sqlalchemy.text(text)))

        yield Caller(one, execute, one.commit, one.rollback, one.close)
        await one.close()
        await engine.dispose()

    return make


def by_django(place: Callable[[str], dict[str, Any]], *, alias: bool) -> Makes:
    """`place`: Django's settings for a URL. `alias`: by the proxy that stands for a connection."""

    @asynccontextmanager
    async def make(url: str) -> AsyncIterator[Caller]:
        if not django.conf.settings.configured:
            django.conf.settings.configure()
            django.setup()
        handler = ConnectionHandler({"default": {}, "shop": place(url)})

        def execute(text: str) -> Any:
            with handler["shop"].cursor() as cursor:
                cursor.execute(text)
                return fetched(cursor)

        async with in_thread(lambda: handler["shop"]) as (thread, wrapper):
            given = ConnectionProxy(handler, "shop") if alias else wrapper
            caller = Caller(given, execute, wrapper.commit, wrapper.rollback, wrapper.close, thread=thread)
            await caller.run(wrapper.set_autocommit, False)  # as within atomic()
            yield caller
            await caller.close()

    return make
