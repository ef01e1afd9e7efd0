"""Faults: of stores, and on the way to a server."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any, Self

import msgspec
import pytest
import uvloop
from tests.waiting import in_virtual_time, not_before, pause

from bide import BadInput, Bide, StoreUnavailable, Task
from bide.core.instants import In
from bide.core.names import new_id
from bide.core.records import NewTask, Ref
from bide.ports import Features, Store, all_answers
from bide.stores.memory import MemoryStore
from bide.testing import Act, Chunk, FaultProxy, FaultyStore, VirtualClock, VirtualLoop
from bide_proofs.reliability import Results

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


NOW = 1_000_000


def once(point: str) -> Callable[[str], BaseException | None]:
    """Fails at `point` the first time."""
    faults: Iterator[BaseException] = iter([StoreUnavailable("cable cut")])
    return lambda here: next(faults, None) if here == point else None


def task(key: str) -> NewTask:
    return NewTask("greet", key, new_id(), In(0))


def test_it_is_all_that_the_store_in_memory_is() -> None:
    store = FaultyStore(MemoryStore())
    assert isinstance(store, Store)
    assert store.features == Features(wakes=store, workers=store, events=store)


@pytest.mark.parametrize(("point", "there"), [("add:before", False), ("add:after", True)])
async def test_a_fault_comes_before_the_call_or_after_it(point: str, there: bool) -> None:
    store = FaultyStore(MemoryStore(), fault=once(point))
    await store.open()
    with pytest.raises(StoreUnavailable, match="cable cut"):
        await store.add([task("ann")], now=NOW)
    (record,) = await store.get([Ref("greet", "ann")])
    assert (record is not None) is there, "nothing was done, or it was done and the answer lost"
    assert [answer.ok for answer in await all_answers(await store.add([task("bob")], now=NOW))] == [True]
    await store.close()


async def test_every_operation_passes_its_points_and_is_counted() -> None:
    points: list[str] = []

    def watch(point: str) -> None:
        points.append(point)

    store = FaultyStore(MemoryStore(), fault=watch)
    app = Bide(store, history="off", keep_done="0s")  # the history is written by calls of its own

    @app.handler("greet")
    async def greet(task: Task[str]) -> None: ...

    async with app:
        settled = asyncio.Event()
        async with app.worker(observe=lambda record, outcome: settled.set()):
            await greet.schedule("ann", key="ann", delay="0s")
            await greet.schedule("bob", key="bob", delay="1h")
            await greet.reschedule("bob", delay="2h")
            await settled.wait()
        await greet.get("bob")
        await app.tally()
        assert [one.key async for one in app.find(topic="greet")] == ["bob"]
        await app.events()
    assert {"open", "add", "change", "lease", "settle", "get", "tally", "find", "events", "announce"} <= set(
        store.calls
    )
    assert store.calls["add"] == 2
    assert points.count("add:before") == points.count("add:after") == 2


def test_what_the_inner_store_cannot_do_it_cannot_either() -> None:
    plain: Any = Plain()
    store = FaultyStore(plain)
    assert store.features == Features()


async def test_deaf_it_takes_subscriptions_and_never_serves_them() -> None:
    for deaf in (False, True):
        heard: list[str] = []
        store = FaultyStore(MemoryStore(), deaf=deaf)
        await store.open()
        listening = await store.listen(["greet"], lambda topic, wake, heard=heard: heard.append(topic))  # type: ignore[misc]
        await store.add([task("ann")], now=NOW)
        await asyncio.sleep(0)
        await listening.close()
        assert heard == ([] if deaf else ["greet"])
        await store.close()


@in_virtual_time
async def test_latency_is_virtual_time_where_time_is(loop: VirtualLoop) -> None:
    store = FaultyStore(MemoryStore(), latency=lambda name: 30.0 if name == "add" else 0.0)
    async with Bide(store, clock=VirtualClock(loop)) as app:
        await app.schedule("greet", key="ann", delay="0s")
    assert loop.time() == 30


class Plain:
    """A store that can do no more than it must: nothing but the nine operations of the one it wraps."""

    features = Features()

    def __init__(self) -> None:
        self._inner = MemoryStore()

    def __getattr__(self, name: str) -> object:
        if name in {"announce", "record", "events", "listen"}:
            raise AttributeError(name)
        return getattr(self._inner, name)


TORTURED: dict[str, Any] = {
    "store": "redis", "about": {"version": "7.0.15"}, "seconds": 600, "processes": {"clients": 2, "workers": 3},
    "load": {
        "scheduled": 120_000, "verbs": {"cancel": {"cancelled": 900, "finished": 100}}, "deliveries": 118_000,
        "settled": {"done": 115_000},
    },
    "faults": {"kill": 40, "reset": 12}, "wrong": {"P1": 0, "P2": 0, "P3": 2, "P4": 0}, "delivered_again": 31,
    "lateness_ms": {"p50": 1.2, "p99": 80, "most": 3210.4}, "recovery_seconds": {"kill": {"p50": 0.0125, "most": 3.05}},
    "cannot": {"disk full": "no file system of its own"},
}  # fmt: skip
SLOPE = {
    "mean": 52_428_800.0, "first": 52_428_800.0, "last": 52_428_800.0, "per_minute": -2048.0, "low": -4096.0,
    "high": 1024.0, "percent_per_hour": -0.234, "allowed": 1_048_576.0, "verdict": "flat",
}  # fmt: skip
SOAKED: dict[str, Any] = {
    "store": "postgres", "seconds": 900, "maximum_per_s": 4000, "rate": 2000, "deliveries": 1_700_000, "lost": 0,
    "duplicated": 0, "early": 0, "load": {"schedule": {"created": 1_800_000}}, "wrong": {"left": 0}, "judged": True,
    "lateness_ms": {"p50": 2.5, "p99": 20, "most": 300}, "slopes": {"worker-1_resident": SLOPE},
}  # fmt: skip


def results(folder: Path, **lines: list[dict[str, Any]]) -> Results:
    for name, some in lines.items():
        (folder / f"{name}.jsonl").write_bytes(b"".join(msgspec.json.encode(one) + b"\n" for one in some))
    return Results(folder)


def row(text: str, *begins: str) -> list[str]:
    """The cells of the line that begins with these."""
    start = f"| **{begins[0]}** |" + "".join(f" {one} |" for one in begins[1:])
    [found] = [line for line in text.splitlines() if line.startswith(start)]
    return [cell.strip() for cell in found.strip("|").split("|")]


def test_a_run_under_faults(tmp_path: Path) -> None:
    text = results(tmp_path, torture=[TORTURED]).torture()
    assert row(text, "Redis", "7.0.15")[2:] == [
        "10", "2 clients, 3 workers", "120,000 scheduled, 1,000 verbs, 115,000 settled", "118,000", "0", "31", "0", "0",
        "2", "2", "3,210",
    ]  # fmt: skip
    assert row(text, "Redis", "kill")[2:] == ["40", "12.5", "3,050"]
    assert row(text, "Redis", "reset")[2:] == ["12", "", ""]
    assert row(text, "SQLite")[1] == "not run yet"


def test_the_newest_line_counts_and_one_cut_off_does_not(tmp_path: Path) -> None:
    newer = {**TORTURED, "wrong": {"lost": 5, "P4": 1}, "lateness_ms": {}}
    results(tmp_path, torture=[TORTURED, newer, {**TORTURED, "store": "redis+cluster"}])
    with (tmp_path / "torture.jsonl").open("ab") as file:
        file.write(b'{"store": "redis", "lost": 9')
    text = Results(tmp_path).torture()
    assert row(text, "Redis", "7.0.15")[6:] == ["5", "31", "0", "1", "0", "6", ""]
    assert row(text, "redis+cluster", "7.0.15")[2] == "10"


def test_a_soak_and_its_slopes(tmp_path: Path) -> None:
    text = results(tmp_path, soak=[SOAKED]).soak()
    assert row(text, "PostgreSQL")[1:] == [
        "15", "4,000", "2,000", "1,800,000", "1,700,000", "0", "0", "0", "0", "2.5", "20", "300",
    ]  # fmt: skip
    assert "### PostgreSQL\n\nNothing grows.\n" in text
    assert row(text, "worker 1: resident memory")[1:] == [
        "50 MiB", "-2 KiB", "-4 KiB to 1 KiB", "-0.234", "1 MiB", "flat",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"judged": False}, "too short"),
        ({"slopes": {"late_p99_ms": {**SLOPE, "verdict": "grows"}}}, "Growing: lateness p99."),
    ],
)
def test_what_the_slopes_come_to(tmp_path: Path, changed: dict[str, Any], said: str) -> None:
    assert said in results(tmp_path, soak=[{**SOAKED, **changed}]).soak()


def test_a_line_that_is_no_run_is_named(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"soak.jsonl, line 2"):
        results(tmp_path, soak=[SOAKED, {"store": "redis"}])
