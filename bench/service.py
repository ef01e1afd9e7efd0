"""A `bide serve` that is measured, the processes that stand around it, and `wrk`."""

from __future__ import annotations

import asyncio
import re
import secrets
import shutil
import socket
import sys
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from bide.cli.bench.processes import PATIENCE, BenchFault, Child, environment

ROOT = Path(__file__).resolve().parent.parent
_TAIL = 2_000
_ERROR = re.compile(r"\S+ (ERROR|CRITICAL) |Traceback |bide: |Error")


class Instance(Child):
    """A running `bide serve`."""

    url: str
    store: str
    """The URL of the store that it serves."""

    async def cpu_percent(self, seconds: float) -> float:
        """Percent of one core that it takes while so many seconds pass."""
        used, began = self.used(), time.monotonic()
        await asyncio.sleep(seconds)
        return 100 * (self.used() - used) / (time.monotonic() - began)


@asynccontextmanager
async def serving(
    store: str, folder: Path, config: str = "", *, uvloop: bool = False, patience: float = PATIENCE
) -> AsyncIterator[Instance]:
    """One on a free port of 127.0.0.1 that is ready; killed if it has not ended `patience` seconds after SIGTERM.

    Raises BenchFault; also if it wrote an error to its log.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
    log = folder / f"serve-{time.monotonic_ns()}.log"
    words = [sys.executable, "-m", "bide", "serve", "--port", str(port), "--log-level", "error"]
    if config:
        file = folder / f"serve-{port}.toml"
        file.write_text(config, encoding="utf-8")
        words += ["--config", str(file)]
    if uvloop:
        words.append("--uvloop")
    env = environment() | {"BIDE_STORE": store}
    instance = await Instance.start("bide serve", *words, cwd=folder, env=env, errors=log, talks=False)
    instance.url, instance.store = f"http://127.0.0.1:{port}", store
    try:
        await _until_ready(instance, log)
        yield instance
    finally:
        with suppress(BenchFault):  # it waits for a receiver that hangs
            await instance.stop(within=patience)
    if wrong := _wrong_in(log):
        raise BenchFault(f"bide serve wrote:\n{wrong}")


async def _until_ready(instance: Instance, log: Path) -> None:
    ends = time.monotonic() + PATIENCE
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=1.0)) as session:
        while instance.returncode is None and time.monotonic() < ends:
            with suppress(aiohttp.ClientError, OSError):
                async with session.get(f"{instance.url}/readyz") as answer:
                    if answer.status == 200:
                        return
            await asyncio.sleep(0.02)
    raise BenchFault(f"bide serve is not ready:\n{_wrong_in(log)}")


def _wrong_in(log: Path) -> str:
    """The first error in it with what follows. Beside errors there are the audit's lines, which it always writes."""
    with log.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            if _ERROR.match(line):
                return line + lines.read(_TAIL)
    return ""


def actor(role: str, **given: Any) -> AbstractAsyncContextManager[Child]:
    """A process of `bench.http_actors` that plays `role` and is ready: it does its part, and answers words."""
    words = (sys.executable, "-m", "bench.http_actors", role, msgspec.json.encode(given).decode())
    return Child.running(f"the process that is to {role}", *words, ready="began", cwd=ROOT)


async def wrk(script: str, url: str, *words: str, connections: int, seconds: float) -> Mapping[str, Any]:
    """One run with one thread, fresh keys; what the script says at its end. Raises BenchFault."""
    binary = shutil.which("wrk")
    if binary is None:
        raise BenchFault("wrk is not installed; on Debian: apt-get install wrk")
    topic, *rest = words
    process = await asyncio.create_subprocess_exec(
        *(binary, "-t1", f"-c{connections}", f"-d{max(1, round(seconds))}s", "--timeout", "10s"),
        *("-s", str(ROOT / "bench" / "wrk" / script), url, "--", topic, f"{secrets.token_hex(6)}-", *rest),
        stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        said, complained = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    try:
        outcome: dict[str, Any] = msgspec.json.decode(said.rstrip().rpartition(b"\n")[2])
    except msgspec.DecodeError:
        raise BenchFault(f"wrk did not do as it should: {(said + complained).decode()[-_TAIL:]}") from None
    return outcome
