"""The PostgreSQL or MySQL behind a store, as a benchmark sees it: through the plain driver, on its own connections.

A benchmark works in a schema of its own (in MySQL a database), made by the store's migrations and dropped at the end.
What MySQL tells of its insides needs the right PROCESS.
"""

from __future__ import annotations

import asyncio
import time
from abc import abstractmethod
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any, ClassVar, TypeVar
from urllib.parse import urlsplit
from uuid import uuid4

from bide.cli.bench import server
from bide.cli.bench.server import Load, ProcessorWatch, Server, Stopwatch, Watch, due_in_an_hour
from bide.cli.bench.worker import PAYLOAD
from bide.core.errors import StoreUnavailable
from bide.ports import HasSchema
from bide.settings import Settings
from bide.wiring import address_of, store_maker

T = TypeVar("T")
POSTGRES, MYSQL = ("postgresql", "postgres"), ("mysql", "mariadb")
SCHEMES = (*POSTGRES, *MYSQL)
_PATIENCE = 60
_SAME = 3.0
"""Seconds by which two clocks of one machine may disagree about when its server began, one counting in seconds."""


class Session:
    """A connection of the plain driver, which knows only asyncio, for code that waits: it has a loop in a thread."""

    def __init__(self, kind: type[SqlServer], address: Any) -> None:
        self._kind = kind
        self._thread = ThreadPoolExecutor(1, "bench server")
        self._runner = asyncio.Runner()
        try:
            self._connection = self.do(kind.connect(address))
        except BaseException:
            self._end()
            raise

    def do(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` in the loop of the thread, and wait for it; the caller may be on a loop of its own."""
        return self._thread.submit(self._runner.run, work).result()

    def rows(self, statement: str, *arguments: Any) -> Sequence[Any]:
        """The rows of one statement."""
        return self.do(self._kind.ask(self._connection, statement, *arguments))

    def round_trip(self) -> float:
        """Microseconds that a request takes which costs the server nothing."""

        async def measured() -> float:
            taken = []
            for _ in range(20):
                began = time.perf_counter_ns()
                await self._kind.ask(self._connection, "SELECT 1")
                taken.append((time.perf_counter_ns() - began) / 1000)
            return median(taken)

        return self.do(measured())

    def close(self) -> None:
        try:
            self.do(self._kind.disconnect(self._connection))
        finally:
            self._end()

    def _end(self) -> None:
        self._thread.submit(self._runner.close).result()
        self._thread.shutdown()


class SqlServer(Server):
    """One server, and the schema on it that the benchmark works in."""

    schema_named: ClassVar[str]
    """A query for the schema with a name."""
    drop: ClassVar[str]
    snapshot_begins: ClassVar[Sequence[str]]
    raw_table: ClassVar[Sequence[str]]
    """Statements that make the table of the raw limit; `SCHEMA_NAME` stands for the schema in these and in `drop`."""
    numbers_arguments: ClassVar[bool]
    """True: arguments are $1, $2, ... in a statement; False: each is %s."""

    def __init__(self, url: str, address: Any, session: Session) -> None:
        self.address = address
        self.rows = session.rows
        self._url = url
        self._session = session
        self.process = self._find()
        """The server's first process, where it runs on this machine and may be looked at."""

    @staticmethod
    @abstractmethod
    def errors() -> tuple[type[Exception], ...]:
        """The errors of its driver."""

    @staticmethod
    @abstractmethod
    async def connect(address: Any) -> Any: ...

    @staticmethod
    @abstractmethod
    async def ask(connection: Any, statement: str, *arguments: Any) -> Sequence[Any]: ...

    @staticmethod
    @abstractmethod
    async def disconnect(connection: Any) -> None: ...

    @abstractmethod
    def _find(self) -> Path | None: ...

    @abstractmethod
    def _used(self, process: Path) -> float:
        """Seconds of processor time of the whole server. Raises OSError."""

    @abstractmethod
    def _requests(self) -> int: ...

    @abstractmethod
    def _serving(self) -> list[Path]:
        """The processes or threads that serve the store."""

    def make(self) -> None:
        """By the store's own migrations."""
        store = store_maker(self._url, Settings())()
        assert isinstance(store, HasSchema)
        self._session.do(store.migrate())

    def clear(self) -> None:
        self.rows(self.drop.replace("SCHEMA_NAME", self.address.schema))

    def is_empty(self) -> bool:
        """True if there is no such schema: one that exists may hold others' tables."""
        return not self.rows(self.schema_named, self.address.schema)

    def load(self) -> Load:
        """Processor time of the whole server, where it can be seen, and requests by its own count."""
        at = time.monotonic()
        cpu = None if self.process is None else self._used(self.process)
        return Load(at=at, cpu=cpu, requests=self._requests())

    def watch(self) -> Watch:
        """Processor time of those who serve the store; for a server elsewhere a stopwatch.

        EXPLAIN ANALYZE would have to know the store's statements, and pg_stat_statements is rarely installed.
        """
        return Stopwatch(self._session.round_trip) if self.process is None else ProcessorWatch(self._serving)

    @contextmanager
    def snapshot(self) -> Iterator[None]:
        """A transaction of another connection, REPEATABLE READ."""
        with closing(Session(type(self), self.address)) as session:
            for statement in self.snapshot_begins:
                session.rows(statement)
            yield

    def raw(self) -> RawSql:
        return RawSql(self, Session(type(self), self.address))


class RawSql:
    """Multi-row inserts (VALUES) into a table with a unique random key and a due-time index, each a transaction.

    The driver puts the arguments in. Arrays by `unnest`, or text made in one go, are a fifth quicker, COPY a quarter.
    """

    def __init__(self, server: SqlServer, session: Session) -> None:
        self.schema = f"bench_limit_{uuid4().hex}"
        self._server = server
        self._session = session
        for statement in ("CREATE SCHEMA SCHEMA_NAME", *server.raw_table):
            session.rows(statement.replace("SCHEMA_NAME", self.schema))

    def store(self, keys: Sequence[str]) -> None:
        due_at = due_in_an_hour()
        places = (
            f"(${first}, ${first + 1}, ${first + 2})" if self._server.numbers_arguments else "(%s, %s, %s)"
            for first in range(1, 3 * len(keys), 3)
        )
        arguments = [value for key in keys for value in (key, due_at, PAYLOAD)]
        insert = f"INSERT INTO {self.schema}.task (name, due_at, payload) VALUES {', '.join(places)}"
        self._session.rows(insert, *arguments)

    def close(self) -> None:
        with closing(self._session):
            self._session.rows(self._server.drop.replace("SCHEMA_NAME", self.schema))


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

    @staticmethod
    def errors() -> tuple[type[Exception], ...]:
        from asyncpg import InterfaceError, PostgresError

        return PostgresError, InterfaceError, OSError

    @staticmethod
    async def connect(address: Any) -> Any:
        import asyncpg

        named = {"application_name": "bide bench"}
        return await asyncpg.connect(address.dsn, timeout=_PATIENCE, server_settings=named)

    @staticmethod
    async def ask(connection: Any, statement: str, *arguments: Any) -> Sequence[Any]:
        found: Sequence[Any] = await connection.fetch(statement, *arguments)
        return found

    @staticmethod
    async def disconnect(connection: Any) -> None:
        await connection.close()

    def _find(self) -> Path | None:
        """The parent of the process that serves us."""
        asked = "SELECT pg_backend_pid(), extract(epoch FROM pg_postmaster_start_time())::float8"
        [[pid, began]] = self.rows(asked)
        return server.place_of_process(pid, began, within=_SAME, parent=True)

    def size(self) -> int:
        """Bytes of the schema's tables and indexes."""
        [[size]] = self.rows(
            "SELECT coalesce(sum(pg_total_relation_size(oid)), 0)::bigint FROM pg_class "
            "WHERE relnamespace = to_regnamespace($1) AND relkind = 'r'",
            f'"{self.address.schema}"',
        )
        return int(size)

    def flush(self) -> None:
        """A checkpoint: a million inserts begin one, and for its minutes commits wait for the disk behind it.

        Without the right to ask for one (`pg_checkpoint`, PostgreSQL 15) those minutes are left as they are.
        """
        from asyncpg import InsufficientPrivilegeError

        with suppress(InsufficientPrivilegeError):
            self.rows("CHECKPOINT")

    def _used(self, process: Path) -> float:
        return server.spent_by_family(process)

    def _requests(self) -> int:
        """Transactions in the database."""
        asked = "SELECT xact_commit + xact_rollback FROM pg_stat_database WHERE datname = current_database()"
        return int(self.rows(asked)[0][0])

    def _serving(self) -> list[Path]:
        rows = self.rows(
            "SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND application_name = 'bide'"
        )
        return [Path("/proc") / str(pid) for (pid,) in rows]

    def health(self) -> Mapping[str, int]:
        """Of the table of tasks. Rows are as counted by the server's statistics, which are a moment behind."""
        [row] = self.rows(
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

    @staticmethod
    def errors() -> tuple[type[Exception], ...]:
        from asyncmy.errors import MySQLError

        return MySQLError, OSError

    @staticmethod
    async def connect(address: Any) -> Any:
        import asyncmy

        host, port = address.hosts[0]
        return await asyncmy.connect(
            host=host, port=port, user=address.user or None, password=address.password, ssl=address.tls(),
            unix_socket=address.socket or None, autocommit=True, connect_timeout=_PATIENCE,
        )  # fmt: skip

    @staticmethod
    async def ask(connection: Any, statement: str, *arguments: Any) -> Sequence[Any]:
        async with connection.cursor() as cursor:
            await cursor.execute(statement, arguments or None)
            found: Sequence[Any] = await cursor.fetchall() if cursor.description else ()
            return found

    @staticmethod
    async def disconnect(connection: Any) -> None:
        await connection.ensure_closed()

    @cached_property
    def _is_mariadb(self) -> bool:
        return "mariadb" in self.rows("SELECT VERSION()")[0][0].lower()

    def _find(self) -> Path | None:
        """The process that its file names."""
        [[file, folder]] = self.rows("SELECT @@pid_file, @@datadir")
        [[_, uptime]] = self.rows("SHOW GLOBAL STATUS LIKE 'Uptime'")
        try:
            pid = int((Path(folder) / file).read_text(encoding="ascii"))
        except (OSError, ValueError):
            return None
        return server.place_of_process(pid, time.time() - int(uptime), within=_SAME)

    def size(self) -> int:
        """Bytes of the files of its tables, which grow by some megabytes at a time."""
        return self._bytes(f"{self.address.schema}/%")

    def _bytes(self, like: str) -> int:
        files = "INNODB_SYS_TABLESPACES" if self._is_mariadb else "INNODB_TABLESPACES"
        [[size]] = self.rows(
            f"SELECT COALESCE(SUM(file_size), 0) FROM information_schema.{files} WHERE name LIKE %s",
            like.replace("_", "\\_"),
        )
        return int(size)

    def _used(self, process: Path) -> float:
        return server.stat(process).used

    def _requests(self) -> int:
        """Statements."""
        return int(self.rows("SHOW GLOBAL STATUS LIKE 'Questions'")[0][1])

    def _serving(self) -> list[Path]:
        statement = (
            "SELECT tid FROM information_schema.processlist WHERE id <> CONNECTION_ID() AND tid > 0"
            if self._is_mariadb
            else "SELECT thread_os_id FROM performance_schema.threads "
            "WHERE type = 'FOREGROUND' AND processlist_id <> CONNECTION_ID()"
        )
        assert self.process is not None
        return [self.process / "task" / str(row[0]) for row in self.rows(statement)]

    def health(self) -> Mapping[str, int]:
        """Of the table of tasks with its indexes; and how many transactions are not purged yet, of all tables."""
        [[history]] = self.rows(
            "SELECT count FROM information_schema.innodb_metrics WHERE name = 'trx_rseg_history_len'"
        )
        return {"bytes": self._bytes(f"{self.address.schema}/{self.address.prefix}task"), "history": int(history)}


@contextmanager
def sql_server(url: str) -> Iterator[tuple[SqlServer, str]]:
    """The server that `url` names, and the URL with a fresh schema unless it names one by `?schema=`.

    Raises BadInput, MissingExtra, and StoreUnavailable, also for what fails on this connection while it is in use.
    """
    url = server.named_part(url, "schema", f"bench_{uuid4().hex}")
    address = address_of(url)  # says what is wrong with it, or missing
    kind: type[SqlServer] = PostgresServer if urlsplit(url).scheme in POSTGRES else MysqlServer
    try:
        with closing(Session(kind, address)) as session:
            yield kind(url, address, session), url
    except kind.errors() as error:
        raise StoreUnavailable(f"the server of the benchmark: {error}") from error
