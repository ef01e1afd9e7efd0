"""From what SQLite reports to what bide raises: the one place that knows both."""

from __future__ import annotations

import re
import sqlite3
from copy import copy

from bide.core.errors import BadInput, BideError, StoreCorrupt, StoreFull, StoreMismatch, StoreUnavailable

_BUSY = frozenset({sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED})
_FULL = frozenset({sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR_WRITE})
_DAMAGED = frozenset({sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_FORMAT})
_FORBIDDEN = frozenset({sqlite3.SQLITE_READONLY, sqlite3.SQLITE_PERM, sqlite3.SQLITE_AUTH})
_OF_THE_FILE = _BUSY | _FULL | _DAMAGED | _FORBIDDEN | {sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CANTOPEN}

_PART_IS_GONE = re.compile(
    "no such (table|index|column)|has no column|malformed|Could not decode|unsupported file format"
)
_NOT_STORABLE = (sqlite3.ProgrammingError, sqlite3.InterfaceError, sqlite3.IntegrityError, sqlite3.DataError)
"""Raised for a value of a wrong type, or one that is too large for SQLite."""


def code_of(error: BaseException) -> int:
    """SQLite's primary result code (of an IOERR the whole code) if it is of the file or its lock; 0 for any other."""
    code: int = getattr(error, "sqlite_errorcode", 0)
    primary = code & 0xFF
    if primary == sqlite3.SQLITE_IOERR:
        return code
    return primary if primary in _OF_THE_FILE else 0


def lost_part(connection: sqlite3.Connection | sqlite3.Cursor, what: str) -> StoreCorrupt:
    """Of a file whose pages are sound, and in which something of bide's is not there."""
    return _damaged(connection.execute("PRAGMA database_list").fetchone()[2], what)


def _damaged(path: str, what: object) -> StoreCorrupt:
    return StoreCorrupt(
        f"{path}: the file is damaged ({what}); stop all users of it, look with 'PRAGMA integrity_check', "
        "and restore a backup or save what can be saved with '.recover'"
    )


def is_busy(error: BaseException) -> bool:
    """True if another connection holds the lock that was asked for."""
    return code_of(error) in _BUSY


def full(path: str, why: str) -> StoreFull:
    return StoreFull(f"{path}: no room for new tasks ({why}); what is there still drains: free some disk space")


def translate(error: Exception, path: str, *, adding: bool = False, own: bool = True) -> Exception:
    """The error to raise from `error`. One that is not the database's fault comes back as it is, ours as its like.

    Not `own`: of a statement on somebody else's tables, where a column that is not there is their matter.
    """
    if isinstance(error, BideError):
        return copy(error)  # raised from itself it would be its own cause, and who walks along the causes would not end
    if isinstance(error, UnicodeEncodeError):
        return BadInput("text", error.object, "text that UTF-8 can hold: no lone surrogates")
    if isinstance(error, UnicodeDecodeError):  # SQLite quotes what it has read in its message, whatever that is
        return _damaged(path, error)
    if isinstance(error, OverflowError):
        return BadInput("number", str(error), "integers of at most 64 bits")
    if isinstance(error, OSError):
        return StoreUnavailable(f"{path}: {error}")
    if not isinstance(error, sqlite3.Error):
        return error
    if own and isinstance(error, sqlite3.IntegrityError) and not adding:
        return _damaged(path, error)  # what was read from a row cannot be written back
    if isinstance(error, _NOT_STORABLE) and "closed" not in str(error):
        return BadInput("task", str(error), "fields of the types that the record declares")
    code = code_of(error)
    if code in _BUSY:
        return StoreUnavailable(f"{path}: another process keeps the file locked ({error}); nothing was done")
    if code in _FULL:
        return full(path, str(error)) if adding else StoreUnavailable(f"{path}: the disk is full ({error})")
    if code in _DAMAGED or (own and not code and _PART_IS_GONE.search(str(error))):
        return _damaged(path, error)
    if code == sqlite3.SQLITE_NOTADB:
        return StoreMismatch(f"{path}: not an SQLite database; give another path, or move that file away")
    why = ""
    if code in _FORBIDDEN:
        why = f"may not be written ({error}); the file and its folder must be writable"
    elif code == sqlite3.SQLITE_CANTOPEN:
        why = f"cannot be opened ({error}); does the folder exist, and may we write there?"
    return StoreUnavailable(f"{path}: {why or error}")
