"""PostgreSQL and MariaDB as the tests of both use them: what differs between the two, under one name each."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, ClassVar

import asyncmy
import asyncpg
from tests.stores.mysql import connections as mysql_connections
from tests.stores.postgres import connections as postgres_connections
from tests.stores.sql.callers import Caller, Makes, in_a_loop
from tests.waiting import until

from bide.core.errors import StoreMismatch, StoreUnavailable
from bide.core.payloads import AT_ONCE
from bide.stores.mysql import MySqlStore
from bide.stores.mysql import queries as mysql_queries
from bide.stores.mysql.connection import address_of as mysql_address
from bide.stores.mysql.joined import MySqlVerbs
from bide.stores.mysql.schema import SCHEMA as MYSQL_SCHEMA
from bide.stores.postgres import PostgresStore
from bide.stores.postgres import queries as postgres_queries
from bide.stores.postgres.connection import address_of as postgres_address
from bide.stores.postgres.schema import SCHEMA as POSTGRES_SCHEMA
from bide_proofs.servers import mariadb, postgres
from bide_proofs.servers.mariadb import MariaDbServer
from bide_proofs.servers.postgres import PostgresServer
from bide_proofs.servers.process import HOST

WAITS: dict[str, Any] = {"clock": "caller", "patience": 45.0, "silence": 60.0}
"""Options of a store that only a hang makes give up."""


class SqlServer:
    """A kind of server, and the URL of one that others use too."""

    name: ClassVar[str]
    """Of the fixtures `{name}_url` and `{name}_server`."""
    Store: ClassVar[Any]
    schema: ClassVar[Any]
    Server: ClassVar[Any]
    kinds: ClassVar[dict[str, Makes]]
    """The connections that a caller may have; the first is an asynchronous one."""
    key: ClassVar[str]
    """The column `key`, quoted where it has to be."""
    at_once: ClassVar[int]
    """How many tasks a verb on a caller's connection writes at once."""
    not_done: ClassVar[tuple[type[Exception], ...]]
    """What a transaction that came to nothing may raise: also what its driver does."""
    no_database: ClassVar[tuple[type[Exception], str]]
    """What is said of a URL that names a database which is not there."""

    def __init__(self, url: str) -> None:
        self.url = url

    def write(self, url: str, statement: str) -> str:
        """With the names of the tables at `url` for {task} and its like."""
        raise NotImplementedError

    def migrate(self, url: str) -> None:
        in_a_loop(lambda: self.schema.migrate(url))

    @asynccontextmanager
    async def somebody(self, url: str) -> AsyncIterator[Caller]:
        """Another program, in a transaction."""
        make = next(iter(self.kinds.values()))
        async with make(url) as caller:
            yield caller

    async def lock(self, caller: Caller, url: str, key: str) -> None:
        """A task of the topic t is locked until `caller` commits or rolls back."""
        where = f"topic = 't' AND {self.key} = '{key}'"
        await caller.execute(self.write(url, f"SELECT 1 FROM {{task}} WHERE {where} FOR UPDATE"))

    @asynccontextmanager
    async def holding(self, url: str, key: str) -> AsyncIterator[Caller]:
        """A transaction that has changed the task and is open; rolled back."""
        async with self.somebody(url) as caller:
            where = f"topic = 't' AND {self.key} = '{key}'"
            await caller.execute(self.write(url, f"UPDATE {{task}} SET created_at = created_at + 1 WHERE {where}"))
            yield caller
            await caller.rollback()


