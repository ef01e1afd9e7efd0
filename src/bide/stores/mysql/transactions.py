"""MySQL's part of the transactions that a handler's statements take part in: text is text on their connections."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bide.core.instants import Millis
from bide.core.records import Settlement
from bide.stores.mysql.connecting import connect
from bide.stores.mysql.joined import JoinedVerbs
from bide.stores.mysql.journaled_connection import Call
from bide.stores.mysql.leased_rows import Settling
from bide.stores.mysql.queries import THERE_ANYWHERE
from bide.stores.mysql.statements import Code, in_hexadecimal
from bide.stores.sql.transactions import Lent, Own, OwnTransactions, ended

_IN_TRANSACTION = 1
"""The bit of the server's status that says so, as of its last answer."""


class OwnTransaction(Own, JoinedVerbs):
    """The verbs while the transaction is open."""

    def __init__(self, runtime: Any, connection: Any) -> None:
        super().__init__(runtime, connection)
        self.settled: list[Settling] = []
        """The tasks it has settled, once it is committed."""

    async def settle(self, outcomes: Sequence[Settlement], *, now: Millis) -> list[bool]:
        known = self._runtime.leased.of(outcomes)
        answers = await super().settle(outcomes, now=now)
        self.settled.append(known)
        return answers


class Transactions(OwnTransactions):
    """On asyncmy's connections."""

    async def _connect(self, name: str) -> Lent:
        return Lent(await connect(self._address, within=self._silence, plain=True), name)

    async def _begin(self, lent: Lent) -> None:
        lent.connection.check_writable(self._address.shown)
        await lent.connection.begin()

    async def _mark(self, lent: Lent) -> None:
        if lent.connection.usable and not lent.connection.driver.server_status & _IN_TRANSACTION:
            raise ended(self._address.shown)
        kept = self._runtime.joined_queries["keep_transaction"].write(
            in_hexadecimal, me=lent.name, number=lent.number, there=Code(THERE_ANYWHERE.encode())
        )
        await lent.connection.ask(kept)

    async def _marked(self, lent: Lent) -> int:
        async def look(call: Call) -> int:
            [rows] = await call.send(call.write("repeated", me=lent.name))
            return int(rows[0][0]) if rows else 0

        return int(await self._keep.repeat(look))

    def _joined(self, lent: Lent) -> OwnTransaction:
        return OwnTransaction(self._runtime, lent.connection.driver)

    def _done(self, joined: OwnTransaction) -> None:
        self._runtime.leased.settled(joined.settled)
        super()._done(joined)
