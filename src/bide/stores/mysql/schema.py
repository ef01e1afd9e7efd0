"""The tables in MySQL or MariaDB, and the checks of `doctor`.

These servers cannot roll back the creation of a table. So each statement can be run twice, and an interrupted migration
is run again from its beginning.

The minimum rights: to run, SELECT, INSERT, UPDATE and DELETE on bide's tables; to migrate, also CREATE, INDEX and ALTER
on the database (granted before it exists if bide is to create it); for all of `bide doctor`, PROCESS.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from asyncmy.errors import MySQLError
from msgspec.structs import replace

from bide.core.errors import StoreUnavailable
from bide.ports import Finding
from bide.stores.mysql.connection import MYSQL, Address, Call, Connection
from bide.stores.mysql.queries import Names, Template, queries_of
from bide.stores.sql.leasing import POLL
from bide.stores.sql.schema import PATIENCE, SqlSchema, oldest_transaction

_BOOK = """CREATE TABLE IF NOT EXISTS {migration} (
    number integer PRIMARY KEY, name varbinary(100) NOT NULL, checksum varbinary(64) NOT NULL,
    at timestamp NOT NULL DEFAULT CURRENT_TIMESTAMP
) ENGINE = InnoDB ROW_FORMAT = DYNAMIC DEFAULT CHARSET = utf8mb4"""


class MySqlSchema(SqlSchema):
    async def _connect(self, address: Address) -> Any:
        return await super()._connect(replace(address, database=""))  # the database may not exist yet

    @asynccontextmanager
    async def _lock(self, connection: Connection, address: Address) -> AsyncIterator[None]:
        name = Names(address.schema, address.prefix).lock
        lock = Template("SELECT GET_LOCK(:name, :patience)").write(name=name, patience=int(PATIENCE))
        [[(got,)]] = await connection.ask(lock)
        if got != 1:
            raise StoreUnavailable(f"{address.shown}: another client has been migrating for {PATIENCE:.0f} s")
        try:
            yield
        finally:
            await connection.ask(Template("SELECT RELEASE_LOCK(:name)").write(name=name))

    async def _done(self, connection: Connection, address: Address) -> Iterable[tuple[int, str]]:
        queries = queries_of(address.schema, address.prefix)
        query = queries["has_migrations"].write(schema=address.schema, table=f"{address.prefix}migration")
        [[(there,)]] = await connection.ask(query)
        [rows] = await connection.ask(queries["migrations"].write()) if there else [()]
        return [(number, checksum.decode()) for number, checksum in rows]

    async def _making(self, connection: Connection, address: Address) -> list[str]:
        query = Template("SELECT COUNT(*) FROM information_schema.schemata WHERE schema_name = :schema")
        [[(there,)]] = await connection.ask(query.write(schema=address.schema))
        return [] if there else [f"CREATE DATABASE IF NOT EXISTS `{address.schema}` CHARACTER SET utf8mb4"]


SCHEMA = MySqlSchema(MYSQL, Path(__file__).parent / "migrations", _BOOK)


# --- doctor

_PACKET = 4 * 1024 * 1024


async def diagnose(call: Call, address: Address) -> list[Finding]:
    """Run the checks, each by one small query."""
    [row] = await call.ask("doctor")
    version, flush, logged, synced, kind = (one.decode() if isinstance(one, bytes) else one for one in row)
    logs, largest = bool(int(logged)), call.connection.largest
    noticing = "the position of the redo log" if await call.ask("redo") else "polling: the redo log is not visible"
    return [
        _server(address, str(version)),
        await SCHEMA.finding(call.connection, address),
        _durability(int(flush), int(synced), logs=logs),
        _log(str(kind), logs=logs),
        Finding(
            largest >= _PACKET,
            f"max_allowed_packet is {largest} bytes",
            f"give it {_PACKET} or more: no task may be larger, and batches are cut to it",
        ),
        Finding(True, f"tasks that other processes schedule are noticed within {POLL} ms, by {noticing}"),
        await _oldest(call),
    ]


def _server(address: Address, version: str) -> Finding:
    numbers = tuple(int(part) for part in version.split("-")[0].split(".")[:2])
    name, least = ("MariaDB", (10, 6)) if "MariaDB" in version else ("MySQL", (8, 0))
    what = f"{address.shown}: {name} {version}"
    return Finding(numbers >= least, what, "bide needs MySQL 8.0 or MariaDB 10.6, or newer")


def _durability(flush: int, synced: int, *, logs: bool) -> Finding:
    if flush != 1:
        return Finding(
            False,
            f"innodb_flush_log_at_trx_commit is {flush}: a power cut may lose the last second of what was acknowledged"
            + (", and so may a crash of the server" if flush == 0 else ""),
            "set it to 1, unless that second may be lost (leases need no flush, but it cannot be chosen for each here)",
        )
    if logs and synced != 1:
        return Finding(
            False, f"sync_binlog is {synced}: after a power cut replicas may lack, or have, what this server has not",
            "set it to 1",
        )  # fmt: skip
    return Finding(True, "every commit is flushed, also that of a lease, since this server cannot choose per commit")


def _log(kind: str, *, logs: bool) -> Finding:
    what = f"binlog_format is {kind}" if logs else "no binary log"
    advice = "set it to ROW: by statement, nothing of bide's can be logged"
    return Finding(not logs or kind in ("ROW", "MIXED"), what, advice, severe=True)


async def _oldest(call: Call) -> Finding:
    try:
        [[age]] = await call.ask("oldest_transaction")
    except MySQLError:
        return Finding(True, "old transactions cannot be checked: this user lacks PROCESS")
    return oldest_transaction(age, "InnoDB", "information_schema.innodb_trx")
