"""Connections to PostgreSQL: the URL, the driver, the meaning of its errors, and the calls of a store.

    postgresql://[user[:password]@]host[:port][,host:port...]/database        postgres:// is the same

`?schema=bide` (the default) is the schema of the tables, and `?prefix=` (default: none) the prefix of their names.
`?pooler=transaction` declares a proxy that gives each transaction another connection (PgBouncer's
`pool_mode = transaction`): then no statement is prepared, and no connection can listen. All other parameters go to the
driver: `sslmode`, `sslrootcert`, `target_session_attrs`, ...

A call is one statement, or a transaction of a few (see `Call`, and `sql.journaled_connection`). While an old
transaction blocks vacuum, no old version of a caller's row can be removed, and each lookup of the row visits all of
them: ten thousand after half a minute, which takes a third of a millisecond, twice per call. So after some calls a
connection switches to a new row, with another name.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any, ClassVar, NamedTuple, Self
from urllib.parse import parse_qsl, urlencode

import asyncpg
from msgspec import Struct

from bide.core.errors import BadInput, StoreCorrupt, StoreMismatch, StoreUnavailable
from bide.core.instants import Millis
from bide.stores.postgres.queries import Names, queries_of
from bide.stores.resending import Lost, NotSent
from bide.stores.sql.dialect import OURS, AlreadyApplied, Dialect, KeyTaken, LockTimeout, Meanings, TransactionConflict
from bide.stores.sql.journaled_connection import JournaledConnection, NumberedCall
from bide.stores.urls import parts_of, unreached

# --- URLs

SCHEMES = ("postgresql", "postgres")
SCHEMA = "bide"
_ACCEPTED = '"postgresql://user:password@host:5432/database", with options such as "?schema=bide&prefix=shop_"'
_SCHEMA = re.compile(r"[a-z_][a-z0-9_]{0,62}")
_PLACE = re.compile(r"(?:\[[0-9A-Fa-f:.%]+\]|[^:\[\]\s]*)(?::(?P<port>[0-9]{1,5}))?")
_PREFIX = re.compile(r"(?:[a-z_][a-z0-9_]{0,39})?")
_NOT_READ = frozenset({
    "channel_binding", "connect_timeout", "gssencmode", "keepalives", "keepalives_count", "keepalives_idle",
    "keepalives_interval", "require_auth", "sslcompression", "tcp_user_timeout",
})  # fmt: skip
"""Parameters of libpq that asyncpg would send to the server as settings of the session, which it refuses."""


class Address(Struct, frozen=True, kw_only=True):
    """The parts of a URL."""

    dsn: str
    """The URL for the driver, without our own parameters."""
    schema: str = SCHEMA
    prefix: str = ""
    pooled: bool = False
    """True behind a transaction-pooling proxy."""
    shown: str = ""
    """The URL without secrets."""


def address_of(url: str) -> Address:
    """Parse a URL. Raises BadInput, which names the error and never shows a password."""
    parts = parts_of(url, _ACCEPTED, schemes=SCHEMES)
    ours: dict[str, str] = {}
    theirs: list[tuple[str, str]] = []
    for name, value in parse_qsl(parts.query, keep_blank_values=True):
        if name in ("schema", "prefix", "pooler"):
            ours[name] = value
        elif name in _NOT_READ:
            raise BadInput(
                "store", f"?{name}=", "options that asyncpg reads, which this one of libpq is not: leave it out"
            )
        else:
            theirs.append((name, value))
    schema, prefix, pooler = ours.get("schema", SCHEMA), ours.get("prefix", ""), ours.get("pooler", "session")
    if not _SCHEMA.fullmatch(schema) or schema.startswith("pg_"):
        raise BadInput("schema", schema, "1 to 63 characters of a-z, 0-9 and _, the first not a digit, and not pg_...")
    if not _PREFIX.fullmatch(prefix):
        raise BadInput("prefix", prefix, "up to 40 characters of a-z, 0-9 and _, the first not a digit")
    if pooler not in ("session", "transaction"):
        raise BadInput("pooler", pooler, '"transaction", or "session" (the default, also for none)')
    places = parts.netloc.rpartition("@")[2]
    for place in places.split(",") if places else ():
        _check_place(place)
    query = f"?{urlencode(theirs)}" if theirs else ""
    where = f"{places or 'localhost'}{parts.path}"
    return Address(
        dsn=f"postgresql://{parts.netloc}{parts.path}{query}",
        schema=schema,
        prefix=prefix,
        pooled=pooler == "transaction",
        shown=f"{where} {schema}.{prefix}*" if prefix else f"{where} {schema}",
    )


def _check_place(place: str) -> None:
    """Raise BadInput unless `place` is "host" or "host:port": the driver's own error would not name it."""
    found = _PLACE.fullmatch(place)
    if found is None or not place or not 0 < int(found["port"] or 5432) <= 65_535:
        raise BadInput("store", place, 'hosts such as "127.0.0.1:5432" or "[::1]:5432"')


