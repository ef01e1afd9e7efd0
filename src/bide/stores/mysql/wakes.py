"""Noticing what others commit: a watch on the position of the redo log.

MySQL has no notifications. But every write to the server, by any program, moves the position of its redo log, which one
cheap statement reads. So a process with listeners reads it every `POLL`, and reads the next wakes of their topics only
if it has moved. A commit becomes visible a moment after it was logged, so the next reading reads them once more.

Without a working watch, workers poll. While it works they still look at each topic once a second, for tasks whose
transaction was open for long, and for expired leases.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from typing import Any

from bide.core.errors import StoreError
from bide.core.instants import Millis
from bide.core.records import Topic
from bide.stores.batches import slices
from bide.stores.mysql.connection import Call
from bide.stores.mysql.queries import Code, numbered
from bide.stores.sql.leasing import POLL, SLACK

_log = logging.getLogger("bide.mysql")
_AT_ONCE = 1_000
"""Topics in one statement."""


async def log_position(call: Call) -> int:
    """The position of the redo log in bytes; 0 if the server does not tell it, as MySQL before 8.0.30."""
    rows = await call.ask("log_position")
    return int(rows[0][1]) if rows else 0


class CommitWatch:
    """Runs while the store has listeners and goes by the server's clock. Belongs to one event loop."""

    def __init__(self, runtime: Any) -> None:
        self._runtime = runtime
        self._task: asyncio.Task[None] | None = None
        self._usable: bool = runtime.by_server
        self._positions = (0, 0)
        """The last two positions of the log."""
        self._topics: set[Topic] = set()
        self._parts: list[tuple[Sequence[Topic], Code]] = []
        self._heads: dict[Topic, Millis] = {}
        self._read_at: Millis = runtime.about(0)

    def start(self) -> None:
        if self._usable and (self._task is None or self._task.done()):
            self._task = asyncio.get_running_loop().create_task(self._run(), name="bide commit watch")

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        failed = False
        try:
            while self._runtime.listeners:
                began = time.monotonic()
                late = asyncio.get_running_loop().call_later(SLACK / 1000, self._works, False)
                try:
                    await self._runtime.connections["read"].read(self._look)
                except StoreError as error:
                    if not failed:
                        _log.info("the position of the redo log cannot be read, so workers poll: %s", error)
                    failed, self._positions = True, (0, 0)
                else:
                    failed = False
                finally:
                    late.cancel()
                if not self._usable:
                    _log.info("this server does not tell the position of its redo log, so workers poll")
                    break
                self._works(not failed)
                await asyncio.sleep(max(POLL / 1000, time.monotonic() - began))
        finally:
            self._works(False)

    def _works(self, works: bool) -> None:
        self._runtime.look_every = SLACK if works else POLL

    async def _look(self, call: Call) -> None:
        """Read the position of the log. If it has moved, read each topic's next wake, and notify of the new ones.

        One seek per topic. A scan begins where those of leases do: two readings back, since a task that wakes at once
        is committed after that time, unless its transaction was open for longer.
        """
        runtime, about = self._runtime, self._runtime.about(0)
        position = await log_position(call)
        self._usable = position > 0
        if self._usable and self._positions != (position, position):
            heads: dict[Topic, Millis] = {}
            for part, wanted in self._wanted():
                rows = await call.ask("next_wakes", floor=self._read_at - POLL, wanted=wanted)
                heads.update((part[place], wake) for place, wake in rows)
            new = {topic: wake for topic, wake in heads.items() if self._heads.get(topic) != wake}
            self._heads, self._positions = heads, (self._positions[1], position)
            runtime.notify(new)
        self._read_at = about

    def _wanted(self) -> list[tuple[Sequence[Topic], Code]]:
        """The topics with listeners, in parts for one statement each."""
        topics = self._runtime.listeners.topics()
        if topics != self._topics:
            self._topics = topics
            self._parts = [(part, numbered(part)) for part in slices(sorted(topics), _AT_ONCE)]
        return self._parts
