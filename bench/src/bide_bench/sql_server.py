"""The PostgreSQL or MySQL server of a benchmark, seen through the plain driver on connections of its own.

A benchmark works in a schema of its own (in MySQL a database), made by the store's migrations and dropped at the end.
MySQL's internal figures need the privilege PROCESS.
"""

from __future__ import annotations

import math
import time
from abc import abstractmethod
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import urlsplit
from uuid import uuid4

from bide.core.errors import StoreUnavailable
from bide.settings import Settings
from bide.wiring import address_of, store_maker
from bide_bench.processes import process_named, spent, spent_by_family, stat
from bide_bench.target import Load, Raw, Stop, Target, due_in_an_hour, named_part, stopwatch
from bide_bench.worker import PAYLOAD

POSTGRES, MYSQL = ("postgresql", "postgres"), ("mysql", "mariadb")
SCHEMES = (*POSTGRES, *MYSQL)
_PATIENCE = 60
_TRIES = 200


class SqlServer(Target):
    """One server, and the schema on it that the benchmark works in."""

    schema_named: ClassVar[str]
    """A query for the schema with a name."""
    drop: ClassVar[str]
    snapshot_begins: ClassVar[Sequence[str]]
    raw_table: ClassVar[Sequence[str]]
    """Statements that make the table of the raw limit; `SCHEMA_NAME` stands for the schema in these and in `drop`."""
    numbers_arguments: ClassVar[bool]
    """True: arguments are $1, $2, ... in a statement; False: each is %s."""
    serving: str
    """A query for the processes or threads that serve the store."""

    def __init__(self, url: str, address: Any, connection: Any) -> None:
        super().__init__(url)
        self.address = address
        self.process: Path | None = None
        """The server's main process, if it runs on this machine and is visible."""
        self._connection = connection

    @staticmethod
    @abstractmethod
    def errors() -> tuple[type[Exception], ...]:
        """The errors of its driver."""

    @staticmethod
    @abstractmethod
    def connected(address: Any) -> Any:
        """A context with a connection."""

    @staticmethod
    @abstractmethod
    async def ask(connection: Any, statement: str, *arguments: Any) -> Sequence[Any]: ...

    @abstractmethod
    async def find(self) -> Path | None:
        """Find the server's main process."""

    @abstractmethod
    async def requests(self) -> int: ...

    async def rows(self, statement: str, *arguments: Any) -> Sequence[Any]:
        """The rows of one statement."""
        return await self.ask(self._connection, statement, *arguments)

    async def make(self) -> None:
        """Create the schema by the store's migrations."""
        schema = store_maker(self.url, Settings())().features.schema
        assert schema is not None
        await schema.migrate()

    async def clear(self) -> None:
        """Drop the schema on a new connection: an interrupted run may have left the other one in mid-statement."""
        async with self.connected(self.address) as connection:
            await self.ask(connection, self.drop.replace("SCHEMA_NAME", self.address.schema))

    async def is_empty(self) -> bool:
        """True if the schema does not exist: an existing one may hold foreign tables."""
        return not await self.rows(self.schema_named, self.address.schema)

    async def load(self) -> Load:
        """Processor time of the whole server, if it is visible, and requests by its own count."""
        at = time.monotonic()
        return Load(at, math.nan if self.process is None else self._used(self.process), await self.requests())

    def _used(self, process: Path) -> float:
        """Seconds of processor time of the whole server. Raises OSError."""
        return spent_by_family(process)

    async def measure(self) -> Stop:
        """Measure the processor time of the processes that serve the store, without waits for disk, locks or clients.

        A server on another machine is measured by the clock, less the time of a `SELECT 1`. EXPLAIN ANALYZE would have
        to know the store's statements, and pg_stat_statements is rarely installed.
        """
        if self.process is None:
            round_trip = stopwatch()
            await self.rows("SELECT 1")
            return stopwatch(less=round_trip())
        places = [self._place(self.process, number) for (number,) in await self.rows(self.serving)]
        before = {place: so_far for place in places if (so_far := _at_rest(place)) is not None}
        return lambda: sum((_at_rest(place) or so_far) - so_far for place, so_far in before.items()) * 1e6

    def _place(self, process: Path, number: int) -> Path:
        """The /proc folder of a number that `serving` found: here a process."""
        return process.parent / str(number)

    @asynccontextmanager
    async def snapshot(self) -> AsyncIterator[None]:
        """Hold a REPEATABLE READ transaction open on another connection."""
        async with self.connected(self.address) as connection:
            for statement in self.snapshot_begins:
                await self.ask(connection, statement)
            yield

    @asynccontextmanager
    async def raw(self) -> AsyncIterator[Raw]:
        """Multi-row inserts (VALUES) into a table with a unique random key and a due-time index, each a transaction.

        The driver binds the arguments. Arrays by `unnest`, or one statement text, are a fifth faster, COPY a quarter.
        """
        schema = f"bench_limit_{uuid4().hex}"
        async with self.connected(self.address) as connection:

            async def store(keys: Sequence[str]) -> None:
                due_at = due_in_an_hour()
                places = (
                    f"(${first}, ${first + 1}, ${first + 2})" if self.numbers_arguments else "(%s, %s, %s)"
                    for first in range(1, 3 * len(keys), 3)
                )
                arguments = [value for key in keys for value in (key, due_at, PAYLOAD)]
                insert = f"INSERT INTO {schema}.task (name, due_at, payload) VALUES {', '.join(places)}"
                await self.ask(connection, insert, *arguments)

            for statement in ("CREATE SCHEMA SCHEMA_NAME", *self.raw_table):
                await self.ask(connection, statement.replace("SCHEMA_NAME", schema))
            try:
                yield store
            finally:
                await self.rows(self.drop.replace("SCHEMA_NAME", schema))


