"""Where a benchmark runs: a store of its own, or a part of one that is there, and what to take away afterwards."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote, unquote, urlsplit

from bide.cli.bench import mysql_server, postgres_server, redis_server
from bide.cli.bench.server import Server
from bide.core.errors import BadInput

TOPIC_PREFIX = "bench."
_ACCEPTED = (
    '"memory:", "sqlite:" (a file of its own), "sqlite:///relative.db", "sqlite:////absolute/path.db", '
    '"redis://host:port/0" (a namespace of its own), "postgresql://host:port/database" or "mysql://..." (a schema of '
    "its own)"
)
_Opens = Callable[[str], AbstractContextManager[tuple[Server, str]]]
_SERVERS: Mapping[str, _Opens] = {
    **dict.fromkeys(redis_server.SCHEMES, redis_server.redis_server),
    **dict.fromkeys(postgres_server.SCHEMES, postgres_server.postgres_server),
    **dict.fromkeys(mysql_server.SCHEMES, mysql_server.mysql_server),
}
"""By the scheme of the URL: the server with the part of it to work in, and the URL that names that part."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A store to measure."""

    kind: str
    """What it is: "memory", "sqlite", "redis", ..."""
    url: str
    path: Path | None = None
    """The file, where there is one."""
    server: Server | None = None
    """The server, where there is one."""
    owned: bool = True
    """Whether all of it is ours, so that it goes as a whole afterwards."""

    @property
    def shared(self) -> bool:
        """Whether another process can work on it."""
        return self.path is not None or self.server is not None

    def health(self) -> Mapping[str, int]:
        """What grows there in long use; of a server what it says of itself."""
        return {"bytes": self.size()} if self.server is None else self.server.health()

    def flush(self) -> None:
        """Have what was stored written down before something is measured."""
        if self.server is not None:
            self.server.flush()

    def size(self) -> int:
        """Bytes on disk, the file and what belongs to it; or those that the server uses."""
        if self.server is not None:
            return self.server.size()
        return sum(path.stat().st_size for path in _files_of(self.path)) if self.path else 0


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
    elif parts.scheme in _SERVERS:
        with _SERVERS[parts.scheme](url) as (server, url_of_part):
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


def _sqlite(path: Path, *, owned: bool) -> Place:
    return Place(kind="sqlite", url=f"sqlite:///{quote(str(path))}", path=path, owned=owned)


def _files_of(path: Path) -> list[Path]:
    """The file and its companions (-wal, -shm, a lock)."""
    return [
        one for one in path.parent.glob(f"{_literal(path.name)}*") if one == path or one.name[len(path.name)] == "-"
    ]


def _literal(name: str) -> str:
    return "".join(f"[{letter}]" if letter in "*?[" else letter for letter in name)
