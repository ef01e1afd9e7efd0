"""A TCP proxy that fails on purpose: late, slow, silent, cut before a request arrives or before its reply comes back.

    async with FaultProxy("127.0.0.1", 6379) as proxy:
        lost = proxy.fault(Act.LOSE_REPLY, when=lambda data: b"EVALSHA" in data)
        ...                                  # the client, connected to proxy.port
        assert lost.hits == 1                # the server has done it, and nobody was told

It knows no protocol. What it judges is a *chunk*: what one read gave, of at most 64 KiB. The request of a client that
waits for each reply is one chunk if it is smaller than that, and so is a batch that is sent in one piece.
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
"""Chunks that may be under way in one direction; then the sender has to wait, as on a wire."""
_RESET = struct.pack("ii", 1, 0)
"""SO_LINGER for no seconds: closing sends RST, and what was not sent is gone."""
_TRIES = 1_000
"""Milliseconds that a port which was just let go may take to be free."""
_PIECES = 20
"""In how many pieces per second a slow direction passes on."""


class Act(enum.Enum):
    """The fate of a chunk, and of its connection."""

    FORWARD = "forward"
    """Passed on."""
    DROP = "drop"
    """Swallowed; the connection goes on."""
    CUT = "cut"
    """Swallowed, and both sides are reset: a request never arrives, a reply is lost."""
    LOSE_REPLY = "lose_reply"
    """Passed on; when the server says the next thing, that is swallowed and the client reset. So the server has done
    what was asked, or begun to; its own side is closed in order, and all that it was sent is read. Of a chunk that goes
    to the client it is the same as CUT."""
    HOLD = "hold"
    """Swallowed, with all that follows in both directions, and nobody is told: a half-open connection."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """The bytes of one read."""

    connection: int
    """1 for the first that the proxy took."""
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
    """Matching chunks that are let through first."""
    times: int | None
    """Matching chunks that it then happens to; None for all."""
    hits: int = 0
    """Chunks that it has happened to."""

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
    """Listens on 127.0.0.1 at `port`, and passes everything on to `host`:`target_port` until it is told otherwise.

    Both may be changed, which concerns connections from then on. One that cannot reach its target is reset.
    """

    def __init__(self, host: str, target_port: int) -> None:
        self.host = host
        self.target_port = target_port
        self.port = 0
        """Known once it is open, and kept."""
        self.hook: Hook | None = None
        """Asked about every chunk; the faults are, where it says FORWARD."""
        self.connections = 0
        """Taken so far."""
        self.bytes_to_server = 0
        """Passed on so far."""
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

    def _count(self, to_server: bool, size: int) -> None:
        """That so many bytes were passed on."""
        if to_server:
            self.bytes_to_server += size
        else:
            self.bytes_to_client += size

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
        """From now on `act` happens to `times` chunks, after the first `skip`, of those for which `when` is true.

        Of several faults the first that takes a chunk has it. It says by its `hits` whether it has come about.
        """
        fault = PlannedFault(act=act, to_server=to_server, when=when, skip=skip, times=times)
        self._faults.append(fault)
        return fault

    def cut_after_request(self, number: int = 1) -> PlannedFault:
        """The `number`th request from now is passed on, and its reply is lost."""
        return self.fault(Act.LOSE_REPLY, skip=number - 1)

    def delay(self, seconds: float, *, to_server: bool = True, to_client: bool = True) -> None:
        """Delay all that is read from now on, in one direction or in both: a latency, and no lower rate."""
        if to_server:
            self._delays[True] = seconds
        if to_client:
            self._delays[False] = seconds

    def slow(self, bytes_per_second: float | None) -> None:
        """No direction of a connection passes on more; None for as fast as it goes."""
        self._rate = bytes_per_second

    def hold(self) -> None:
        """Every connection, also those to come, stays open and swallows all. Those that were held are not released."""
        self._holding = True
        for link in self._links:
            link.held = True

    def cut(self) -> None:
        """Every connection is reset, on both sides. New ones are taken."""
        for link in self._links:
            link.cut()

    async def refuse(self) -> None:
        """New connections are refused, as if nobody listened. Those there are stay; `cut` them for a dead server."""
        if self._server is not None:
            self._server.close()
            self._server = None
            self._reserved = await _bound(
                self.port
            )  # nobody else gets the port, and since it does not listen it refuses

    async def accept(self) -> None:
        """New connections are taken, at the same port as ever."""
        self._closed = False
        if self._server is None:
            taken, self._reserved = self._reserved or await _bound(self.port), None
            self.port = taken.getsockname()[1]
            self._server = await asyncio.start_server(self._serve, sock=taken, limit=_CHUNK)

    async def heal(self) -> None:
        """No faults, no hook, no delay, accepting again. A connection that is held stays so: it has lost bytes."""
        self._faults.clear()
        self.hook = None
        self.delay(0)
        self.slow(None)
        self._holding = False
        await self.accept()

    async def close(self) -> None:
        """Nothing listens, and every connection is reset. Raises what the hook, or a `when`, has raised."""
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
        if self._closed:  # taken just before
            _reset(writer)
            return
        task = asyncio.current_task()
        assert task is not None
        self.connections += 1
        link = _Link(self, self.connections, task, (reader, writer))
        link.held = self._holding
        self._links.add(link)
        try:
            # cut, or no target: this task is the connection's alone, and nobody waits for more than its end
            with contextlib.suppress(asyncio.CancelledError, OSError):
                await link.run()
        finally:
            self._links.discard(link)

    def _judge(self, chunk: Chunk) -> Act:
        """The fate of a chunk, for its connection to carry out."""
        try:
            if self.hook is not None and (act := self.hook(chunk)) is not Act.FORWARD:
                return act
            return next((fault.act for fault in self._faults if fault.takes(chunk)), Act.FORWARD)
        except Exception as error:  # noqa: BLE001 - a test's own mistake, which `close` tells
            self._mistake = self._mistake or error
            return Act.CUT


@dataclass(frozen=True, slots=True)
class _Parcel:
    """A chunk under way."""

    due: float
    data: bytes
    """Empty for the end of the stream."""
    loses_reply: bool = False


class _Link:
    """One connection: in each direction a task that reads and judges, and one that passes on when it is due."""

    def __init__(
        self,
        proxy: FaultProxy,
        number: int,
        task: asyncio.Task[Any],
        client: tuple[asyncio.StreamReader, asyncio.StreamWriter],
    ) -> None:
        self.task = task
        self.held = False
        self._proxy = proxy
        self._number = number
        self._client = client
        self._server: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self._loses_reply = False

    def cut(self) -> None:
        """Reset, both sides."""
        self.task.cancel()

    async def run(self) -> None:
        """Until both sides have ended, or it is cut."""
        try:
            if self.held:  # the target never hears of it
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
        """Where one side was reset, the other is too, unless nobody is to be told."""
        try:
            await pump
        except OSError:
            if not self.held:
                self.cut()

    async def _read(self, reader: asyncio.StreamReader, under_way: asyncio.Queue[_Parcel], to_server: bool) -> None:
        """Judges what comes, and puts under way what is to go on."""
        loop = asyncio.get_running_loop()
        while not self.held:
            data = await reader.read(_CHUNK)
            if self._loses_reply and not to_server:
                _reset(self._client[1])  # which is the end of what the server hears, once it was sent all before
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
        await _swallow(reader)  # and not even the end of it is told

    def _judge(self, data: bytes, to_server: bool) -> Act:
        if self.held:
            return Act.HOLD
        if not data:
            return Act.FORWARD
        return self._proxy._judge(Chunk(connection=self._number, to_server=to_server, data=data))

    async def _write(self, writer: asyncio.StreamWriter, under_way: asyncio.Queue[_Parcel], to_server: bool) -> None:
        """Passes on what is under way, each parcel when it is due."""
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
                self._proxy._count(to_server, len(piece))
                await writer.drain()
            if not parcel.data and not self.held:
                if not writer.is_closing():
                    writer.write_eof()
                return

    def _is_over(self, writer: asyncio.StreamWriter) -> bool:
        """True if nothing more is to be written."""
        return self.held or writer.is_closing()


async def _swallow(reader: asyncio.StreamReader) -> None:
    while await reader.read(_CHUNK):
        pass


def _reset(writer: asyncio.StreamWriter) -> None:
    """Closed at once, by RST."""
    taken: socket.socket | None = writer.get_extra_info("socket")
    if taken is not None and not writer.is_closing():
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
    writer.transport.abort()


async def _bound(port: int) -> socket.socket:
    """A socket that has the port (any, for 0) and does not listen, so that connections to it are refused."""
    for _ in range(_TRIES):
        taken = socket.socket()
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            taken.bind(("127.0.0.1", port))
        except OSError:  # uvloop closes the one that listened a moment later
            taken.close()
            await asyncio.sleep(0.001)
        else:
            return taken
    raise OSError(f"another program has port {port}")
