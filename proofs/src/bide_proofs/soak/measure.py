"""Memory, files and rows of processes and stores, as the system and the server show them.

A figure that cannot be seen from here is left out.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from bide.cli.bench.place import Place, SqlitePlace
from bide.cli.bench.processes import family, process_named
from bide.cli.bench.redis_server import RedisServer
from bide.cli.bench.sql_server import MysqlServer, PostgresServer

_PROC = Path("/proc")


def process(pid: int) -> dict[str, float]:
    """Resident bytes, open files and threads of a process; nothing where the system does not show them."""
    place = _PROC / str(pid)
    try:
        status = _fields(place / "status")
        return {
            "resident": status["VmRSS"] * 1024,
            "descriptors": len(os.listdir(place / "fd")),
            "threads": status["Threads"],
        }
    except (OSError, KeyError):
        return {}


def _fields(path: Path) -> dict[str, int]:
    """The numbers of a file such as `/proc/7/status`, by name; sizes in kilobytes. Raises OSError."""
    found = {}
    for line in path.read_text(encoding="ascii", errors="replace").splitlines():
        name, _, rest = line.partition(":")
        words = rest.split()
        if words and words[0].isdigit():
            found[name] = int(words[0])
    return found


async def store(place: Place) -> dict[str, float]:
    """Figures of a store and its server, by name."""
    if isinstance(place, SqlitePlace):
        files = {"store_file_bytes": place.path, "store_wal_bytes": Path(f"{place.path}-wal")}
        return {name: float(path.stat().st_size) for name, path in files.items() if path.exists()}
    found: dict[str, float] = {f"store_{name}": value for name, value in (await place.health()).items()}
    if isinstance(place, PostgresServer):
        found |= _postgres(place.process)
    elif isinstance(place, MysqlServer):
        found |= await _mysql(place)
    elif isinstance(place, RedisServer) and not place.is_cluster:
        found |= _redis(place.client)
    return found


def _of_server(place: Path | None) -> dict[str, float]:
    return {} if place is None else {f"server_{name}": value for name, value in process(int(place.name)).items()}


async def _mysql(server: MysqlServer) -> dict[str, float]:
    """Its process, without the pages that it has read: these stay until the pool is full, as it was told to do."""
    found = _of_server(server.process)
    if "server_resident" in found:
        [[_, pool]] = await server.rows("SHOW GLOBAL STATUS LIKE 'Innodb_buffer_pool_bytes_data'")
        found |= {"server_private": found.pop("server_resident") - float(pool), "server_pool": float(pool)}
    return found


def _redis(client: Any) -> dict[str, float]:
    """The server's process, if it runs here."""
    return _of_server(process_named(int(client.info("server")["process_id"]), ("redis-server", "valkey-server")))


def _postgres(postmaster: Path | None) -> dict[str, float]:
    """All its processes together: what each has for itself, and apart what they share, which is filled up once."""
    if postmaster is None:
        return {}
    private = shared = number = 0
    for one in family(postmaster):
        with suppress(OSError, KeyError):  # it ended a moment ago
            rollup = _fields(one / "smaps_rollup")
            private += rollup["Pss_Anon"] * 1024
            shared += rollup["Pss_Shmem"] * 1024
            number += 1
    return {"server_private": private, "server_shared": shared, "server_processes": number} if number else {}
