"""Calls to MySQL or MariaDB, each on the connection for its kind; see `sql.journaled_connection`.

Where the primary is away a replica answers what is read, which may be behind.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from bide.core.errors import StoreMismatch
from bide.core.instants import Millis
from bide.core.records import Topic
from bide.stores.mysql.address import Address
from bide.stores.mysql.dialect import MYSQL, Connection, Rows, connect
from bide.stores.mysql.queries import THERE, Code, Quote, listed, queries_of, quoted, tuples
from bide.stores.sql.dialect import NotSent
from bide.stores.sql.journaled_connection import JournaledConnection, NumberedCall

_SECOND_BEST = 1.0
"""Seconds that a connection to a replica is read from, before it is looked whether the primary is there again."""
_BETWEEN = b"; "
_topics = msgspec.json.Decoder(list[Topic])


class Repeated(NamedTuple):
    """The caller's row of a call that was done before."""

    now: Millis
    micros: int
    answer: bytes | None


class Call(NumberedCall):
    """One call on its way: packets of statements, with values written into those of `queries.sql`."""

    __slots__ = ("_ahead",)
    utc = True
    """True if the time zone of the connection is UTC."""
    quote: Quote = staticmethod(quoted)
    there = Code(THERE.encode())
    packed = staticmethod(msgspec.json.encode)

    def __init__(self, *of: Any) -> None:
        super().__init__(*of)
        self._ahead: tuple[bytes, ...] = ()

    def write(self, query: str, **values: Any) -> bytes:
        """A named query with its values."""
        written: bytes = self.queries[query].write(self.quote, **values)
        return written

    def begin(self, now: Millis | None, most: int = 0) -> list[bytes]:
        """The statements that open a transaction and say what time it is, :now or the server's.

        `most`: how many tokens above the clock may be given out.
        """
        if now is None:
            return [self.write("begin"), *self.read_clock(None)]
        return [
            self.write("begin"),
            self.write("raise_floor", now=now, most=most),
            self.write("take_floor", now=now, most=most),
        ]

    def read_clock(self, now: Millis | None) -> list[bytes]:
        """The time for the statements that follow."""
        return [self.write("read_clock", there=self._there(now)), self.write("tell_clock")]

    def look_at_clock(self, now: Millis | None) -> bytes:
        """The statement that tells the time to the caller alone."""
        return self.write("look_at_clock", there=self._there(now))

    def _there(self, now: Millis | None) -> Code | int:
        return self.there if now is None else now * 1000

    def pass_gate(self, micros: int | Code, answer: bytes | None = None) -> list[bytes]:
        """The statements that end a call if it is new, and fail if it is not. `micros`: its highest token."""
        values = {"me": self.caller, "number": self.number, "micros": micros, "answer": answer}
        return [self.write("pass_gate", **values), self.write("gate"), self.write("commit")]

    def ending(self) -> list[bytes]:
        """The statements that commit what is not numbered."""
        return [self.write("commit")]

    async def begin_snapshot(self) -> None:
        """Show one state of the database to what is asked from now on. It takes no round trip of its own."""
        self._ahead = self.write("snapshot"), self.write("begin_snapshot")

    async def commit(self) -> None:
        await self.send(*self.ending())

    async def send(
        self, *statements: bytes, commits: bool = False, meanwhile: Callable[[], object] | None = None
    ) -> list[Rows]:
        """One packet; the rows of each statement that has any. `meanwhile`: what to do until the answer comes."""
        self.sent = self.sent or commits
        if self._ahead:
            statements, self._ahead = (*self._ahead, *statements), ()
        found: list[Rows] = await self.connection.ask(_BETWEEN.join(statements), meanwhile)
        return found

    async def timed(
        self, *statements: bytes, commits: bool = False, meanwhile: Callable[[], object] | None = None
    ) -> list[Rows]:
        """The same, where the first rows are those of the query `clock`."""
        sent = time.monotonic()
        answers = await self.send(*statements, commits=commits, meanwhile=meanwhile)
        if self._of.time is not None:
            self._of.time.saw(answers[0][0][1], sent, time.monotonic())
        return answers

    async def ask(self, query: str, **values: Any) -> Rows:
        answers = await self.send(self.write(query, **values))
        return answers[0] if answers else ()

    async def write_and_ask(self, query: str, values: Mapping[str, Any], then: str) -> Rows:
        """Write, and then the rows of another query, in one packet."""
        [rows] = await self.send(self.write(query, **values), self.write(then))
        return rows

    def lines(self, rows: Sequence[Sequence[Any]]) -> dict[str, Any]:
        """The values of a query that inserts many rows."""
        return {"rows": tuples(rows, self.quote)}

    def listed(self, values: Sequence[Any]) -> Code:
        """The value of a query that is about one of these."""
        return listed(values, self.quote)

    @staticmethod
    def text(data: bytes) -> str:
        return data.decode("utf-8", "replace")

    @staticmethod
    def name(data: bytes) -> str:
        """Read what names a task: what is no UTF-8, by another program's doing, still names it."""
        return data.decode("utf-8", "surrogateescape")

    @staticmethod
    def unpacked(topics: bytes) -> list[Topic]:
        """None of a row that no worker wrote."""
        try:
            return _topics.decode(topics)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return []

    async def introduce(self) -> None:
        await self.ask("new_caller", me=self.caller, there=self.there)


class MySqlConnection(JournaledConnection[Call]):
    """See `sql.journaled_connection`."""

    def __init__(self, name: str, address: Address, **options: Any) -> None:
        super().__init__(name, address, MYSQL, **options)
        self.largest = 0
        """Bytes of a packet that the server takes, once it is known."""

    def queries_on(self, connection: Connection) -> Mapping[str, Any]:
        return queries_of(self._address.schema, self._address.prefix, mariadb=connection.mariadb)

    async def _connect(self) -> Connection:
        connection = await connect(self._address, within=self._silence)
        self.largest = connection.largest
        return connection

    async def _connected(self, *, writes: bool) -> Any:
        connection = await super()._connected(writes=writes)
        if writes:
            connection.check_writable(self._address.shown)
        return connection

    def _fit(self, connection: Connection) -> bool:
        """One to a replica only until it is time to see whether the primary is there again."""
        aging = connection.read_only and len(self._address.hosts) > 1
        return connection.usable and not (aging and time.monotonic() - connection.made_at >= _SECOND_BEST)

    def _call(self, connection: Connection, limit: asyncio.Timeout) -> Call:
        return Call(self, connection, self.queries_on(connection), limit)

    async def _prepare(self, call: Call) -> Repeated | None:
        return await self._look_back(call) if call.again else None

    def _kept(self, row: Any) -> Repeated:
        return Repeated(*row[1:])

    def _meaning(self, error: Exception, call: Call | None, *, adding: bool) -> Exception:
        found = super()._meaning(error, call, adding=adding)
        if isinstance(found, StoreMismatch) and found is not error and call is not None and call.connection.read_only:
            return NotSent(str(found))  # a replica that is just being made, in the place of the primary
        return found
