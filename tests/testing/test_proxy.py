"""The proxy that fails on purpose: each fault where it is told to, and nothing else; against a server that echoes."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import time
from collections.abc import AsyncIterator
from typing import Self

import pytest
import uvloop
from tests.waiting import not_before, pause

from bide.testing import Act, Chunk, FaultProxy

SILENCE = 0.05
"""Seconds without a word that count as silence."""


class Echo:
    """Says everything back, and remembers what it heard and how connections ended."""

    def __init__(self) -> None:
        self.heard: list[bytes] = []
        self.ends: asyncio.Queue[str] = asyncio.Queue()
        self.port = 0

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *error: object) -> None:
        self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(65_536):
                self.heard.append(data)
                writer.write(data)
                await writer.drain()
            self.ends.put_nowait("closed")
        except OSError:
            self.ends.put_nowait("reset")
        finally:
            writer.close()


class Caller:
    """A client of the proxy."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def ask(self, data: bytes) -> bytes:
        self.writer.write(data)
        return await self.reader.readexactly(len(data))

    async def hears_nothing(self) -> bool:
        try:
            await asyncio.wait_for(self.reader.read(1), SILENCE)
        except TimeoutError:
            return True
        return False


@contextlib.asynccontextmanager
async def connected(proxy: FaultProxy) -> AsyncIterator[Caller]:
    reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
    try:
        yield Caller(reader, writer)
    finally:
        writer.close()


@pytest.fixture
async def echo() -> AsyncIterator[Echo]:
    async with Echo() as server:
        yield server


@pytest.fixture
async def proxy(echo: Echo) -> AsyncIterator[FaultProxy]:
    async with FaultProxy("127.0.0.1", echo.port) as between:
        yield between
        assert between.port


async def test_it_passes_everything_on_and_counts(echo: Echo, proxy: FaultProxy) -> None:
    async with connected(proxy) as caller, connected(proxy) as other:
        assert await caller.ask(b"one") == b"one"
        assert await other.ask(b"other") == b"other"
        assert await caller.ask(b"two") == b"two"
        assert proxy.open_connections == 2
    assert await echo.ends.get() == await echo.ends.get() == "closed"
    assert echo.heard == [b"one", b"other", b"two"]
    assert (proxy.connections, proxy.bytes_to_server, proxy.bytes_to_client) == (2, 11, 11)


async def test_a_large_stream_arrives_whole_and_its_end_is_told(proxy: FaultProxy) -> None:
    sent = bytes(range(256)) * 20_000
    async with connected(proxy) as caller:

        async def send() -> None:
            caller.writer.write(sent)
            await caller.writer.drain()
            caller.writer.write_eof()

        _, received = await asyncio.gather(send(), caller.reader.read(-1))
    assert received == sent, "one side may end while the other goes on"


async def test_a_request_that_never_arrives(echo: Echo, proxy: FaultProxy) -> None:
    lost = proxy.fault(Act.CUT, when=lambda data: b"write" in data)
    async with connected(proxy) as caller:
        assert await caller.ask(b"read") == b"read"
        assert lost.hits == 0
        with pytest.raises(ConnectionResetError):
            await caller.ask(b"write")
    assert await echo.ends.get() == "reset"
    assert (echo.heard, lost.hits) == ([b"read"], 1)
    async with connected(proxy) as caller:
        assert await caller.ask(b"write") == b"write", "once"


async def test_a_reply_that_is_lost(echo: Echo, proxy: FaultProxy) -> None:
    lost = proxy.fault(Act.LOSE_REPLY, when=lambda data: b"write" in data)
    async with connected(proxy) as caller:
        assert await caller.ask(b"read") == b"read"
        with pytest.raises(ConnectionResetError):
            await caller.ask(b"write")
    assert await echo.ends.get() == "closed", "the server has time to read all that it was sent"
    assert (echo.heard, lost.hits) == ([b"read", b"write"], 1)
    assert proxy.bytes_to_client == len(b"read")


