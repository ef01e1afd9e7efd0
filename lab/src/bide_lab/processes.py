"""The processes of a cell: clients of a strategy and its consumers, which do what the process of the lab orders.

An order is a line of JSON on a child's standard input, whose end means stop, and names a method of `Part` with its
arguments; each is answered by a line of JSON.
"""

from __future__ import annotations

import asyncio
import gc
import math
import pkgutil
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from bide.cli.bench.processes import BenchFault, Child, resident_bytes
from bide_lab.journal import Journal
from bide_lab.strategies import chosen
from bide_lab.strategy import Item, Setting, now

_PATIENCE = 30.0
"""Seconds for a process to begin."""
_GRACE = 5.0
"""Seconds for it to end."""
_PAUSE = 0.2
"""Seconds before a consumer that failed is started again, as its supervisor would."""
_BATCH = 500
"""Tasks that are scheduled at once when very many are."""
_LINE = 1 << 26
"""Bytes of an order or an answer at most."""
LabFault = BenchFault
"""A cell could not be played: says what went wrong, and in which process."""


class Spec(msgspec.Struct, frozen=True, kw_only=True):
    """The part of one process in a cell."""

    strategy: str
    source: str
    """The file that it is in."""
    setting: Setting
    journal: Path
    role: str = ""
    """Of a consumer; empty for a client. A strategy within one process has both."""
    seconds: float = 0.0
    """How long each effect takes."""
    slow: float = 0.0
    """How long the effect of a key takes that begins with "slow"."""

    @property
    def name(self) -> str:
        """The name in its error messages."""
        return f"{self.strategy} {self.role or 'client'}"


class Step(NamedTuple):
    """One call: when it is made and for which tasks. Times are milliseconds from the beginning of the play."""

    at: int
    verb: str
    items: Sequence[tuple[str, int | None]]
    """Keys, and when they are to be due."""


class Process(Child):
    """A child, as the process of the lab sees it. An order raises `LabFault` if it ended by itself."""

    spec: Spec
    killed = False
    _turn: asyncio.Lock

    @classmethod
    async def begin(cls, spec: Spec, *, log: Path) -> Process:
        """It runs and is connected. Raises `LabFault`."""
        process = await cls.start(
            f"the process {spec.name}", sys.executable, "-P", "-c", f"from {__name__} import main; main()",
            msgspec.json.encode(spec, enc_hook=str).decode(), errors=log,
        )  # fmt: skip
        process.spec, process._turn = spec, asyncio.Lock()
        try:
            await process.receive_any(within=_PATIENCE)
        except BaseException:
            await process.stop()
            raise
        return process

    async def order(self, do: str, **arguments: Any) -> dict[str, Any]:
        """The answer of a method of `Part`; empty if the child was killed."""
        async with self._turn:
            if not self.killed:
                self.send(msgspec.json.encode([do, arguments]).decode())
                try:
                    return await self.receive_any(within=math.inf)
                except LabFault:
                    if not self.killed:
                        raise
            return {}

    async def play(
        self, begin: int, steps: Sequence[Step], *, callers: int = 256, may_fail: bool = False
    ) -> dict[str, Any]:
        """See `Part.play`. Raises `LabFault` if a call failed and none `may_fail`."""
        answer = await self.order("play", begin=begin, steps=steps, callers=callers)
        if answer.get("failed") and not may_fail:
            raise LabFault(f"{answer['failed']} calls failed, the first with {answer['failure']}")
        return answer

    async def usage(self, *, collect: bool = False) -> dict[str, Any]:
        """See `Part.usage`."""
        return await self.order("usage", collect=collect)

    async def measure(self, function: Callable[..., Awaitable[Any]], *arguments: Any) -> dict[str, Any]:
        """The figures of `function(strategy, *arguments)`, called in the child."""
        name = f"{function.__module__}:{function.__qualname__}"
        return await self.order("measure", function=name, arguments=arguments)

    def kill(self) -> None:
        """SIGKILL: it has no chance to do anything more."""
        self.killed = True
        super().kill()

    async def stop(self, *, within: float = _GRACE) -> None:
        """It ends in order; if it does not, by SIGKILL."""
        with suppress(LabFault):
            await super().stop(within=within)


