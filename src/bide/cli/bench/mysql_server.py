"""The MySQL or MariaDB behind a store, as a benchmark sees it: through the plain driver, on connections of its own.

A benchmark works in a database of its own, made by the store's migrations and dropped at the end. What is asked of the
server's insides needs the right PROCESS.
"""

from __future__ import annotations

import ssl
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit
from uuid import uuid4

from bide.cli.bench.loop_thread import LoopThread
from bide.cli.bench.processes import ProcessorWatch, started_at, stat
from bide.cli.bench.server import LessRoundTrip, Load, Watch
from bide.cli.bench.worker import PAYLOAD
from bide.core.errors import StoreUnavailable
from bide.ports import HasSchema
from bide.settings import Settings
from bide.wiring import store_maker

SCHEMES = ("mysql", "mariadb")
_PREFIX = "bide_"
_PATIENCE = 60
_SAME = 3.0
"""Seconds that two clocks of one machine may differ about when its server began, one of which counts in seconds."""
_HOUR = 3_600_000


class MysqlServer:
    """One server, and the database on it that the benchmark works in."""

    kind = "mysql"
    remembers_heads = False

    def __init__(self, thread: LoopThread, connection: Any, url: str) -> None:
        query = dict(parse_qsl(urlsplit(url).query))
        self.schema = query["schema"]
        self._table = f"{self.schema}/{query.get('prefix', _PREFIX)}task"
        self._thread = thread
        self._connection = connection
        self._url = url
        [[version]] = self._rows("SELECT VERSION()")
        self._is_mariadb = "mariadb" in version.lower()
        self.process = self._find()

    def _find(self) -> Path | None:
        """The server's process, if it runs here and may be looked at: by its file, and the time of its beginning."""
        [[file, folder]] = self._rows("SELECT @@pid_file, @@datadir")
        [[_, uptime]] = self._rows("SHOW GLOBAL STATUS LIKE 'Uptime'")
        try:
            place = Path("/proc") / (Path(folder) / file).read_text(encoding="ascii").strip()
            return place if abs(started_at(place) - (time.time() - int(uptime))) < _SAME else None
        except (OSError, ValueError, IndexError):
            return None

    def make(self) -> None:
        """By the store's own migrations."""
        store = store_maker(self._url, Settings())()
        assert isinstance(store, HasSchema)
        self._thread.do(store.migrate())

    def clear(self) -> None:
        """Drop the database, with whatever is in it."""
        self._rows(f"DROP DATABASE IF EXISTS `{self.schema}`")

    def is_empty(self) -> bool:
        """Whether there is no such database: one that is there may hold others' tables."""
        return not self._rows("SELECT 1 FROM information_schema.schemata WHERE schema_name = %s", self.schema)

    def size(self) -> int:
        """Bytes of the files of its tables, which grow by some megabytes at a time."""
        return self._bytes(f"{self.schema}/%")

    def _bytes(self, like: str) -> int:
        files = "INNODB_SYS_TABLESPACES" if self._is_mariadb else "INNODB_TABLESPACES"
        [[size]] = self._rows(
            f"SELECT COALESCE(SUM(file_size), 0) FROM information_schema.{files} WHERE name LIKE %s",
            like.replace("_", "\\_"),
        )
        return int(size)

    def load(self) -> Load:
        """Processor time of the process, and statements, by its own count."""
        at = time.monotonic()
        cpu = None if self.process is None else stat(self.process).used
        [[_, requests]] = self._rows("SHOW GLOBAL STATUS LIKE 'Questions'")
        return Load(at=at, cpu=cpu, requests=int(requests))

    def watch(self) -> Watch:
        """The processor time of the threads that serve connections but ours; of a server elsewhere the stopwatch."""
        return LessRoundTrip(self._round_trip) if self.process is None else ProcessorWatch(self._threads)

    def _threads(self) -> list[Path]:
        statement = (
            "SELECT tid FROM information_schema.processlist WHERE id <> CONNECTION_ID() AND tid > 0"
            if self._is_mariadb
            else "SELECT thread_os_id FROM performance_schema.threads "
            "WHERE type = 'FOREGROUND' AND processlist_id <> CONNECTION_ID()"
        )
        assert self.process is not None
        return [self.process / "task" / str(row[0]) for row in self._rows(statement)]

    def _round_trip(self) -> float:
        async def measured() -> float:
            taken = []
            for _ in range(20):
                began = time.perf_counter_ns()
                await ask(self._connection, "SELECT 1")
                taken.append((time.perf_counter_ns() - began) / 1000)
            return median(taken)

        return self._thread.do(measured())

    def raw(self) -> RawMysql:
        return RawMysql(self._thread, self._url)

    def flush(self) -> None:
        """InnoDB writes at its own pace, and has no word for it."""

    def health(self) -> Mapping[str, int]:
        """Of the table of tasks with its indexes; and how many transactions are not purged yet, of all tables."""
        [[history]] = self._rows(
            "SELECT count FROM information_schema.innodb_metrics WHERE name = 'trx_rseg_history_len'"
        )
        return {"bytes": self._bytes(self._table), "history": int(history)}

    @contextmanager
    def snapshot(self) -> Iterator[None]:
        """A transaction of another connection, REPEATABLE READ."""
        connection = self._thread.do(connect(self._url))
        try:
            self._thread.do(ask(connection, "SET SESSION TRANSACTION ISOLATION LEVEL REPEATABLE READ"))
            self._thread.do(ask(connection, "START TRANSACTION WITH CONSISTENT SNAPSHOT"))
            yield
        finally:
            self._thread.do(connection.ensure_closed())

    def _rows(self, statement: str, *arguments: Any) -> Sequence[Any]:
        return self._thread.do(ask(self._connection, statement, *arguments))


