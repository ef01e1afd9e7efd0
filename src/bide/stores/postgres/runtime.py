"""What an open store has: its lanes, its ear, its transactions, and what it knows of the server."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from bide.core.instants import Millis
from bide.core.records import Topic
from bide.stores.batches import merge_earliest
from bide.stores.postgres import leasing
from bide.stores.postgres.address import Address
from bide.stores.postgres.bounds import Asked, Bounds
from bide.stores.postgres.joined import SAMPLES
from bide.stores.postgres.journaled_connection import Call, PostgresConnection
from bide.stores.postgres.purging import Purging
from bide.stores.postgres.queries import Names, queries_of
from bide.stores.postgres.schema import SCHEMA
from bide.stores.postgres.wakes import Hearing, Telling
from bide.stores.sql.locked_rows import Ask, LockedRows, RowLocked
from bide.stores.sql.scan_position import SLACK, ScanPositions
from bide.stores.sql.store import LANES, ServerOpened

_log = logging.getLogger("bide.postgres")
_SLACK: Millis = 100
"""The slack of the floors where wakes are heard: then who committed late has told of it, whatever is looked for."""


class Opened(ServerOpened):
    """What an open store has. Made by `open`, let go of by `close`."""

    lanes: dict[str, PostgresConnection]

    def __init__(self, address: Address, *, by_server: bool, patience: float, silence: float, cap: Millis) -> None:
        super().__init__(_log)
        self.names = Names(address.schema, address.prefix)
        queries = queries_of(address.schema, address.prefix)
        self.lanes = {
            kind: PostgresConnection(
                f"{self.name}:{kind}", address, queries, patience=patience, silence=silence,
                time=self.time if by_server else None, passes=kind == "held",
            )
            for kind in LANES
        }  # fmt: skip
        self.joined_queries = queries_of(address.schema, address.prefix, joined=True)
        self.held = LockedRows(self.lanes["held"], address.shown)
        self.telling = Telling(cap)
        self.hearing = Hearing(address, self.names.channel, self.name, self.lanes["keep"], patience=silence)
        self.floors = ScanPositions(used=by_server, slack=SLACK if address.pooled else _SLACK)
        self.bounds = Bounds(used=by_server and not address.pooled, beside=self._look_whole)
        self.purging = Purging(used=by_server)
        self.hearing.told = self._told
        self.raised: Millis = -1
        """Where the caller's clock counts: up to when the counter of tokens is known to have been raised."""

    def _told(self, wakes: Mapping[Topic, Millis]) -> None:
        self.floors.told(wakes)
        self.bounds.told(wakes)

    def _look_whole(self, asked: Asked) -> bool:
        return self.aside.run(partial(leasing.look_whole, self.lanes["whole"], self.bounds, asked))

    def tell(self, wakes: Mapping[Topic, Millis]) -> None:
        self.hearing.tell(wakes)

    def messages(self, wakes: Mapping[Topic, Millis], about: Millis) -> list[str]:
        return self.telling.within(wakes, about)

    async def look(self, address: Address | None = None) -> None:
        async def work(call: Call) -> None:
            await call.begin()
            if address is not None:
                await SCHEMA.check(call.connection, address)
            [(database, started, *_)] = await call.fetch("identity", *SAMPLES)
            await call.commit()
            self.identity = database, started

        await self.lanes["read"].read(work)

    async def _micros(self, call: Call) -> int:
        [(micros,)] = await call.fetch("time")
        return int(micros)

    async def past(self, kind: str, part: Sequence[Any], ask: Ask) -> list[Any]:
        try:
            return await ask(self.lanes[kind], part)
        except RowLocked as error:  # ALTER TABLE or CREATE INDEX locks the whole table
            return [error] * len(part)

    async def close(self) -> None:
        await self.hearing.close()
        await super().close()


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
