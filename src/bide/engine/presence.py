"""The live workers and their topics, the tasks that each holds, and how notifications arrive here."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from msgspec import Struct

from bide.core.errors import BadInput, SetupError
from bide.core.names import new_id
from bide.core.records import Filter, Page, State, Topic
from bide.engine.client import Client
from bide.ports import Instrument, Shares, Wakes

MOST_HELD = 1_000
"""Leased tasks that one look goes through."""
_FIRST_PAGE = 20
_PAGE = 200
_PAGE_BYTES = 1 << 20
"""Payloads are read along: pages are as long as these let them be."""
_MOST_BYTES = 4 << 20
_LATELY = 600.0
"""Seconds for which a missed wake-up is worth a warning."""


class Held(NamedTuple):
    """The tasks of one topic that one holder has."""

    number: int
    lost: int
    """Those of them whose lease has run out: the holder has died, or hangs."""


class Holding(Struct, frozen=True):
    """The leased tasks, by holder and topic."""

    by: Mapping[tuple[str, Topic], Held]
    whole: bool
    """True if all leases were read; if not, those that end first were."""


class Channel(Struct, frozen=True):
    """How this process hears of earlier wakes."""

    notifies: bool
    """False: the store cannot tell; who waits asks again and again."""
    loops: int
    """Loops that listen, or did."""
    heard: int
    """Wake-ups so far."""
    heard_ago: float | None
    """Seconds since the last; None: none yet."""
    missed: int
    """Of which it is known that they were lost: each has cost lateness of one sleep at most."""
    missed_lately: bool


class WakeChannel(Instrument):
    """Counts the wake-ups of the loops of one process: attach it to the app before that is opened."""

    def __init__(self) -> None:
        self._wakes: list[Wakes] = []
        self._missed = 0
        self._missed_at: float | None = None

    def working(self, wakes: Wakes) -> None:
        self._wakes.append(wakes)

    def look(self, *, notifies: bool) -> Channel:
        """How it is now. `notifies`: whether the store is one that can tell."""
        now = time.monotonic()
        missed = sum(one.missed for one in self._wakes)
        if missed > self._missed:
            self._missed, self._missed_at = missed, now
        heard_at = max((one.heard_at for one in self._wakes if one.heard_at is not None), default=None)
        return Channel(
            notifies, len(self._wakes), sum(one.tidings for one in self._wakes),
            None if heard_at is None else now - heard_at, missed,
            self._missed_at is not None and now - self._missed_at < _LATELY,
        )  # fmt: skip


class Presence:
    """Asks an open client's store who works. Raises StoreError."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._asker = f"looks on: {new_id()[-8:]}"
        """A reader is asked for a name too, though it announces nothing; no worker has one like this."""

    async def workers(self) -> Mapping[str, Sequence[Topic]] | None:
        """Those that said within the last seconds that they live, with their topics; None: that is not to be had."""
        store, now = self._client.store, self._client.clock.now()
        if not isinstance(store, Shares):
            return None
        try:
            return await store.announce(self._asker, [], now, now=now)
        except (BadInput, SetupError):  # a service says so to whoever may not work
            return None

    async def holding(self, topics: Sequence[Topic], *, whole: bool) -> Holding:
        """The leases of these topics, some of each; at most `MOST_HELD` tasks are read, and some MB.

        `whole`: whether nothing is leased of other topics.
        """
        by: dict[tuple[str, Topic], Held] = {}
        read, number = 0, 0
        share = max(_FIRST_PAGE, MOST_HELD // max(len(topics), 1))
        for place, topic in enumerate(topics):
            if place * share >= MOST_HELD or read > _MOST_BYTES:
                return Holding(by, False)
            where = Filter(topic=topic, state=State.LEASED)
            looked, limit, cursor = 0, min(_FIRST_PAGE, share), None
            while True:
                found = await self._client.find_page(where, Page(limit=limit, cursor=cursor))
                now = self._client.clock.now()
                for record in found.tasks:
                    before = by.get((record.holder or "", topic), Held(0, 0))
                    by[record.holder or "", topic] = Held(before.number + 1, before.lost + (record.wake_at <= now))
                    read += len(record.payload)
                looked, number, cursor = looked + len(found.tasks), number + len(found.tasks), found.cursor
                if cursor is None:
                    break
                if looked >= share or read > _MOST_BYTES:
                    whole = False
                    break
                size = max(read // max(number, 1), 1)
                limit = max(1, min(_PAGE, share - looked, _PAGE_BYTES // size))
        return Holding(by, whole)
