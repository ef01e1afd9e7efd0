"""The place of a benchmark: a store of its own or a part of one that is there, and its raw limit."""

from __future__ import annotations

import sqlite3
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from heapq import heappush
from pathlib import Path
from urllib.parse import quote, unquote, urlsplit
from uuid import uuid4

from bide.cli.bench import redis_server, sql_server
from bide.cli.bench.server import Raw, Server, due_in_an_hour
from bide.cli.bench.worker import PAYLOAD
from bide.core.errors import BadInput

_ACCEPTED = (
    '"memory:", "sqlite:" (a file of its own), "sqlite:///relative.db", "sqlite:////absolute/path.db", '
    '"redis://host:port/0" (a namespace of its own), "postgresql://host:port/database" or "mysql://..." (a schema of '
    "its own)"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A store to measure."""

    kind: str
    """ "memory", "sqlite", "redis", "postgres" or "mysql"."""
    url: str
    path: Path | None = None
    """The file, where there is one."""
    server: Server | None = None
    """The server, where there is one."""
    owned: bool = True
    """True if all of it was made for this run, so that it is removed as a whole afterwards."""

    @property
    def shared(self) -> bool:
        """True if another process can work on it."""
        return self.path is not None or self.server is not None

    def health(self) -> Mapping[str, int]:
        """Figures that grow in long use."""
        return {"bytes": self.size()} if self.server is None else self.server.health()

    def flush(self) -> None:
        """Have what was stored written out before something is measured."""
        if self.server is not None:
            self.server.flush()

    def size(self) -> int:
        """Bytes of the file and its companions, or those that the server uses."""
        if self.server is not None:
            return self.server.size()
        return sum(path.stat().st_size for path in _files_of(self.path)) if self.path else 0

    def raw(self) -> Raw:
        """The plain driver in the same place."""
        if self.server is not None:
            return self.server.raw()
        return RawMemory() if self.path is None else RawSqlite(self.path.parent)


@contextmanager
def place_of(url: str) -> Iterator[Place]:
    """The place that `url` names; files and parts of a server that were not there before are removed at the end.

    Raises BadInput, and for a server MissingExtra and StoreUnavailable.
    """
    parts = urlsplit(url)
    if url == "memory:":
        yield Place(kind="memory", url=url)
    elif url == "sqlite:":
        with tempfile.TemporaryDirectory(prefix="bide-bench-") as directory:
            yield _sqlite(Path(directory) / "bench.db", owned=True)
    elif parts.scheme == "sqlite" and not parts.netloc and len(parts.path) > 1 and not parts.query:
        path = Path(unquote(parts.path.removeprefix("/"))).absolute()
        before = set(_files_of(path))
        try:
            yield _sqlite(path, owned=path not in before)
        finally:
            if path not in before:
                for made in set(_files_of(path)) - before:
                    with suppress(FileNotFoundError):
                        made.unlink()
    elif parts.scheme in (*redis_server.SCHEMES, *sql_server.SCHEMES):
        opens = redis_server.redis_server if parts.scheme in redis_server.SCHEMES else sql_server.sql_server
        with opens(url) as (server, url_of_part):
            owned = url_of_part != url or server.is_empty()
            try:
                if owned:
                    server.make()
                yield Place(kind=server.kind, url=url_of_part, server=server, owned=owned)
            finally:
                if owned:
                    server.clear()
    else:
        raise BadInput("store", parts.scheme or "text without a scheme", _ACCEPTED)


class RawMemory:
    """A heap of due times and a dictionary of payloads."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, str]] = []
        self._payloads: dict[str, bytes] = {}

    def store(self, keys: Sequence[str]) -> None:
        heap, payloads = self._heap, self._payloads
        for key in keys:
            payloads[key] = PAYLOAD
            heappush(heap, (due_in_an_hour(), key))

    def close(self) -> None:
        self._heap.clear()
        self._payloads.clear()


class RawSqlite:
    """`executemany` into a table with a unique random key and a due-time index, flushed at every commit as ours is."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / f"bench-limit-{uuid4().hex}.db"
        self._connection = sqlite3.connect(self._path, isolation_level=None)
        for statement in (
            "PRAGMA journal_mode = WAL",
            "PRAGMA synchronous = FULL",
            "CREATE TABLE task (row INTEGER PRIMARY KEY, key TEXT NOT NULL, due_at INTEGER NOT NULL, payload BLOB)",
            "CREATE UNIQUE INDEX task_key ON task (key)",
            "CREATE INDEX task_due ON task (due_at)",
        ):
            self._connection.execute(statement)

    def store(self, keys: Sequence[str]) -> None:
        rows = [(key, due_in_an_hour(), PAYLOAD) for key in keys]
        self._connection.execute("BEGIN IMMEDIATE")
        self._connection.executemany("INSERT INTO task (key, due_at, payload) VALUES (?, ?, ?)", rows)
        self._connection.execute("COMMIT")

    def close(self) -> None:
        self._connection.close()
        for path in self._path.parent.glob(f"{self._path.name}*"):
            path.unlink()


def _sqlite(path: Path, *, owned: bool) -> Place:
    return Place(kind="sqlite", url=f"sqlite:///{quote(str(path))}", path=path, owned=owned)


def _files_of(path: Path) -> list[Path]:
    """The file and its companions (-wal, -shm, a lock)."""
    literal = "".join(f"[{letter}]" if letter in "*?[" else letter for letter in path.name)
    return [one for one in path.parent.glob(f"{literal}*") if one == path or one.name[len(path.name)] == "-"]
