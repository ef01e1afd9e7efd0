"""Every kind of connection that a caller may have to MySQL, each to be used in the same way by a test."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import aiomysql
import asyncmy
import pymysql
from tests.stores.sql.callers import Caller, Makes, by_django, by_sqlalchemy, by_sqlalchemy_async, fetched, in_thread

from bide.stores.mysql.connection import address_of


def account(url: str) -> dict[str, Any]:
    """For drivers; the connection is in no database, since all names are whole."""
    parts = urlsplit(url)
    return {
        "host": parts.hostname, "port": parts.port or 3306, "user": parts.username, "password": parts.password or "",
    }  # fmt: skip


def sqlalchemys(driver: str) -> Callable[[str], str]:
    """What SQLAlchemy calls the place, by way of that driver."""
    return lambda url: f"mysql+{driver}://{urlsplit(url).netloc}/{address_of(url).schema}"


def djangos(url: str) -> dict[str, Any]:
    pymysql.install_as_MySQLdb()
    parts = urlsplit(url)
    return {
        "ENGINE": "django.db.backends.mysql", "NAME": address_of(url).schema, "USER": parts.username,
        "PASSWORD": parts.password or "", "HOST": parts.hostname, "PORT": str(parts.port),
    }  # fmt: skip


def by_asyncio(driver: Any, **options: Any) -> Makes:
    """`driver`: asyncmy or aiomysql, which have the same functions."""

    @asynccontextmanager
    async def make(url: str) -> AsyncIterator[Caller]:
        connection = await driver.connect(**account(url), **options)

        async def execute(text: str) -> Any:
            async with connection.cursor() as cursor:
                await cursor.execute(text)
                return await cursor.fetchall() if cursor.description else []

        try:
            yield Caller(connection, execute, connection.commit, connection.rollback, connection.ensure_closed)
        finally:
            connection.close()

    return make


by_asyncmy = partial(by_asyncio, asyncmy)
by_aiomysql = partial(by_asyncio, aiomysql)


def by_pymysql(**options: Any) -> Makes:
    @asynccontextmanager
    async def make(url: str) -> AsyncIterator[Caller]:
        async with in_thread(lambda: pymysql.connect(**account(url), **options)) as (thread, one):

            def execute(text: str) -> Any:
                with one.cursor() as cursor:
                    cursor.execute(text)
                    return fetched(cursor)

            def close() -> None:
                if one.open:
                    one.close()

            caller = Caller(one, execute, one.commit, one.rollback, close, thread=thread)
            yield caller
            await caller.close()

    return make


KINDS: dict[str, Makes] = {
    "asyncmy": by_asyncmy(),
    "aiomysql": by_aiomysql(),
    "aiomysql with dicts": by_aiomysql(cursorclass=aiomysql.DictCursor),
    "PyMySQL": by_pymysql(),
    "PyMySQL, latin1 without backslashes": by_pymysql(
        charset="latin1", init_command="SET sql_mode = 'NO_BACKSLASH_ESCAPES', time_zone = '+05:00'"
    ),
    "PyMySQL with dicts": by_pymysql(cursorclass=pymysql.cursors.DictCursor),
    "SQLAlchemy Connection": by_sqlalchemy(sqlalchemys("pymysql"), session=False),
    "SQLAlchemy Session": by_sqlalchemy(sqlalchemys("pymysql"), session=True),
    "SQLAlchemy AsyncConnection, asyncmy": by_sqlalchemy_async(sqlalchemys("asyncmy"), session=False),
    "SQLAlchemy AsyncSession, aiomysql": by_sqlalchemy_async(sqlalchemys("aiomysql"), session=True),
    "Django": by_django(djangos, alias=False),
    "Django, by alias": by_django(djangos, alias=True),
}
"""In a transaction, or about to begin one with the first statement."""
