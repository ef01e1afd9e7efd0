"""The servers of a store, which server has a shard, and one shared connection to each server.

A `Topology` is one server, the master that Sentinel names, or the masters of a Cluster, each with its slots. Callers
get a `connection(shard)` from it, and call `rediscover` when a server is lost, or answers that it is the wrong one.

A `SharedConnection` pipelines: calls go out one after another, and answers come back in the same order. redis-py makes
the connection (TLS, passwords, databases). Its work per call is bypassed, because a worker under load sends tens of
thousands of calls. All calls made within one iteration of the event loop leave in one write.

A call that fails on the way raises NotSent or Lost. A refusal by the server is a reply: the call was not done. Its
first word decides whether to wait, to query another server, or to give up.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import hiredis
from msgspec import Struct
from redis.asyncio.connection import AbstractConnection, Connection, SSLConnection, UnixDomainSocketConnection
from redis.crc import key_slot
from redis.exceptions import (
    AskError,
    AuthenticationError,
    AuthenticationWrongNumberOfArgsError,
    BusyLoadingError,
    RedisError,
    ResponseError,
)

from bide.core.errors import StoreCorrupt, StoreError, StoreFull, StoreUnavailable
from bide.stores.redis.address import Address
from bide.stores.redis.layout import Layout
from bide.stores.resending import Lost, NotSent
from bide.stores.urls import unreached

_log = logging.getLogger("bide.redis")
Command = Sequence[str | bytes | int]
Reply = Any
"""bytes, int, None, a list of these, or a ResponseError, which is a value because the connection stays usable."""

_FIRST_PAUSE, _LONGEST_PAUSE = 0.02, 1.0
_PLENTY = 16_384
"""Bytes that justify a separate write, so that the server begins while more calls are made."""
_pack: Callable[[tuple[Any, ...]], bytes] = hiredis.pack_command

WAIT = frozenset({"TRYAGAIN", "LOADING", "BUSY", "CLUSTERDOWN", "MASTERDOWN", "NOREPLICAS", "UNBLOCKED", "MISCONF"})
"""Not done, for a passing reason: retry the same server in a moment."""
ELSEWHERE = frozenset({"MOVED", "READONLY", "CLUSTERDOWN", "MASTERDOWN"})
"""Not done, and another server may be the right one: rediscover."""

_STUMBLED = re.compile(
    r"user_script:[0-9]+: (?:attempt to|bad argument|Missing bytes)|is not (?:an integer|a valid float)"
)
"""Errors of a script that found data it did not write. A retry would fail in the same way."""


class _Pending(Struct, eq=False):
    """Commands that were sent together, and their replies so far."""

    future: asyncio.Future[list[Reply]]
    count: int
    sent: float
    answers: list[Reply] = []


class SharedConnection:
    """A connection that opens at its first use, and again after it broke. Belongs to one event loop.

    `patience`: seconds without an answer to the oldest call after which the connection is given up, because a half-open
    connection stays silent. `closed`: in the state after `close`, so that it never connects.
    """

    def __init__(
        self, name: str, make: Callable[[], AbstractConnection], *, patience: float, closed: bool = False
    ) -> None:
        self.name = name
        self._make = make
        self._patience = patience
        self._loop = asyncio.get_running_loop()
        self._connection: AbstractConnection | None = None
        self._connecting: asyncio.Task[None] | None = None
        self._reader: asyncio.Task[None] | None = None
        self._writer: asyncio.Task[None] | None = None
        self._outbox: list[bytes] = []
        self._outbox_size = 0
        self._pending: deque[_Pending] = deque()
        self._watch: asyncio.TimerHandle | None = None
        self._failures = 0
        self._not_before = 0.0
        self._why = ""
        """The error of the last attempt to connect."""
        self._closed = closed

    @property
    def ready(self) -> bool:
        """True if `post` may be called."""
        return self._connection is not None

    @property
    def plenty(self) -> bool:
        """True if enough bytes wait for a separate write."""
        return self._outbox_size > _PLENTY

    async def ask(self, commands: Sequence[Command]) -> list[Reply]:
        """Send the commands together; return their answers in order.

        Raises NotSent, Lost, or StoreUnavailable if a retry cannot help.
        """
        if self._connection is None:
            await self._connect()
            if self._connection is None:
                raise NotSent(f"{self.name}: the connection broke as soon as it was made")
        return await self.post(commands)

    def post(self, commands: Sequence[Command]) -> asyncio.Future[list[Reply]]:
        """Add the commands to the next write; return a future of their answers, or Lost. Only while `ready`."""
        packed = b"".join([_pack(tuple(command)) for command in commands])  # if it refuses one, none is sent
        asked = _Pending(self._loop.create_future(), len(commands), self._loop.time())
        self._outbox.append(packed)
        self._outbox_size += len(packed)
        self._pending.append(asked)
        if self._writer is None:
            self._writer = self._loop.create_task(self._write(), name=f"bide connection to {self.name}: write")
        if self._watch is None:
            self._watch = self._loop.call_later(self._patience, self._check)
        return asked.future

    async def flush(self) -> None:
        """Write the posted commands now, rather than at the end of this loop iteration."""
        connection = self._connection
        if self._outbox and connection is not None:
            packed, self._outbox, self._outbox_size = b"".join(self._outbox), [], 0
            try:
                await connection.send_packed_command(packed, check_health=False)
            except BaseException as error:
                # also if the caller was cancelled midway: part of a call is written, or redis-py has dropped the
                # connection, and would replace it with one that is never closed
                if self._connection is connection:  # otherwise it was given up and replaced meanwhile
                    await self._break(Lost(f"{self.name}: {said(error)}"))
                if not isinstance(error, (RedisError, OSError)):
                    raise

    async def _connect(self) -> None:
        if self._closed:
            raise NotSent(f"{self.name}: the store is closed")
        if self._connecting is None:
            if self._loop.time() < self._not_before:
                raise NotSent(self._why)
            self._connecting = self._loop.create_task(self._open(), name=f"bide connection to {self.name}: connect")
            # retrieve its error, because its callers may have been cancelled; `_why` keeps it
            self._connecting.add_done_callback(lambda done: done.cancelled() or done.exception())
        connecting, caller = self._connecting, asyncio.current_task()
        try:
            await asyncio.shield(connecting)
        except asyncio.CancelledError:
            if connecting.cancelled() and not (caller and caller.cancelling()):  # by `close`, not by the caller
                raise NotSent(f"{self.name}: the store is closed") from None
            raise

    async def _open(self) -> None:
        connection = self._make()
        try:
            async with asyncio.timeout(self._patience):
                await connection.connect()  # type: ignore[no-untyped-call]
        except (RedisError, OSError, TimeoutError) as error:
            await connection.disconnect(nowait=True)
            self._failures += 1
            pause = min(_LONGEST_PAUSE, _FIRST_PAUSE * 2 ** min(self._failures, 10))
            self._not_before = self._loop.time() + pause
            text = self._why = unreached(self.name, error)
            if isinstance(error, AuthenticationError | AuthenticationWrongNumberOfArgsError):
                raise StoreUnavailable(f"{text} (check the user and the password in the URL)") from error
            if isinstance(error, ResponseError) and "DB index" in str(error):
                raise StoreUnavailable(f"{self.name}: the server has no database of this number: {error}") from error
            raise NotSent(text) from error
        except BaseException:
            await _abort(connection)
            raise
        finally:
            self._connecting = None
        self._failures = 0
        self._connection = connection
        self._reader = self._loop.create_task(self._read(connection), name=f"bide connection to {self.name}: read")

    async def _write(self) -> None:
        try:
            while self._outbox and self._connection is not None:
                await self.flush()
        finally:
            self._writer = None

    async def _read(self, connection: AbstractConnection) -> None:
        pending, read = self._pending, connection.read_response
        try:
            while True:
                try:
                    reply: Reply = await read(disable_decoding=True, disconnect_on_error=False)
                except ResponseError as refused:
                    reply = refused
                except BusyLoadingError as loading:  # redis-py treats this as the end of the connection
                    reply = ResponseError(f"LOADING {loading}")
                asked = pending[0]
                asked.answers.append(reply)
                if len(asked.answers) == asked.count:
                    pending.popleft()
                    if not asked.future.done():
                        asked.future.set_result(asked.answers)
        except (RedisError, OSError, IndexError) as error:
            await self._break(Lost(f"{self.name}: {said(error)}"))

    def _check(self) -> None:
        """Give up a connection that was silent for too long: it is half-open, or its server is stalled."""
        self._watch = None
        if not self._pending:
            return
        left = self._pending[0].sent + self._patience - self._loop.time()
        if left <= 0:
            self._writer = self._loop.create_task(
                self._break(Lost(f"{self.name}: no answer within {self._patience:g} s")),
                name="bide connection: give up",
            )
        else:
            self._watch = self._loop.call_later(left, self._check)

    async def _break(self, error: Lost | NotSent) -> None:
        """Give up the connection; every call that waits for an answer fails."""
        connection, self._connection = self._connection, None
        pending, self._pending = self._pending, deque()
        self._outbox, self._outbox_size = [], 0
        reader, self._reader = self._reader, None
        if reader is not None and reader is not asyncio.current_task():
            reader.cancel()
        if self._writer is asyncio.current_task():
            self._writer = None
        for asked in pending:
            if not asked.future.done():
                asked.future.set_exception(error)
                asked.future.exception()  # its caller may have been cancelled
        if connection is not None:
            if not self._closed:
                _log.info("connection lost: %s", error)
            await _abort(connection)

    async def drop(self, why: str) -> None:
        """Give up the connection, so that the next call makes a new one."""
        if self._connection is not None:
            await self._break(Lost(f"{self.name}: {why}"))

    async def close(self) -> None:
        """Close the connection. A call that still waits for an answer fails with Lost."""
        self._closed = True
        if self._connecting is not None:
            self._connecting.cancel()
            await asyncio.wait([self._connecting])
        await self._break(Lost(f"{self.name}: the store was closed"))
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None


async def _abort(connection: AbstractConnection) -> None:
    """Close a connection and drop unsent data: if the server reads nothing, a flush would never end."""
    writer = getattr(connection, "_writer", None)
    if writer is not None:
        writer.transport.abort()
    await connection.disconnect(nowait=True)


# --- errors


class UnderReplicated(Exception):
    """Done, but fewer replicas have it than required. A resend waits for them again."""


def word_of(reply: ResponseError) -> str:
    """The first word of an error reply, which is its kind; redis-py turns some of them into classes."""
    kind = type(reply).__name__
    known = {
        "NoScriptError": "NOSCRIPT", "BusyLoadingError": "LOADING", "ReadOnlyError": "READONLY",
        "OutOfMemoryError": "OOM", "MovedError": "MOVED", "AskError": "ASK", "TryAgainError": "TRYAGAIN",
        "ClusterDownError": "CLUSTERDOWN", "MasterDownError": "MASTERDOWN", "NoPermissionError": "NOPERM",
    }.get(kind)  # fmt: skip
    return known or str(reply).partition(" ")[0]


def where_to_ask(reply: ResponseError) -> tuple[str, int] | None:
    """The server that ASK or MOVED names; None for any other reply. redis-py before version 7 leaves them as text."""
    if word_of(reply) not in ("ASK", "MOVED"):
        return None
    host, _, port = str(reply).rpartition(" ")[2].rpartition(":")
    return (reply.host, reply.port) if isinstance(reply, AskError) else (host, int(port))


def refusal(reply: ResponseError, where: str) -> StoreError:
    """The error for a call that the server has refused for good."""
    word, text = word_of(reply), str(reply)
    if word == "OOM" or "used memory > 'maxmemory'" in text:
        return StoreFull(f"{where}: the server has reached its maxmemory: {text}")
    if "WRONGTYPE" in text or "Bad data format" in text or _STUMBLED.search(text):
        return StoreCorrupt(f"{where}: a key of bide's holds something else: {text}")
    if word in ("NOPERM", "NOAUTH", "WRONGPASS"):
        return StoreUnavailable(f"{where}: this user lacks rights: {text} (docs/redis.md lists those that bide needs)")
    return StoreUnavailable(f"{where}: {text}")


def said(error: BaseException) -> str:
    """The text of an error, or its type if it has no text; redis-py omits the first word of a redirection."""
    return f"{word_of(error)} {error}" if isinstance(error, AskError) else str(error) or type(error).__name__


try:
    from redis.driver_info import DriverInfo
except ImportError:  # this redis-py reads its own version once
    _DRIVER: dict[str, Any] = {}
else:  # this one reads it from package metadata for every connection, which takes longer than everything else
    _DRIVER = {"driver_info": DriverInfo()}


# --- servers

Server = tuple[str, int]
"""Host and port; for a socket, its path and 0."""


class Topology:
    """The servers of one store, with a connection to each server used so far.

    Here one server, with no alternative: if it became a replica, it may be made a master again.
    """

    def __init__(self, address: Address, patience: float) -> None:
        self._address = address
        self._patience = patience
        self._connections: dict[Server, SharedConnection] = {}
        self._discovering = asyncio.Lock()
        self._discovered = 0
        self._closed = False
        """True after `close`: then no call connects any more."""

    def _where(self, shard: int | None) -> Server | None:
        """The server that has the shard (None: the keys of the whole namespace), if known."""
        return self._address.hosts[0] if self._address.path is None else (self._address.path, 0)

    async def _discover(self) -> None:
        """Find the current servers. Raises NotSent, StoreUnavailable."""

    async def rediscover(self) -> None:
        """Find the servers again, once for all concurrent callers."""
        discovered = self._discovered
        async with self._discovering:
            if discovered == self._discovered:
                await self._discover()
                self._discovered += 1

    async def _found(self, shard: int | None) -> Server:
        where = self._where(shard)
        if where is None:
            await self.rediscover()
            where = self._where(shard)
            if where is None:
                raise NotSent(f"{self._address.shown}: no server serves the slot of shard {shard}")
        return where

    async def connection(self, shard: int | None) -> SharedConnection:
        """The connection to the server that has the shard. Raises NotSent, StoreUnavailable."""
        return self.at(*await self._found(shard))

    def ready(self, shard: int) -> SharedConnection | None:
        """The connection to the shard's server if it is known and connected, else None."""
        where = self._where(shard)
        connection = None if where is None else self._connections.get(where)
        return connection if connection is not None and connection.ready else None

    def at(self, host: str, port: int) -> SharedConnection:
        """The connection to a server by its address, for a redirected call."""
        connection = self._connections.get((host, port))
        if connection is None:
            connection = self._connections[host, port] = self._connect_to(host, port)
        return connection

    def part_of(self, shard: int) -> int:
        """A number that is equal for shards that fail together; the other shards do not wait for them."""
        return 0

    async def masters(self) -> list[SharedConnection]:
        """A connection to every server that holds data."""
        return [await self.connection(None)]

    async def new_connection(self, shard: int | None) -> AbstractConnection:
        """A new, unconnected connection to the shard's server, for a subscription."""
        return make_connection(self._address, *await self._found(shard))

    async def close(self) -> None:
        self._closed = True
        for connection in list(self._connections.values()):
            await connection.close()

    def _connect_to(
        self, host: str, port: int, *, to_discover: bool = False, for_sentinel: bool = False
    ) -> SharedConnection:
        """A new connection to a server. `to_discover`: for a single query, with a shorter timeout."""
        name = f"{host}:{port}" if port else host
        return SharedConnection(
            f"sentinel {name}" if for_sentinel else name,
            lambda: make_connection(self._address, host, port, for_sentinel=for_sentinel),
            patience=min(1.0, self._patience) if to_discover else self._patience,
            closed=self._closed,
        )