class Recorded:
    """The effect, which is written down when it is done."""

    def __init__(self, spec: Spec, journal: Journal) -> None:
        self._spec = spec
        self._journal = journal

    async def __call__(self, key: str, due: int) -> None:
        at = time.time_ns()
        if seconds := self._seconds(key):
            await asyncio.sleep(seconds)
        self._journal.effect(key, due, at)

    def blocking(self, key: str, due: int) -> None:
        at = time.time_ns()
        if seconds := self._seconds(key):
            time.sleep(seconds)
        self._journal.effect(key, due, at)

    def _seconds(self, key: str) -> float:
        return self._spec.slow if self._spec.slow and key.startswith("slow") else self._spec.seconds


class Part:
    """One process's strategy, and the orders that it is given."""

    def __init__(self, spec: Spec) -> None:
        self._spec = spec
        self._journal = Journal(spec.journal)
        self._strategy = next(one for one in chosen([spec.source]) if one.name == spec.strategy)(spec.setting)
        self._failure = ""
        """The last one of the consumer."""

    async def run(self) -> None:
        """Until told to stop."""
        orders = asyncio.StreamReader(limit=_LINE)
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
                do, arguments = msgspec.json.decode(line)
                answer = await getattr(self, do)(**arguments)
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
                self._failure = f"{type(error).__name__}: {error}"
            await asyncio.sleep(_PAUSE)
            if not self._strategy.in_process:
                with suppress(Exception):  # it has failed already, and is thrown away
                    await self._strategy.close()
                self._strategy = type(self._strategy)(self._spec.setting)
                with suppress(OSError):  # the server may be away still: `run` says so, and we come back
                    await self._strategy.open()

    async def play(self, begin: int, steps: Sequence[Step], callers: int) -> dict[str, Any]:
        """Make the calls, each at its time or as soon after it as a caller is free.

        The `seconds` that they took in all, and how many `failed`.
        """
        left = iter(steps)
        failures: list[str] = []
        began = time.time_ns()

        async def caller() -> None:
            for at, verb, items in left:
                pause = (begin + at) / 1000 - time.time()
                if pause > 0:
                    await asyncio.sleep(pause)
                try:
                    await self._call(verb, [(key, None if due is None else begin + due) for key, due in items])
                except Exception as error:  # noqa: BLE001 - the caller has no answer, and is told so
                    failures.append(f"{type(error).__name__}: {error}")

        await asyncio.gather(*(caller() for _ in range(min(callers, len(steps)))))
        return {"seconds": (time.time_ns() - began) / 1e9, "failed": len(failures), "failure": "".join(failures[:1])}

    async def _call(self, verb: str, items: Sequence[tuple[str, int | None]]) -> None:
        strategy, asked = self._strategy, [Item(key, due or 0) for key, due in items]
        numbers = self._journal.begun(verb, items)
        word = "failed"
        try:
            if verb == "schedule":
                await strategy.schedule(asked)
                word = "ok"
            else:
                [item] = asked
                done = await (strategy.reschedule(item) if verb == "reschedule" else getattr(strategy, verb)(item.key))
                word = "ok" if done else "late"
        finally:
            self._journal.answered(numbers, word)

    async def fill(self, count: int, ahead: int) -> dict[str, Any]:
        """Schedule so many tasks, which no journal tells of, due in `ahead` milliseconds; the `seconds` that it took.

        They are made here, so that this memory grows by them and not by an order for them.
        """
        due, began = now() + ahead, time.monotonic()
        for begin in range(0, count, _BATCH):
            numbers = range(begin, min(count, begin + _BATCH))
            await self._strategy.schedule([Item(f"w{number:07d}", due) for number in numbers])
        return {"seconds": time.monotonic() - began}

    async def measure(self, function: str, arguments: Sequence[Any]) -> Any:
        return await pkgutil.resolve_name(function)(self._strategy, *arguments)

    async def usage(self, collect: bool) -> dict[str, Any]:
        """`at`, `cpu` in seconds, `resident` bytes, `threads`, the last `failure` of the consumer, `counts`.

        `collect`: garbage is collected before, which costs processor time.
        """
        if collect:
            gc.collect()
        return {
            "at": time.monotonic(), "cpu": time.process_time(), "resident": resident(),
            "threads": threading.active_count(), "failure": self._failure, "counts": dict(self._strategy.counts()),
        }  # fmt: skip


def resident() -> int:
    """Bytes of this process that are in memory now."""
    return resident_bytes(Path("/proc/self"))


def main() -> None:
    """In a child."""
    with suppress(KeyboardInterrupt):
        spec = msgspec.json.decode(sys.argv[1], type=Spec, dec_hook=lambda kind, given: kind(given))
        asyncio.run(Part(spec).run())