class Postgres(SqlServer):
    name = "postgres"
    Store = PostgresStore
    schema: ClassVar[Any] = POSTGRES_SCHEMA
    Server = PostgresServer
    kinds = postgres_connections.KINDS
    key = "key"
    at_once = AT_ONCE
    not_done = (StoreUnavailable, OSError, asyncpg.PostgresError, asyncpg.InterfaceError)
    no_database = StoreUnavailable, "create the database"

    def statements(self, url: str, since: int = 0) -> list[str]:
        """What a migration runs after that version, in a schema or database that is there."""
        return POSTGRES_SCHEMA.statements(postgres_address(url), since)

    def ask(self, url: str, statement: str) -> list[Any]:
        """The rows of a statement, with {task} for the table's name, on a connection of its own."""
        return postgres.ask(postgres_address(url).dsn, self.write(url, statement))

    def write(self, url: str, statement: str) -> str:
        address = postgres_address(url)
        return postgres_queries.Names(address.schema, address.prefix).write(statement)

    def beside(self, url: str, table: str) -> str:
        """The name of a table of the caller's beside ours, quoted."""
        return f'"{postgres_address(url).schema}".{table}'

    async def execute(self, connection: Any, statement: str) -> None:
        """On a handler's connection."""
        await connection.execute(statement)

    def administer(self, server: Any, *statements: str) -> None:
        """An administrator's statements to a private server, on one connection."""

        async def running() -> None:
            connection = await asyncpg.connect(server.url)
            for statement in statements:
                await connection.execute(statement)
            await connection.close()

        in_a_loop(running)

    def apart(self, server: Any) -> tuple[str, Path]:
        """A place whose files may all lie in a folder of the server's, and that folder, which is not there yet."""
        return server.url, server.home / "small"

    def move(self, server: Any, folder: Path) -> None:
        """All tables lie in that folder from now on."""
        server.ask(f"CREATE TABLESPACE small LOCATION '{folder}'")
        for kind in ("TABLE", "INDEX"):
            server.ask(f"ALTER {kind} ALL IN TABLESPACE pg_default SET TABLESPACE small")

    async def pair(self, start: Any) -> tuple[Any, Any, str]:
        """A primary, a replica that has what was acknowledged, and the URL of both, with tables."""
        primary = start()
        replica = start(follows=primary)
        primary.ask("ALTER SYSTEM SET synchronous_standby_names = '*'")  # what is acknowledged is there too
        primary.ask("SELECT pg_reload_conf()")
        hosts = f"{HOST}:{primary.port},{HOST}:{replica.port}"
        url = f"postgresql://{postgres.USER}@{hosts}/{postgres.DATABASE}?target_session_attrs=read-write"
        await self.schema.migrate(url)
        return primary, replica, url

    def end_connections(self, server: Any) -> int:
        """Those of all clients of a private server; how many there were."""
        ending = (
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid() AND usename = 'bide'"
        )
        return len(server.ask(ending))

    def drop(self, url: str) -> None:
        """The tables are gone, and what they lie in."""
        self.ask(url, "DROP SCHEMA IF EXISTS {schema} CASCADE")


class MySql(SqlServer):
    name = "mysql"
    Store = MySqlStore
    schema: ClassVar[Any] = MYSQL_SCHEMA
    Server = MariaDbServer
    kinds = mysql_connections.KINDS
    key = "`key`"
    at_once = MySqlVerbs._at_once
    not_done = (StoreUnavailable, OSError, asyncmy.errors.OperationalError)
    no_database = StoreMismatch, "bide migrate"

    def statements(self, url: str, since: int = 0) -> list[str]:
        return MYSQL_SCHEMA.statements(mysql_address(url), since)

    def ask(self, url: str, statement: str) -> list[Any]:
        return mariadb.ask(url, self.write(url, statement))

    def write(self, url: str, statement: str) -> str:
        address = mysql_address(url)
        return mysql_queries.Names(address.schema, address.prefix).write(statement)

    def beside(self, url: str, table: str) -> str:
        return f"`{mysql_address(url).schema}`.{table}"

    async def execute(self, connection: Any, statement: str) -> None:
        await connection.query(statement)

    def administer(self, server: Any, *statements: str) -> None:
        for statement in statements:
            server.ask(statement)

    def apart(self, server: Any) -> tuple[str, Path]:
        return f"{server.url}?schema=small", server.home / "data" / "small"

    def move(self, server: Any, folder: Path) -> None:
        """They lie there."""

    async def pair(self, start: Any, *, waits: int = 600_000) -> tuple[Any, Any, str]:
        """`waits`: milliseconds that a commit waits for the replica before it is acknowledged without."""
        log = {"log-bin": "binlog", "gtid-strict-mode": "1"}
        semi = {"rpl-semi-sync-master-enabled": "1", "rpl-semi-sync-master-timeout": str(waits)}
        primary = start(options={**log, **semi, "server-id": "1"})
        replica = start(options={**log, "server-id": "2", "rpl-semi-sync-slave-enabled": "1"}, follows=primary)

        def connected() -> bool:
            return bool(primary.ask("SHOW STATUS LIKE 'Rpl_semi_sync_master_clients'")[0][1] == "1")

        await until(connected, "the replica to follow")
        hosts = f"{HOST}:{primary.port},{HOST}:{replica.port}"
        url = f"mysql://{mariadb.USER}@{hosts}/{mariadb.DATABASE}"
        await self.schema.migrate(url)
        return primary, replica, url

    def end_connections(self, server: Any) -> int:
        found = server.ask("SELECT id FROM information_schema.processlist WHERE user = 'bide'")
        server.ask("KILL USER bide")
        return len(found)

    def drop(self, url: str) -> None:
        self.ask(url, f"DROP DATABASE IF EXISTS `{mysql_address(url).schema}`")


Database = Postgres | MySql
"""Each has what the other has."""