def topology_of(address: Address, layout: Layout, *, patience: float) -> Topology:
    if address.kind == "cluster":
        return ClusterTopology(address, patience, layout)
    if address.kind == "sentinel":
        return SentinelTopology(address, patience)
    return Topology(address, patience)


def make_connection(address: Address, host: str, port: int, *, for_sentinel: bool = False) -> AbstractConnection:
    """An unconnected connection whose answers are bytes. Timeouts are left to the SharedConnection."""
    options: dict[str, Any] = {
        "db": 0 if for_sentinel or address.kind == "cluster" else address.db,
        "username": address.sentinel_username if for_sentinel else address.username,
        "password": address.sentinel_password if for_sentinel else address.password,
        "socket_timeout": None,
        "socket_connect_timeout": 5,
        "protocol": 2,
        "client_name": "bide",
        "health_check_interval": 0,
        **_DRIVER,
    }
    if address.path is not None:
        return UnixDomainSocketConnection(path=address.path, **options)
    kind = SSLConnection if address.tls else Connection
    if address.tls:
        options |= address.tls_options
    return kind(host=host, port=port, socket_keepalive=True, **options)


class SentinelTopology(Topology):
    """The master that a majority of Sentinels agrees on: queried at the start, and when it is lost or demoted."""

    _master: Server | None = None

    def _where(self, shard: int | None) -> Server | None:
        return self._master

    async def _discover(self) -> None:
        """Query each Sentinel in turn until one answers."""
        troubles = []
        for host, port in self._address.hosts:
            try:
                found = await self._ask(host, port)
            except (NotSent, Lost, StoreUnavailable) as error:
                troubles.append(str(error))
                continue
            if found is None:
                troubles.append(f"{host}:{port} knows no service {self._address.service!r}")
                continue
            if found != self._master:  # otherwise its connection may be in use
                _log.info("the master of %s is %s:%d", self._address.service, *found)
                before, self._master = self._master, found
                if before is not None:
                    await self.at(*before).drop("another server is the master now")
            return
        raise NotSent(f"no Sentinel names a master: {'; '.join(troubles)}")

    async def _ask(self, host: str, port: int) -> Server | None:
        connection = self._connect_to(host, port, to_discover=True, for_sentinel=True)
        try:
            [reply] = await connection.ask([("SENTINEL", "get-master-addr-by-name", self._address.service)])
        finally:
            await connection.close()
        if isinstance(reply, ResponseError):
            raise NotSent(f"sentinel {host}:{port}: {reply}")
        return None if reply is None else (reply[0].decode(), int(reply[1]))


