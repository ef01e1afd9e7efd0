"""The tables in PostgreSQL, created in one transaction under an advisory lock; and the checks of `doctor`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from bide.ports import Finding
from bide.stores.postgres.connection import POSTGRES, Address, Call
from bide.stores.postgres.queries import Names, queries_of
from bide.stores.postgres.wakes import Subscription
from bide.stores.sql.schema import SqlSchema, oldest_transaction

_BOOK = """CREATE TABLE {migration} (
    number integer PRIMARY KEY, name text NOT NULL, checksum text NOT NULL, at timestamptz NOT NULL DEFAULT now()
)"""


class PostgresSchema(SqlSchema):
    def _apart(self, connection: Any) -> Any:
        return connection.transaction()

    @asynccontextmanager
    async def _lock(self, connection: Any, address: Address) -> AsyncIterator[None]:
        lock = Names(address.schema, "").lock - 1  # one for all prefixes, which share the schema
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
"""The number of dead rows above which leases are noticeably slower."""


async def diagnose(call: Call, address: Address, subscription: Subscription, *, works: bool) -> list[Finding]:
    """Run the checks, by one small query. `works`: an echo came back through the subscription."""
    await call.begin()
    [row] = await call.fetch("doctor", Names(address.schema, address.prefix).parts["task"])
    schema = await SCHEMA.finding(call.connection, address)
    await call.commit()
    server = f"{address.shown}: PostgreSQL {row['version']}"
    return [
        Finding(row["number"] >= 120_000, server, "bide needs PostgreSQL 12 or newer"),
        schema,
        _durability(row["fsync"], row["commit"]),
        _listening(address, subscription, works=works),
        Finding(
            row["dead"] < _DEAD,
            f"about {row['live']} rows and {row['dead']} dead ones",
            "vacuum does not keep up: look for old transactions, and at autovacuum_max_workers",
        ),
        _horizon(row["age"]),
    ]


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
            "behind a transaction-pooling proxy no connection can listen, so workers poll five times a second",
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


def _horizon(age: int | None) -> Finding:
    if age is None:
        return Finding(
            False,
            "this user may not see how old others' transactions are",
            "an old one keeps vacuum from cleaning up: GRANT pg_read_all_stats TO this user, or watch it yourself",
        )
    return oldest_transaction(age, "vacuum", "pg_stat_activity shows who")