def _at_rest(place: Path) -> float | None:
    """Seconds spent, read while it sleeps: they are rarely updated while it runs. None: it has ended."""
    try:
        for _ in range(_TRIES):
            if stat(place).state not in "RD":
                break
        return spent(place)
    except OSError:
        return None


class PostgresServer(SqlServer):
    """PostgreSQL."""

    kind = "postgres"
    numbers_arguments = True
    schema_named = "SELECT FROM pg_namespace WHERE nspname = $1"
    drop = 'DROP SCHEMA IF EXISTS "SCHEMA_NAME" CASCADE'
    snapshot_begins = ("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY", "SELECT 1")  # taken by the first statement
    raw_table = (
        "CREATE TABLE SCHEMA_NAME.task (number bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, "
        'name text COLLATE "C" NOT NULL UNIQUE, due_at bigint NOT NULL, payload bytea NOT NULL)',
        "CREATE INDEX task_due ON SCHEMA_NAME.task (due_at)",
    )
    serving = "SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND application_name = 'bide'"

    @staticmethod
    def errors() -> tuple[type[Exception], ...]:
        from asyncpg import InterfaceError, PostgresError

        return PostgresError, InterfaceError, OSError

    @staticmethod
    @asynccontextmanager
    async def connected(address: Any) -> AsyncIterator[Any]:
        import asyncpg

        named = {"application_name": "bide bench"}
        connection = await asyncpg.connect(address.dsn, timeout=_PATIENCE, server_settings=named)
        try:
            yield connection
        finally:
            await connection.close()

    @staticmethod
    async def ask(connection: Any, statement: str, *arguments: Any) -> Sequence[Any]:
        found: Sequence[Any] = await connection.fetch(statement, *arguments)
        return found

    async def find(self) -> Path | None:
        """The parent of the process that serves us."""
        [[pid]] = await self.rows("SELECT pg_backend_pid()")
        ours = process_named(pid, ("postgres",))
        return None if ours is None else process_named(stat(ours).parent, ("postgres",))

    async def size(self) -> int:
        """Bytes of the schema's tables and indexes."""
        [[size]] = await self.rows(
            "SELECT coalesce(sum(pg_total_relation_size(oid)), 0)::bigint FROM pg_class "
            "WHERE relnamespace = to_regnamespace($1) AND relkind = 'r'",
            f'"{self.address.schema}"',
        )
        return int(size)

    async def flush(self) -> None:
        """Run a checkpoint: a million inserts start one, which slows commits for minutes.

        Without the privilege for it (`pg_checkpoint`, PostgreSQL 15) nothing is done.
        """
        from asyncpg import InsufficientPrivilegeError

        with suppress(InsufficientPrivilegeError):
            await self.rows("CHECKPOINT")

    async def requests(self) -> int:
        """Count the transactions in the database."""
        asked = "SELECT xact_commit + xact_rollback FROM pg_stat_database WHERE datname = current_database()"
        return int((await self.rows(asked))[0][0])

    async def health(self) -> Mapping[str, int]:
        """Figures of the task table. Row counts are from the server's statistics, which lag a little."""
        [row] = await self.rows(
            "SELECT n_live_tup, n_dead_tup, pg_table_size(relid), pg_indexes_size(relid), "
            "vacuum_count + autovacuum_count FROM pg_stat_user_tables WHERE relid = $1::text::regclass",
            f'"{self.address.schema}"."{self.address.prefix}task"',
        )
        names = ("live_rows", "dead_rows", "table_bytes", "index_bytes", "vacuums")
        return {name: int(value) for name, value in zip(names, row, strict=True)}


