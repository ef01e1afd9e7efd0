"""What an open store has: its lanes, who listens, its transactions, and what it knows of the server."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from bide.core.instants import Millis
from bide.core.records import Topic
from bide.stores.listeners import Listeners
from bide.stores.mysql import leasing
from bide.stores.mysql.address import Address
from bide.stores.mysql.depths import Depths
from bide.stores.mysql.ear import POLL, Ear
from bide.stores.mysql.joined import identity_of
from bide.stores.mysql.journaled_connection import Call, MySqlConnection
from bide.stores.mysql.leased_rows import LeasedRows
from bide.stores.mysql.past import Name, go_past
from bide.stores.mysql.queries import queries_of
from bide.stores.mysql.schema import SCHEMA
from bide.stores.sql.locked_rows import Ask, LockedRows, RowLocked, is_among
from bide.stores.sql.scan_position import ScanPositions
from bide.stores.sql.store import LANES, ServerOpened

_log = logging.getLogger("bide.mysql")


class Opened(ServerOpened):
    """What an open store has. Made by `open`, let go of by `close`."""

    lanes: dict[str, MySqlConnection]

    def __init__(self, address: Address, *, by_server: bool, patience: float, silence: float) -> None:
        super().__init__(_log)
        self.lanes = {
            kind: MySqlConnection(
                f"{self.name}:{kind}", address, patience=patience, silence=silence,
                time=self.time if by_server else None,
            )
            for kind in LANES
        }  # fmt: skip
        self.listeners = Listeners(_log)
        self.joined_queries = queries_of(address.schema, address.prefix)
        self.held = LockedRows(self.lanes["held"], address.shown)
        self.locked: dict[Name, int] = {}
        """The tasks that somebody keeps locked, and how many calls about each are tried again."""
        self.floors = ScanPositions(used=by_server, slack=POLL)
        self.depths = Depths(used=by_server, beside=self._look_whole)
        self.expected = leasing.Expected()
        self.ear = Ear(
            address, self.listeners, used=by_server, floor=self.floors.floor,
            now=lambda: int(self.time.seconds() * 1000), tell=self.tell,
        )  # fmt: skip
        self.leased = LeasedRows()

    async def past(self, kind: str, part: Sequence[Any], ask: Ask) -> list[Any]:
        return await go_past(self.lanes[kind], self.lanes["held"], part, ask, known=self.locked)

    def tried_again(self, asked: Sequence[Any], answers: list[Any], ask: Ask, *, patience: float) -> list[Any]:
        if not is_among(RowLocked, answers):
            return answers
        names = [(one.topic, one.key) for one, answer in zip(asked, answers, strict=True) if type(answer) is RowLocked]

        async def past(lane: MySqlConnection, part: Sequence[Any]) -> list[Any]:
            return await go_past(lane, lane, part, ask, waiting=False)

        apart = super().tried_again(asked, answers, past, patience=patience)
        for name, future in zip(names, [one for one in apart if isinstance(one, asyncio.Future)], strict=True):
            self.locked[name] = self.locked.get(name, 0) + 1
            future.add_done_callback(partial(self._let_go, name))
        return apart

    def _let_go(self, name: Name, _: object) -> None:
        left = self.locked.pop(name) - 1
        if left:
            self.locked[name] = left

    def _look_whole(self, topics: Sequence[Topic]) -> None:
        self.aside.run(partial(leasing.look_whole, self.lanes["whole"], self.depths, topics))

    async def look(self, address: Address | None = None) -> None:
        async def work(call: Call) -> None:
            if address is not None:
                await SCHEMA.check(call.connection, address)
            [[row]] = await call.send(call.write("identity"))
            self.identity = identity_of(row)
            self.joins.queries = call.queries

        await self.lanes["read"].read(work)

    async def _micros(self, call: Call) -> int:
        [[(micros,)]] = await call.send(call.write("time", there=call.there))
        return int(micros)

    async def reserve(self, now: Millis, most: int) -> int:
        async def work(call: Call) -> int:
            [[(_, micros)]] = await call.send(*call.begin(now, most), call.write("clock"), *call.ending())
            return int(micros)

        return await self.here(self.lanes["keep"].read(work))

    def tell(self, wakes: Mapping[Topic, Millis]) -> None:
        self.floors.told(wakes)
        self.depths.told(wakes)
        self.expected.told(wakes)
        for topic, wake in wakes.items():
            self.listeners.tell(topic, wake)

    async def close(self) -> None:
        await self.ear.close()
        await super().close()
