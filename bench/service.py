"""A `bide serve` that is measured, the processes that stand around it, and `wrk`."""

from __future__ import annotations

import asyncio
import re
import secrets
import shutil
import sys
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
from bench.command import ROOT

from bide_bench.processes import PATIENCE, BenchFault, Child, stat
from bide_proofs.servers.server import ServiceProcess

_TAIL = 2_000
_ERROR = re.compile(r"\S+ (ERROR|CRITICAL) |Traceback |bide: |Error")


class Instance(ServiceProcess):
    """A `bide serve` that is measured."""

    def used(self) -> float:
        """Seconds of processor time so far. Raises OSError where it has ended."""
        return stat(Path(f"/proc/{self.pid}")).used

    async def cpu_percent(self, seconds: float) -> float:
        """Percent of one core that it takes while so many seconds pass."""
        used, began = self.used(), time.monotonic()
        await asyncio.sleep(seconds)
        return 100 * (self.used() - used) / (time.monotonic() - began)


@asynccontextmanager
async def serving(
    store: str, folder: Path, config: str = "", *, uvloop: bool = False, patience: float = PATIENCE
) -> AsyncIterator[Instance]:
    """One that is ready; killed if it has not ended `patience` seconds after SIGTERM, as where a receiver hangs.

    Raises ServerFailed, and BenchFault if it wrote an error to its log.
    """
    instance = Instance(folder / f"serve-{time.monotonic_ns()}")
    instance.store = store
    if config:
        file = folder / f"{instance.directory.name}.toml"
        file.write_text(config, encoding="utf-8")
        instance.words += ("--config", str(file))
    if uvloop:
        instance.words += ("--uvloop",)
    await asyncio.to_thread(instance.start)
    try:
        yield instance
    finally:
        await asyncio.to_thread(instance.halt, patience=patience)
    if wrong := _wrong_in(instance.log):
        raise BenchFault(f"bide serve wrote:\n{wrong}")


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