class RawMysql:
    """Multi-row inserts into a table with a unique random key and a due-time index, each a transaction.

    The driver puts the arguments in; text that is made in one go is a sixth quicker.
    """

    def __init__(self, thread: LoopThread, url: str) -> None:
        self._thread = thread
        self._schema = f"bench_limit_{uuid4().hex}"
        self._connection = thread.do(connect(url))
        for statement in (
            f"CREATE DATABASE {self._schema}",
            f"CREATE TABLE {self._schema}.task (number bigint NOT NULL AUTO_INCREMENT PRIMARY KEY, "
            "name varbinary(64) NOT NULL, due_at bigint NOT NULL, payload blob NOT NULL, UNIQUE KEY (name), "
            "KEY (due_at)) ENGINE = InnoDB",
        ):
            thread.do(ask(self._connection, statement))

    def store(self, keys: Sequence[str]) -> None:
        due_at = time.time_ns() // 1_000_000 + _HOUR
        places = ", ".join(["(%s, %s, %s)"] * len(keys))
        insert = f"INSERT INTO {self._schema}.task (name, due_at, payload) VALUES {places}"
        arguments = [value for key in keys for value in (key, due_at, PAYLOAD)]
        self._thread.do(ask(self._connection, insert, *arguments))

    def close(self) -> None:
        try:
            self._thread.do(ask(self._connection, f"DROP DATABASE {self._schema}"))
        finally:
            self._thread.do(self._connection.ensure_closed())


@contextmanager
def mysql_server(url: str) -> Iterator[tuple[MysqlServer, str]]:
    """The server that `url` names, and the URL with a fresh database unless it names one by `?schema=`.

    Raises BadInput, MissingExtra, and StoreUnavailable, also for what fails on this connection while it is in use.
    """
    if not dict(parse_qsl(urlsplit(url).query)).get("schema"):
        url = f"{url}{'&' if '?' in url else '?'}schema=bench_{uuid4().hex}"
    store_maker(url, Settings())  # says what is wrong with it, or missing
    from asyncmy.errors import MySQLError

    thread = LoopThread()
    try:
        connection = thread.do(connect(url))
        try:
            yield MysqlServer(thread, connection, url), url
        finally:
            thread.do(connection.ensure_closed())
    except (MySQLError, OSError) as error:
        raise StoreUnavailable(f"the MySQL server of the benchmark: {error}") from error
    finally:
        thread.close()


async def connect(url: str) -> Any:
    """A plain connection for a URL that the store accepts, to the first of its hosts."""
    import asyncmy

    parts = urlsplit(url)
    query = dict(parse_qsl(parts.query))
    account, _, places = parts.netloc.rpartition("@")
    user, _, password = account.partition(":")
    host, colon, port = places.split(",")[0].rpartition(":")
    return await asyncmy.connect(
        host=(host if colon else port) or "localhost", port=int(port) if colon else 3306, user=unquote(user) or None,
        password=unquote(password), unix_socket=query.get("socket"), ssl=_tls(query), autocommit=True,
        connect_timeout=_PATIENCE,
    )  # fmt: skip


def _tls(query: Mapping[str, str]) -> ssl.SSLContext | None:
    mode = query.get("ssl_mode", "required" if "ssl_ca" in query else "disabled")
    if mode == "disabled":
        return None
    context = ssl.create_default_context(cafile=query.get("ssl_ca"))
    context.check_hostname = mode == "verify_identity"
    context.verify_mode = ssl.CERT_NONE if mode == "required" and "ssl_ca" not in query else ssl.CERT_REQUIRED
    if "ssl_cert" in query:
        context.load_cert_chain(query["ssl_cert"], query.get("ssl_key"))
    return context


async def ask(connection: Any, statement: str, *arguments: Any) -> Sequence[Any]:
    """The rows of one statement."""
    async with connection.cursor() as cursor:
        await cursor.execute(statement, arguments or None)
        found: Sequence[Any] = await cursor.fetchall() if cursor.description else ()
        return found
