"""One process of a cell: a client of a strategy, or one of its consumers. Run as `python -m bide_lab.actor SPEC`.

It is told what to do by lines of JSON on its standard input, whose end means stop, and answers in lines of JSON.
"""

from __future__ import annotations

import asyncio
import gc
import importlib
import os
import resource
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from bide_lab.catalogue import catalogue, chosen
from bide_lab.journal import Journal
from bide_lab.strategy import Item, Setting, Strategy, Unsupported, now

_PAUSE = 0.2
"""Seconds before a consumer that failed is started again, as its supervisor would."""


class Spec(msgspec.Struct, frozen=True, kw_only=True):
    """What a process is to be."""

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


def encoded(spec: Spec) -> str:
    """As the one argument of the process."""
    return msgspec.json.encode(spec, enc_hook=str).decode()


class Step(msgspec.Struct, frozen=True, array_like=True):
    """One call: when it is made and for which tasks. Times are milliseconds from the beginning of the play."""

    at: int
    verb: str
    items: Sequence[tuple[str, int | None]]
    """Keys, and when they are to be due."""


class Play(msgspec.Struct, frozen=True, kw_only=True):
    """Calls to make, each at its time or as soon after it as a caller is free."""

    begin: int
    """Milliseconds since the epoch."""
    steps: Sequence[Step]
    callers: int = 256


class Fill(msgspec.Struct, frozen=True, kw_only=True):
    """Many tasks, far off, made here: so that what a process grows by is theirs, and not that of an order for them."""

    count: int
    ahead: int
    """Milliseconds."""
    batch: int = 500


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """One line of standard input."""

    do: str
    play: Play | None = None
    fill: Fill | None = None


class Recorded:
    """The effect: written down when it begins, and when it is done if that takes time."""

    def __init__(self, spec: Spec, journal: Journal) -> None:
        self._seconds = spec.seconds
        self._slow = spec.slow
        self._journal = journal

    async def __call__(self, key: str, due: int) -> None:
        seconds = self._takes(key)
        self._journal.effect(key, due, "~" if seconds else "!")
        if seconds:
            await asyncio.sleep(seconds)
            self._journal.effect(key, due, ".")

    def blocking(self, key: str, due: int) -> None:
        seconds = self._takes(key)
        self._journal.effect(key, due, "~" if seconds else "!")
        if seconds:
            time.sleep(seconds)
            self._journal.effect(key, due, ".")

    def _takes(self, key: str) -> float:
        return self._slow if self._slow and key.startswith("slow") else self._seconds


class Actor:
    """One process's strategy, and what it is told."""

    def __init__(self, spec: Spec) -> None:
        self._spec = spec
        self._make: Callable[[Setting], Strategy] = strategy_of(spec)
        self._journal = Journal(spec.journal)
        self._strategy = self._make(spec.setting)
        self._restarts = 0

    async def act(self) -> None:
        """Until told to stop."""
        orders = await _lines()
        consumer: asyncio.Task[None] | None = None
        try:
            await self._strategy.open()
            if self._spec.role:
                consumer = asyncio.create_task(self._consume())
                await asyncio.sleep(0)
            _say(ready=True)
            while line := await orders.readline():
                order = msgspec.json.decode(line, type=Order)
                if order.do == "stop":
                    break
                if order.do == "usage":
                    _say(**self._usage())
                elif order.do == "collect":
                    gc.collect()
                    _say(**self._usage())
                elif order.play is not None:
                    _say(**await self._play(order.play))
                elif order.fill is not None:
                    _say(**await self._fill(order.fill))
        finally:
            while consumer is not None and not consumer.done():  # a driver loses a cancellation that meets an answer
                consumer.cancel()
                await asyncio.wait([consumer], timeout=1)
            await self._strategy.close()
            self._journal.close()

    async def _consume(self) -> None:
        """A consumer that fails is started again by whoever looks after it, and so is this one."""
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
                await self._reopen()

    async def _reopen(self) -> None:
        with suppress(Exception):  # it has failed already, and is thrown away
            await self._strategy.close()
        self._strategy = self._make(self._spec.setting)
        with suppress(OSError):  # the server may be away still: `run` says so, and we come back
            await self._strategy.open()

    async def _play(self, play: Play) -> dict[str, Any]:
        steps = iter(play.steps)
        unsupported: dict[str, str] = {}
        failed: list[str] = []
        began = time.time_ns()

        async def caller() -> None:
            for step in steps:
                pause = (play.begin + step.at) / 1000 - time.time()
                if pause > 0:
                    await asyncio.sleep(pause)
                items = [(key, None if due is None else play.begin + due) for key, due in step.items]
                try:
                    await self._call(step.verb, items)
                except Unsupported as error:
                    unsupported[step.verb] = str(error)
                except Exception as error:  # noqa: BLE001 - the caller has no answer, and is told so
                    failed.append(f"{type(error).__name__}: {error}")

        await asyncio.gather(*(caller() for _ in range(min(play.callers, len(play.steps)))))
        return {
            "seconds": (time.time_ns() - began) / 1e9, "unsupported": unsupported, "failed": len(failed),
            "failure": failed[0] if failed else "",
        }  # fmt: skip

    async def _fill(self, fill: Fill) -> dict[str, Any]:
        due, began = now() + fill.ahead, time.monotonic()
        for begin in range(0, fill.count, fill.batch):
            numbers = range(begin, min(fill.count, begin + fill.batch))
            await self._strategy.schedule([Item(f"w{number:07d}", due) for number in numbers])
        return {"seconds": time.monotonic() - began}

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
                answers: dict[str, Callable[[], Coroutine[Any, Any, bool]]] = {
                    "reschedule": lambda: strategy.reschedule(Item(key, due or 0)),
                    "cancel": lambda: strategy.cancel(key),
                    "fire_now": lambda: strategy.fire_now(key),
                }
                word = "ok" if await answers[verb]() else "late"
        finally:
            self._journal.answered(numbers, word)

    def _usage(self) -> dict[str, Any]:
        used = resource.getrusage(resource.RUSAGE_SELF)
        return {
            "at": time.monotonic(), "cpu": used.ru_utime + used.ru_stime, "resident": resident(),
            "threads": threading.active_count(), "fired": self._journal.fired, "restarts": self._restarts,
            "counts": dict(self._strategy.counts()),
        }  # fmt: skip


def resident() -> int:
    """Bytes of this process that are in memory now."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def strategy_of(spec: Spec) -> type[Strategy]:
    """The class that a process is to play."""
    if spec.source:
        return next(one for one in chosen([spec.source]) if one.name == spec.strategy)
    return catalogue()[spec.strategy]


async def _lines() -> asyncio.StreamReader:
    reader = asyncio.StreamReader(limit=1 << 26)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    return reader


def _say(**words: Any) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(words) + b"\n")
    sys.stdout.flush()


def main() -> None:
    spec = msgspec.json.decode(sys.argv[1], type=Spec, dec_hook=lambda kind, given: kind(given))
    with suppress(KeyboardInterrupt):
        asyncio.run(Actor(spec).act())


if __name__ == "__main__":
    importlib.invalidate_caches()
    main()
