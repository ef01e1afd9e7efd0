"""A process of a run: several callers on one app, or a worker on all topics, until it is told to end, or worse."""

from __future__ import annotations

import asyncio
import logging
import os
import random
import select
import time
from collections.abc import Awaitable, Callable
from itertools import count
from pathlib import Path
from typing import SupportsIndex

import msgspec

from bide.core.errors import StoreError, StoreMismatch
from bide.testing.history.journal import Journal, Log
from bide.testing.history.recording import RecordedClient, Recording
from bide_proofs.harness.processes import Parent, ready, run, spec_of
from bide_proofs.servers.clock import CLOCK_FILE
from bide_proofs.torture.clock import SharedClock
from bide_proofs.torture.load import CALLERS, Caller
from bide_proofs.torture.topics import app_on, handle

_AGAIN = 0.2
"""Seconds after which a store is opened again that is away."""


class Spec(msgspec.Struct, frozen=True, kw_only=True):
    """The first line of its standard input."""

    url: str
    name: str
    journal: str
    clock: str
    first_call: int
    seed: str
    rate: float = 0.0
    """Of a client: verbs a second. A worker asks nothing."""
    farthest: float = 0.0
    """Of a client: the longest delay that it asks for, in seconds."""
    shares_clock: bool = False
    """True if its time of day is the store's, as with a file, which has no clock but that of its callers."""


class Actor:
    """One process, with an app on the store that writes down what it does."""

    def __init__(self, spec: Spec) -> None:
        self.spec = spec
        self.chance = random.Random(spec.seed)
        self.clock = SharedClock(Path(spec.clock))
        if spec.shares_clock:
            self.clock.become_ours()
        self.journal = Journal(
            Log(Path(spec.journal)).say, time_ns=time.monotonic_ns, clock=self.clock.now, calls=count(spec.first_call)
        )
        self.app = app_on(spec.url)
        self.app.instruments.append(Recording(self.journal, spec.name))

    async def until_open(self, open_: Callable[[], Awaitable[object]], over: asyncio.Event) -> bool:
        """Open the store, again while it is away; True if it is open before all is over."""
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


async def _ask(actor: Actor, parent: Parent) -> None:
    spec = actor.spec
    if not await actor.until_open(actor.app.open, parent.over):
        return
    ready()
    callers = [
        Caller(
            RecordedClient(actor.app, actor.journal, f"{spec.name}/{number}"), actor.clock,
            random.Random(f"{spec.seed}/{number}"), spec.farthest,
        )
        for number in range(CALLERS)
    ]  # fmt: skip
    await asyncio.gather(*(caller.run(spec.rate / CALLERS, parent.over) for caller in callers))
    await actor.app.close()


async def _work(actor: Actor, parent: Parent) -> None:
    handle(actor.app, actor.chance)
    worker = actor.app.worker()
    if await actor.until_open(worker.__aenter__, parent.over):
        try:
            ready()
            await parent.over.wait()
        finally:
            await worker.__aexit__()


def main(act: Callable[[Actor, Parent], Awaitable[None]]) -> None:
    """Read the spec, and act until the parent says that it is over."""
    spec = spec_of(Spec)
    if CLOCK_FILE in os.environ:
        # libfaketime refuses what time.sleep asks for, which is a sleep by the monotonic clock until an instant
        time.sleep = _sleep
    logging.basicConfig(level=logging.ERROR, format="%(name)s: %(message)s")
    logging.getLogger().handlers[0].addFilter(_is_a_defect)
    run(lambda parent: act(Actor(spec), parent))


def _sleep(seconds: SupportsIndex | float, /) -> None:
    select.select([], [], [], float(seconds))


def _is_a_defect(record: logging.LogRecord) -> bool:
    """That a task is dead, or could not be settled while the store was away, is what is to be expected here."""
    return record.exc_info is not None or record.name not in ("bide.worker", "bide.settler")


if __name__ == "__main__":
    main(lambda actor, parent: (_ask if actor.spec.rate else _work)(actor, parent))