async def test_the_third_request_and_no_other(echo: Echo, proxy: FaultProxy) -> None:
    lost = proxy.cut_after_request(3)
    async with connected(proxy) as caller:
        assert await caller.ask(b"1") == b"1"
        assert await caller.ask(b"2") == b"2"
        with pytest.raises(ConnectionResetError):
            await caller.ask(b"3")
    async with connected(proxy) as caller:
        assert await caller.ask(b"4") == b"4"
    assert (echo.heard, lost.hits) == ([b"1", b"2", b"3", b"4"], 1)


@pytest.mark.parametrize("act", [Act.CUT, Act.LOSE_REPLY])
async def test_a_fault_of_what_comes_back(echo: Echo, proxy: FaultProxy, act: Act) -> None:
    proxy.fault(act, to_server=False, times=None)
    for _ in range(2):
        async with connected(proxy) as caller:
            with pytest.raises(ConnectionResetError):
                await caller.ask(b"done")
    assert echo.heard == [b"done", b"done"]
    assert proxy.bytes_to_client == 0


async def test_one_that_is_dropped_is_missing(echo: Echo, proxy: FaultProxy) -> None:
    proxy.fault(Act.DROP)
    async with connected(proxy) as caller:
        caller.writer.write(b"gone")
        assert await caller.hears_nothing()
        assert await caller.ask(b"there") == b"there"
    assert echo.heard == [b"there"]


@pytest.mark.parametrize("leaves", ["in order", "by a reset"])
async def test_half_open_by_a_fault_nobody_is_told(echo: Echo, proxy: FaultProxy, leaves: str) -> None:
    proxy.fault(Act.HOLD)
    async with connected(proxy) as held, connected(proxy) as other:
        held.writer.write(b"swallowed")
        assert await held.hears_nothing()
        held.writer.write(b"and this")
        assert await held.hears_nothing()
        assert await other.ask(b"another") == b"another"
        if leaves == "by a reset":
            held.writer.get_extra_info("socket").setsockopt(
                socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)
            )
    assert await echo.ends.get() == "closed"
    assert echo.heard == [b"another"]
    with pytest.raises(TimeoutError):  # the server does not hear that the held client has left
        await asyncio.wait_for(echo.ends.get(), SILENCE)


async def test_all_are_held_and_those_to_come(echo: Echo, proxy: FaultProxy) -> None:
    async with connected(proxy) as before:
        await before.ask(b"before")
        proxy.hold()
        async with connected(proxy) as later:
            for caller in (before, later):
                caller.writer.write(b"x" * 1_000_000)
                await caller.writer.drain()
                assert await caller.hears_nothing()
            await proxy.heal()
            assert await before.hears_nothing(), "it has lost bytes, so it cannot go on"
        async with connected(proxy) as after:
            assert await after.ask(b"after") == b"after"
    assert echo.heard == [b"before", b"after"]


async def test_all_are_cut_at_once(echo: Echo, proxy: FaultProxy) -> None:
    async with connected(proxy) as one, connected(proxy) as two:
        await one.ask(b"1")
        await two.ask(b"2")
        proxy.cut()
        for caller in (one, two):
            with pytest.raises(ConnectionResetError):
                await caller.reader.read(1)
        assert await echo.ends.get() == await echo.ends.get() == "reset"
        assert proxy.open_connections == 0
    async with connected(proxy) as three:
        assert await three.ask(b"3") == b"3"


async def test_refused_and_taken_again_at_the_same_port(proxy: FaultProxy) -> None:
    port = proxy.port
    async with connected(proxy) as before:
        await before.ask(b"1")
        for _ in range(3):
            await proxy.refuse()
            with pytest.raises(ConnectionRefusedError):
                await asyncio.open_connection("127.0.0.1", port)
            assert await before.ask(b"still there") == b"still there"
            await proxy.accept()
            async with connected(proxy) as after:
                assert await after.ask(b"2") == b"2"
    assert proxy.port == port


async def test_without_its_target_it_resets(echo: Echo, proxy: FaultProxy) -> None:
    there = proxy.target_port
    async with FaultProxy("127.0.0.1", 0) as free:
        await free.refuse()
        proxy.target_port = free.port
        async with connected(proxy) as caller:
            with pytest.raises(ConnectionResetError):
                await caller.reader.read(1)
    proxy.target_port = there
    async with connected(proxy) as caller:
        assert await caller.ask(b"back") == b"back"


