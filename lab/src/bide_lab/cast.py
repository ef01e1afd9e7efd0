"""The processes of a cell, as the one that directs it sees them: started, told, watched, and killed."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from bide_lab.actor import Fill, Order, Play, Spec, Step, encoded

_PATIENCE = 30.0
"""Seconds for a process to begin, or to end."""
_TOLD = 3
"""Last lines of what a process said that are repeated when it failed."""


class LabFault(Exception):
    """A cell could not be played: says what went wrong, and in which process."""


class Player:
    """One process of a cell."""

    def __init__(self, process: asyncio.subprocess.Process, spec: Spec, log: Path) -> None:
        self._process = process
        self._log = log
        self.spec = spec
        self.killed = False
        self._turn = asyncio.Lock()

    @classmethod
    async def start(cls, spec: Spec, *, log: Path) -> Player:
        """It runs and is connected. Raises `LabFault`."""
        with log.open("ab") as errors:
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-P", "-m", "bide_lab.actor", encoded(spec),
                stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=errors, limit=1 << 26,
                env=os.environ,
            )  # fmt: skip
        player = cls(process, spec, log)
        try:
            await asyncio.wait_for(player._answer(), _PATIENCE)
        except BaseException:
            await player.stop()
            raise
        return player

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def name(self) -> str:
        return f"{self.spec.strategy} {self.spec.role or 'client'}"

    async def play(self, begin: int, steps: Sequence[Step], *, callers: int = 256) -> dict[str, Any]:
        """Make the calls; `seconds` they took in all, verbs that are `unsupported`, how many `failed` and one of them.

        Raises `LabFault` if the process ended meanwhile and was not killed.
        """
        return await self._ask(Order(do="play", play=Play(begin=begin, steps=steps, callers=callers)))

    async def fill(self, count: int, *, ahead: int) -> float:
        """Schedule so many tasks, which no journal tells of, due in `ahead` milliseconds; the seconds that it took."""
        answer = await self._ask(Order(do="fill", fill=Fill(count=count, ahead=ahead)))
        return float(answer["seconds"])

    async def usage(self, *, collect: bool = False) -> dict[str, Any]:
        """`at`, `cpu` in seconds, `resident` bytes, `threads`, `fired`, `restarts`, `counts`.

        `collect`: garbage is collected before, which costs it processor time.
        """
        return await self._ask(Order(do="collect" if collect else "usage"))

    async def _ask(self, order: Order) -> dict[str, Any]:
        async with self._turn:
            assert self._process.stdin is not None
            try:
                self._process.stdin.write(msgspec.json.encode(order) + b"\n")
                await self._process.stdin.drain()
            except (BrokenPipeError, ConnectionResetError):
                pass  # its end is told by what it does not answer
            return await self._answer()

    async def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = await self._process.stdout.readline()
        if line:
            answer: dict[str, Any] = msgspec.json.decode(line)
            return answer
        if self.killed:
            return {}
        raise LabFault(f"the process {self.name} ended: {self._said()}")

    def _said(self) -> str:
        lines = self._log.read_text(encoding="utf-8", errors="replace").splitlines()
        return " | ".join(lines[-_TOLD:]) or "it said nothing"

    def complaints(self) -> str:
        """What it wrote on its standard error."""
        return self._said() if self._log.stat().st_size else ""

    def kill(self) -> None:
        """SIGKILL: it has no chance to do anything more."""
        self.killed = True
        self._send(signal.SIGKILL)

    def pause(self) -> None:
        """SIGSTOP: it hangs until `resume`."""
        self._send(signal.SIGSTOP)

    def resume(self) -> None:
        self._send(signal.SIGCONT)

    def _send(self, number: signal.Signals) -> None:
        if self._process.returncode is None:
            self._process.send_signal(number)

    async def stop(self) -> None:
        """It ends in order; if it does not, by SIGKILL."""
        if self._process.returncode is None and self._process.stdin is not None:
            self.resume()
            self._process.stdin.close()
        try:
            await asyncio.wait_for(self._process.wait(), 5.0)
        except TimeoutError:
            self.kill()
            await self._process.wait()
