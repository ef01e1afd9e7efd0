"""From what the driver reports to what bide raises: the one place that knows both.

Lost          it was sent, and the answer did not come: only the caller's row tells whether it was done
NotSent       there is no connection, or nothing that writes at its end: trying again is safe
Again         it was refused and undone for what others did meanwhile: the same batch once more
Taken         it was refused and undone, since a key that was to be new is there
Locked        so too, since others keep a row of it locked: the others of the batch without it
(a StoreError) it will not be done, for the reason that it says
"""

from __future__ import annotations

import asyncpg

from bide.core.errors import (
    BadInput,
    BideError,
    StoreCorrupt,
    StoreError,
    StoreFull,
    StoreMismatch,
    StoreUnavailable,
)

_AGAIN = frozenset({"40001", "40P01"})
"""Serialization failure, deadlock."""
_TAKEN = "23505"
"""Unique violation."""
_LOCKED = frozenset({"55P03"})
"""Lock not available."""
_ELSEWHERE = frozenset({"25006", "57P03", "53300"})
"""Read-only (it was a replica, or has become one), starting up or shutting down, too many clients: not done."""
_ENDED = frozenset({"57P01", "57P02", "57P05", "08000", "08003", "08006", "08001", "08004", "08P01"})
"""The connection is of no use any more."""
_FULL = frozenset({"53100"})
_DAMAGED = frozenset({"XX001", "XX002"})
_MISSING = frozenset({"42P01", "42703", "42883", "3F000"})
_RIGHTS = frozenset({"42501"})
_ACCOUNT = frozenset({"28000", "28P01"})
_POOLED = frozenset({"26000", "42P05"})
"""A prepared statement is gone, or was there already: another client's connection has been handed to us."""


class NotSent(Exception):
    """Nothing was done, and it may pass."""


class Taken(Exception):
    """A key that was to be new is there already."""


class Lost(Exception):
    """The connection broke, or nothing came in time, after it was sent."""


class Again(Exception):
    """Undone by the server, because of others: try again."""


class Locked(Again):
    """Undone by the server: somebody has kept a row locked for longer than our lanes wait for one."""


AWAY = (asyncpg.PostgresError, asyncpg.InterfaceError, asyncpg.InternalClientError, OSError, TimeoutError, NotSent)
"""The driver's errors, of the server as of the way to it, and ours where there is no way."""


def meaning(error: BaseException, where: str, *, adding: bool = False) -> Exception:
    """What to raise, or to act on, for `error` of a statement. Defects of our own come back as they are."""
    if isinstance(error, BideError | NotSent | Lost | Again | Taken):
        return error
    if isinstance(error, asyncpg.DataError | UnicodeEncodeError):
        return BadInput("task", str(error), "text without NUL or lone surrogates, and integers of at most 64 bits")
    if isinstance(error, asyncpg.InvalidCachedStatementError):
        return Again(f"{where}: {error}")  # somebody migrates: it is prepared anew
    if isinstance(error, asyncpg.PostgresError):
        lost = isinstance(error, asyncpg.PostgresConnectionError)
        return by_code(error.sqlstate or "", f"{where}: {error}", adding=adding, lost=lost)
    if isinstance(error, asyncpg.InterfaceError | asyncpg.InternalClientError | OSError | TimeoutError | EOFError):
        return Lost(f"{where}: {said(error)}")
    assert isinstance(error, Exception)
    return error


def by_code(code: str, text: str, *, adding: bool = False, lost: bool = False) -> Exception:
    """What an error means that the server reported under this SQLSTATE. `lost`: by which the connection ended."""
    found: StoreError
    if code in _AGAIN:
        return Again(text)
    if code in _LOCKED:
        return Locked(text)
    if code == _TAKEN:
        return Taken(text)
    if code in _ELSEWHERE:
        return NotSent(text)
    if code in _ENDED or lost:
        return Lost(text)
    if code in _FULL or (code.startswith("53") and adding):
        what = "free some of its disk"
        return StoreFull(f"{text}: {what}") if adding else StoreUnavailable(f"{text}: {what}")
    if code in _DAMAGED:
        found = StoreCorrupt(f"{text}; look with pg_amcheck, REINDEX a damaged index, or restore a backup")
    elif code in _MISSING:
        found = StoreMismatch(f"{text}; run `bide migrate`")
    elif code in _RIGHTS:
        found = StoreUnavailable(f"{text}; grant this user what it needs (docs/sql.md)")
    elif code in _ACCOUNT:
        found = StoreUnavailable(f"{text}; check the user and the password in the URL")
    elif code in _POOLED:
        found = StoreUnavailable(f"{text}; is there a transaction-pooling proxy? Then give ?pooler=transaction")
    elif code == "3D000":
        found = StoreUnavailable(f"{text}; create the database, then run `bide migrate`")
    else:
        found = StoreUnavailable(text)
    return found


def said(error: BaseException) -> str:
    """What an error says, or what it is if it says nothing."""
    return str(error) or type(error).__name__
