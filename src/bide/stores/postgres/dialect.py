"""A connection to PostgreSQL: made, set up for our statements, and what its errors mean."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from contextlib import suppress
from typing import Any, ClassVar, NamedTuple, Self

import asyncpg

from bide.core.errors import BadInput, StoreCorrupt, StoreMismatch, StoreUnavailable
from bide.stores.postgres.address import Address, address_of
from bide.stores.postgres.queries import Names
from bide.stores.sql.dialect import OURS, Again, Dialect, Locked, Lost, Meanings, NotSent, Taken
from bide.stores.urls import unreached

AWAY = (asyncpg.PostgresError, asyncpg.InterfaceError, asyncpg.InternalClientError, OSError, TimeoutError, NotSent)
"""The driver's errors, of the server as of the way to it, and ours where there is no way."""
_FULL = "53100"
_TOO_MANY_CLIENTS = "53300"
_MEANINGS: Meanings[str] = Meanings(
    {
        # serialization failure, deadlock
        Again: ("40001", "40P01"),
        Locked: ("55P03",),
        Taken: ("23505",),
        # read-only (it was a replica, or has become one), starting up or shutting down: not done
        NotSent: ("25006", "57P03", _TOO_MANY_CLIENTS),
        # the connection is of no use any more
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
            # a prepared statement is gone, or was there already: another client's connection has been handed to us
            StoreUnavailable, ("26000", "42P05"),
            "is there a transaction-pooling proxy? Then give ?pooler=transaction",
        ),
    ),
)  # fmt: skip


def meaning(error: BaseException, where: str, *, adding: bool = False) -> Exception:
    """The exception to raise, or to act on, for `error` of a statement. Defects of our own come back as they are."""
    if isinstance(error, OURS):
        return error
    if isinstance(error, asyncpg.DataError | UnicodeEncodeError):
        return BadInput("task", str(error), "text without NUL or lone surrogates, and integers of at most 64 bits")
    if isinstance(error, asyncpg.InvalidCachedStatementError):
        return Again(f"{where}: {error}")  # somebody migrates: it is prepared anew
    if isinstance(error, asyncpg.PostgresError):
        return by_code(error.sqlstate or "", f"{where}: {error}", adding=adding)
    if isinstance(error, asyncpg.InterfaceError | asyncpg.InternalClientError | OSError | TimeoutError | EOFError):
        return Lost(f"{where}: {said(error)}")
    assert isinstance(error, Exception)
    return error


def by_code(code: str, text: str, *, adding: bool = False) -> Exception:
    """The meaning of an error that the server reported under this SQLSTATE."""
    short = adding and code.startswith("53") and code != _TOO_MANY_CLIENTS  # of memory, say, to write what is new
    return _MEANINGS.meaning(_FULL if short else code, text, adding=adding)


def said(error: BaseException) -> str:
    """The text of an error, or its type if it has none."""
    return str(error) or type(error).__name__


PLANNER = {
    # a table that was empty or small when a statement was planned, and is large now, has not been analyzed yet: only
    # plans that are right for every size are allowed
    "enable_seqscan": "off",
    "enable_bitmapscan": "off",
    "enable_hashjoin": "off",
    "enable_mergejoin": "off",
    "jit": "off",
}
SESSION = {
    **PLANNER,
    # planning a lease takes longer than carrying it out, and the plan is the same for all arguments
    "plan_cache_mode": "force_generic_plan",
    "default_transaction_isolation": "'read committed'",
    # one whose process is gone without a word keeps its locks no longer
    "idle_in_transaction_session_timeout": "5000",
}
_FORGET = (
    "RESET SESSION AUTHORIZATION; RESET ROLE; RESET ALL; SELECT pg_advisory_unlock_all(); UNLISTEN *; CLOSE ALL; "
    "DISCARD TEMP; DISCARD SEQUENCES; "
)
_BUILT_IN = 16_384
"""Types below this number are the same in every database."""
_ARRAYS = frozenset({1000, 1001, 1005, 1007, 1016})
"""Of boolean, bytea, smallint, integer and bigint: what our statements are told, and what they answer."""


class _Asked(NamedTuple):
    """In the place of a statement: the driver looks whether it had a name, or has undone what else has none."""

    name: str = "of another connection"


class _Connection(asyncpg.Connection):  # type: ignore[misc]
    """One connection of the driver's, with what `sql.dialect.Connection` asks for.

    It asks what arrays are once in a process, and not on each connection, for each statement with another one.

    That takes three round trips, and the server longer than many calls; so the first call of its kind in a process is
    done in half the time. Should the driver come to ask in another way, it asks each time.
    """

    _known: ClassVar[tuple[frozenset[int], Any]] = frozenset(), ()
    settings = ""
    """Statements that make those that it was opened with."""
    begun: Any
    """The driver's transaction for a handler, who may have savepoints in it: `conn.transaction()`."""
    name: str
    number: int
    pooled = False
    """True if a proxy stands between, so that the session is nobody's."""

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
        if self.is_in_transaction():
            await self.execute("ROLLBACK")

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
        """For `reset`: what a handler has set, locked or made in its session is not the next one's. One round trip."""
        return _FORGET + self.settings

    async def _introspect_types(self, typeoids: Collection[int], timeout: float | None) -> tuple[Any, Any]:
        known, found = self._known
        if known.issuperset(typeoids):
            return found, _Asked()
        found, statement = await super()._introspect_types(_ARRAYS.union(typeoids), timeout)
        if max(typeoids) < _BUILT_IN:
            _Connection._known = known | _ARRAYS.union(typeoids), [*self._known[1], *found]
        return found, statement


async def connect(address: Address, *, within: float, session: Mapping[str, str] = SESSION) -> Any:
    """A new connection with these settings, for our statements. Raises NotSent, StoreUnavailable, BadInput."""
    try:
        connection = await asyncpg.connect(
            address.dsn,
            timeout=within,
            connection_class=_Connection,
            statement_cache_size=0 if address.pooled else 200,
            server_settings={"application_name": "bide"},
        )
        connection.pooled = address.pooled
        if session and not address.pooled:  # else the next client would have these settings
            # in a statement of their own, and not as the connection begins, where proxies refuse them
            connection.settings = "".join(f"SET {name} = {value};" for name, value in session.items())
            try:
                await connection.execute(connection.settings, timeout=within)
            except BaseException:  # also of whoever is cancelled here: nobody else has it, to close it
                connection.terminate()
                raise
        return connection
    except (asyncpg.PostgresError, asyncpg.InterfaceError, OSError, TimeoutError) as error:
        found = meaning(error, address.shown)
        if isinstance(found, Lost):
            found = NotSent(unreached(address.shown, error))
        raise found from error
    except (ValueError, IndexError) as error:  # of the driver's own reading of the URL, as of a port in its options
        raise BadInput("store", address.shown, f"a URL that the driver can read, and not: {error}") from error


POSTGRES = Dialect(logging.getLogger("bide.postgres"), address_of, connect, meaning, said, AWAY, Names)
