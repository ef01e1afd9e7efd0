"""Private servers to be tortured: those of `bide_proofs.servers`, behind proxies and with their faults.

They are configured as bide's documents recommend. No server that was not started here is touched.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from bide.core.errors import BadInput
from bide_proofs.torture.plain import SqliteFile
from bide_proofs.torture.server import Server
from bide_proofs.torture.servers.http import TorturedService
from bide_proofs.torture.servers.mariadb import TorturedMariaDb
from bide_proofs.torture.servers.postgres import TorturedPostgres
from bide_proofs.torture.servers.redis import TorturedCluster, TorturedRedis, TorturedSentinel

_KINDS: Mapping[str, Callable[[Path], Server]] = {
    "sqlite": SqliteFile,
    "redis": TorturedRedis,
    "redis-cluster": TorturedCluster,
    "redis-sentinel": TorturedSentinel,
    "postgres": TorturedPostgres,
    "mariadb": TorturedMariaDb,
    "http": lambda folder: TorturedService(folder, TorturedRedis(folder / "store")),
}


def server_of(name: str, folder: Path) -> Server:
    """Make a server with its data below `folder`, without starting it. Raises BadInput for an unknown name."""
    make = _KINDS.get(name)
    if make is None:
        raise BadInput("server", name, f"one of {', '.join(_KINDS)}")
    return make(folder)
