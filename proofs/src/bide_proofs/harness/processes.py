"""The processes of a run: started by a spec, asked, killed, halted, replaced by others in the same place, and ended.

A child is `python -m MODULE`. The first line of its standard input is its spec as JSON; an argument could be read by
every user of the machine. Each further line is a word to it, and the end of the input tells it to end. It answers by
lines of JSON on its standard output, the first of which has the word `ready`; what it said outlives a kill.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from bide.cli.bench.processes import environment
from bide.testing.history.events import Died
from bide.testing.history.recording import Journal
from bide_proofs.harness.command import PATIENCE, ChildFailed
from bide_proofs.servers.process import Guard

S = TypeVar("S", bound=msgspec.Struct)
READY = "ready"
_RESTART_AFTER = 0.5
"""Seconds after which a child is replaced that ended by itself: it may not be able to live at all."""


@dataclass(frozen=True, kw_only=True)
class ChildSpec:
    """A process to start."""

    module: str
    """It is run as `python -m module`."""
    spec: msgspec.Struct
    """The first line of its standard input."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Besides ours, without settings of bide."""
    finishes: bool = False
    """True if it may end by itself, with 0: its work is done, and it is not replaced."""


@dataclass(eq=False)
class Child:
    """One process of a group."""

    kind: str
    slot: int
    name: str
    spec: ChildSpec
    process: asyncio.subprocess.Process
    said: dict[str, Any] = field(default_factory=dict)
    """The newest value of each word that it said."""
    expected: bool = False
    """True if it was ended on purpose."""
    over: asyncio.Task[None] = field(init=False)
    """Ends when it has ended and all that it said was read."""
    _changed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when it has said something, or has ended."""
    _ended: bool = False

    @property
    def code(self) -> int | None:
        """The exit code; the negative number of a signal; None while it runs."""
        return self.process.returncode

    @property
    def finished(self) -> bool:
        """True if it ended by itself, as it may."""
        return self.spec.finishes and self.code == 0

    async def ask(self, word: str) -> Any:
        """Tell it `word`, and return what it says to that. Raises ChildFailed."""
        self.said.pop(word, None)
        self.tell(word)
        return await self.hear(word)

    def tell(self, line: str) -> None:
        """A line on its standard input."""
        assert self.process.stdin is not None
        self.process.stdin.write(line.encode() + b"\n")

    async def hear(self, word: str) -> Any:
        """Wait until it has said `word`; the value. Raises ChildFailed."""
        try:
            async with asyncio.timeout(PATIENCE):
                while word not in self.said:
                    if self._ended:
                        raise ChildFailed(f"{self.name} ended with {self.code} before it said {word!r}")
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            raise ChildFailed(f"{self.name} did not say {word!r} within {PATIENCE:g} s") from None
        return self.said[word]

    async def listen(self, heard: Callable[[Child, dict[str, Any]], None] | None) -> None:
        """Read what it says until its end."""
        assert self.process.stdout is not None
        async for line in self.process.stdout:
            if not line.endswith(b"\n"):
                break  # a kill cut it off
            said = msgspec.json.decode(line, type=dict[str, Any])
            self.said |= said
            self._changed.set()
            if heard is not None:
                heard(self, said)
        await self.process.wait()
        self._ended = True
        self._changed.set()

    def send(self, number: signal.Signals) -> None:
        """A signal, if it still runs."""
        if self.code is None:
            # not by the process object, which first polls whether it lives, and so takes its end from the watcher
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.process.pid, number)


class ProcessGroup:
    """All children of a run. `spec_of(kind, slot, name)` says what to start; each life of a slot has a name of its own.

    With a `journal` their deaths are written down; `heard` is given all that they say.
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
        """The ends that were not intended."""
        self.children: list[Child] = []
        """Those that live."""
        self.started = 0
        self._folder = folder
        self._spec_of = spec_of
        self._journal = journal
        self._heard = heard
        self._lives: dict[tuple[str, int], int] = {}
        self._abandoned = False

    def of(self, *kinds: str) -> list[Child]:
        """Those of some kinds that live, by name."""
        return sorted((child for child in self.children if child.kind in kinds), key=lambda child: child.name)

    async def start(self, kind: str, count: int) -> None:
        """Start so many of a kind, and wait until all of them are ready. Raises ChildFailed."""
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
        with (self._folder / f"{name}.err").open("ab") as errors:
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-P", "-m", spec.module,
                stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=errors, start_new_session=True,
                env={**environment(), **spec.environment},  # without settings that would change what is tried
            )  # fmt: skip
        child = Child(kind, slot, name, spec, process)
        child.tell(msgspec.json.encode(spec.spec).decode())
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
        if not child.expected or child.code not in (0, -signal.SIGKILL):
            self.wrong.append(f"{child.name} ended with {child.code}")
        if not child.expected and not self._abandoned:
            await asyncio.sleep(_RESTART_AFTER)
            await self._one(child.kind, child.slot)

    async def kill(self, child: Child) -> bool:
        """Kill it by SIGKILL, and start another in its place; whether it lived until then."""
        child.expected = True
        child.send(signal.SIGKILL)
        await child.over
        if not child.finished:
            await self._one(child.kind, child.slot)
        return child.code == -signal.SIGKILL

    async def halt(self, child: Child, seconds: float) -> None:
        """Stop it by SIGSTOP, and continue it after so long."""
        # one that stands still would not notice that the run is no more
        guard = Guard('kill -KILL "$1"', str(child.process.pid))
        try:
            child.send(signal.SIGSTOP)
            await asyncio.sleep(seconds)
        finally:
            child.send(signal.SIGCONT)
            guard.dismiss()

    async def end(self, kind: str) -> None:
        """Tell all of a kind to end, and wait for it. One that does not is killed, which is wrong."""
        ending = self.of(kind)
        for child in ending:
            child.expected = True
            assert child.process.stdin is not None
            child.process.stdin.close()
        for child in ending:
            try:
                await asyncio.wait_for(asyncio.shield(child.over), PATIENCE)
            except TimeoutError:
                self.wrong.append(f"{child.name} was told to end, and did not within {PATIENCE:g} s")
                child.send(signal.SIGKILL)
                await child.over

    async def abandon(self) -> None:
        """Kill all that still run; nothing is judged any more."""
        self._abandoned = True
        for child in list(self.children):
            child.expected = True
            child.send(signal.SIGKILL)
            await child.over

    def errors(self) -> list[str]:
        """Lines that they wrote to their standard error: none, unless they met a defect."""
        return [
            f"{path.stem}: {line}"
            for path in sorted(self._folder.glob("*.err"))
            for line in path.read_text(errors="replace").splitlines()
        ]


