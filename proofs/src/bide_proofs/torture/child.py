"""What a client and a worker process have in common: their duty, their journal, an app that opens in the end."""

from __future__ import annotations

import asyncio
import logging
import os
import random
import select
import sys
import time
from collections.abc import Awaitable, Callable
from itertools import count
from pathlib import Path
from typing import SupportsIndex

import msgspec

from bide.core.errors import StoreError, StoreMismatch
from bide.testing.history.journal import Journal, Log
from bide.testing.history.recording import Recording
from bide_proofs.torture.clock import CLOCK_FILE, SharedClock
from bide_proofs.torture.topics import app_on

READY = "ready\n"
_AGAIN = 0.2
"""Seconds after which a store is opened again that is away."""


class Duty(msgspec.Struct, frozen=True, kw_only=True):
    """What a process is told, as one line of JSON at its standard input, whose end tells it to come to an end.

    Not as arguments, which everybody on the machine could read.
    """

    url: str
    who: str
    journal: str
    clock: str
    first_call: int
    seed: str
    rate: float = 0.0
    """Of a client: verbs a second."""
    farthest: float = 0.0
    """Of a client: the longest delay that it asks for, in seconds."""
    shares_clock: bool = False
    """Whether its time of day is the store's, as with a file, which has no clock but that of its callers."""


class Child:
    """One process at its duty."""

    def __init__(self, duty: Duty) -> None:
        self.duty = duty
        self.chance = random.Random(duty.seed)
        self.clock = SharedClock(Path(duty.clock))
        if duty.shares_clock:
            self.clock.become_ours()
        self.journal = Journal(
            Log(Path(duty.journal)).say, time_ns=time.monotonic_ns, clock=self.clock.now, calls=count(duty.first_call)
        )
        self.app = app_on(duty.url)
        self.app.instruments.append(Recording(self.journal, duty.who))

    async def until_open(self, open_: Callable[[], Awaitable[object]], over: asyncio.Event) -> bool:
        """Whether it could be opened before it was over; a store that is away is asked again."""
        while not over.is_set():
            try:
                await open_()
            except StoreMismatch:
                raise
            except StoreError:
                await asyncio.sleep(_AGAIN)
            else:
                return True
        return False


def main(run: Callable[[Child, asyncio.Event], Awaitable[None]]) -> None:
    """Of a process: reads its duty, and does `run` until it is told to end."""
    duty = msgspec.json.decode(sys.stdin.buffer.readline(), type=Duty)
    if CLOCK_FILE in os.environ:
        # libfaketime refuses what time.sleep asks for, which is a sleep by the monotonic clock until an instant
        time.sleep = _sleep
    logging.basicConfig(level=logging.ERROR, format="%(name)s: %(message)s")
    logging.getLogger().handlers[0].addFilter(_is_a_defect)
    asyncio.run(_lived(Child(duty), run))


def _sleep(seconds: SupportsIndex | float, /) -> None:
    select.select([], [], [], float(seconds))


def _is_a_defect(record: logging.LogRecord) -> bool:
    """That a task is dead, or could not be settled while the store was away, is what is to be expected here."""
    return record.exc_info is not None or record.name not in ("bide.worker", "bide.settler")


async def _lived(child: Child, run: Callable[[Child, asyncio.Event], Awaitable[None]]) -> None:
    over = asyncio.Event()
    told = asyncio.create_task(_told(over))
    try:
        await run(child, over)
    finally:
        told.cancel()


async def _told(over: asyncio.Event) -> None:
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    await reader.read()
    over.set()


def ready() -> None:
    """Tell whoever started this that it works."""
    sys.stdout.write(READY)
    sys.stdout.flush()
