"""The processes of a run: started by a spec, queried, killed, halted, replaced in the same slot, and ended.

A child is `python -m MODULE`. The first line of its standard input is its spec as JSON; an argument could be read by
every user of the machine. Each further line is a command, and the end of the input asks it to end. The child answers
with lines of JSON on its standard output, the first of which has the word `ready`. Its answers survive a kill.
"""

from __future__ import annotations

import asyncio
import math
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from bide.testing.history.events import Died
from bide.testing.history.recording import Journal
from bide_bench.processes import BenchFault, environment
from bide_bench.processes import Child as Process
from bide_bench.worker import send, words
from bide_proofs.harness.command import PATIENCE, ChildFailed
from bide_proofs.servers.process import Guard

S = TypeVar("S", bound=msgspec.Struct)
READY = "ready"
_RESTART_AFTER = 0.5
"""Seconds after which a child that ended by itself is replaced, since it may end at once every time."""


@dataclass(frozen=True, kw_only=True)
class ChildSpec:
    """A process to start."""

    module: str
    """The module, run as `python -m module`."""
    spec: msgspec.Struct
    """The first line of its standard input."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables in addition to ours, without bide's settings."""
    finishes: bool = False
    """True if it may end by itself with exit code 0 when its work is done; it is then not replaced."""


class Child(Process):
    """One process of a group, whose output is read from its beginning."""

    kind: str
    slot: int
    name: str
    spec: ChildSpec
    expected = False
    """True if it was ended on purpose."""
    over: asyncio.Task[None]
    """Done when the process has ended and all its output was read."""
    said: dict[str, Any]
    """The newest value of each word in its output."""
    _changed: asyncio.Event
    """Set when it has written a line, or has ended."""
    _ended = False

    @classmethod
    async def of(cls, kind: str, slot: int, name: str, spec: ChildSpec, errors: Path) -> Child:
        """Start a child and send it its spec."""
        words = (sys.executable, "-P", "-m", spec.module)
        child = await cls.start(name, *words, env={**environment(), **spec.environment}, errors=errors)
        child.kind, child.slot, child.name, child.spec = kind, slot, name, spec
        child.said, child._changed = {}, asyncio.Event()
        child.send(msgspec.json.encode(spec.spec).decode())
        return child

    @property
    def finished(self) -> bool:
        """True if it ended by itself and was allowed to."""
        return self.spec.finishes and self.returncode == 0

    async def ask(self, word: str, *, within: float = PATIENCE) -> Any:
        """Send `word`, and return the child's answer. Raises ChildFailed."""
        self.said.pop(word, None)
        self.send(word)
        return await self.hear(word, within=within)

    async def hear(self, word: str, *, within: float = PATIENCE) -> Any:
        """Wait until the child has written `word`; return the value. Raises ChildFailed."""
        try:
            async with asyncio.timeout(within):
                while word not in self.said:
                    if self._ended:
                        raise ChildFailed(f"{self.name} ended with {self.returncode} before it said {word!r}")
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            raise ChildFailed(f"{self.name} did not say {word!r} within {within:g} s") from None
        return self.said[word]

    async def listen(self, heard: Callable[[Child, dict[str, Any]], None] | None) -> None:
        """Read its output until its end."""
        with suppress(BenchFault):  # it has ended
            while True:
                said = await self.receive_any(within=math.inf)
                self.said |= said
                self._changed.set()
                if heard is not None:
                    heard(self, said)
        await self.stop()
        self._ended = True
        self._changed.set()

    def signal(self, number: signal.Signals) -> None:
        """Send a signal if the child still runs."""
        if self.returncode is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)


async def _ended(child: Child) -> str:
    """Ask a child to end, and return the failure, if any."""
    try:
        await child.stop(within=PATIENCE)
    except BenchFault:
        return f"{child.name} was told to end, and did not within {PATIENCE:g} s"
    finally:
        await child.over
    return ""


