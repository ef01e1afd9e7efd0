"""The servers that the contestants share: private ones as they come, each emptied before every run."""

from __future__ import annotations

import binascii
import re
from base64 import b64decode
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from redis import Redis

from bide_proofs.servers.postgres import PostgresServer, ask
from bide_proofs.servers.redis import RedisServer

_DATABASE = "bench"
_AS_IT_COMES = {"fsync": "on", "shared_buffers": "128MB", "deadlock_timeout": "1s"}
"""Settings of PostgreSQL that the servers of the tests have otherwise."""
_ENCODED = re.compile(rb"[A-Za-z0-9+/]{80,}={0,2}")
_READ = {
    b"string": ("GET",),
    b"list": ("LRANGE", "0", "-1"),
    b"set": ("SMEMBERS",),
    b"hash": ("HGETALL",),
    b"zset": ("ZRANGE", "0", "-1"),
    b"stream": ("XRANGE", "-", "+"),
}


class OnRedis:
    """A database of Redis."""

    kind = "redis"

    def __init__(self, server: RedisServer) -> None:
        self.url = server.url
        self.version = server.info("server")["redis_version"]

    def empty(self) -> None:
        with Redis.from_url(self.url) as client:
            client.flushdb()

    def holds(self, payloads: set[str]) -> set[str]:
        """Those of `payloads` that are still somewhere in the database."""
        with Redis.from_url(self.url) as client:
            everything = b"\n".join(_values(client))
        return {payload for payload in payloads if payload.encode() in everything}


def _values(client: Any) -> Iterator[bytes]:
    """Everything that is stored, in pieces; what is encoded in base64 also decoded."""
    for key in client.scan_iter(count=1000):
        if command := _READ.get(client.type(key)):
            yield from _leaves(client.execute_command(command[0], key, *command[1:]))


def _leaves(reply: object) -> Iterator[bytes]:
    if isinstance(reply, bytes):
        yield reply
        for part in _ENCODED.findall(reply):
            with suppress(binascii.Error):
                yield b64decode(part)
    elif isinstance(reply, dict):
        yield from _leaves([*reply, *reply.values()])
    elif isinstance(reply, list | tuple | set):
        for part in reply:
            yield from _leaves(part)


class OnPostgres:
    """A database of PostgreSQL."""

    kind = "postgres"

    def __init__(self, server: PostgresServer) -> None:
        self.url = f"{server.url.rpartition('/')[0]}/{_DATABASE}"
        self.version = server.value("SHOW server_version").split()[0]
        self._server = server

    def empty(self) -> None:
        """Make it anew, without tables."""
        self._server.ask(f"DROP DATABASE IF EXISTS {_DATABASE} WITH (FORCE)", f"CREATE DATABASE {_DATABASE}")

    def holds(self, payloads: set[str]) -> set[str]:
        """Those of `payloads` that are still in some table, as text or as bytes."""
        tables = ask(
            self.url,
            "SELECT format('%I.%I', schemaname, tablename) FROM pg_tables "
            "WHERE schemaname NOT IN ('pg_catalog', 'information_schema')",
        )
        everything = "\n".join(row for (table,) in tables for (row,) in ask(self.url, f"SELECT t::text FROM {table} t"))
        return {one for one in payloads if one in everything or one.encode().hex() in everything}


Server = OnRedis | OnPostgres


@contextmanager
def servers_of(kinds: set[str], directory: Path) -> Iterator[Mapping[str, Server]]:
    """A server of each kind, with its data below `directory`. Raises ServerMissing, ServerFailed."""
    servers: dict[str, Server] = {}
    with ExitStack() as running:
        if "redis" in kinds:
            servers["redis"] = OnRedis(running.enter_context(RedisServer(directory / "redis")))
        if "postgres" in kinds:
            own = PostgresServer(directory / "postgres", options=_AS_IT_COMES)
            servers["postgres"] = OnPostgres(running.enter_context(own))
        yield servers
