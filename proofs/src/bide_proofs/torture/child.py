"""A client or a worker process of a run: its spec, its clock, its journal, and an app that opens in the end."""

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
from bide.testing.history.recording import Recording
from bide_proofs.harness.child import Parent, run, spec_of
from bide_proofs.servers.clock import CLOCK_FILE
from bide_proofs.torture.clock import SharedClock
from bide_proofs.torture.topics import app_on

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
    """Of a client: verbs a second."""
    farthest: float = 0.0
    """Of a client: the longest delay that it asks for, in seconds."""
    shares_clock: bool = False
    """Whether its time of day is the store's, as with a file, which has no clock but that of its callers."""


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
