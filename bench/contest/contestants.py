"""The contestants: the package of each, and the command line of its worker, as its documentation has it.

The environment of each contestant, made once for each content of its requirements.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from bide.cli.bench.processes import BenchFault

ROOT = Path(__file__).resolve().parent.parent.parent
"""Of the project."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Contestant:
    """One library. `worker` is the command line after the interpreter."""

    name: str
    package: str
    """Its name where it is installed from; its version is in the requirements."""
    worker: Sequence[str]
    producer: Sequence[str]
    server: str = "redis"
    """The server that keeps its tasks: "redis" or "postgres"."""
    setup: Sequence[str] = ()
    """The command line that makes its tables, where the server is one that has some."""
    node: bool = False
    variables: Mapping[str, str] = field(default_factory=dict)
    """Settings of its worker that it takes from the environment alone."""

    uvloop: Sequence[str] | None = None
    """Further arguments of its worker on uvloop; None: it does not run on asyncio."""

    sleepy: Sequence[str] = ()
    """Further arguments of its worker where handlers sleep."""

    def loop(self, wanted: str) -> str:
        """The event loop that it runs on where `wanted` is asked for."""
        return "asyncio" if self.uvloop is None else wanted

    def command(self, wanted: str, *, sleepy: bool) -> Sequence[str]:
        """The worker's, for that loop and such handlers."""
        on_uvloop = (self.uvloop or ()) if self.loop(wanted) == "uvloop" else ()
        return (*self.worker, *on_uvloop, *(self.sleepy if sleepy else ()))

    @property
    def requirements(self) -> Path:
        return ROOT / "bench" / f"requirements-{self.name}.txt"

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


def _python(
    name: str,
    package: str,
    *worker: str,
    uvloop: Sequence[str] | None = None,
    sleepy: Sequence[str] = (),
    **variables: str,
) -> Contestant:
    return Contestant(
        name=name, package=package, worker=("-P", "-m", *worker), producer=("-P", "-m", "bench.contest.produce", name),
        uvloop=uvloop, sleepy=sleepy, variables=variables,
    )  # fmt: skip


_BULLMQ = str(ROOT / "bench" / "contest" / "bullmq.cjs")
_GRAPHILE = str(ROOT / "bench" / "contest" / "graphile.cjs")

BIDE = replace(
    _python("bide", "bide", "bide", "work", "bench.contest.bide:app", "--quiet", uvloop=("--uvloop",)),
    setup=("-P", "-m", "bench.contest.bide"),
)
"""On whatever server the peer beside it is on."""

PEERS: Mapping[str, Contestant] = {
    contestant.name: contestant
    for contestant in (
        _python("docket", "pydocket", "bench.contest.docket", uvloop=()),
        _python(
            *("arq", "arq", "arq", "bench.contest.arq.WorkerSettings", "--custom-log-dict", "bench.contest.arq.QUIET"),
            uvloop=(),
        ),
        _python("saq", "saq", "saq", "bench.contest.saq.settings", uvloop=()),
        _python(
            *("dramatiq", "dramatiq", "dramatiq", "bench.contest.dramatiq", "--processes", "1", "--threads", "8"),
            dramatiq_worker_timeout="10", dramatiq_queue_prefetch="1000", dramatiq_delay_queue_prefetch="50000",
        ),
        _python(
            *("celery", "celery", "celery", "-A", "bench.contest.celery", "worker", "--loglevel", "WARNING"),
            *("--pool", "threads", "--concurrency", "8"),
        ),
        _python(
            *("huey", "huey", "huey.bin.huey_consumer", "bench.contest.huey.huey", "-q", "-k", "thread", "-w", "2"),
            sleepy=("-w", "8"),
        ),
        Contestant(
            name="bullmq", package="bullmq", worker=(_BULLMQ, "work"), producer=(_BULLMQ, "produce"), node=True
        ),
        replace(
            _python("procrastinate", "procrastinate", "bench.contest.procrastinate", uvloop=()),
            server="postgres", setup=("-P", "-m", "bench.contest.procrastinate", "setup"),
        ),
        Contestant(
            name="graphile", package="graphile-worker", server="postgres", worker=(_GRAPHILE, "work"),
            setup=(_GRAPHILE, "setup"), producer=(_GRAPHILE, "produce"), node=True,
        ),
    )
}  # fmt: skip


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