class ProcessGroup:
    """All children of a run. `spec_of(kind, slot, name)` returns the spec; each life of a slot has its own name.

    A `journal` records their deaths; `heard` gets all their output.
    """

    def __init__(
        self,
        folder: Path,
        spec_of: Callable[[str, int, str], ChildSpec],
        *,
        journal: Journal | None = None,
        heard: Callable[[Child, dict[str, Any]], None] | None = None,
    ) -> None:
        self.wrong: list[str] = []
        """Unintended ends of children."""
        self.children: list[Child] = []
        """The live children."""
        self.started = 0
        self._folder = folder
        self._spec_of = spec_of
        self._journal = journal
        self._heard = heard
        self._lives: dict[tuple[str, int], int] = {}
        self._abandoned = False

    def of(self, *kinds: str) -> list[Child]:
        """The live children of these kinds, in order of name."""
        return sorted((child for child in self.children if child.kind in kinds), key=lambda child: child.name)

    async def start(self, kind: str, count: int) -> None:
        """Start `count` children of a kind, and wait until all of them are ready. Raises ChildFailed."""
        started = [await self._one(kind, slot) for slot in range(count)]
        try:
            for child in started:
                await child.hear(READY)
        except ChildFailed as failed:
            raise ChildFailed("\n".join([str(failed), *self.errors()])) from None

    async def _one(self, kind: str, slot: int) -> Child:
        life = self._lives[kind, slot] = self._lives.get((kind, slot), 0) + 1
        name = f"{kind}-{slot}.{life}"
        spec = self._spec_of(kind, slot, name)
        child = await Child.of(kind, slot, name, spec, self._folder / f"{name}.err")
        child.over = asyncio.create_task(self._watch(child), name=f"watch {name}")
        self.children.append(child)
        self.started += 1
        return child

    async def _watch(self, child: Child) -> None:
        await child.listen(self._heard)
        self.children.remove(child)
        if self._journal is not None:
            self._journal.say(Died(child.name, time.monotonic_ns()))
        if child.finished:
            return
        if not child.expected or child.returncode not in (0, -signal.SIGKILL):
            self.wrong.append(f"{child.name} ended with {child.returncode}")
        if not child.expected and not self._abandoned:
            await asyncio.sleep(_RESTART_AFTER)
            await self._one(child.kind, child.slot)

    async def kill(self, child: Child) -> bool:
        """Kill a child by SIGKILL and start another in its place; return True if it had not ended before."""
        child.expected = True
        child.signal(signal.SIGKILL)
        await child.over
        if not child.finished:
            await self._one(child.kind, child.slot)
        return child.returncode == -signal.SIGKILL

    async def halt(self, child: Child, seconds: float) -> None:
        """Stop a child by SIGSTOP, and continue it after `seconds`."""
        # a stopped child would not notice that the run has ended
        guard = Guard('kill -KILL "$1"', str(child.pid))
        try:
            child.signal(signal.SIGSTOP)
            await asyncio.sleep(seconds)
        finally:
            child.signal(signal.SIGCONT)
            guard.dismiss()

    async def end(self, kind: str) -> None:
        """Ask all children of a kind to end, and wait. A child that does not end is killed and counts as a failure."""
        ending = self.of(kind)
        for child in ending:
            child.expected = True
        self.wrong += filter(None, await asyncio.gather(*map(_ended, ending)))

    async def abandon(self) -> None:
        """Kill all children that still run; their ends are not judged any more."""
        self._abandoned = True
        for child in list(self.children):
            child.expected = True
            child.signal(signal.SIGKILL)
            await child.over

    def errors(self) -> list[str]:
        """The lines of their standard error: there are none unless there is a defect."""
        return [
            f"{path.stem}: {line}"
            for path in sorted(self._folder.glob("*.err"))
            for line in path.read_text(errors="replace").splitlines()
        ]


# --- the child's side


def spec_of(kind: type[S]) -> S:
    """Read the spec from the first line of the standard input, before anything else is read."""
    return msgspec.json.decode(sys.stdin.buffer.readline(), type=kind)


def ready() -> None:
    """Report to the parent that this process is at work."""
    send(**{READY: True})


async def told_to_end() -> None:
    """Wait until the parent asks this process to end, or has ended itself."""
    async for _ in words():
        pass
