"""The tables in MySQL or MariaDB, where no transaction undoes that one was made.

So each statement can be run twice, and a migration that was cut short is run again from its beginning.

The least rights: to run, SELECT, INSERT, UPDATE and DELETE on bide's tables; to migrate, CREATE, INDEX and ALTER in
addition, on the database (and, to make that itself, CREATE on it before it is there); PROCESS for all of `bide doctor`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager, nullcontext
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from bide.core.errors import StoreUnavailable
from bide.stores.mysql.address import Address
from bide.stores.mysql.dialect import MYSQL, Connection
from bide.stores.mysql.queries import Names, queries_of
from bide.stores.mysql.statements import Template
from bide.stores.sql.schema import PATIENCE, SqlSchema

_BOOK = """CREATE TABLE IF NOT EXISTS {migration} (
    number integer PRIMARY KEY, name varbinary(100) NOT NULL, checksum varbinary(64) NOT NULL,
    at timestamp NOT NULL DEFAULT CURRENT_TIMESTAMP
) ENGINE = InnoDB ROW_FORMAT = DYNAMIC DEFAULT CHARSET = utf8mb4"""


class MySqlSchema(SqlSchema):
    async def _connect(self, address: Address) -> Any:
        return await super()._connect(replace(address, database=""))  # the database may not be there yet

    def _apart(self, connection: Connection) -> Any:
        return nullcontext()

    @asynccontextmanager
    async def _lock(self, connection: Connection, address: Address) -> AsyncIterator[None]:
        name = Names(address.schema, address.prefix).lock
        lock = Template("SELECT GET_LOCK(:name, :patience)").write(name=name, patience=int(PATIENCE))
        [[(got,)]] = await connection.ask(lock)
        if got != 1:
            raise StoreUnavailable(f"{address.shown}: somebody else has been migrating for {PATIENCE:.0f} s")
        try:
            yield
        finally:
            await connection.ask(Template("SELECT RELEASE_LOCK(:name)").write(name=name))

    async def _done(self, connection: Connection, address: Address) -> Iterable[tuple[int, str]]:
        queries = queries_of(address.schema, address.prefix)
        looked = queries["has_migrations"].write(schema=address.schema, table=f"{address.prefix}migration")
        [[(there,)]] = await connection.ask(looked)
        [rows] = await connection.ask(queries["migrations"].write()) if there else [()]
        return [(number, checksum.decode()) for number, checksum in rows]

    async def _making(self, connection: Connection, address: Address) -> list[str]:
        looked = Template("SELECT COUNT(*) FROM information_schema.schemata WHERE schema_name = :schema")
        [[(there,)]] = await connection.ask(looked.write(schema=address.schema))
        return [] if there else [f"CREATE DATABASE IF NOT EXISTS `{address.schema}` CHARACTER SET utf8mb4"]


SCHEMA = MySqlSchema(MYSQL, Path(__file__).parent / "migrations", _BOOK)
