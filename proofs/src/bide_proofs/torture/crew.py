"""The client and worker processes of a run: started, stopped, killed, and replaced by others in the same place."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

import msgspec

from bide.testing.history.events import Died
from bide.testing.history.journal import Journal
from bide_proofs.servers.process import Guard
from bide_proofs.torture.child import READY, Duty
from bide_proofs.trial import PATIENCE

CLIENT, WORKER = "client", "worker"
_CALLS = 10_000_000
"""Numbers of calls that each process has for itself."""
_AGAIN = 0.5
"""Seconds after which one is replaced that ended by itself: it may not be able to live at all."""


@dataclass(eq=False)
class Member:
    """One process."""

    kind: str
    slot: int
    who: str
    process: asyncio.subprocess.Process
    expected: bool = False
    """Whether its end is somebody's doing."""
    watched: asyncio.Task[None] = field(init=False)


class Crew:
    """All of them. `urls` are handed out in turn; a slot in `wrong` gets `wrong_environment` as well."""

    def __init__(
        self,
        folder: Path,
        journal: Journal,
        urls: Sequence[str],
        *,
        clock: Path,
        seed: int,
        rate: float,
        farthest: float,
        shares_clock: bool,
        environment: Mapping[str, str],
        wrong_environment: Mapping[str, str],
    ) -> None:
        self.ended: list[str] = []
        """Who came to an end that nobody had in mind for them."""
        self.members: list[Member] = []
        self.started = 0
        self._folder = folder
        self._journal = journal
        self._urls = urls
        self._clock = clock
        self._seed = seed
        self._rate = rate
        self._farthest = farthest
        self._shares_clock = shares_clock
        self._environment = environment
        self._wrong_environment = wrong_environment
        self._lives: dict[tuple[str, int], int] = {}
        self._numbers = count()
        self._abandoned = False

    async def start(self, kind: str, slots: int) -> None:
        """So many of a kind, and wait until all of them work."""
        started = [await self._one(kind, slot) for slot in range(slots)]
        for member in started:
            assert member.process.stdout is not None
            if await asyncio.wait_for(member.process.stdout.readline(), PATIENCE) != READY.encode():
                raise RuntimeError(f"{member.who} did not start: {self.said()}")

    async def _one(self, kind: str, slot: int) -> Member:
        number = next(self._numbers)
        life = self._lives[kind, slot] = self._lives.get((kind, slot), 0) + 1
        who = f"{kind}-{slot}.{life}"
        # every second one, so that those with a wrong clock and those with a right one meet in every store
        wrong = self._wrong_environment if slot % 2 else {}
        duty = Duty(
            url=self._urls[number % len(self._urls)], who=who, journal=str(self._folder / f"{who}.jsonl"),
            clock=str(self._clock), first_call=(number + 1) * _CALLS, seed=f"{self._seed}/{who}", rate=self._rate,
            farthest=self._farthest, shares_clock=self._shares_clock,
        )  # fmt: skip
        with (self._folder / f"{who}.err").open("ab") as said:
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", f"bide_proofs.torture.{kind}",
                stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=said, start_new_session=True,
                env={**_without_ours(), **self._environment, **wrong},
            )  # fmt: skip
        assert process.stdin is not None
        process.stdin.write(msgspec.json.encode(duty) + b"\n")
        member = Member(kind, slot, who, process)
        member.watched = asyncio.create_task(self._watch(member))
        self.members.append(member)
        self.started += 1
        return member

    async def _watch(self, member: Member) -> None:
        code = await member.process.wait()
        self.members.remove(member)
        self._journal.say(Died(member.who, time.monotonic_ns()))
        if not member.expected or code not in (0, -signal.SIGKILL):
            self.ended.append(f"{member.who} ended with {code}")
        if not member.expected and not self._abandoned:
            await asyncio.sleep(_AGAIN)
            await self._one(member.kind, member.slot)

    async def kill(self, member: Member) -> None:
        """By SIGKILL; another takes its place at once."""
        member.expected = True
        _signal(member, signal.SIGKILL)
        await member.watched
        await self._one(member.kind, member.slot)

    async def halt(self, member: Member, seconds: float) -> None:
        """By SIGSTOP, and SIGCONT after so long."""
        # one that stands still would not notice that the run is no more
        guard = Guard('kill -KILL "$1"', str(member.process.pid))
        try:
            _signal(member, signal.SIGSTOP)
            await asyncio.sleep(seconds)
        finally:
            _signal(member, signal.SIGCONT)
            guard.dismiss()

    async def end(self, kind: str) -> None:
        """Tell all of a kind to come to an end, and wait for it. One that does not is killed, and told of."""
        ending = [member for member in self.members if member.kind == kind]
        for member in ending:
            member.expected = True
            assert member.process.stdin is not None
            member.process.stdin.close()
        for member in ending:
            try:
                await asyncio.wait_for(asyncio.shield(member.watched), PATIENCE)
            except TimeoutError:
                self.ended.append(f"{member.who} was told to end, and did not within {PATIENCE:g} s")
                _signal(member, signal.SIGKILL)
                await member.watched

    async def abandon(self) -> None:
        """Kill what is left; nothing is judged any more."""
        self._abandoned = True
        for member in list(self.members):
            member.expected = True
            _signal(member, signal.SIGKILL)
            await member.watched

    def said(self) -> list[str]:
        """What they wrote to their standard error: nothing, unless they met a defect."""
        return [
            f"{path.stem}: {line}"
            for path in sorted(self._folder.glob("*.err"))
            for line in path.read_text(errors="replace").splitlines()
        ]


def _signal(member: Member, number: signal.Signals) -> None:
    if member.process.returncode is None:
        # not by the process object, which looks first whether it lives, and takes its end from whoever waits for it
        with contextlib.suppress(ProcessLookupError):
            os.kill(member.process.pid, number)


def _without_ours() -> dict[str, str]:
    """The environment, without settings that would change what is tortured."""
    return {name: value for name, value in os.environ.items() if not name.startswith("BIDE_")}
