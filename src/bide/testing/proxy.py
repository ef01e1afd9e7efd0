"""A TCP proxy that fails on purpose: it delays, slows or swallows data, or cuts a connection before request or reply.

    async with FaultProxy("127.0.0.1", 6379) as proxy:
        lost = proxy.fault(Act.LOSE_REPLY, when=lambda data: b"EVALSHA" in data)
        ...                                  # the client, connected to proxy.port
        assert lost.hits == 1                # the server has done it, but the client got no reply

The proxy knows no protocol. It judges *chunks*: the result of one read, of at most 64 KiB. A smaller request of a
client that waits for each reply is one chunk, and so is a batch that is sent in one piece.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import socket
import struct
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

_CHUNK = 65_536
_AHEAD = 64
"""Chunks that may be in transit in one direction; after that the sender has to wait, as on a network."""
_RESET = struct.pack("ii", 1, 0)
"""SO_LINGER with 0 seconds: closing sends RST and drops unsent data."""
_TRIES = 1_000
"""Milliseconds to wait for a port that was just released."""
_PIECES = 20
"""The number of pieces per second that a slow direction passes on."""


class Act(enum.Enum):
    """The fate of a chunk, and of its connection."""

    FORWARD = "forward"
    """Passed on."""
    DROP = "drop"
    """Swallowed; the connection goes on."""
    CUT = "cut"
    """Swallowed, and both sides are reset: a request never arrives, a reply is lost."""
    LOSE_REPLY = "lose_reply"
    """Passed on; the server's next data is swallowed, and the client is reset. So the server has handled the request,
    or begun to; it reads all that it was sent, and its side is closed in order. For a chunk that goes to the client,
    the same as CUT."""
    HOLD = "hold"
    """Swallowed, as is all further data in both directions, and neither side notices: a half-open connection."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """The bytes of one read."""

    connection: int
    """The number of the connection: 1 for the first that the proxy accepted."""
    to_server: bool
    data: bytes


Hook = Callable[[Chunk], Act]


@dataclass(slots=True, kw_only=True)
class PlannedFault:
    """A fault for some of the chunks of one direction."""

    act: Act
    to_server: bool
    when: Callable[[bytes], bool]
    skip: int
    """The number of matching chunks that pass first."""
    times: int | None
    """The number of matching chunks to which the fault then applies; None for all."""
    hits: int = 0
    """The number of chunks to which the fault has applied."""

    def takes(self, chunk: Chunk) -> bool:
        if chunk.to_server is not self.to_server or self.hits == self.times:
            return False
        if not self.when(chunk.data):
            return False
        if self.skip:
            self.skip -= 1
            return False
        self.hits += 1
        return True


class FaultProxy:
    """Listens on 127.0.0.1 at `port`, and passes all data on to `host`:`target_port` until it is set to do otherwise.

    Both may be changed; new connections then go to the new target. A connection that cannot reach its target is reset.
    """

    def __init__(self, host: str, target_port: int) -> None:
        self.host = host
        self.target_port = target_port
        self.port = 0
        """Set when the proxy opens, and kept from then on."""
        self.hook: Hook | None = None
        """Called for every chunk. If it returns FORWARD, the faults decide."""
        self.connections = 0
        """The number of connections accepted so far."""
        self.bytes_to_server = 0
        """The number of bytes passed on so far."""
        self.bytes_to_client = 0
        self._faults: list[PlannedFault] = []
        self._delays = {True: 0.0, False: 0.0}
        self._rate: float | None = None
        self._holding = False
        self._closed = False
        self._mistake: Exception | None = None
        self._links: set[_Link] = set()
        self._server: asyncio.Server | None = None
        self._reserved: socket.socket | None = None

    async def __aenter__(self) -> Self:
        await self.accept()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    @property
    def open_connections(self) -> int:
        return len(self._links)

    def fault(
        self,
        act: Act,
        *,
        when: Callable[[bytes], bool] = lambda data: True,
        to_server: bool = True,
        skip: int = 0,
        times: int | None = 1,
    ) -> PlannedFault:
        """From now on, apply `act` to chunks for which `when` is true: skip the first `skip`, then take `times`.

        If several faults match a chunk, the first applies. The fault's `hits` shows whether it has occurred.
        """
        fault = PlannedFault(act=act, to_server=to_server, when=when, skip=skip, times=times)
        self._faults.append(fault)
        return fault

    def cut_after_request(self, number: int = 1) -> PlannedFault:
        """Pass on the `number`th request from now, and lose its reply."""
        return self.fault(Act.LOSE_REPLY, skip=number - 1)

    def delay(self, seconds: float, *, to_server: bool = True, to_client: bool = True) -> None:
        """Delay all data read from now on, in one direction or both: this adds latency and does not lower the rate."""
        if to_server:
            self._delays[True] = seconds
        if to_client:
            self._delays[False] = seconds

    def slow(self, bytes_per_second: float | None) -> None:
        """Limit the rate of each direction of a connection; None for no limit."""
        self._rate = bytes_per_second

    def hold(self) -> None:
        """Keep every connection open, also new ones, and swallow all data. A held connection is never released."""
        self._holding = True
        for link in self._links:
            link.held = True

    def cut(self) -> None:
        """Reset both sides of every connection. New connections are accepted."""
        for link in self._links:
            link.cut()

    async def refuse(self) -> None:
        """Refuse new connections, as if no server listened. Open ones stay; for a dead server, `cut` them too."""
        if self._server is not None:
            self._server.close()
            self._server = None
            self._reserved = await _bound(self.port)  # so that no other program gets the port

    async def accept(self) -> None:
        """Accept new connections, at the same port as before."""
        self._closed = False
        if self._server is None:
            taken, self._reserved = self._reserved or await _bound(self.port), None
            self.port = taken.getsockname()[1]
            self._server = await asyncio.start_server(self._serve, sock=taken, limit=_CHUNK)

    async def heal(self) -> None:
        """Remove faults, hook, delays and rate limit, and accept again. Held connections stay held: they lost data."""
        self._faults.clear()
        self.hook = None
        self.delay(0)
        self.slow(None)
        self._holding = False
        await self.accept()

    async def close(self) -> None:
        """Stop listening and reset every connection. Raises the first error that the hook or a `when` has raised."""
        self._closed = True
        await self.refuse()
        if self._reserved is not None:
            self._reserved.close()
            self._reserved = None
        links = [link.task for link in self._links]
        self.cut()
        await asyncio.gather(*links, return_exceptions=True)
        if self._mistake is not None:
            raise self._mistake

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._closed:  # accepted just before
            _reset(writer)
            return
        task = asyncio.current_task()
        assert task is not None
        self.connections += 1
        link = _Link(self, self.connections, task, (reader, writer))
        link.held = self._holding
        self._links.add(link)
        try:
            # cut, or no target: this task serves only this connection, and callers only wait for its end
            with contextlib.suppress(asyncio.CancelledError, OSError):
                await link.run()
        finally:
            self._links.discard(link)

    def _judge(self, chunk: Chunk) -> Act:
        """Decide the fate of a chunk, which its connection then carries out."""
        try:
            if self.hook is not None and (act := self.hook(chunk)) is not Act.FORWARD:
                return act
            return next((fault.act for fault in self._faults if fault.takes(chunk)), Act.FORWARD)
        except Exception as error:  # noqa: BLE001 - a test's own mistake, which `close` raises
            self._mistake = self._mistake or error
            return Act.CUT


@dataclass(frozen=True, slots=True)
class _Parcel:
    """A chunk in transit."""

    due: float
    data: bytes
    """Empty for the end of the stream."""
    loses_reply: bool = False


class _Link:
    """One connection. In each direction, one task reads and judges chunks, and one passes them on when they are due."""

    def __init__(
        self, proxy: FaultProxy, number: int, task: asyncio.Task[Any],
        client: tuple[asyncio.StreamReader, asyncio.StreamWriter],
    ) -> None:  # fmt: skip
        self.task = task
        self.held = False
        self._proxy = proxy
        self._number = number
        self._client = client
        self._server: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self._loses_reply = False

    def cut(self) -> None:
        """Reset both sides."""
        self.task.cancel()

    async def run(self) -> None:
        """Serve the connection until both sides have ended or it is cut."""
        try:
            if self.held:  # the target never sees this connection
                await _swallow(self._client[0])
                await asyncio.Event().wait()
            self._server = await asyncio.open_connection(self._proxy.host, self._proxy.target_port, limit=_CHUNK)
            async with asyncio.TaskGroup() as pumps:
                for to_server, source, goal in (
                    (True, self._client, self._server),
                    (False, self._server, self._client),
                ):
                    under_way: asyncio.Queue[_Parcel] = asyncio.Queue(_AHEAD)
                    pumps.create_task(self._unless_reset(self._read(source[0], under_way, to_server)))
                    pumps.create_task(self._unless_reset(self._write(goal[1], under_way, to_server)))
        except BaseException:
            for side in (self._client, self._server):
                if side is not None:
                    _reset(side[1])
            raise
        self._client[1].close()
        self._server[1].close()

    async def _unless_reset(self, pump: Coroutine[None, None, None]) -> None:
        """If one side was reset, reset the other, unless the connection is held."""
        try:
            await pump
        except OSError:
            if not self.held:
                self.cut()

    async def _read(self, reader: asyncio.StreamReader, under_way: asyncio.Queue[_Parcel], to_server: bool) -> None:
        """Read and judge chunks, and queue those to pass on."""
        loop = asyncio.get_running_loop()
        while not self.held:
            data = await reader.read(_CHUNK)
            if self._loses_reply and not to_server:
                _reset(self._client[1])  # the server gets its end of stream after all earlier data
                await _swallow(reader)
                data = b""
            act = self._judge(data, to_server)
            if act is Act.CUT or (act is Act.LOSE_REPLY and not to_server):
                self.cut()
                return
            if act is Act.HOLD:
                self.held = True
            elif act is not Act.DROP:
                due = loop.time() + self._proxy._delays[to_server]
                await under_way.put(_Parcel(due, data, loses_reply=act is Act.LOSE_REPLY))
                if not data:
                    return
        await _swallow(reader)  # not even the end of the stream is passed on

    def _judge(self, data: bytes, to_server: bool) -> Act:
        if self.held:
            return Act.HOLD
        if not data:
            return Act.FORWARD
        return self._proxy._judge(Chunk(connection=self._number, to_server=to_server, data=data))

    async def _write(self, writer: asyncio.StreamWriter, under_way: asyncio.Queue[_Parcel], to_server: bool) -> None:
        """Pass on each queued parcel when it is due."""
        loop = asyncio.get_running_loop()
        while True:
            parcel = await under_way.get()
            await asyncio.sleep(parcel.due - loop.time())
            ahead = parcel.data
            while ahead and not self._is_over(writer):
                rate = self._proxy._rate
                size = len(ahead) if rate is None else max(1, int(rate / _PIECES))
                piece, ahead = ahead[:size], ahead[size:]
                if rate is not None:
                    await asyncio.sleep(len(piece) / rate)
                    if self._is_over(writer):
                        break
                if parcel.loses_reply and not ahead:
                    self._loses_reply = True
                writer.write(piece)
                if to_server:
                    self._proxy.bytes_to_server += len(piece)
                else:
                    self._proxy.bytes_to_client += len(piece)
                await writer.drain()
            if not parcel.data and not self.held:
                if not writer.is_closing():
                    writer.write_eof()
                return

    def _is_over(self, writer: asyncio.StreamWriter) -> bool:
        """True if nothing more may be written."""
        return self.held or writer.is_closing()


async def _swallow(reader: asyncio.StreamReader) -> None:
    while await reader.read(_CHUNK):
        pass


def _reset(writer: asyncio.StreamWriter) -> None:
    """Close the connection at once, with RST."""
    taken: socket.socket | None = writer.get_extra_info("socket")
    if taken is not None and not writer.is_closing():
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
    writer.transport.abort()


async def _bound(port: int) -> socket.socket:
    """A socket that is bound to the port (0: any) and does not listen, so that connections to it are refused."""
    for _ in range(_TRIES):
        taken = socket.socket()
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            taken.bind(("127.0.0.1", port))
        except OSError:  # uvloop closes the listening socket a moment later
            taken.close()
            await asyncio.sleep(0.001)
        else:
            return taken
    raise OSError(f"another program has port {port}")
