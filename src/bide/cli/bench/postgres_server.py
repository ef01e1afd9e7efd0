"""The PostgreSQL behind a store, as a benchmark sees it: through the plain driver, beside the store's own connections.

A benchmark works in a schema of its own, made by the store's migrations and dropped at the end.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl, urlencode, urlsplit
from uuid import uuid4

from bide.cli.bench.loop_thread import LoopThread
from bide.cli.bench.processes import ProcessorWatch, spent_by_family, started_at, stat
from bide.cli.bench.server import LessRoundTrip, Load, Watch
from bide.cli.bench.worker import PAYLOAD
from bide.core.errors import StoreUnavailable
from bide.ports import HasSchema
from bide.settings import Settings
from bide.wiring import store_maker

if TYPE_CHECKING:
    from asyncpg import Connection

SCHEMES = ("postgresql", "postgres")
_OURS = ("schema", "prefix", "pooler")
_PATIENCE = 60.0
_SAME = 2.0
"""Seconds that two clocks of one machine may differ about when its server began."""
_HOUR = 3_600_000


class PostgresServer:
    """One server, and the schema that the benchmark works in."""

    kind = "postgres"
    remembers_heads = False

    def __init__(self, thread: LoopThread, connection: Connection, url: str) -> None:
        query = dict(parse_qsl(urlsplit(url).query))
        self.schema = query["schema"]
        self._table = f'"{self.schema}"."{query.get("prefix", "")}task"'
        self._thread = thread
        self._connection: Any = connection
        self._url = url
        self.postmaster = self._find()

    def _find(self) -> Path | None:
        """The server's first process, if it runs here and may be looked at: the parent of the one that serves us.

        A process with that number may be another here than there, so the time of its beginning has to agree.
        """
        row = self._rows(
            "SELECT pg_backend_pid() AS pid, extract(epoch FROM pg_postmaster_start_time())::float8 AS began"
        )[0]
        try:
            parent = Path("/proc") / str(stat(Path("/proc") / str(row["pid"])).parent)
            return parent if abs(started_at(parent) - row["began"]) < _SAME else None
        except (OSError, ValueError, IndexError):
            return None

    def make(self) -> None:
        """By the store's own migrations."""
        store = store_maker(self._url, Settings())()
        assert isinstance(store, HasSchema)
        self._thread.do(store.migrate())

    def clear(self) -> None:
        """Drop the schema, with whatever is in it."""
        self._execute(f'DROP SCHEMA IF EXISTS "{self.schema}" CASCADE')

    def is_empty(self) -> bool:
        """Whether there is no such schema: one that is there may hold others' tables."""
        return not self._rows("SELECT FROM pg_namespace WHERE nspname = $1", self.schema)

    def size(self) -> int:
        """Bytes of the schema's tables and indexes."""
        [[size]] = self._rows(
            "SELECT coalesce(sum(pg_total_relation_size(oid)), 0)::bigint FROM pg_class "
            "WHERE relnamespace = to_regnamespace($1) AND relkind = 'r'",
            f'"{self.schema}"',
        )
        return int(size)

    def flush(self) -> None:
        """A checkpoint: a million inserts begin one, and for its minutes commits wait for the disk behind it.

        Without the right to ask for one (`pg_checkpoint`, PostgreSQL 15) those minutes are left as they are.
        """
        from asyncpg import InsufficientPrivilegeError

        with suppress(InsufficientPrivilegeError):
            self._execute("CHECKPOINT")

    def load(self) -> Load:
        """Processor time of all its processes, and transactions in the database, by its own count."""
        at = time.monotonic()
        cpu = None if self.postmaster is None else spent_by_family(self.postmaster)
        [[requests]] = self._rows(
            "SELECT xact_commit + xact_rollback FROM pg_stat_database WHERE datname = current_database()"
        )
        return Load(at=at, cpu=cpu, requests=int(requests))

    def watch(self) -> Watch:
        """The processor time of the processes that serve the store; of a server elsewhere the stopwatch.

        EXPLAIN ANALYZE would have to know the store's statements, and pg_stat_statements is rarely there.
        """
        return LessRoundTrip(self._round_trip) if self.postmaster is None else ProcessorWatch(self._backends)

    def _backends(self) -> list[Path]:
        rows = self._rows(
            "SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND application_name = 'bide'"
        )
        return [Path("/proc") / str(row["pid"]) for row in rows]

    def _round_trip(self) -> float:
        async def measured() -> float:
            taken = []
            for _ in range(20):
                began = time.perf_counter_ns()
                await self._connection.fetch("SELECT 1")
                taken.append((time.perf_counter_ns() - began) / 1000)
            return median(taken)

        return self._thread.do(measured())

    def raw(self) -> RawPostgres:
        return RawPostgres(self._thread, self._url)

    def health(self) -> Mapping[str, int]:
        """Of the table of tasks. Rows are as counted by the server's statistics, which are a moment behind."""
        [row] = self._rows(
            "SELECT n_live_tup, n_dead_tup, pg_table_size(relid), pg_indexes_size(relid), "
            "vacuum_count + autovacuum_count FROM pg_stat_user_tables WHERE relid = $1::text::regclass",
            self._table,
        )
        names = ("live_rows", "dead_rows", "table_bytes", "index_bytes", "vacuums")
        return {name: int(value) for name, value in zip(names, row, strict=True)}

    @contextmanager
    def snapshot(self) -> Iterator[None]:
        """A transaction of another connection, REPEATABLE READ."""
        connection = self._thread.do(connect(self._url))
        try:
            self._thread.do(connection.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY"))
            self._thread.do(connection.fetch("SELECT 1"))  # by the first statement it is taken
            yield
        finally:
            self._thread.do(connection.close())

    def _rows(self, statement: str, *arguments: Any) -> list[Any]:
        found: list[Any] = self._thread.do(self._connection.fetch(statement, *arguments))
        return found

    def _execute(self, statement: str) -> None:
        self._thread.do(self._connection.execute(statement, timeout=_PATIENCE))


class RawPostgres:
    """Multi-row inserts (VALUES) into a table with a unique random key and a due-time index, each a transaction.

    Arrays by `unnest` are a fifth quicker, and COPY a quarter, for whoever knows those.
    """

    def __init__(self, thread: LoopThread, url: str) -> None:
        self._thread = thread
        self._schema = f"bench_limit_{uuid4().hex}"
        self._connection: Any = thread.do(connect(url))
        for statement in (
            f"CREATE SCHEMA {self._schema}",
            f"CREATE TABLE {self._schema}.task (number bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, "
            'key text COLLATE "C" NOT NULL UNIQUE, due_at bigint NOT NULL, payload bytea NOT NULL)',
            f"CREATE INDEX task_due ON {self._schema}.task (due_at)",
        ):
            thread.do(self._connection.execute(statement))

    def store(self, keys: Sequence[str]) -> None:
        due_at = time.time_ns() // 1_000_000 + _HOUR
        places = ", ".join(f"(${first}, ${first + 1}, ${first + 2})" for first in range(1, 3 * len(keys), 3))
        insert = f"INSERT INTO {self._schema}.task (key, due_at, payload) VALUES {places}"
        arguments = [value for key in keys for value in (key, due_at, PAYLOAD)]
        self._thread.do(self._connection.execute(insert, *arguments))

    def close(self) -> None:
        try:
            self._thread.do(self._connection.execute(f"DROP SCHEMA {self._schema} CASCADE", timeout=_PATIENCE))
        finally:
            self._thread.do(self._connection.close())


@contextmanager
def postgres_server(url: str) -> Iterator[tuple[PostgresServer, str]]:
    """The server that `url` names, and the URL with a fresh schema unless it names one.

    Raises BadInput, MissingExtra, and StoreUnavailable, also for what fails on this connection while it is in use.
    """
    if not dict(parse_qsl(urlsplit(url).query)).get("schema"):
        url = f"{url}{'&' if '?' in url else '?'}schema=bench_{uuid4().hex}"
    store_maker(url, Settings())  # says what is wrong with it, or missing
    from asyncpg import InterfaceError, PostgresError

    thread = LoopThread()
    try:
        connection = thread.do(connect(url))
        try:
            yield PostgresServer(thread, connection, url), url
        finally:
            thread.do(connection.close())
    except (PostgresError, InterfaceError, OSError) as error:
        raise StoreUnavailable(f"the PostgreSQL server of the benchmark: {error}") from error
    finally:
        thread.close()


async def connect(url: str) -> Any:
    """A plain connection for a URL that the store accepts."""
    import asyncpg

    parts = urlsplit(url)
    theirs = [(name, value) for name, value in parse_qsl(parts.query) if name not in _OURS]
    dsn = parts._replace(query=urlencode(theirs)).geturl()
    return await asyncpg.connect(dsn, timeout=_PATIENCE, server_settings={"application_name": "bide bench"})