class MysqlServer(SqlServer):
    """MySQL or MariaDB, at the first of the URL's hosts."""

    kind = "mysql"
    numbers_arguments = False
    schema_named = "SELECT 1 FROM information_schema.schemata WHERE schema_name = %s"
    drop = "DROP DATABASE IF EXISTS `SCHEMA_NAME`"
    snapshot_begins = (
        "SET SESSION TRANSACTION ISOLATION LEVEL REPEATABLE READ",
        "START TRANSACTION WITH CONSISTENT SNAPSHOT",
    )
    raw_table = (
        "CREATE TABLE SCHEMA_NAME.task (number bigint NOT NULL AUTO_INCREMENT PRIMARY KEY, "
        "name varbinary(64) NOT NULL, due_at bigint NOT NULL, payload blob NOT NULL, UNIQUE KEY (name), "
        "KEY (due_at)) ENGINE = InnoDB",
    )
    tablespaces = "INNODB_TABLESPACES"
    serving = (
        "SELECT thread_os_id FROM performance_schema.threads "
        "WHERE type = 'FOREGROUND' AND processlist_id <> CONNECTION_ID()"
    )

    @staticmethod
    def errors() -> tuple[type[Exception], ...]:
        from asyncmy.errors import MySQLError

        return MySQLError, OSError

    @staticmethod
    @asynccontextmanager
    async def connected(address: Any) -> AsyncIterator[Any]:
        import asyncmy

        host, port = address.hosts[0]
        connection = await asyncmy.connect(
            host=host, port=port, user=address.user or None, password=address.password, ssl=address.tls(),
            unix_socket=address.socket or None, autocommit=True, connect_timeout=_PATIENCE,
        )  # fmt: skip
        try:
            yield connection
        finally:
            await connection.ensure_closed()

    @staticmethod
    async def ask(connection: Any, statement: str, *arguments: Any) -> Sequence[Any]:
        async with connection.cursor() as cursor:
            await cursor.execute(statement, arguments or None)
            found: Sequence[Any] = await cursor.fetchall() if cursor.description else ()
            return found

    async def find(self) -> Path | None:
        """Read the process id from its file."""
        [[file, folder, version]] = await self.rows("SELECT @@pid_file, @@datadir, VERSION()")
        if "mariadb" in version.lower():
            self.tablespaces = "INNODB_SYS_TABLESPACES"
            self.serving = "SELECT tid FROM information_schema.processlist WHERE id <> CONNECTION_ID() AND tid > 0"
        try:
            pid = int((Path(folder) / file).read_text(encoding="ascii"))
        except (OSError, ValueError):
            return None
        return process_named(pid, ("mysqld", "mariadbd"))

    def _used(self, process: Path) -> float:
        return stat(process).used  # includes threads that have ended

    def _place(self, process: Path, number: int) -> Path:
        return process / "task" / str(number)

    async def size(self) -> int:
        """Bytes of the files of its tables, which grow by some megabytes at a time."""
        return await self._bytes(f"{self.address.schema}/%")

    async def _bytes(self, like: str) -> int:
        [[size]] = await self.rows(
            f"SELECT COALESCE(SUM(file_size), 0) FROM information_schema.{self.tablespaces} WHERE name LIKE %s",
            like.replace("_", "\\_"),
        )
        return int(size)

    async def requests(self) -> int:
        """Count the statements."""
        return int((await self.rows("SHOW GLOBAL STATUS LIKE 'Questions'"))[0][1])

    async def health(self) -> Mapping[str, int]:
        """Bytes of the task table with its indexes, and the transactions that are not purged yet, of all tables."""
        [[history]] = await self.rows(
            "SELECT count FROM information_schema.innodb_metrics WHERE name = 'trx_rseg_history_len'"
        )
        size = await self._bytes(f"{self.address.schema}/{self.address.prefix}task")
        return {"bytes": size, "history": int(history)}


@asynccontextmanager
async def sql_server(url: str) -> AsyncIterator[SqlServer]:
    """Connect to the server that `url` names, with a fresh schema unless `?schema=` names one.

    Raises BadInput, and StoreUnavailable, also for what fails on this connection while it is in use.
    """
    url = named_part(url, "schema", f"bench_{uuid4().hex}")
    address = address_of(url)  # raises for a bad URL
    kind: type[SqlServer] = PostgresServer if urlsplit(url).scheme in POSTGRES else MysqlServer
    try:
        async with kind.connected(address) as connection:
            server = kind(url, address, connection)
            server.process = await server.find()
            yield server
    except kind.errors() as error:
        raise StoreUnavailable(f"the server of the benchmark: {error}") from error
