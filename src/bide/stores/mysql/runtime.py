"""What an open store in MySQL has, beside its connections: who looks for others' commits, and what is leased here."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from types import ModuleType
from typing import Any, ClassVar

from bide.core.instants import Millis
from bide.core.records import Leased, Topic
from bide.ports import Finding, Heard, Listening
from bide.stores.batches import slices
from bide.stores.listeners import Listeners
from bide.stores.mysql import adding, diagnosis, keeping, leasing, operations, reading
from bide.stores.mysql.address import Address
from bide.stores.mysql.connecting import MYSQL
from bide.stores.mysql.depths import Depths
from bide.stores.mysql.ear import POLL, Ear
from bide.stores.mysql.joined import identity_of
from bide.stores.mysql.journaled_connection import Call, MySqlConnection
from bide.stores.mysql.leased_rows import LeasedRows
from bide.stores.mysql.past import Name, go_past
from bide.stores.mysql.queries import queries_of
from bide.stores.mysql.reading import MySqlReads
from bide.stores.mysql.schema import SCHEMA
from bide.stores.mysql.sizes import AT_ONCE, WITH_ERRORS, slices_of_new
from bide.stores.mysql.transactions import Transactions
from bide.stores.sql.locked_rows import Ask, RowLocked, is_among
from bide.stores.sql.runtime import Runtime
from bide.stores.sql.scan_position import ScanPositions


class MySqlRuntime(Runtime):
    dialect = MYSQL
    operations: ClassVar[ModuleType] = operations
    reading: ClassVar[ModuleType] = reading
    reads = MySqlReads
    at_once = AT_ONCE
    _transactions = Transactions

    def __init__(self, address: Address, **options: Any) -> None:
        super().__init__(address, **options)
        self.joined_queries = queries_of(address.schema, address.prefix)
        self.locked: dict[Name, int] = {}
        """The tasks that somebody keeps locked, and how many calls about each are tried again."""
        self.floors = ScanPositions(used=self.by_server, slack=POLL)
        self.depths = Depths(used=self.by_server, beside=self._look_whole)
        self.expected = leasing.Expected()
        self.listeners = Listeners(MYSQL.log)
        self.ear = Ear(
            address, self.listeners, used=self.by_server, floor=self.floors.floor,
            now=lambda: int(self.time.seconds() * 1000), tell=self.tell,
        )  # fmt: skip
        self.leased = LeasedRows()

    def _connection(self, name: str, **options: Any) -> MySqlConnection:
        return MySqlConnection(name, self.address, **options)

    @property
    def largest(self) -> int:
        """Bytes of a packet that the server takes."""
        return int(self.connections["read"].largest)

    def parts(self, kind: str, asked: Sequence[Any]) -> Sequence[Sequence[Any]]:
        if kind == "add":
            return slices_of_new(asked, self.largest)
        errors = kind == "change" or any(one.error for one in asked)
        return slices(asked, WITH_ERRORS if errors else AT_ONCE)

    def operation(self, kind: str) -> Callable[..., Any]:
        operations: dict[str, Callable[..., Any]] = {
            "add": partial(adding.add, conflicts=self.conflicts),
            "change": self.operations.change,
            "settle": partial(self.operations.settle, leased=self.leased),
        }
        return operations[kind]

    async def past(self, kind: str, part: Sequence[Any], ask: Ask) -> list[Any]:
        return await go_past(self.connections[kind], self.connections["held"], part, ask, known=self.locked)

    def tried_again(self, asked: Sequence[Any], answers: list[Any], ask: Ask, *, patience: float) -> list[Any]:
        if not is_among(RowLocked, answers):
            return answers
        names = [(one.topic, one.key) for one, answer in zip(asked, answers, strict=True) if type(answer) is RowLocked]

        async def past(connection: MySqlConnection, part: Sequence[Any]) -> list[Any]:
            return await go_past(connection, connection, part, ask, waiting=False)

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
        self.background.run(partial(leasing.look_whole, self.connections["whole"], self.depths, topics))

    async def look(self, *, check: bool = False) -> None:
        async def work(call: Call) -> None:
            if check:
                await SCHEMA.check(call.connection, self.address)
            [[row]] = await call.send(call.write("identity"))
            self.identity = identity_of(row)
            self.joined_queries = call.queries

        await self.connections["read"].read(work)

    async def _micros(self, call: Call) -> int:
        [[(micros,)]] = await call.send(call.write("time", there=call.there))
        return int(micros)

    async def reserve(self, now: Millis, most: int) -> int:
        async def work(call: Call) -> int:
            [[(_, micros)]] = await call.send(*call.begin(now, most), call.write("clock"), *call.ending())
            return int(micros)

        return int(await self.here(self.connections["keep"].read(work)))

    def tell(self, wakes: Mapping[Topic, Millis]) -> None:
        self.floors.told(wakes)
        self.depths.told(wakes)
        self.expected.told(wakes)
        for topic, wake in wakes.items():
            self.listeners.tell(topic, wake)

    async def lease(self, wants: Mapping[Topic, int], now: Millis, lasts: Millis, holder: str) -> Leased:
        sent = self.loop.time()
        leased = await leasing.lease(
            self.connections["lease"], self.floors, self.depths, self.expected, wants, self.now(now), self.about(now),
            lasts, holder, self.leased,
        )  # fmt: skip
        self.ear.looked(wants, sent)
        return leased

    async def purge(self, now: Millis | None, limit: int) -> int:
        keep = self.connections["keep"]
        purged = await keeping.purge(keep, now, limit)
        await keeping.forget_callers(keep, [connection.name for connection in self.connections.values()])
        return purged

    async def listen(self, topics: Collection[Topic], heard: Heard) -> Listening:
        return self.ear.listen(topics, heard)

    def deaf_to(self, topics: Collection[Topic]) -> bool:
        return not self.ear.hears_of(topics)

    async def diagnose(self) -> list[Finding]:
        return await diagnosis.diagnose(self.connections["keep"], self.address, self.time)

    async def close(self) -> None:
        await self.ear.close()
        await super().close()
