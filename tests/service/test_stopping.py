"""A process of `bide serve` that is told to stop while clients neither read nor send, and webhooks come due."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import signal
import socket
import sys
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from urllib.parse import urlsplit

from tests.service.calling import Api
from tests.sinks.receiver import receiving
from tests.waiting import PATIENCE

from bide import Bide
from bide.service import serving
from bide.service.serving import ServeConfig

BIG = "x" * 200_000


@asynccontextmanager
async def serve(folder: Path, *options: str, **given: str) -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    """The process, and where it listens."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "bide", "serve", "--port", "0", "--store", f"sqlite:///{folder}/bide.db", *options),
        env={**os.environ, **given}, stderr=PIPE, cwd=folder,
    )  # fmt: skip
    try:
        yield process, (await said(process, r"http://127\.0\.0\.1:\d+"))[-1]
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def said(process: asyncio.subprocess.Process, what: str) -> list[str]:
    """What it has said up to `what`, and `what`."""
    lines: list[str] = []
    assert process.stderr is not None
    async with asyncio.timeout(PATIENCE):
        while line := (await process.stderr.readline()).decode():
            if found := re.search(what, line):
                return [*lines, found[0]]
            lines.append(line)
    raise AssertionError("".join(lines))


async def test_it_listens_when_it_says_where_it_is() -> None:
    """Who waits for the line, and calls, is not refused."""
    draining: list[Callable[[str], object]] = []

    class Caller(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if found := re.search(r"bide serve: http://127\.0\.0\.1:(\d+)", record.getMessage()):
                with socket.create_connection(("127.0.0.1", int(found[1]))):
                    draining.pop()("reached")

    log, caller = logging.getLogger("bide.serve"), Caller()
    log.addHandler(caller)
    log.setLevel(logging.INFO)
    try:
        await serving.serve(
            Bide("memory:"), ServeConfig(), host="127.0.0.1", port=0, insecure=False, shown_store="memory:",
            begin=lambda drain, grace: draining.append(drain),
        )  # fmt: skip
    finally:
        log.removeHandler(caller)
        log.setLevel(logging.NOTSET)
    assert draining == []


async def test_nobody_keeps_it_beyond_its_grace_and_no_webhook_begins_after_the_signal(tmp_path: Path) -> None:
    async with receiving() as hook:
        options = ("--webhook", f"tick={hook.url}", "--allow", hook.place)
        async with serve(tmp_path, *options, BIDE_GRACE="2s", BIDE_CONCURRENCY="1") as (process, url):
            api = Api(url)
            ticks = [{"topic": "tick", "key": str(n), "delay": f"{n * 100}ms", "payload": n} for n in range(300)]
            heavy = [{"topic": "big", "key": str(n), "delay": "1h", "payload": BIG} for n in range(60)]
            await asyncio.to_thread(api.done, "POST", "/v1/schedule", heavy)
            await asyncio.to_thread(api.done, "POST", "/v1/schedule", ticks)
            host, port = urlsplit(url).hostname, urlsplit(url).port
            reading, silent = await asyncio.open_connection(host, port, limit=1)
            silent.write(b"GET /v1/tasks?topic=big&limit=1000 HTTP/1.1\r\nhost: localhost\r\n\r\n")
            assert await reading.readexactly(1), "and no more"
            hearing, slow = await asyncio.open_connection(host, port)
            slow.write(
                b"POST /v1/schedule HTTP/1.1\r\nhost: localhost\r\nexpect: 100-continue\r\ncontent-length: 9\r\n\r\n["
            )
            assert await hearing.readuntil(b"100 Continue")
            await hook.came.wait()

            process.send_signal(signal.SIGTERM)
            await said(process, "draining")
            before = len(hook.received)
            lines = await said(process, "has stopped")

            assert len(hook.received) <= before + 1, "a request may be on its way while the signal comes"
            assert not [line for line in lines if "Traceback" in line], lines
            assert await process.wait() == 0
            for writer in (silent, slow):
                writer.close()
            api.close()
