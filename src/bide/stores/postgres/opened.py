"""What an open store has: its lanes, its ear, its transactions, and what it knows of the server."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from functools import partial
from uuid import uuid4

from bide.core.instants import Millis
from bide.core.records import Topic
from bide.stores.aside import Aside
from bide.stores.batches import Conflicts, merge_earliest
from bide.stores.floors import SLACK, Floors
from bide.stores.held import HeldTasks
from bide.stores.postgres import leasing, schema
from bide.stores.postgres.address import Address
from bide.stores.postgres.bounds import Asked, Bounds
from bide.stores.postgres.joined import SAMPLES, Identity, Joins
from bide.stores.postgres.lane import Call, Lane
from bide.stores.postgres.purging import Purging
from bide.stores.postgres.queries import Names, queries_of
from bide.stores.postgres.transactions import Transactions
from bide.stores.postgres.wakes import Hearing, Telling
from bide.stores.server_time import ServerTime

_log = logging.getLogger("bide.postgres")
_SLACK: Millis = 100
"""The slack of the floors where wakes are heard: then who committed late has told of it, whatever is looked for."""
LANES = ("add", "change", "settle", "lease", "extend", "held", "read", "keep", "whole")


class Opened:
    """What an open store has. Made by `open`, let go of by `close`."""

    def __init__(self, address: Address, *, by_server: bool, patience: float, silence: float, cap: Millis) -> None:
        self.names = Names(address.schema, address.prefix)
        self.time = ServerTime()
        self.name = uuid4().hex[:16]
        queries = queries_of(address.schema, address.prefix)
        self.lanes = {
            kind: Lane(
                f"{self.name}:{kind}", address, queries, patience=patience, silence=silence,
                time=self.time if by_server else None, passes=kind == "held",
            )
            for kind in LANES
        }  # fmt: skip
        self.held = HeldTasks(self.lanes["held"], address.shown)
        self.telling = Telling(cap)
        self.hearing = Hearing(address, self.names.channel, self.name, self.lanes["keep"], patience=silence)
        self.floors = Floors(used=by_server, slack=SLACK if address.pooled else _SLACK)
        self.bounds = Bounds(used=by_server and not address.pooled, beside=self._look_whole)
        self.aside = Aside(_log)
        self.purging = Purging(used=by_server)
        self.hearing.told = self._told
        self.conflicts = Conflicts()
        self.loop = asyncio.get_running_loop()
        self.identity: Identity = (0, 0)
        self.joins: Joins
        self.transactions: Transactions
        self.raised: Millis = -1
        """Where the caller's clock counts: up to when the counter of tokens is known to have been raised."""

    def _told(self, wakes: Mapping[Topic, Millis]) -> None:
        self.floors.told(wakes)
        self.bounds.told(wakes)

    def _look_whole(self, asked: Asked) -> bool:
        return self.aside.run(partial(leasing.look_whole, self.lanes["whole"], self.bounds, asked))

    async def look(self, address: Address | None = None) -> None:
        """Which database this is; with an address also whether its schema is the one that this code works with."""

        async def work(call: Call) -> None:
            await call.begin()
            if address is not None:
                await schema.check(call.connection, address)
            [(database, started, *_)] = await call.fetch("identity", *SAMPLES)
            await call.commit()
            self.identity = database, started

        await self.lanes["read"].read(work)

    async def is_this(self, identity: Identity) -> bool:
        """Whether a connection to `identity` is to this database; looked up anew if the server was started again."""
        if identity != self.identity:
            try:
                running: object = asyncio.get_running_loop()
            except RuntimeError:
                running = None
            if running is self.loop:
                await self.look()
            else:  # a synchronous verb, in a thread of its own
                asyncio.run_coroutine_threadsafe(self.look(), self.loop).result()
        return identity == self.identity

    async def close(self) -> None:
        await self.aside.close()
        await self.held.close()
        await self.transactions.close()
        await self.hearing.close()
        for lane in self.lanes.values():
            await lane.close()


class Told:
    """The wakes of one call: which messages go with it, and what to say in this process once it is done."""

    def __init__(self, opened: Opened, now: Callable[[], Millis]) -> None:
        self._opened = opened
        self._now = now
        self._wakes: dict[Topic, Millis] = {}

    def __call__(self, wakes: Mapping[Topic, Millis]) -> list[str]:
        merge_earliest(self._wakes, wakes)
        return self._opened.telling.messages(wakes, self._now())

    def undone(self) -> None:
        self._opened.telling.forget(self._wakes)

    def done(self) -> None:
        if self._wakes:
            self._opened.hearing.tell(self._wakes)
