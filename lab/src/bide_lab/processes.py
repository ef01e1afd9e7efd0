"""The processes of a cell: clients of a strategy, and its consumers, each told what to do by the process of the lab.

A child is told by lines of JSON on its standard input, whose end means stop, and answers in lines of JSON.
"""

from __future__ import annotations

import asyncio
import gc
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from bide_lab.journal import Journal
from bide_lab.strategies import catalogue, chosen
from bide_lab.strategy import Item, Setting, Strategy, Unsupported, now

_PATIENCE = 30.0
"""Seconds for a process to begin."""
_GRACE = 5.0
"""Seconds for it to end."""
_SAID = 3
"""Last lines of its standard error that are repeated when it failed."""
_PAUSE = 0.2
"""Seconds before a consumer that failed is started again, as its supervisor would."""
_BATCH = 500
"""Tasks that are scheduled at once when very many are."""


class LabFault(Exception):
    """A cell could not be played: says what went wrong, and in which process."""


class Spec(msgspec.Struct, frozen=True, kw_only=True):
    """The part of one process in a cell."""

    strategy: str
    source: str
    """The file that it is in, if the lab did not come with it."""
    setting: Setting
    journal: Path
    role: str = ""
    """Of a consumer; empty for a client. A strategy within one process has both."""
    seconds: float = 0.0
    """How long each effect takes."""
    slow: float = 0.0
    """How long the effect of a key takes that begins with "slow"."""

    def strategy_class(self) -> type[Strategy]:
        if self.source:
            return next(one for one in chosen([self.source]) if one.name == self.strategy)
        return catalogue()[self.strategy]


class Step(msgspec.Struct, frozen=True, array_like=True):
    """One call: when it is made and for which tasks. Times are milliseconds from the beginning of the play."""

    at: int
    verb: str
    items: Sequence[tuple[str, int | None]]
    """Keys, and when they are to be due."""


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """One line to a child."""

    do: str
    """The method of `Child`."""
    begin: int = 0
    """Milliseconds since the epoch, from which steps count."""
    steps: Sequence[Step] = ()
    callers: int = 0
    count: int = 0
    ahead: int = 0
    """Milliseconds."""
    collect: bool = False


class Process:
    """A child, as the process of the lab sees it."""

    def __init__(self, process: asyncio.subprocess.Process, spec: Spec, log: Path) -> None:
        self._process = process
        self._log = log
        self.spec = spec
        self.name = f"{spec.strategy} {spec.role or 'client'}"
        self.killed = False
        self._turn = asyncio.Lock()

    @classmethod
    async def start(cls, spec: Spec, *, log: Path) -> Process:
        """It runs and is connected. Raises `LabFault`."""
        with log.open("ab") as errors:
            process = await asyncio.create_subprocess_exec(
                *command(__name__, spec), stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=errors,
                limit=1 << 26,
            )  # fmt: skip
        child = cls(process, spec, log)
        try:
            await asyncio.wait_for(child._answer(), _PATIENCE)
        except BaseException:
            await child.stop()
            raise
        return child

    async def play(
        self, begin: int, steps: Sequence[Step], *, callers: int = 256, may_fail: bool = False
    ) -> dict[str, Any]:
        """Make the calls, each at its time or as soon after it as a caller is free.

        The `seconds` that they took in all, and how many `failed`. Raises `LabFault` if one did and none `may_fail`,
        or if the process ended meanwhile and was not killed.
        """
        answer = await self._ask(Order(do="play", begin=begin, steps=steps, callers=callers))
        if answer.get("failed") and not may_fail:
            raise LabFault(f"{answer['failed']} calls failed, the first with {answer['failure']}")
        return answer

    async def fill(self, count: int, *, ahead: int) -> float:
        """Schedule so many tasks, which no journal tells of, due in `ahead` milliseconds; the seconds that it took.

        They are made in the child, so that its memory grows by them and not by an order for them.
        """
        return float((await self._ask(Order(do="fill", count=count, ahead=ahead)))["seconds"])

    async def usage(self, *, collect: bool = False) -> dict[str, Any]:
        """`at`, `cpu` in seconds, `resident` bytes, `threads`, `restarts`, `counts`.

        `collect`: garbage is collected before, which costs it processor time.
        """
        return await self._ask(Order(do="usage", collect=collect))

    async def _ask(self, order: Order) -> dict[str, Any]:
        async with self._turn:
            assert self._process.stdin is not None
            with suppress(BrokenPipeError, ConnectionResetError):  # its end is told by what it does not answer
                self._process.stdin.write(msgspec.json.encode(order) + b"\n")
                await self._process.stdin.drain()
            return await self._answer()

    async def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        if line := await self._process.stdout.readline():
            answer: dict[str, Any] = msgspec.json.decode(line)
            return answer
        if self.killed:
            return {}
        raise LabFault(f"the process {self.name} ended: {self.complaints() or 'it said nothing'}")

    def complaints(self) -> str:
        """The last lines that it wrote on its standard error."""
        return " | ".join(self._log.read_text(encoding="utf-8", errors="replace").splitlines()[-_SAID:])

    def kill(self) -> None:
        """SIGKILL: it has no chance to do anything more."""
        self.killed = True
        if self._process.returncode is None:
            self._process.send_signal(signal.SIGKILL)

    async def stop(self) -> None:
        """It ends in order; if it does not, by SIGKILL."""
        if self._process.returncode is None and self._process.stdin is not None:
            self._process.stdin.close()
        try:
            await asyncio.wait_for(self._process.wait(), _GRACE)
        except TimeoutError:
            self.kill()
            await self._process.wait()


