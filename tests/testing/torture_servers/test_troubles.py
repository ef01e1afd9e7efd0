"""Every private server starts, can have each of its troubles, works again after it, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from tests.servers.fixtures import not_installed
from tests.testing.torture_servers.watching import Brief, Load, descendants, left_of

from bide.core.errors import BadInput, StoreFull
from bide.testing.torture.plain import SqliteFile
from bide.testing.torture.server import Server
from bide.testing.torture.servers import NAMES, ServerMissing, server_of, suffering
from bide.testing.torture.servers.private import PrivateServer
from bide.testing.torture.servers.redis import RedisServer
from bide.testing.torture.servers.redis_node import Asking

pytestmark = [
    pytest.mark.faults,
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="/proc tells the processes of a server"),
]
in_full = pytest.mark.skipif(not os.environ.get("TORTURE"), reason="takes minutes: set TORTURE=1 in the environment")


@asynccontextmanager
async def started(name: str, folder: Path) -> AsyncIterator[Server]:
    """The server; when it is stopped nothing is left of it."""
    server = server_of(name, folder)
    began, before, temporary = time.time(), descendants(), set(Path("/tmp").glob("bide-server-*"))  # noqa: ASYNC240
    try:
        await server.start()
    except ServerMissing as error:
        not_installed(error)  # type: ignore[arg-type]
    ours = descendants() - before
    homes = set(Path("/tmp").glob("bide-server-*")) - temporary  # noqa: ASYNC240
    try:
        yield server
    finally:
        ours |= descendants() - before
        await server.stop()
    assert left_of(ours, folder, *homes, since=began) == []


def told(*words: object) -> None:
    """Shown with -s, and where the test fails."""
    sys.stderr.write(" ".join(map(str, words)) + "\n")


@in_full
@pytest.mark.parametrize("name", NAMES)
async def test_each_trouble_is_survived(name: str, tmp_path: Path) -> None:
    began = time.monotonic()
    async with started(name, tmp_path / name) as server, Load(server) as load:
        assert server.about()["version"]
        assert not set(server.cannot) & set(server.troubles())
        await load.works()
        if isinstance(server, PrivateServer) and server.farthest:
            for ahead in (server.farthest, -server.farthest, 0.0):
                server.ahead = ahead
                assert abs(await server.clock() - (time.time() + ahead) * 1000) < 500
        told(f"{name}: started after {time.monotonic() - began:.1f} s; cannot {dict(server.cannot)}")
        for kind, trouble in server.troubles().items():
            acknowledged, failed, at = len(load.acknowledged), len(load.errors), time.monotonic()
            said = await trouble(Brief(kind))
            lasted = time.monotonic() - at
            again = await load.works()
            taken = len(load.acknowledged) - acknowledged
            refused = len(load.errors) - failed
            told(f"{name}: {kind}: {said} ({lasted:.1f} s; {taken} taken, {refused} refused, +{again:.1f} s)")
            assert len(said) > len("killed it")
        await load.drained()
        assert server.ahead == 0 or isinstance(server, SqliteFile)
    told(f"{name}: {time.monotonic() - began:.1f} s in all")


@in_full
@pytest.mark.parametrize("name", ["redis-sentinel", "redis-cluster", "postgres", "mariadb"])
async def test_a_failover_loses_nothing_that_was_answered(name: str, tmp_path: Path) -> None:
    async with started(name, tmp_path / name) as server, Load(server) as load:
        for seed in range(5):
            told(await server.troubles()[suffering.FAILOVER](Brief(seed)), f"+{await load.works():.1f} s")
        await load.drained()
        assert len(load.acknowledged) > 50


@in_full
@pytest.mark.parametrize("name", NAMES)
async def test_a_trouble_that_is_cut_short_is_mended(name: str, tmp_path: Path) -> None:
    async with started(name, tmp_path / name) as server, Load(server) as load:
        await load.works()
        for kind, trouble in server.troubles().items():
            for moment in (0.0, 0.02, 0.3):
                caused = asyncio.ensure_future(trouble(Brief(kind)))
                await asyncio.sleep(moment)
                caused.cancel()
                await asyncio.gather(caused, return_exceptions=True)
            told(f"{name}: {kind}: +{await load.works():.1f} s")


async def test_a_cancelled_kill_is_mended(tmp_path: Path) -> None:
    async with started("redis", tmp_path / "redis") as server:
        assert isinstance(server, RedisServer)
        for moment in (0.0, 0.01, 0.1):
            killed = asyncio.ensure_future(server.troubles()[suffering.KILL](Brief()))
            await asyncio.sleep(moment)
            killed.cancel()
            await asyncio.gather(killed, return_exceptions=True)
            assert await server.node.answers()


async def during(server: PrivateServer, kind: str) -> AsyncIterator[None]:
    """Again and again while the server has this trouble."""
    caused = asyncio.ensure_future(server.troubles()[kind](Brief(kind)))
    while not caused.done():
        yield
        await asyncio.sleep(0.02)
    await caused


async def test_what_a_trouble_does_is_seen(tmp_path: Path) -> None:
    async with started("redis", tmp_path / "redis") as server, Load(server) as load:
        assert isinstance(server, RedisServer)
        node = server.node
        await load.works()

        pids = {node.pid}
        for kind in (suffering.KILL, suffering.RESTART):
            async for _ in during(server, kind):
                pass
            pids.add(node.pid)
        assert len(pids) == 3

        await load.works()
        states = set()
        async for _ in during(server, suffering.STILL):
            states.add(Path(f"/proc/{node.pid}/stat").read_text().rpartition(")")[2].split()[0])  # noqa: ASYNC240
        assert "T" in states

        await load.works()
        refused = []
        async for _ in during(server, suffering.CROWDED):
            try:
                async with Asking(node.host, node.port) as asking:
                    await asking("PING")
            except OSError as error:
                refused.append(str(error))
        assert any("max number of clients" in one for one in refused)

        await load.works()
        off = []
        if suffering.CLOCK not in server.cannot:
            async for _ in during(server, suffering.CLOCK):
                off.append(abs(await server.clock() - time.time() * 1000 - server.ahead * 1000))
                assert off[-1] < 500
                states.add(str(server.ahead))
            assert len(states) > 2 or "-1.6" in states

        if suffering.DISK not in server.cannot:
            free = []
            async for _ in during(server, suffering.DISK):
                found = os.statvfs(node.disk.place)
                free.append(found.f_bavail * found.f_frsize)
            assert min(free) < 100_000
            found = os.statvfs(node.disk.place)
            assert found.f_bavail * found.f_frsize > 100_000_000

        await load.works()
        async for _ in during(server, suffering.MEMORY):
            pass
        assert any(isinstance(error, StoreFull) for error in load.errors)
        await load.drained()


async def test_names(tmp_path: Path) -> None:
    assert isinstance(server_of("sqlite", tmp_path / "file"), SqliteFile)
    with pytest.raises(BadInput, match="one of sqlite, redis, "):
        server_of("oracle", tmp_path)
