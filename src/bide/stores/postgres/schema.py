"""The schema, its versions, and how it comes about: numbered migrations, each once, by one client at a time.

Only a program that may create tables migrates; whoever runs tasks checks, and refuses what is missing or older. A newer
schema is accepted: migrations only ever add what older code can live with.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import asyncpg

from bide.core.errors import BideError, StoreUnavailable
from bide.stores.migrations import Migrations
from bide.stores.postgres.address import Address, address_of
from bide.stores.postgres.connecting import connect
from bide.stores.postgres.errors import Lost, NotSent, meaning
from bide.stores.postgres.queries import Names, queries_of

_PATIENCE = 30.0
T = TypeVar("T")

_BOOK = """CREATE TABLE {migration} (
    number integer PRIMARY KEY, name text NOT NULL, checksum text NOT NULL, at timestamptz NOT NULL DEFAULT now()
)"""
_DONE = "INSERT INTO {migration} (number, name, checksum) VALUES (%d, '%s', '%s')"
MIGRATIONS = Migrations(Path(__file__).parent / "migrations", _BOOK, _DONE)


async def found_version(connection: Any, address: Address) -> int:
    """The version that is there, 0 for none. Raises StoreMismatch where a migration is not the one that we know."""
    queries = queries_of(address.schema, address.prefix)
    if not await connection.fetchval(queries["has_migrations"]):
        return 0
    return MIGRATIONS.version_of(await connection.fetch(queries["migrations"]), address.shown)


async def check(connection: Any, address: Address) -> None:
    """Raises StoreMismatch, with what to do, where the schema is missing or older than this code."""
    MIGRATIONS.check(await found_version(connection, address), address.shown)


def statements(address: Address, since: int = 0) -> list[str]:
    """What `migrate` runs after version `since`, in a schema that is there: for whoever would rather run it by hand."""
    return MIGRATIONS.statements(Names(address.schema, address.prefix).write, since)


async def apply(connection: Any, address: Address) -> list[str]:
    """Bring the schema to what this code wants, in one transaction under an advisory lock; the names of the steps."""
    async with connection.transaction():
        lock = Names(address.schema, "").lock - 1  # one for all prefixes, since the first of them makes the schema
        await connection.execute("SELECT pg_advisory_xact_lock($1)", lock)
        version = await found_version(connection, address)  # now that nobody else is about to change it
        for statement in await _missing(connection, address, version):
            await connection.execute(statement)
    return MIGRATIONS.steps(version)


async def _missing(connection: Any, address: Address, version: int) -> list[str]:
    """What has to be run after `version`, also to make the schema itself."""
    names = Names(address.schema, address.prefix)
    there = await connection.fetchval("SELECT to_regnamespace($1) IS NOT NULL", names.parts["schema"])
    made = [] if there else [names.write("CREATE SCHEMA {schema}")]
    return made + statements(address, version)


async def migrate(url: str) -> list[str]:
    """Make or complete the schema that `url` names; the names of the steps that were missing. Any number may at once.

    Needs the right to create tables in the schema, and, if the schema is not there, to create one in the database.
    Raises StoreUnavailable, StoreMismatch.
    """
    return await _connected(url, apply)


async def plan(url: str) -> list[str]:
    """What `migrate` would run now. Raises StoreUnavailable, StoreMismatch."""

    async def look(connection: Any, address: Address) -> list[str]:
        async with connection.transaction():
            return await _missing(connection, address, await found_version(connection, address))

    return await _connected(url, look)


async def versions(url: str) -> tuple[int, int]:
    """What is there, and what this code wants: `bide migrate --check`. Raises StoreUnavailable, StoreMismatch."""

    async def look(connection: Any, address: Address) -> tuple[int, int]:
        async with connection.transaction():
            return await found_version(connection, address), MIGRATIONS.wanted

    return await _connected(url, look)


async def _connected(url: str, work: Callable[[Any, Address], Awaitable[T]]) -> T:
    """`work` on a connection of its own."""
    address = address_of(url)
    try:
        connection = await connect(address, within=_PATIENCE)
        try:
            return await work(connection, address)
        finally:
            await connection.close(timeout=_PATIENCE)
    except (NotSent, Lost, asyncpg.PostgresError, asyncpg.InterfaceError, OSError) as error:
        raise _plain(meaning(error, address.shown)) from error


def _plain(found: Exception) -> Exception:
    return found if isinstance(found, BideError) else StoreUnavailable(str(found))
