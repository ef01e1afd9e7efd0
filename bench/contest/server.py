"""The Redis server that all contestants share: started for the purpose, or somebody's that is empty."""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import re
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import RedisError

from bide.cli.bench.workers import BenchFault
from bide_proofs.servers.process import ServerFailed, ServerMissing
from bide_proofs.servers.redis import RedisServer

_ENCODED = re.compile(rb"[A-Za-z0-9+/]{80,}={0,2}")
_READ = {
    b"string": ("GET",),
    b"list": ("LRANGE", "0", "-1"),
    b"set": ("SMEMBERS",),
    b"hash": ("HGETALL",),
    b"zset": ("ZRANGE", "0", "-1"),
    b"stream": ("XRANGE", "-", "+"),
}


class ServerFault(BenchFault):
    """There is no server to measure with; the text says why."""


class Server:
    """A Redis database that is ours to empty."""

    kind = "redis"

    def __init__(self, url: str, info: dict[str, Any]) -> None:
        self.url = url
        self.version = str(info["redis_version"])
        self.pid = int(info["process_id"])

    async def empty(self) -> None:
        async with Redis.from_url(self.url) as client:
            await client.flushdb()

    async def holds(self, payloads: set[str]) -> set[str]:
        """Those of `payloads` that are still somewhere in the database."""
        found: set[str] = set()
        async with Redis.from_url(self.url) as client:
            async for value in _values(client):
                found |= {payload for payload in payloads - found if payload.encode() in value}
        return found


async def _values(client: Any) -> AsyncIterator[bytes]:
    """Everything that is stored, in pieces; what is encoded in base64 also decoded."""
    async for key in client.scan_iter(count=1000):
        if command := _READ.get(await client.type(key)):
            for value in _leaves(await client.execute_command(command[0], key, *command[1:])):
                yield value


def _leaves(reply: object) -> Iterator[bytes]:
    if isinstance(reply, bytes):
        yield reply
        for part in _ENCODED.findall(reply):
            with contextlib.suppress(binascii.Error):
                yield base64.b64decode(part)
    elif isinstance(reply, dict):
        yield from _leaves([*reply, *reply.values()])
    elif isinstance(reply, list | tuple | set):
        for part in reply:
            yield from _leaves(part)


@asynccontextmanager
async def server_at(url: str | None, directory: Path) -> AsyncIterator[Server]:
    """The one at `url`, which must be empty, or one of our own. Raises ServerFault."""
    if url is not None:
        yield await _look_at(url)
        return
    own = RedisServer(directory / "redis")
    try:
        await asyncio.to_thread(own.start)
    except (ServerMissing, ServerFailed) as error:
        raise ServerFault(f"{error}; or give the URL of an empty database") from None
    try:
        yield await _look_at(own.url)
    finally:
        await asyncio.to_thread(own.stop)


async def _look_at(url: str) -> Server:
    """Raises ServerFault if it does not answer, or holds anything."""
    try:
        async with Redis.from_url(url) as client:
            if size := await client.dbsize():
                raise ServerFault(
                    f"the database holds {size} keys; this empties it again and again, so give an empty one"
                )
            return Server(url, await client.info("server"))
    except (RedisError, ValueError) as error:
        raise ServerFault(f"there is no Redis server at the URL: {error}") from None
