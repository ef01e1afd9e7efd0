"""The processes of a run: an instance of `bide serve`, those that stand around it, and `wrk`."""

from __future__ import annotations

import asyncio
import os
import re
import secrets
import shutil
import socket
import sys
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from bide.cli.bench.server import stat

ROOT = Path(__file__).resolve().parent.parent
_PATIENCE = 30.0
_TAIL = 2_000
_ERROR = re.compile(r"\S+ (ERROR|CRITICAL) |Traceback |bide: |Error")


class HttpFault(Exception):
    """Nothing can be measured, and this is why."""


class Instance:
    """A running `bide serve`."""

    def __init__(self, url: str, pid: int) -> None:
        self.url = url
        self.pid = pid

    def used(self) -> float:
        """Seconds of processor time so far, of all its threads, in steps of 10 ms. Raises OSError."""
        return stat(Path("/proc") / str(self.pid)).used


@asynccontextmanager
async def serving(
    store: str, folder: Path, config: str = "", *, uvloop: bool = False, patience: float = _PATIENCE
) -> AsyncIterator[Instance]:
    """Started on a free port of 127.0.0.1 and ready; killed if it has not ended `patience` seconds after it was told.

    Raises HttpFault; also if it wrote an error to its log.
    """
    port, log = _free_port(), folder / f"serve-{time.monotonic_ns()}.log"
    words = [sys.executable, "-m", "bide", "serve", "--port", str(port), "--log-level", "error"]
    if config:
        file = folder / f"serve-{port}.toml"
        file.write_text(config, encoding="utf-8")
        words += ["--config", str(file)]
    if uvloop:
        words.append("--uvloop")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("BIDE_")}
    with log.open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            *words, env=environment | {"BIDE_STORE": store}, cwd=folder,
            stdin=asyncio.subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True,
        )  # fmt: skip
    try:
        url = f"http://127.0.0.1:{port}"
        await _until_ready(url, process, log)
        yield Instance(url, process.pid)
    finally:
        await _end(process, patience)
    if wrong := _wrong_in(log):
        raise HttpFault(f"bide serve wrote:\n{wrong}")


async def _until_ready(url: str, process: asyncio.subprocess.Process, log: Path) -> None:
    ends = time.monotonic() + _PATIENCE
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=1.0)) as session:
        while process.returncode is None and time.monotonic() < ends:
            with suppress(aiohttp.ClientError, OSError):
                async with session.get(f"{url}/readyz") as answer:
                    if answer.status == 200:
                        return
            await asyncio.sleep(0.02)
    raise HttpFault(f"bide serve is not ready:\n{_wrong_in(log)}")


def _wrong_in(log: Path) -> str:
    """The first error in it with what follows. Beside errors there are the audit's lines, which it always writes."""
    with log.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            if _ERROR.match(line):
                return line + lines.read(_TAIL)
    return ""


async def _end(process: asyncio.subprocess.Process, patience: float = _PATIENCE) -> None:
    if process.returncode is not None:
        return
    process.terminate()
    try:
        await asyncio.wait_for(process.wait(), patience)
    except TimeoutError:
        process.kill()
        await process.wait()


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


class Actor:
    """A process of `bench.http_actors`: it does its part, and answers words with objects."""

    def __init__(self, role: str, process: asyncio.subprocess.Process) -> None:
        self.role = role
        self.began: dict[str, Any] = {}
        """What it said when it was ready."""
        self._process = process

    async def ask(self, word: str) -> dict[str, Any]:
        """Its answer to that word. Raises HttpFault if it has ended."""
        assert self._process.stdin is not None
        with suppress(ConnectionError):
            self._process.stdin.write(word.encode() + b"\n")
            await self._process.stdin.drain()
        return await self.hear()

    async def hear(self) -> dict[str, Any]:
        """What it says next. Raises HttpFault if it has ended."""
        assert self._process.stdout is not None
        line = await self._process.stdout.readline()
        if not line:
            raise HttpFault(f"the process that is to {self.role} has ended; what it wrote is above")
        answer: dict[str, Any] = msgspec.json.decode(line)
        return answer


@asynccontextmanager
async def actor(role: str, **given: Any) -> AsyncIterator[Actor]:
    """A process that plays `role`, begun; ended at the end."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "bench.http_actors", role, msgspec.json.encode(given).decode()),
        cwd=ROOT, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, start_new_session=True,
    )  # fmt: skip
    try:
        one = Actor(role, process)
        one.began = await one.hear()
        yield one
    finally:
        await _end(process)


def has_wrk() -> bool:
    """Whether it is installed."""
    return shutil.which("wrk") is not None


async def wrk(script: str, url: str, *words: str, connections: int, seconds: float) -> Mapping[str, Any]:
    """One run with one thread, fresh keys; what the script says at its end. Raises HttpFault."""
    binary = shutil.which("wrk")
    if binary is None:
        raise HttpFault("wrk is not installed; on Debian: apt-get install wrk")
    topic, *rest = words
    process = await asyncio.create_subprocess_exec(
        *(binary, "-t1", f"-c{connections}", f"-d{max(1, round(seconds))}s", "--timeout", "10s"),
        *("-s", str(ROOT / "bench" / "wrk" / script), url, "--", topic, f"{secrets.token_hex(6)}-", *rest),
        stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        start_new_session=True,
    )  # fmt: skip
    try:
        said, complained = await process.communicate()
    finally:
        await _end(process)
    try:
        outcome: dict[str, Any] = msgspec.json.decode(said.rstrip().rpartition(b"\n")[2])
    except msgspec.DecodeError:
        raise HttpFault(f"wrk did not do as it should: {(said + complained).decode()[-_TAIL:]}") from None
    return outcome