def command(module: str, spec: Spec, *more: str) -> Sequence[str]:
    """The words that run `main` of a module in a process of its own."""
    encoded = msgspec.json.encode(spec, enc_hook=str).decode()
    return sys.executable, "-P", "-c", f"from {module} import main; main()", encoded, *more


def told_spec() -> Spec:
    """The spec in the words that this process was started by."""
    return msgspec.json.decode(sys.argv[1], type=Spec, dec_hook=lambda kind, given: kind(given))


class Recorded:
    """The effect: written down when it begins, and when it is done if that takes time."""

    def __init__(self, spec: Spec, journal: Journal) -> None:
        self._spec = spec
        self._effect = journal.effect

    async def __call__(self, key: str, due: int) -> None:
        if seconds := self._begun(key, due):
            await asyncio.sleep(seconds)
            self._effect(key, due, ".")

    def blocking(self, key: str, due: int) -> None:
        if seconds := self._begun(key, due):
            time.sleep(seconds)
            self._effect(key, due, ".")

    def _begun(self, key: str, due: int) -> float:
        """The seconds that it takes from now on."""
        seconds = self._spec.slow if self._spec.slow and key.startswith("slow") else self._spec.seconds
        self._effect(key, due, "~" if seconds else "!")
        return seconds


class Child:
    """One process's strategy, and what it is told."""

    def __init__(self, spec: Spec) -> None:
        self._spec = spec
        self._journal = Journal(spec.journal)
        self._strategy = spec.strategy_class()(spec.setting)
        self._restarts = 0

    async def run(self) -> None:
        """Until told to stop."""
        orders = asyncio.StreamReader(limit=1 << 26)
        await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(orders), sys.stdin)
        consumer: asyncio.Task[None] | None = None
        try:
            await self._strategy.open()
            if self._spec.role:
                consumer = asyncio.create_task(self._consume())
                await asyncio.sleep(0)
            answer: Mapping[str, Any] = {}
            while True:
                sys.stdout.buffer.write(msgspec.json.encode(answer) + b"\n")
                sys.stdout.flush()
                if not (line := await orders.readline()):
                    break
                order = msgspec.json.decode(line, type=Order)
                answer = await {"play": self.play, "fill": self.fill, "usage": self.usage}[order.do](order)
        finally:
            while consumer is not None and not consumer.done():  # a driver loses a cancellation that meets an answer
                consumer.cancel()
                await asyncio.wait([consumer], timeout=1)
            await self._strategy.close()
            self._journal.close()

    async def _consume(self) -> None:
        """A consumer that fails is started again by a supervisor, and so is this one, with connections of its own."""
        effect = Recorded(self._spec, self._journal)
        while True:
            try:
                await self._strategy.run(self._spec.role, effect)
                raise RuntimeError(f"{self._spec.strategy}.run({self._spec.role!r}) came to an end")
            except Exception as error:  # noqa: BLE001 - whatever it was, it is told and counted
                sys.stderr.write(f"{type(error).__name__}: {error}\n")
                self._restarts += 1
            await asyncio.sleep(_PAUSE)
            if not self._strategy.in_process:
                with suppress(Exception):  # it has failed already, and is thrown away
                    await self._strategy.close()
                self._strategy = type(self._strategy)(self._spec.setting)
                with suppress(OSError):  # the server may be away still: `run` says so, and we come back
                    await self._strategy.open()

    async def play(self, order: Order) -> dict[str, Any]:
        steps = iter(order.steps)
        failures: list[str] = []
        began = time.time_ns()

        async def caller() -> None:
            for step in steps:
                pause = (order.begin + step.at) / 1000 - time.time()
                if pause > 0:
                    await asyncio.sleep(pause)
                items = [(key, None if due is None else order.begin + due) for key, due in step.items]
                try:
                    await self._call(step.verb, items)
                except Exception as error:  # noqa: BLE001 - the caller has no answer, and is told so
                    failures.append(f"{type(error).__name__}: {error}")

        await asyncio.gather(*(caller() for _ in range(min(order.callers, len(order.steps)))))
        return {"seconds": (time.time_ns() - began) / 1e9, "failed": len(failures), "failure": "".join(failures[:1])}

    async def _call(self, verb: str, items: Sequence[tuple[str, int | None]]) -> None:
        strategy = self._strategy
        if verb in strategy.cannot:
            raise Unsupported(strategy.cannot[verb])
        numbers = self._journal.begun(verb, items)
        word = "failed"
        try:
            if verb == "schedule":
                await strategy.schedule([Item(key, due or 0) for key, due in items])
                word = "ok"
            else:
                [(key, due)] = items
                done = await (
                    strategy.reschedule(Item(key, due or 0)) if verb == "reschedule" else getattr(strategy, verb)(key)
                )
                word = "ok" if done else "late"
        finally:
            self._journal.answered(numbers, word)

    async def fill(self, order: Order) -> dict[str, Any]:
        due, began = now() + order.ahead, time.monotonic()
        for begin in range(0, order.count, _BATCH):
            numbers = range(begin, min(order.count, begin + _BATCH))
            await self._strategy.schedule([Item(f"w{number:07d}", due) for number in numbers])
        return {"seconds": time.monotonic() - began}

    async def usage(self, order: Order) -> dict[str, Any]:
        if order.collect:
            gc.collect()
        return {
            "at": time.monotonic(), "cpu": processor_seconds(), "resident": resident(),
            "threads": threading.active_count(), "restarts": self._restarts, "counts": dict(self._strategy.counts()),
        }  # fmt: skip


def processor_seconds() -> float:
    """Processor time of this process so far."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def resident() -> int:
    """Bytes of this process that are in memory now."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def main() -> None:
    """In a child."""
    with suppress(KeyboardInterrupt):
        asyncio.run(Child(told_spec()).run())
