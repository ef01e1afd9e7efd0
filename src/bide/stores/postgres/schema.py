"""The tables in PostgreSQL: made in one transaction, under an advisory lock."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from bide.stores.postgres.address import Address
from bide.stores.postgres.dialect import POSTGRES
from bide.stores.postgres.queries import Names, queries_of
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