class ClusterTopology(Topology):
    """The masters of a Cluster, each with the slots that it serves now."""

    def __init__(self, address: Address, patience: float, layout: Layout) -> None:
        super().__init__(address, patience)
        self._slots = [key_slot(tag.encode()) for tag in layout.tags]
        self._common = key_slot(f"{{{layout.namespace}}}:".encode())
        self._owner: dict[int, Server] = {}

    def _where(self, shard: int | None) -> Server | None:
        return self._owner.get(self._common if shard is None else self._slots[shard])

    async def _discover(self) -> None:
        troubles = []
        for host, port in dict.fromkeys([*self._owner.values(), *self._address.hosts]):
            connection = self._connect_to(host, port, to_discover=True)
            try:
                [reply] = await connection.ask([("CLUSTER", "SLOTS")])
            except (NotSent, Lost) as error:
                troubles.append(str(error))
                continue
            finally:
                await connection.close()
            if isinstance(reply, ResponseError):
                raise StoreUnavailable(f"{host}:{port} is not a Cluster: {reply} (use redis:// for a single server)")
            wanted = {*self._slots, self._common}
            owner = {}
            for first, last, master, *_ in reply:
                where = (master[0].decode() or host, int(master[1]))
                owner.update({slot: where for slot in wanted if first <= slot <= last})
            self._owner = owner
            return
        raise NotSent(f"no server of the Cluster answers: {'; '.join(troubles)}")

    def part_of(self, shard: int) -> int:
        return hash(self._owner.get(self._slots[shard], shard))

    async def masters(self) -> list[SharedConnection]:
        await self._found(None)
        return [self.at(*where) for where in dict.fromkeys(self._owner.values())]
