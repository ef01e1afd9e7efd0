"""The Redis server that all contestants share: started for the purpose, or somebody's that is empty."""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import re
import shutil
import socket
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Self
from urllib.parse import unquote, urlsplit

_PATIENCE = 10.0
_ENCODED = re.compile(rb"[A-Za-z0-9+/]{80,}={0,2}")


class ServerFault(Exception):
    """There is no server to measure with; the text says why."""


class ReplyError(Exception):
    """The server refused a command."""


class Connection:
    """As much of the Redis protocol as is needed here, so that this needs no library."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def open(cls, url: str) -> Self:
        """Raises OSError, ReplyError."""
        parts = urlsplit(url)
        if parts.scheme != "redis":
            raise ServerFault(f"{parts.scheme}: is not accepted; give redis://[user:password@]host[:port][/database]")
        reader, writer = await asyncio.open_connection(parts.hostname or "127.0.0.1", parts.port or 6379, limit=2**26)
        connection = cls(reader, writer)
        if parts.password:
            user = [unquote(parts.username)] if parts.username else []
            await connection.call("AUTH", *user, unquote(parts.password))
        if parts.path.strip("/"):
            await connection.call("SELECT", parts.path.strip("/"))
        return connection

    async def call(self, *words: str | bytes) -> Any:
        """One command and its reply. Raises ReplyError, OSError."""
        encoded = [word.encode() if isinstance(word, str) else word for word in words]
        self._writer.write(b"*%d\r\n" % len(encoded) + b"".join(b"$%d\r\n%b\r\n" % (len(w), w) for w in encoded))
        await self._writer.drain()
        return await self._reply()

    async def _reply(self) -> Any:
        line = await self._reader.readline()
        kind, rest = line[:1], line[1:-2]
        match kind:
            case b"+":
                return rest
            case b"-":
                raise ReplyError(rest.decode(errors="replace"))
            case b":":
                return int(rest)
            case b"$":
                if rest == b"-1":
                    return None
                return (await self._reader.readexactly(int(rest) + 2))[:-2]
            case b"*":
                return [await self._reply() for _ in range(int(rest))]
            case _:
                raise ConnectionError("the Redis server closed the connection")

    async def close(self) -> None:
        self._writer.close()
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()


_READ = {
    b"string": ("GET",),
    b"list": ("LRANGE", "0", "-1"),
    b"set": ("SMEMBERS",),
    b"hash": ("HGETALL",),
    b"zset": ("ZRANGE", "0", "-1"),
    b"stream": ("XRANGE", "-", "+"),
}


async def values(connection: Connection) -> AsyncIterator[bytes]:
    """Everything that is stored, in pieces, what is encoded in base64 also decoded."""
    cursor = b"0"
    while True:
        cursor, keys = await connection.call("SCAN", cursor, "COUNT", "1000")
        for key in keys:
            command = _READ.get(await connection.call("TYPE", key))
            if command:
                for value in _leaves(await connection.call(command[0], key, *command[1:])):
                    yield value
        if cursor == b"0":
            return


def _leaves(reply: object) -> Iterator[bytes]:
    if isinstance(reply, bytes):
        yield reply
        for part in _ENCODED.findall(reply):
            with contextlib.suppress(binascii.Error):
                yield base64.b64decode(part)
    elif isinstance(reply, list):
        for part in reply:
            yield from _leaves(part)


class Server:
    """A Redis database that is ours to empty."""

    kind = "redis"

    def __init__(self, url: str, version: str) -> None:
        self.url = url
        self.version = version

    async def empty(self) -> None:
        connection = await Connection.open(self.url)
        try:
            await connection.call("FLUSHDB")
        finally:
            await connection.close()

    async def holds(self, payloads: set[str]) -> set[str]:
        """Those of `payloads` that are still somewhere in the database."""
        found: set[str] = set()
        connection = await Connection.open(self.url)
        try:
            async for value in values(connection):
                found |= {payload for payload in payloads - found if payload.encode() in value}
        finally:
            await connection.close()
        return found


@asynccontextmanager
async def server_at(url: str | None, directory: Path) -> AsyncIterator[Server]:
    """The one at `url`, which must be empty, or one of our own. Raises ServerFault."""
    if url is not None:
        yield await _look_at(url)
        return
    binary = shutil.which("redis-server")
    if binary is None:
        raise ServerFault(
            "redis-server is not installed; install it, or give the URL of an empty database with --redis"
        )
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = await asyncio.create_subprocess_exec(
        *(binary, "--port", str(port), "--bind", "127.0.0.1", "--dir", str(directory), "--save", ""),
        *("--appendonly", "yes", "--appendfsync", "everysec", "--logfile", str(directory / "redis.log")),
        stdin=asyncio.subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    try:
        yield await _look_at(f"redis://127.0.0.1:{port}/0")
    finally:
        if process.returncode is None:
            process.terminate()
            try:
                await asyncio.wait_for(process.wait(), _PATIENCE)
            except TimeoutError:
                process.kill()
                await process.wait()


async def _look_at(url: str) -> Server:
    """Wait until it answers; raises ServerFault if it does not, or holds anything."""
    connection = await _reach(url)
    try:
        if size := await connection.call("DBSIZE"):
            raise ServerFault(f"the database holds {size} keys; this empties it again and again, so give an empty one")
        found = re.search(rb"redis_version:(\S+)", await connection.call("INFO", "server"))
        return Server(url, found.group(1).decode() if found else "unknown")
    except ReplyError as error:
        raise ServerFault(f"the Redis server refused: {error}") from None
    finally:
        await connection.close()


async def _reach(url: str) -> Connection:
    ends = time.monotonic() + _PATIENCE
    while True:
        try:
            return await Connection.open(url)
        except ReplyError as error:
            raise ServerFault(f"the Redis server refused: {error}") from None
        except OSError as error:
            if time.monotonic() > ends:
                raise ServerFault(f"there is no Redis server at the URL: {error}") from None
            await asyncio.sleep(0.05)
