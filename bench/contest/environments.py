"""Where each contestant is installed: an environment of its own, made once for each content of its requirements."""

from __future__ import annotations

import asyncio
import hashlib
import os
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from bench.contest.contestants import BIDE, Contestant, bide_python, pins

from bide.cli.bench.workers import BenchFault

_PATIENCE = 600.0
_STAMP = ".installed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """How its processes are run."""

    interpreter: str
    variables: dict[str, str] = field(default_factory=dict)


def default_place() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "bide-peers"


async def environment_of(contestant: Contestant, place: Path) -> Environment:
    """Make it, unless it is there. Raises BenchFault."""
    if contestant is BIDE:
        return Environment(interpreter=str(bide_python()))
    text = contestant.requirements.read_text(encoding="utf-8")
    fingerprint = hashlib.sha256(f"{sys.version}\n{text}".encode()).hexdigest()[:12]
    directory = place / f"{contestant.name}-{fingerprint}"
    if contestant.node:
        return await _node(directory, text)
    return await _python(directory, contestant.requirements)


async def _python(directory: Path, requirements: Path) -> Environment:
    python = directory / "bin" / "python"
    if not (directory / _STAMP).exists():
        _afresh(directory)
        await carry_out("installing it", sys.executable, "-m", "venv", str(directory))
        await carry_out(
            "installing it",
            *(str(python), "-m", "pip", "install", "--quiet", "--no-input", "--disable-pip-version-check"),
            *("-r", str(requirements)),
        )
        (directory / _STAMP).touch()
    return Environment(interpreter=str(python))


async def _node(directory: Path, requirements: str) -> Environment:
    node, npm = shutil.which("node"), shutil.which("npm")
    if node is None or npm is None:
        raise BenchFault("node and npm are not installed")
    if not (directory / _STAMP).exists():
        _afresh(directory)
        wanted = [f"{name}@{version}" for name, version in pins(requirements).items()]
        await carry_out(
            "installing it",
            *(npm, "install", "--prefix", str(directory), "--no-save", "--ignore-scripts", "--no-audit", "--no-fund"),
            *wanted,
        )
        (directory / _STAMP).touch()
    return Environment(interpreter=node, variables={"NODE_PATH": str(directory / "node_modules")})


def _afresh(directory: Path) -> None:
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)


async def carry_out(doing: str, *command: str, cwd: Path | None = None, env: Mapping[str, str] | None = None) -> None:
    """A command to its end. Raises BenchFault with the last line that it wrote, where it fails or takes too long."""
    process = await asyncio.create_subprocess_exec(
        *command, cwd=cwd, env=env,
        stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip
    try:
        said, _ = await asyncio.wait_for(process.communicate(), _PATIENCE)
    except TimeoutError:
        raise BenchFault(f"{doing} took more than {_PATIENCE:.0f} s") from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode:
        lines = said.decode(errors="replace").strip().splitlines() or ["nothing was said"]
        raise BenchFault(f"{doing} failed: {lines[-1]}")
