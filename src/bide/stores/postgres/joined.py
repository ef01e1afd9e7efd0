"""The verbs in a transaction that is the caller's: task and data are committed together, or not at all.

Each verb is the very operation that a lane runs, within a savepoint: done whole or not at all, and the transaction
around it can go on. Three things are different from our own connections. The call has no number, since it needs none:
whether it was done is whether that transaction was committed. A lock on the counter of tokens is let go at once. And
the planner is not told what to avoid, since that would hold for the caller's statements too. Its plans are right
without, even for a table that nobody has analyzed, if they are made for the size that the table has: so each is made
anew, and not kept from the day when the table was empty.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from bide.core.answers import Answer
from bide.core.errors import BadInput, BideError, OutcomeUnknown, SetupError, StoreUnavailable
from bide.core.instants import Millis
from bide.core.records import Change, Filter, Found, NewTask, Page, Record, Ref, Settlement, Topic
from bide.stores.batches import merge_earliest, slices
from bide.stores.borrowed import Borrowed, Driver
from bide.stores.postgres import adding, operations, reading
from bide.stores.postgres.errors import Locked, Lost, by_code, meaning, said
from bide.stores.postgres.lane import Call, Row, Work
from bide.stores.whole import Known, Whole

T = TypeVar("T")
Identity = tuple[int, int]
"""Of a database: its number on its server, and when that server was started, to the microsecond."""

SAMPLES: Sequence[Any] = (
    ["a\u00e9", None], [1 << 62, None], [True, False], [b"\x00\xff", None], "a\u00e9", b"\x00\xff", -1,
)  # fmt: skip
_UNUSABLE = {
    "25P02": "an earlier statement of its transaction failed: roll that back",
    "25006": "its transaction is read-only",
}
_FIRST = (
    "SELECT set_config('bide.plans', current_setting('plan_cache_mode'), true), "
    "set_config('bide.patience', current_setting('lock_timeout'), true)",
    "SET LOCAL plan_cache_mode = force_custom_plan",
    "SELECT set_config('lock_timeout', '10s', true) "
    "WHERE current_setting('lock_timeout')::interval NOT BETWEEN '1 ms' AND '10 s'",
)
"""What holds for a verb: its plans, and that it waits for a lock so long at most; the caller may have said less."""
_LAST = (
    "SELECT set_config('plan_cache_mode', current_setting('bide.plans'), true), "
    "set_config('lock_timeout', current_setting('bide.patience'), true)",
)
ACCEPTED = (
    "an open connection to the store's own database, by asyncpg, psycopg (3), SQLAlchemy (a Connection or a Session, "
    "synchronous or not, over one of these two) or Django (over psycopg 3)"
)


class JoinedCall(Call):
    """A call within a transaction that is not ours: without a number, and nothing to begin or to commit."""

    __slots__ = ("_driver",)

    def __init__(self, driver: Driver, queries: Mapping[str, str]) -> None:
        self._driver = driver
        self.queries = queries
        self.connection = driver.raw
        self.number = None  # type: ignore[assignment]
        self.sent = self.begun = False

    @property
    def caller(self) -> str:
        return None  # type: ignore[return-value]

    async def fetch(self, query: str, *arguments: Any) -> list[Any]:
        return await self._driver.run(self.queries[query], arguments)  # type: ignore[return-value]

    async def timed(self, query: str, *arguments: Any) -> list[Any]:
        return await self.fetch(query, *arguments)

    async def begin(self, how: str = "") -> None:
        """It has begun."""

    async def commit(self) -> None:
        """Whoever began it will."""


class Joins:
    """What the verbs have of the open store."""

    def __init__(
        self,
        where: str,
        queries: Mapping[str, str],
        *,
        now: Callable[[Millis], Millis | None],
        about: Callable[[Millis], Millis],
        tell: Callable[[Mapping[Topic, Millis], Millis], list[str]],
        identity: Callable[[Identity], Awaitable[bool]],
    ) -> None:
        """`identity`: whether this is the store's own database."""
        self.where = where
        self.queries = queries
        self.now = now
        self.about = about
        self.tell = tell
        self.identity = identity
        self.known: WeakKeyDictionary[Any, Known] = WeakKeyDictionary()


