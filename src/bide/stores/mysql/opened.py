"""What an open store has: its lanes, who listens, its transactions, and what it knows of the server."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar
from uuid import uuid4

from bide.core.instants import Millis
from bide.core.records import Topic
from bide.stores.aside import Aside
from bide.stores.batches import Conflicts
from bide.stores.floors import Floors
from bide.stores.held import Held, HeldTasks, is_among
from bide.stores.listeners import Listeners
from bide.stores.mysql import leasing
from bide.stores.mysql.address import Address
from bide.stores.mysql.depths import Depths
from bide.stores.mysql.ear import POLL, Ear
from bide.stores.mysql.joined import Identity, Joins, identity_of
from bide.stores.mysql.lane import Call, Lane
from bide.stores.mysql.leased_rows import LeasedRows
from bide.stores.mysql.past import Name, go_past
from bide.stores.mysql.transactions import Transactions
from bide.stores.server_time import ServerTime

_log = logging.getLogger("bide.mysql")
LANES = ("add", "change", "settle", "lease", "extend", "read", "keep", "held", "whole")
T = TypeVar("T")


class Opened:
    """What an open store has. Made by `open`, let go of by `close`."""

    def __init__(self, address: Address, *, by_server: bool, patience: float, silence: float) -> None:
        self.time = ServerTime()
        self.name = uuid4().hex[:16]
        self.lanes = {
            kind: Lane(
                f"{self.name}:{kind}", address, patience=patience, silence=silence,
                time=self.time if by_server else None,
            )
            for kind in LANES
        }  # fmt: skip
        self.listeners = Listeners(_log)
        self.held = HeldTasks(self.lanes["held"], address.shown)
        self.locked: dict[Name, int] = {}
        """The tasks that somebody keeps locked, and how many calls about each are tried again."""
        self.floors = Floors(used=by_server, slack=POLL)
        self.depths = Depths(used=by_server, beside=self._look_whole)
        self.aside = Aside(_log)
        self.expected = leasing.Expected()
        self.ear = Ear(
            address, self.listeners, used=by_server, floor=self.floors.floor,
            now=lambda: int(self.time.seconds() * 1000), tell=self.tell,
        )  # fmt: skip
        self.conflicts = Conflicts()
        self.leased = LeasedRows()
        self.loop = asyncio.get_running_loop()
        self.identity: Identity | None = None
        self.joins: Joins
        self.transactions: Transactions

    def tried_again(self, asked: Sequence[Any], answers: list[Any], ask: Any, *, patience: float) -> list[Any]:
        """`answers` with a future in the place of each that says Held."""
        if not is_among(Held, answers):
            return answers
        names = [(one.topic, one.key) for one, answer in zip(asked, answers, strict=True) if type(answer) is Held]

        async def past(lane: Lane, part: Sequence[Any]) -> list[Any]:
            return await go_past(lane, lane, part, ask, waiting=False)

        apart = self.held.answers(asked, answers, past, patience=patience)
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

    async def look(self) -> None:
        """Which server this is."""

        async def work(call: Call) -> None:
            [[row]] = await call.send(call.write("identity"))
            self.identity = identity_of(row)
            self.joins.queries = call.queries

        await self.lanes["read"].read(work)

    async def is_this(self, identity: Identity) -> bool:
        """Whether a connection to `identity` is to this server; looked up anew, for it may be another by now."""
        if identity != self.identity:
            await self._here(self.look())
        return identity == self.identity

    async def reserve(self, now: Millis, most: int) -> int:
        """The first of so many tokens, where the caller's clock counts."""

        async def work(call: Call) -> int:
            [[(_, micros)]] = await call.send(*call.begin(now, most), call.write("clock"), *call.commit())
            return int(micros)

        return await self._here(self.lanes["keep"].read(work))

    async def _here(self, work: Coroutine[Any, Any, T]) -> T:
        """On our own loop, also for a synchronous verb, which is in a thread of its own."""
        try:
            running: object = asyncio.get_running_loop()
        except RuntimeError:
            running = None
        if running is self.loop:
            return await work
        return asyncio.run_coroutine_threadsafe(work, self.loop).result()

    def tell(self, wakes: Mapping[Topic, Millis]) -> None:
        """What was committed in this process, or seen there, and wakes then."""
        self.floors.told(wakes)
        self.depths.told(wakes)
        self.expected.told(wakes)
        for topic, wake in wakes.items():
            self.listeners.tell(topic, wake)

    async def close(self) -> None:
        await self.ear.close()
        await self.aside.close()
        await self.transactions.close()
        await self.held.close()
        for lane in self.lanes.values():
            await lane.close()