# --- errors

AWAY = (asyncpg.PostgresError, asyncpg.InterfaceError, asyncpg.InternalClientError, OSError, TimeoutError, NotSent)
"""The driver's errors, whether from the server or from the connection, and our own for an unreachable server."""
_FULL = "53100"
_TOO_MANY_CLIENTS = "53300"
_MEANINGS: Meanings[str] = Meanings(
    {
        # serialization failure, deadlock
        TransactionConflict: ("40001", "40P01"),
        LockTimeout: ("55P03",),
        KeyTaken: ("23505",),
        # read-only (it is a replica, or became one), starting up or shutting down: not done
        NotSent: ("25006", "57P03", _TOO_MANY_CLIENTS),
        # the connection is unusable
        Lost: (
            "57P01", "57P02", "57P05", "08000", "08003", "08006", "08001", "08004", "08007", "08P01",
        ),
    },
    full=(_FULL,),
    refusals=(
        (StoreCorrupt, ("XX001", "XX002"), "look with pg_amcheck, REINDEX a damaged index, or restore a backup"),
        (StoreMismatch, ("42P01", "42703", "42883", "3F000"), "run `bide migrate`"),
        (StoreUnavailable, ("42501",), "grant this user what it needs (docs/sql.md)"),
        (StoreUnavailable, ("28000", "28P01"), "check the user and the password in the URL"),
        (StoreUnavailable, ("3D000",), "create the database, then run `bide migrate`"),
        (
            # a prepared statement is missing, or exists already: a proxy gave us another client's connection
            StoreUnavailable, ("26000", "42P05"),
            "is there a transaction-pooling proxy? Then give ?pooler=transaction",
        ),
    ),
)  # fmt: skip


def meaning(error: BaseException, where: str, *, adding: bool = False) -> Exception:
    """The exception to raise, or to act on, for a statement's `error`. Returns errors of our own code unchanged."""
    if isinstance(error, OURS):
        return error
    if isinstance(error, asyncpg.DataError | UnicodeEncodeError):
        return BadInput("task", str(error), "text without NUL or lone surrogates, and integers of at most 64 bits")
    if isinstance(error, asyncpg.InvalidCachedStatementError):
        return TransactionConflict(f"{where}: {error}")  # another process migrates: prepare it again
    if isinstance(error, asyncpg.PostgresError):
        return by_code(error.sqlstate or "", f"{where}: {error}", adding=adding)
    if isinstance(error, asyncpg.InterfaceError | asyncpg.InternalClientError | OSError | TimeoutError | EOFError):
        return Lost(f"{where}: {said(error)}")
    assert isinstance(error, Exception)
    return error


def by_code(code: str, text: str, *, adding: bool = False) -> Exception:
    """The meaning of a server error with this SQLSTATE."""
    short = adding and code.startswith("53") and code != _TOO_MANY_CLIENTS  # short of memory, for example
    return _MEANINGS.meaning(_FULL if short else code, text, adding=adding)


def said(error: BaseException) -> str:
    """The text of an error, or its type if it has none."""
    return str(error) or type(error).__name__


# --- connections