async def test_the_hook_sees_all_and_decides_first(echo: Echo, proxy: FaultProxy) -> None:
    seen: list[Chunk] = []

    def hook(chunk: Chunk) -> Act:
        seen.append(chunk)
        return Act.LOSE_REPLY if chunk.data == b"2" else Act.FORWARD

    proxy.hook = hook
    async with connected(proxy) as caller:
        await caller.ask(b"1")
        with pytest.raises(ConnectionResetError):
            await caller.ask(b"2")
    assert seen == [
        Chunk(connection=1, to_server=True, data=b"1"),
        Chunk(connection=1, to_server=False, data=b"1"),
        Chunk(connection=1, to_server=True, data=b"2"),
    ]
    assert echo.heard == [b"1", b"2"]
    proxy.fault(Act.CUT, times=None)
    await proxy.heal()
    async with connected(proxy) as caller:
        assert await caller.ask(b"2") == b"2", "healed, it has neither hook nor faults"


async def test_a_mistake_in_a_hook_is_told(echo: Echo) -> None:
    def mistaken(chunk: Chunk) -> Act:
        raise ZeroDivisionError

    proxy = FaultProxy("127.0.0.1", echo.port)
    await proxy.accept()
    proxy.hook = mistaken
    async with connected(proxy) as caller:
        with pytest.raises(ConnectionResetError):
            await caller.ask(b"1")
    with pytest.raises(ZeroDivisionError):
        await proxy.close()


async def test_closed_it_has_nothing_open(echo: Echo) -> None:
    async with FaultProxy("127.0.0.1", echo.port) as proxy, connected(proxy) as caller:
        await caller.ask(b"1")
        proxy.hold()
        async with connected(proxy) as held:
            await proxy.close()
            for one in (caller, held):
                with pytest.raises(ConnectionResetError):
                    await one.reader.read(1)
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection("127.0.0.1", proxy.port)
        assert proxy.open_connections == 0


async def test_a_delay_is_latency_and_keeps_the_order(proxy: FaultProxy) -> None:
    async with connected(proxy) as caller:
        await caller.ask(b"connected")
        proxy.delay(0.2, to_client=False)
        proxy.delay(0.1, to_server=False)
        started = time.monotonic()
        for number in range(10):
            caller.writer.write(b"%d" % number)
            await pause(0.005, why="each is to be a chunk of its own")
        assert await caller.reader.readexactly(10) == b"0123456789"
        not_before(time.monotonic(), started + 0.3, "what is held up for 0.2 s there and 0.1 s back")


async def test_slow_is_bytes_per_second(proxy: FaultProxy) -> None:
    proxy.slow(50_000)
    async with connected(proxy) as caller:
        started = time.monotonic()
        assert await caller.ask(b"x" * 10_000) == b"x" * 10_000
        not_before(time.monotonic(), started + 0.2, "what is passed on slowly")
        proxy.slow(None)
        assert await caller.ask(b"x" * 1_000_000) == b"x" * 1_000_000
    proxy.slow(20)
    async with connected(proxy) as caller:
        caller.writer.write(b"ab")
        assert await caller.reader.read(2) == b"a"


def test_it_runs_on_uvloop() -> None:
    async def story() -> None:
        async with Echo() as echo, FaultProxy("127.0.0.1", echo.port) as proxy:
            async with connected(proxy) as caller:
                await caller.ask(b"1")
                for _ in range(3):
                    await proxy.refuse()
                    with pytest.raises(ConnectionRefusedError):
                        await asyncio.open_connection("127.0.0.1", proxy.port)
                    await proxy.accept()
                proxy.cut_after_request()
                with pytest.raises(ConnectionResetError):
                    await caller.ask(b"2")
            assert await echo.ends.get() == "closed"
            async with connected(proxy) as caller:
                await caller.ask(b"3")
                proxy.fault(Act.CUT)
                with pytest.raises(ConnectionResetError):
                    await caller.ask(b"4")
            assert await echo.ends.get() == "reset"
            assert echo.heard == [b"1", b"2", b"3"]

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(story())