class JoinedVerbs:
    """The verbs on one connection. Each is done whole or not at all, and leaves the transaction around it as it is."""

    passes = False

    def __init__(self, joins: Joins, connection: Any) -> None:
        self._joins = joins
        self._connection = connection
        self.wakes: dict[Topic, Millis] = {}
        """What this transaction makes wake earlier, to be told once it is committed."""

    @property
    def connection(self) -> Any:
        """The connection, for statements of your own."""
        return self._connection

    async def add(self, tasks: Sequence[NewTask], *, now: Millis) -> list[Answer]:
        return await self._write(adding.add, tasks, now)

    async def change(self, changes: Sequence[Change], *, now: Millis) -> list[Answer]:
        return await self._write(operations.change, changes, now)

    async def settle(self, outcomes: Sequence[Settlement], *, now: Millis) -> list[bool]:
        return await self._write(operations.settle, outcomes, now)

    async def get(self, refs: Sequence[Ref]) -> list[Record | None]:
        return await reading.get(self, refs) if refs else []

    async def find(self, where: Filter, page: Page) -> Found:
        return await reading.find(self, where, page)

    async def _write(self, operation: Any, asked: Sequence[Any], now: Millis) -> list[Any]:
        joins = self._joins
        about = joins.about(now)
        wakes: dict[Topic, Millis] = {}

        def tell(some: Mapping[Topic, Millis]) -> list[str]:
            merge_earliest(wakes, some)
            return joins.tell(some, about)

        whole = _Whole()
        answers: list[Any] = []

        async def work(call: Call) -> None:
            whole.call = call
            for part in slices(asked):
                answers.extend(await operation(whole, part, joins.now(now), about, tell))

        if asked:
            await self._savepoint(work, adding=operation is adding.add)
        merge_earliest(self.wakes, wakes)
        return answers

    # --- as a lane

    async def run(
        self,
        work: Work[T],
        repeated: Callable[[Row, Call], Awaitable[T]],
        *,
        past: Work[T] | None = None,
        adding: bool = False,
    ) -> T:
        return await self._savepoint(work, adding=adding)

    async def read(self, work: Work[T]) -> T:
        return await self._savepoint(work)

    async def _savepoint(self, work: Work[T], *, adding: bool = False) -> T:
        """`work`, whole or not at all."""
        whole: Whole | None = None
        try:
            driver = await self._driver()
            known = self._joins.known.setdefault(driver.raw, Known(asynchronous=driver.asynchronous))
            async with known.turn:
                whole = Whole(driver, first=_FIRST, last=_LAST)
                async with whole:
                    if not known.ours:
                        await self._look(driver)
                        known.ours = True
                    return await work(JoinedCall(driver, self._joins.queries))
        except Exception as error:
            found = self._meaning(error, adding=adding, committing=whole is not None and whole.committing)
            if found is error:
                raise
            raise found from error

    async def _driver(self) -> Driver:
        raise NotImplementedError

    async def _look(self, driver: Driver) -> None:
        """Whether it is a connection to the store's own database, and gives what our statements take. BadInput."""
        [row] = await driver.run(self._joins.queries["identity"], SAMPLES)
        database, started, has_tables, *came = row
        if list(came) != list(SAMPLES):
            raise BadInput(
                "connection",
                self._connection,
                "a connection whose codecs leave text, bytea, bigint, boolean and arrays of them as they are",
            )
        if not has_tables or not await self._joins.identity((database, started)):
            raise BadInput(
                "connection", self._connection, f"{ACCEPTED}: this one is to another database than {self._joins.where}"
            )

    def _meaning(self, error: Exception, *, adding: bool, committing: bool) -> Exception:
        where = self._joins.where
        code = getattr(error, "sqlstate", None)
        kind = type(error).__name__
        if isinstance(code, str) and code in _UNUSABLE:
            return SetupError(f"{where}: the connection cannot be used now: {_UNUSABLE[code]}")
        if type(error).__module__.partition(".")[0] == "psycopg":
            found: Exception
            if isinstance(code, str):
                found = by_code(code, f"{where}: {error}", adding=adding)
            elif kind == "DataError":
                found = BadInput("task", str(error), "text without NUL or lone surrogates, and integers of 64 bits")
            elif kind == "OperationalError":
                found = Lost(f"{where}: {said(error)}")
            else:
                found = SetupError(f"{where}: the connection cannot be used: {said(error)}")
        elif kind == "InterfaceError":
            found = SetupError(f"{where}: the connection cannot be used: {said(error)}")
        else:
            found = meaning(error, where, adding=adding)
        if isinstance(found, Lost):
            text = f"{found}; its transaction is gone with it"
            return OutcomeUnknown(str(found)) if committing else StoreUnavailable(text)
        if isinstance(found, Locked):
            return StoreUnavailable(f"{found}: another transaction holds the task; nothing was done")
        if found is not error and not isinstance(found, BideError):
            return StoreUnavailable(f"{found}; nothing was done: begin the transaction anew")
        return found


class _Whole:
    """A lane for an operation that is within one savepoint already."""

    passes = False
    call: Call

    async def run(
        self,
        work: Work[T],
        repeated: Callable[[Row, Call], Awaitable[T]],
        *,
        past: Work[T] | None = None,
        adding: bool = False,
    ) -> T:
        return await work(self.call)

    async def read(self, work: Work[T]) -> T:
        return await work(self.call)


class CallersConnection(JoinedVerbs):
    """The verbs on a connection that the caller opened, in whatever transaction it is in.

    If it is in none, and none begins by itself with a statement, the verb is one of its own.
    """

    def __init__(self, joins: Joins, lent: Borrowed) -> None:
        super().__init__(joins, lent.given)
        self._lent = lent

    async def _driver(self) -> Driver:
        driver = await self._lent.driver()
        if type(driver).__name__ not in ("AsyncpgDriver", "PsycopgDriver"):
            raise BadInput("connection", self._connection, ACCEPTED)
        if driver.closed:
            raise SetupError(f"{self._joins.where}: the connection is closed")
        return driver
