"""A receiver of webhooks on 127.0.0.1 that does what a test says, down to the byte: well, badly, or not at all."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import NamedTuple

from tests.waiting import forever


class Received(NamedTuple):
    """One request, as it came."""

    method: str
    path: str
    headers: dict[str, str]
    """By name in lower case; a repeated one would be joined by a bar, which no header of ours has."""
    body: bytes


Answer = Callable[[Received, asyncio.StreamWriter], Awaitable[None]]


def says(status: int, body: bytes = b"", *headers: str) -> Answer:
    """The plain answer, with its length."""
    lines = [f"HTTP/1.1 {status} Some Phrase", f"Content-Length: {len(body)}", *headers]
    return says_bytes("\r\n".join(lines).encode() + b"\r\n\r\n" + body)


def says_bytes(answer: bytes) -> Answer:
    async def answering(request: Received, writer: asyncio.StreamWriter) -> None:
        writer.write(answer)
        await writer.drain()

    return answering


async def hangs(request: Received, writer: asyncio.StreamWriter) -> None:
    """Never answers."""
    await forever()


async def closes(request: Received, writer: asyncio.StreamWriter) -> None:
    """Hangs up instead of answering."""
    writer.close()


class Receiver:
    """What came, and what is answered: `answer` may be changed at any time."""

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.received: list[Received] = []
        self.connections = 0
        self.came = asyncio.Event()
        """A request is here."""
        self.gone = asyncio.Event()
        """A connection has ended, by whomever."""
        self.port = 0
        self.host = "127.0.0.1"
        self._running: set[asyncio.Task[None]] = set()

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}/hook"

    @property
    def place(self) -> str:
        """As an entry of an allow-list."""
        return f"{self.host}:{self.port}"

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        me = asyncio.current_task()
        assert me is not None
        self._running.add(me)
        self.connections += 1
        try:
            while (request := await _read(reader)) is not None and not writer.is_closing():
                self.received.append(request)
                self.came.set()
                answering = asyncio.ensure_future(self.answer(request, writer))
                gone = asyncio.ensure_future(reader.read(1))  # a client sends nothing before it has its answer
                await asyncio.wait([answering, gone], return_when=asyncio.FIRST_COMPLETED)
                over = gone.done()
                for task in (answering, gone):
                    task.cancel()
                await asyncio.gather(answering, gone, return_exceptions=True)
                if over:
                    break
        except (OSError, asyncio.CancelledError):
            return  # the other side went away, or the test is over
        finally:
            self.gone.set()
            self._running.discard(me)
            writer.close()

    async def end(self) -> None:
        for task in list(self._running):
            task.cancel()
        if self._running:
            await asyncio.wait(list(self._running))


async def _read(reader: asyncio.StreamReader) -> Received | None:
    try:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    except (asyncio.IncompleteReadError, OSError):
        return None
    first, *lines = head.split("\r\n")[:-2]
    method, path, _ = first.split(" ")
    headers: dict[str, str] = {}
    for line in lines:
        name, _, value = line.partition(":")
        name = name.lower()
        headers[name] = f"{headers[name]}|{value.strip()}" if name in headers else value.strip()
    return Received(method, path, headers, await reader.readexactly(int(headers.get("content-length", 0))))


@asynccontextmanager
async def receiving(
    answer: Answer | None = None, *, host: str = "127.0.0.1", port: int = 0, tls: ssl.SSLContext | None = None
) -> AsyncIterator[Receiver]:
    """A receiver that answers 200, or as told."""
    receiver = Receiver(answer or says(200, b"thanks"))
    server = await asyncio.start_server(receiver._serve, host, port, ssl=tls)
    receiver.host, receiver.port = server.sockets[0].getsockname()[:2]
    try:
        yield receiver
    finally:
        server.close()
        await receiver.end()
        await server.wait_closed()
