"""The contestants, as `contestants.toml` lists them, and the environment of each.

An environment is made once for each content of its requirements.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from bide_bench.processes import BenchFault

_HERE = Path(__file__).resolve().parent
_STAMP = ".installed"
_PATIENCE = 600.0
"""Seconds after which an installation, or the making of tables, is given up."""


class Contestant(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One library, and its programs: the words after `python -P -m`, or after its script for node.js."""

    name: str
    package: str
    """Its name where it is installed from; its version is in the requirements."""
    worker: str
    setup: str = ""
    """Makes its tables, where the server is one that has some."""
    server: str = "redis"
    """The server that keeps its tasks: "redis" or "postgres"."""
    node: bool = False
    variables: dict[str, str] = {}
    """Settings of its worker that it takes from the environment alone."""
    uvloop: str | None = None
    """Further words of its worker on uvloop; None: it does not run on asyncio."""
    sleepy: str = ""
    """Further words of its worker where handlers sleep."""

    def loop(self, wanted: str) -> str:
        """The event loop that it runs on where `wanted` is asked for."""
        return "asyncio" if self.uvloop is None else wanted

    def to_work(self, wanted: str, *, sleepy: bool) -> Sequence[str]:
        """The command line of its worker after the interpreter, for that loop and such handlers."""
        on_uvloop = self.uvloop if self.loop(wanted) == "uvloop" else None
        return self._words(self.worker, on_uvloop or "", self.sleepy if sleepy else "")

    def to_produce(self) -> Sequence[str]:
        """That of the process that schedules."""
        return self._words("produce" if self.node else f"bench.contest.produce {self.name}")

    def to_set_up(self) -> Sequence[str]:
        """That of the process that makes its tables."""
        return self._words(self.setup)

    def _words(self, *parts: str) -> Sequence[str]:
        program = [str(_HERE / "peers" / f"{self.name}.cjs")] if self.node else ["-P", "-m"]
        return [*program, *" ".join(parts).split()]

    @property
    def requirements(self) -> Path:
        return _HERE.parent / f"requirements-{self.name}.txt"

    @property
    def version(self) -> str:
        """The pinned one. Raises KeyError if its requirements do not name it."""
        return pins(self.requirements.read_text(encoding="utf-8"))[self.package]


def pins(requirements: str) -> dict[str, str]:
    """Names and versions, of pip's form (`name==1.0`) or of npm's (`name@1.0`).

    >>> pins("# a comment\\narq==0.28.0\\n@ioredis/commands@2.0.0\\n")
    {'arq': '0.28.0', '@ioredis/commands': '2.0.0'}
    """
    found: dict[str, str] = {}
    for line in requirements.splitlines():
        entry = line.partition("#")[0].strip()
        if entry:
            name, _, version = entry.partition("==") if "==" in entry else entry.rpartition("@")
            found[name] = version
    return found


_ALL: Mapping[str, Contestant] = {
    name: msgspec.convert({"name": name, **fields}, Contestant)
    for name, fields in tomllib.loads((_HERE / "contestants.toml").read_text(encoding="utf-8")).items()
}
BIDE = _ALL["bide"]
PEERS = {name: contestant for name, contestant in _ALL.items() if contestant is not BIDE}


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
