"""The schema, its versions, and how it comes about: numbered migrations, each once, by one client at a time.

Only a program that may create tables migrates; whoever runs tasks checks, and refuses what is missing or older. A newer
schema is accepted: migrations only ever add what older code can live with. Tables cannot be made within a transaction
here, so each statement can be run twice, and a migration that was cut short is run again from its beginning.

The least rights: to run, SELECT, INSERT, UPDATE and DELETE on bide's tables; to migrate, CREATE, INDEX and ALTER in
addition, on the database (and, to make that itself, CREATE on it before it is there); PROCESS for all of `bide doctor`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

from asyncmy.errors import MySQLError

from bide.core.errors import BideError, StoreUnavailable
from bide.stores.migrations import Migrations
from bide.stores.mysql.address import Address, address_of
from bide.stores.mysql.connecting import Connection, connect
from bide.stores.mysql.errors import Broken, Lost, NotSent, meaning
from bide.stores.mysql.queries import Names, queries_of
from bide.stores.mysql.statements import Template

_PATIENCE = 30.0
T = TypeVar("T")

_BOOK = """CREATE TABLE IF NOT EXISTS {migration} (
    number integer PRIMARY KEY, name varbinary(100) NOT NULL, checksum varbinary(64) NOT NULL,
    at timestamp NOT NULL DEFAULT CURRENT_TIMESTAMP
) ENGINE = InnoDB ROW_FORMAT = DYNAMIC DEFAULT CHARSET = utf8mb4"""
_DONE = "INSERT INTO {migration} (number, name, checksum) VALUES (%d, '%s', '%s')"
MIGRATIONS = Migrations(Path(__file__).parent / "migrations", _BOOK, _DONE)


async def found_version(connection: Connection, address: Address) -> int:
    """The version that is there, 0 for none. Raises StoreMismatch where a migration is not the one that we know."""
    queries = queries_of(address.schema, address.prefix)
    looked = queries["has_migrations"].write(schema=address.schema, table=f"{address.prefix}migration")
    [[(there,)]] = await connection.ask(looked)
    if not there:
        return 0
    [rows] = await connection.ask(queries["migrations"].write())
    return MIGRATIONS.version_of([(number, checksum.decode()) for number, checksum in rows], address.shown)


async def check(connection: Connection, address: Address) -> None:
    """Raises StoreMismatch, with what to do, where the schema is missing or older than this code."""
    MIGRATIONS.check(await found_version(connection, address), address.shown)


def statements(address: Address, since: int = 0) -> list[str]:
    """What `migrate` runs after version `since`, in a database that is there: to run it by hand, for example."""
    return MIGRATIONS.statements(Names(address.schema, address.prefix).write, since)


async def _missing(connection: Connection, address: Address) -> tuple[int, list[str]]:
    """The version that is there, and the statements that are missing."""
    looked = Template("SELECT COUNT(*) FROM information_schema.schemata WHERE schema_name = :schema")
    [[(there,)]] = await connection.ask(looked.write(schema=address.schema))
    made = [] if there else [f"CREATE DATABASE IF NOT EXISTS `{address.schema}` CHARACTER SET utf8mb4"]
    version = await found_version(connection, address)
    return version, made + (statements(address, version) if version < MIGRATIONS.wanted else [])


async def apply(connection: Connection, address: Address) -> list[str]:
    """Bring the schema to what this code wants, under an advisory lock; the names of the steps."""
    names = Names(address.schema, address.prefix)
    lock = Template("SELECT GET_LOCK(:name, :patience)").write(name=names.lock, patience=int(_PATIENCE))
    [[(got,)]] = await connection.ask(lock)
    if got != 1:
        raise StoreUnavailable(f"{address.shown}: somebody else has been migrating for {_PATIENCE:.0f} s")
    try:
        version, missing = await _missing(connection, address)  # now that nobody else is about to change it
        for statement in missing:
            await connection.ask(statement)
    finally:
        await connection.ask(Template("SELECT RELEASE_LOCK(:name)").write(name=names.lock))
    return MIGRATIONS.steps(version)


async def migrate(url: str) -> list[str]:
    """Make or complete the schema that `url` names; the names of the steps that were missing. Any number may at once.

    Raises StoreUnavailable, StoreMismatch.
    """
    return await _asked(address_of(url), apply)


async def plan(url: str) -> list[str]:
    """What `migrate` would run now. Raises StoreUnavailable, StoreMismatch."""
    _, missing = await _asked(address_of(url), _missing)
    return missing


async def versions(url: str) -> tuple[int, int]:
    """What is there, and what this code wants: `bide migrate --check`. Raises StoreUnavailable, StoreMismatch."""
    return await _asked(address_of(url), found_version), MIGRATIONS.wanted


async def _asked(address: Address, ask: Callable[[Connection, Address], Awaitable[T]]) -> T:
    """What a connection of its own is answered."""
    try:
        connection = await connect(_without_database(address), within=_PATIENCE)
        try:
            return await ask(connection, address)
        finally:
            await connection.close(within=_PATIENCE)
    except (NotSent, Lost, MySQLError, Broken, OSError, TimeoutError) as error:
        raise _plain(meaning(error, address.shown)) from error


def _without_database(address: Address) -> Address:
    """For a connection that names no database, since that may not be there yet."""
    return Address(
        hosts=address.hosts, user=address.user, password=address.password, database="", schema=address.schema,
        prefix=address.prefix, socket=address.socket, options=address.options, shown=address.shown,
    )  # fmt: skip


def _plain(found: Exception) -> Exception:
    return found if isinstance(found, BideError) else StoreUnavailable(str(found))