PLANNER = {
    # a table may have grown since a statement was planned, and not have been analyzed yet: allow only plans that suit
    # every size
    "enable_seqscan": "off",
    "enable_bitmapscan": "off",
    "enable_hashjoin": "off",
    "enable_mergejoin": "off",
    "jit": "off",
}
SESSION = {
    **PLANNER,
    # planning a lease takes longer than executing it, and the plan is the same for all arguments
    "plan_cache_mode": "force_generic_plan",
    "default_transaction_isolation": "'read committed'",
    # end the transaction of a vanished process, which releases its locks
    "idle_in_transaction_session_timeout": "5000",
}
_FORGET = (
    "RESET SESSION AUTHORIZATION; RESET ROLE; RESET ALL; SELECT pg_advisory_unlock_all(); UNLISTEN *; CLOSE ALL; "
    "DISCARD TEMP; DISCARD SEQUENCES; "
)
_BUILT_IN = 16_384
"""Types below this number are the same in every database."""
_ARRAYS = frozenset({1000, 1001, 1005, 1007, 1016})
"""The arrays of boolean, bytea, smallint, integer and bigint: those in our statements' parameters and results."""


class _Introspected(NamedTuple):
    """Replaces the driver's statement, whose name the driver checks."""

    name: str = "of another connection"


class _Connection(asyncpg.Connection):  # type: ignore[misc]
    """A connection of the driver, with the methods that the stores of all servers use.

    It introspects array types once per process, where the driver does so on each connection for each statement with a
    new type. An introspection takes three round trips, and more server time than many calls; this halves the time of
    the first call of each kind. If a future driver introspects in another way, this saving is lost, and nothing else.
    """

    _known: ClassVar[tuple[frozenset[int], Any]] = frozenset(), ()
    settings = ""
    """The statements that restore the settings with which it was opened."""
    begun: Any = None
    """The driver's transaction for a handler, which may use savepoints in it: `conn.transaction()`."""
    name: str
    number: int
    pooled = False
    """True behind a pooling proxy, where clients share the session."""

    @property
    def driver(self) -> Self:
        return self

    @property
    def usable(self) -> bool:
        return not self.is_closed()

    async def ask(self, statement: str) -> None:
        await self.execute(statement)

    async def begin(self) -> None:
        """Begin a transaction for a handler."""
        self.begun = self.transaction(isolation="read_committed")
        await self.begun.start()

    async def rollback(self) -> None:
        """Roll back the open transaction; close the connection if a handler has ended that unknown to the driver."""
        begun, self.begun = self.begun, None
        if self.is_closed():
            return
        if begun is None:
            if self.is_in_transaction():
                await self.execute("ROLLBACK")
        elif self.is_in_transaction():
            await begun.rollback()
        else:
            self.terminate()

    def drop(self) -> None:
        with suppress(Exception):
            self.terminate()

    async def end(self, *, within: float) -> None:
        with suppress(*AWAY):
            await self.close(timeout=within)

    async def reset(self, *, timeout: float | None = None) -> None:
        if not self.pooled:
            await super().reset(timeout=timeout)

    def get_reset_query(self) -> str:
        """The statements of `reset`: clear a handler's settings, locks and temporary objects. One round trip."""
        return _FORGET + self.settings

    async def _introspect_types(self, typeoids: Collection[int], timeout: float | None) -> tuple[Any, Any]:
        known, found = self._known
        if known.issuperset(typeoids):
            return found, _Introspected()
        found, statement = await super()._introspect_types(_ARRAYS.union(typeoids), timeout)
        if max(typeoids) < _BUILT_IN:
            _Connection._known = known | _ARRAYS.union(typeoids), [*self._known[1], *found]
        return found, statement


async def connect(address: Address, *, within: float, session: Mapping[str, str] = SESSION) -> Any:
    """Open a connection with these settings. Raises NotSent, StoreUnavailable, BadInput."""
    try:
        connection = await asyncpg.connect(
            address.dsn,
            timeout=within,
            connection_class=_Connection,
            statement_cache_size=0 if address.pooled else 200,
            server_settings={"application_name": "bide"},
        )
        connection.pooled = address.pooled
        if session and not address.pooled:  # behind a pooler, the next client would get these settings
            # in a separate statement, and not as startup parameters, which proxies refuse
            connection.settings = "".join(f"SET {name} = {value};" for name, value in session.items())
            try:
                await connection.execute(connection.settings, timeout=within)
            except BaseException:  # on cancellation too, since nothing else would close it
                connection.terminate()
                raise
        return connection
    except (asyncpg.PostgresError, asyncpg.InterfaceError, OSError, TimeoutError) as error:
        found = meaning(error, address.shown)
        if isinstance(found, Lost):
            found = NotSent(unreached(address.shown, error))
        raise found from error
    except (ValueError, IndexError) as error:  # from the driver's parsing of the URL, such as a port in its options
        raise BadInput("store", address.shown, f"a URL that the driver can read ({error})") from error


