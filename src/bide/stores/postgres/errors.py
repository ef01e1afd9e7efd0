"""From what PostgreSQL and its drivers report to the kinds of `sql.dialect`, or to what bide raises."""

from __future__ import annotations

import asyncpg

from bide.core.errors import BadInput, StoreCorrupt, StoreMismatch, StoreUnavailable
from bide.stores.sql.dialect import OURS, Again, Locked, Lost, Meanings, NotSent, Taken

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
    """What to raise, or to act on, for `error` of a statement. Defects of our own come back as they are."""
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
    """What an error means that the server reported under this SQLSTATE."""
    short = adding and code.startswith("53") and code != _TOO_MANY_CLIENTS  # of memory, say, to write what is new
    return _MEANINGS.meaning(_FULL if short else code, text, adding=adding)


def said(error: BaseException) -> str:
    """What an error says, or what it is if it says nothing."""
    return str(error) or type(error).__name__
