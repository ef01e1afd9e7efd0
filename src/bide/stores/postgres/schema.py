"""The tables in PostgreSQL, made in one transaction under an advisory lock; and what `doctor` checks."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from bide.ports import Finding
from bide.stores.clocks import ServerTime
from bide.stores.postgres.connection import POSTGRES, Address, Call, PostgresConnection
from bide.stores.postgres.queries import Names, queries_of
from bide.stores.postgres.wakes import Subscription
from bide.stores.sql.schema import SqlSchema

_BOOK = """CREATE TABLE {migration} (
    number integer PRIMARY KEY, name text NOT NULL, checksum text NOT NULL, at timestamptz NOT NULL DEFAULT now()
)"""


class PostgresSchema(SqlSchema):
    def _apart(self, connection: Any) -> Any:
        return connection.transaction()

    @asynccontextmanager
    async def _lock(self, connection: Any, address: Address) -> AsyncIterator[None]:
        lock = Names(address.schema, "").lock - 1  # one for all prefixes, since the first of them makes the schema
        await connection.execute("SELECT pg_advisory_xact_lock($1)", lock)
        yield

    async def _done(self, connection: Any, address: Address) -> Iterable[tuple[int, str]]:
        queries = queries_of(address.schema, address.prefix)
        there = await connection.fetchval(queries["has_migrations"])
        found: Iterable[tuple[int, str]] = await connection.fetch(queries["migrations"]) if there else ()
        return found

    async def _making(self, connection: Any, address: Address) -> list[str]:
        names = Names(address.schema, address.prefix)
        there = await connection.fetchval("SELECT to_regnamespace($1) IS NOT NULL", names.parts["schema"])
        return [] if there else [names.write("CREATE SCHEMA {schema}")]


SCHEMA = PostgresSchema(POSTGRES, Path(__file__).parent / "migrations", _BOOK)


# --- doctor

_DEAD = 500_000
"""Dead rows from which on a lease is noticeably slower."""
_LONG = 600
"""Seconds of a transaction after which vacuum has been held back for too long."""


async def diagnose(
    connection: PostgresConnection, address: Address, subscription: Subscription, time: ServerTime
) -> list[Finding]:
    """Each check is one small query."""
    works = await subscription.works()

    async def work(call: Call) -> list[Finding]:
        connection = call.connection
        await call.begin()
        version, number, fsync, commit = await connection.fetchrow(
            "SELECT current_setting('server_version'), current_setting('server_version_num')::integer, "
            "current_setting('fsync'), current_setting('synchronous_commit')"
        )
        found = [
            _server(address, version, number),
            await SCHEMA.finding(connection, address),
            _durability(fsync, commit),
            _listening(address, subscription, works=works),
            await _bloat(connection, address),
            await _horizon(connection),
            time.finding(),
        ]
        await call.commit()
        return found

    return await connection.read(work)


def _server(address: Address, version: str, number: int) -> Finding:
    ok = number >= 120_000
    return Finding(ok, f"{address.shown}: PostgreSQL {version}", "" if ok else "bide needs PostgreSQL 12 or newer")


def _durability(fsync: str, commit: str) -> Finding:
    if fsync == "off":
        return Finding(False, "fsync is off: a power cut may destroy the database", "set it on", severe=True)
    if commit == "off":
        return Finding(
            False,
            "synchronous_commit is off: a crash may lose the newest of what was acknowledged",
            "set it on for bide's user (ALTER ROLE ... SET synchronous_commit = on)",
        )
    return Finding(True, f"synchronous_commit is {commit}")


def _listening(address: Address, subscription: Subscription, *, works: bool) -> Finding:
    if address.pooled:
        return Finding(
            False,
            "a transaction-pooling proxy stands between: no connection can listen, so workers poll five times a second",
            "give workers a URL that goes to the server itself",
        )
    if not works:
        return Finding(
            False,
            "the subscription does not receive its own echo: workers poll five times a second",
            "is there a proxy that pools transactions? Go around it, or say so with ?pooler=transaction",
        )
    what = f"; the subscription was replaced {subscription.replaced} times" if subscription.replaced else ""
    return Finding(True, f"LISTEN works{what}")


async def _bloat(connection: Any, address: Address) -> Finding:
    table = Names(address.schema, address.prefix).parts["task"]
    live, dead = await connection.fetchrow(
        "SELECT n_live_tup, n_dead_tup FROM pg_stat_user_tables WHERE relid = $1::text::regclass", table
    ) or (0, 0)
    ok = dead < _DEAD
    return Finding(
        ok,
        f"about {live} rows and {dead} dead ones",
        "" if ok else "vacuum does not keep up: look for old transactions, and at autovacuum_max_workers",
    )


async def _horizon(connection: Any) -> Finding:
    if not await connection.fetchval("SELECT pg_has_role(current_user, 'pg_read_all_stats', 'USAGE')"):
        return Finding(
            False,
            "how old others' transactions are this user may not see",
            "an old one keeps vacuum from cleaning up: GRANT pg_read_all_stats TO this user, or watch it yourself",
        )
    age = await connection.fetchval(
        "SELECT coalesce(max(extract(epoch FROM now() - xact_start)), 0)::bigint FROM pg_stat_activity "
        "WHERE backend_xmin IS NOT NULL AND pid <> pg_backend_pid()"
    )
    ok = age < _LONG
    return Finding(
        ok,
        f"the oldest transaction is {age} s old" if age else "no old transaction",
        "" if ok else "it keeps vacuum from cleaning up, and leases get slower: end it (pg_stat_activity shows who)",
    )