POSTGRES = Dialect(logging.getLogger("bide.postgres"), address_of, connect, meaning, said, AWAY, Names)


# --- calls

CALLS_OF_A_ROW = 256
"""Updates of a caller's row before it is replaced. A new row costs a round trip; a version, 0.05 us per later call."""
_PATIENCE = {
    # a row that is locked for longer than a verb takes belongs to an open transaction: the batch skips it
    "lock_timeout": "30"
}
_SESSION = SESSION | _PATIENCE
_POOLED_SESSION = "".join(f"; SET LOCAL {name} = {value}" for name, value in (PLANNER | _PATIENCE).items())
Row = Any
"""A row of the driver, with access by position and by name."""


class Call(NumberedCall):
    """One call under way: it runs statements of `queries.sql` by name, and may begin a transaction around them."""

    __slots__ = ()
    text = name = str
    packed = unpacked = listed = list

    @property
    def _begun(self) -> bool:
        """True within a transaction."""
        return bool(self.connection.usable and self.connection.is_in_transaction())

    async def fetch(self, query: str, *arguments: Any) -> list[Any]:
        """The rows of a named query."""
        if self._of.pooled and not self._begun:  # the pooler keeps one connection only within a transaction
            await self.begin()
            rows = await self.fetch(query, *arguments)
            await self.commit()
            return rows
        self.sent = self.sent or not self._begun
        found: list[Any] = await self.connection.fetch(self.queries[query], *arguments)
        return found

    async def timed(self, query: str, *arguments: Any) -> list[Any]:
        """Like `fetch`, for a query whose column `micros` has the server's time."""
        sent = time.monotonic()
        rows = await self.fetch(query, *arguments)
        if rows and self._of.time is not None:
            self._of.time.saw(rows[0]["micros"], sent, time.monotonic())
        return rows

    async def numbered(self, query: str, now: Millis | None, *arguments: Any) -> list[Any]:
        """Like `timed`, for a query that passes the gate. Raises AlreadyApplied."""
        rows = await self.timed(query, now, self.caller, self.number, *arguments)
        if not rows:
            raise AlreadyApplied
        return rows

    async def ask(self, query: str, **values: Any) -> list[Any]:
        return await self.fetch(query, *values.values())

    def lines(self, rows: Sequence[Sequence[Any]]) -> dict[str, Any]:
        """The parameters of a query that inserts one or more rows."""
        return {str(number): list(column) for number, column in enumerate(zip(*rows, strict=True))}

    async def begin(self, how: str = "") -> None:
        await self.connection.execute(f"BEGIN {how}{_POOLED_SESSION if self._of.pooled else ''}")

    async def begin_snapshot(self) -> None:
        """Begin a transaction in which all queries see the same state of the database."""
        await self.begin("ISOLATION LEVEL REPEATABLE READ, READ ONLY")

    async def commit(self) -> None:
        self.sent = True
        await self.connection.execute("COMMIT")

    async def introduce(self) -> None:
        await self.fetch("new_caller", self.caller)


class PostgresConnection(JournaledConnection[Call]):
    """See `sql.journaled_connection`."""

    _dialect = POSTGRES

    def __init__(self, name: str, address: Address, **options: Any) -> None:
        super().__init__(name, address, **options)
        self.queries = queries_of(address.schema, address.prefix)
        self.pooled = address.pooled
        self._first_name = name
        self._renew_at = CALLS_OF_A_ROW

    async def _connect(self) -> Any:
        return await connect(self._address, within=self._silence, session=_SESSION)

    def _call(self, connection: Any, limit: asyncio.Timeout) -> Call:
        return Call(self, connection, self.queries, limit)

    async def _prepare(self, call: Call) -> Any:
        """Switch to a new caller row every `CALLS_OF_A_ROW` calls."""
        if self.number > self._renew_at:
            name = f"{self._first_name}.{self.number}"
            try:
                await call.fetch("renew_caller", self.name, name)
            finally:
                call.sent = False
            self.name, self._renew_at = name, self.number + CALLS_OF_A_ROW