# --- the child's side


class Parent:
    """The process that has started this one."""

    def __init__(self) -> None:
        self.over = asyncio.Event()
        """Set when it tells us to end, or is no more."""
        self._words: asyncio.Queue[str | None] = asyncio.Queue()

    async def listen(self) -> None:
        """Read its words until their end."""
        reader = asyncio.StreamReader()
        await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
        async for line in reader:
            self._words.put_nowait(line.decode().strip())
        self._words.put_nowait(None)
        self.over.set()

    async def words(self) -> AsyncIterator[str]:
        """Its words, until it tells us to end."""
        while (word := await self._words.get()) is not None:
            yield word


def spec_of(kind: type[S]) -> S:
    """The first line of the standard input; to be read before anything else is."""
    return msgspec.json.decode(sys.stdin.buffer.readline(), type=kind)


def run(main: Callable[[Parent], Awaitable[None]]) -> None:
    """Run `main` until it returns. It has to end soon after `parent.over`."""

    async def listened() -> None:
        parent = Parent()
        listening = asyncio.create_task(parent.listen())
        try:
            await main(parent)
        finally:
            listening.cancel()

    asyncio.run(listened())


def say(**values: object) -> None:
    """Tell the parent values by words, in one line that outlives this process."""
    os.write(1, msgspec.json.encode(values) + b"\n")


def ready() -> None:
    """Tell the parent that this process works."""
    say(**{READY: True})
