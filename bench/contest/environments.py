"""The environment of each contestant, made once for each content of its requirements."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bench.contest.contestants import BIDE, Contestant, pins

from bide.cli.bench.processes import BenchFault

_PATIENCE = 600.0
_STAMP = ".installed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """The interpreter and the variables of its processes."""

    interpreter: str
    variables: dict[str, str] = field(default_factory=dict)


def default_place() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "bide-peers"


def environment_of(contestant: Contestant, place: Path) -> Environment:
    """Make it, unless it is there. Raises BenchFault."""
    if contestant is BIDE:
        return Environment(interpreter=sys.executable)
    text = contestant.requirements.read_text(encoding="utf-8")
    fingerprint = hashlib.sha256(f"{sys.version}\n{text}".encode()).hexdigest()[:12]
    directory = place / f"{contestant.name}-{fingerprint}"
    steps: list[Sequence[str]]
    quietly: Sequence[str]
    if contestant.node:
        node, npm = shutil.which("node"), shutil.which("npm")
        if node is None or npm is None:
            raise BenchFault("node and npm are not installed")
        quietly = ("--no-save", "--ignore-scripts", "--no-audit", "--no-fund")
        wanted = [f"{name}@{version}" for name, version in pins(text).items()]
        steps = [(npm, "install", "--prefix", str(directory), *quietly, *wanted)]
        made = Environment(interpreter=node, variables={"NODE_PATH": str(directory / "node_modules")})
    else:
        python = str(directory / "bin" / "python")
        quietly = ("--quiet", "--no-input", "--disable-pip-version-check")
        install = (python, "-m", "pip", "install", *quietly, "-r", str(contestant.requirements))
        steps = [(sys.executable, "-m", "venv", str(directory)), install]
        made = Environment(interpreter=python)
    if not (directory / _STAMP).exists():
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(parents=True)
        for step in steps:
            carry_out("installing it", *step)
        (directory / _STAMP).touch()
    return made


def carry_out(doing: str, *command: str, cwd: Path | None = None, env: Mapping[str, str] | None = None) -> None:
    """A command to its end. Raises BenchFault with the last line that it wrote, where it fails or takes too long."""
    try:
        ended = subprocess.run(
            command, cwd=cwd, env=env, timeout=_PATIENCE, check=False, text=True, errors="replace",
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise BenchFault(f"{doing} took more than {_PATIENCE:.0f} s") from None
    if ended.returncode:
        lines = ended.stdout.strip().splitlines() or ["nothing was said"]
        raise BenchFault(f"{doing} failed: {lines[-1]}")
