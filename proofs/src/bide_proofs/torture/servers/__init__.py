"""Private servers to be tortured: started from Debian's programs on free ports of 127.0.0.1, with data in one folder.

What they run is what bide's documents recommend. Nothing that was not started here is touched.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from bide.core.errors import BadInput
from bide_proofs.torture.server import Server
from bide_proofs.torture.servers.processes import ServerFailed, ServerMissing

__all__ = ["NAMES", "ServerFailed", "ServerMissing", "server_of"]


def _sqlite(folder: Path) -> Server:
    from bide_proofs.torture.plain import SqliteFile

    folder.mkdir(parents=True, exist_ok=True)
    return SqliteFile(folder)


def _redis(folder: Path) -> Server:
    from bide_proofs.torture.servers.redis import RedisServer

    return RedisServer(folder)


def _redis_cluster(folder: Path) -> Server:
    from bide_proofs.torture.servers.redis_cluster import RedisCluster

    return RedisCluster(folder)


def _redis_sentinel(folder: Path) -> Server:
    from bide_proofs.torture.servers.redis_sentinel import RedisSentinel

    return RedisSentinel(folder)


def _postgres(folder: Path) -> Server:
    from bide_proofs.torture.servers.postgres import PostgresServer

    return PostgresServer(folder)


def _mariadb(folder: Path) -> Server:
    from bide_proofs.torture.servers.mariadb import MariaDbServer

    return MariaDbServer(folder)


def _http(folder: Path) -> Server:
    from bide_proofs.torture.servers.http import HttpServer
    from bide_proofs.torture.servers.redis import RedisServer

    return HttpServer(folder, RedisServer(folder / "store"))


def _http_postgres(folder: Path) -> Server:
    from bide_proofs.torture.servers.http import HttpServer
    from bide_proofs.torture.servers.postgres import PostgresServer

    return HttpServer(folder, PostgresServer(folder / "store"))


_KINDS: Mapping[str, Callable[[Path], Server]] = {
    "sqlite": _sqlite,
    "redis": _redis,
    "redis-cluster": _redis_cluster,
    "redis-sentinel": _redis_sentinel,
    "postgres": _postgres,
    "mariadb": _mariadb,
    "http": _http,
    "http-postgres": _http_postgres,
}
NAMES = tuple(_KINDS)


def server_of(name: str, folder: Path) -> Server:
    """A server, not started, that keeps all it has below `folder`. Raises BadInput for a name that is none of NAMES."""
    make = _KINDS.get(name)
    if make is None:
        raise BadInput("server", name, f"one of {', '.join(NAMES)}")
    return make(folder)
