"""The servers that the contestants share: private ones as they come, each emptied before every run."""

from __future__ import annotations

import binascii
import re
from base64 import b64decode
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from bide_proofs.servers.postgres import PostgresServer, ask
from bide_proofs.servers.redis import Connection, RedisServer, Reply

_DATABASE = "bench"
_AS_IT_COMES = {"fsync": "on", "shared_buffers": "128MB", "deadlock_timeout": "1s"}
"""Settings of PostgreSQL that the servers of the tests have otherwise."""
_ENCODED = re.compile(r"[A-Za-z0-9+/]{80,}={0,2}")
_READ = {
    "string": ("GET",),
    "list": ("LRANGE", "0", "-1"),
    "set": ("SMEMBERS",),
    "hash": ("HGETALL",),
    "zset": ("ZRANGE", "0", "-1"),
    "stream": ("XRANGE", "-", "+"),
}


class OnRedis:
    """A database of Redis."""

    kind = "redis"

    def __init__(self, server: RedisServer) -> None:
        self.url = server.url
        self.version = server.info("server")["redis_version"]
        self._server = server

    def empty(self) -> None:
        self._server.ask("FLUSHDB")

    def holds(self, payloads: set[str]) -> set[str]:
        """Those of `payloads` that are still somewhere in the database."""
        with Connection(self._server.host, self._server.port) as connection:
            keys = connection.ask("KEYS", "*")
            assert isinstance(keys, list)
            reads = ((_READ.get(str(connection.ask("TYPE", str(key)))), str(key)) for key in keys)
            values = [connection.ask(read[0], key, *read[1:]) for read, key in reads if read]
        everything = "\n".join(_texts(values))
        return {payload for payload in payloads if payload in everything}


def _texts(reply: Reply) -> Iterator[str]:
    """Everything in it, in pieces; what is encoded in base64 also decoded."""
    if isinstance(reply, list):
        for part in reply:
            yield from _texts(part)
    elif isinstance(reply, str):
        yield reply
        for part in _ENCODED.findall(reply):
            with suppress(binascii.Error):
                yield b64decode(part).decode("utf-8", "replace")


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
