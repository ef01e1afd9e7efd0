"""From what the driver reports to what bide raises: the one place that knows both.

Lost          it was sent, and the answer did not come: only the caller's row tells whether it was done
NotSent       there is no connection, or nothing that writes at its end: trying again is safe
Again         it was refused and undone for what others did meanwhile: the same batch once more
Locked        the same, since somebody keeps a row locked
Shut          the gate is: this call was done before, or its caller has no row yet
Taken         a key that was to be new is there already
Fewer         not all of the rows were as they were thought to be
(a StoreError) it will not be done, for the reason that it says
"""

from __future__ import annotations

import struct

from asyncmy.errors import MySQLError

from bide.core.errors import (
    BadInput,
    BideError,
    StoreCorrupt,
    StoreError,
    StoreFull,
    StoreMismatch,
    StoreUnavailable,
)

_AGAIN = frozenset({1213, 1020, 1412, 1479, 1615})
"""Deadlock, record changed, table definition changed, statement to be prepared anew."""
_LOCKED = frozenset({1205, 3572})
"""Lock wait timeout, and NOWAIT of MySQL."""
_ELSEWHERE = frozenset({1290, 1792, 1836, 3100, 1040, 1203, 1053, 1226, 3168, 1927})
"""Read-only (it was a replica, or has become one), too many clients, shutting down: not done."""
_ENDED = frozenset({2000, 2006, 2012, 2013, 2014, 2027, 2055, 1152, 1153, 1154, 1155, 1156, 1157, 1158, 1159, 1160,
                    1161, 1184, 4031})  # fmt: skip
"""The connection is of no use any more."""
_NOT_THERE = frozenset({2001, 2002, 2003, 2004, 2005, 2007})
_FULL = frozenset({1021, 1114, 1030, 1041, 1037, 1038, 3, 28})
"""Disk full, table full, an error of the storage engine (that a full disk gives, too), out of memory."""
_DAMAGED = frozenset({1034, 1035, 126, 127, 1712, 1817})
_MISSING = frozenset({1146, 1054, 1049, 1305, 1176})
_RIGHTS = frozenset({1142, 1143, 1044, 1227, 1370})
_ACCOUNT = frozenset({1045, 1698, 1251, 2059, 1275, 1862})
_INPUT = frozenset({1264, 1265, 1366, 1406, 1048, 1300})
_TOO_LARGE = 1153
_SHUT = 1242
"""What the gate provokes: a subquery with two rows."""
_FEWER = 1690
"""What `all_of_them` provokes: a number that is too large."""
_TAKEN = 1062
_STATEMENT_LOG = 1665


class NotSent(Exception):
    """Nothing was done, and it may pass."""


class Lost(Exception):
    """The connection broke, or nothing came in time, after it was sent."""


class Again(Exception):
    """Undone by the server, because of others: try again."""


class Locked(Again):
    """Undone by the server: somebody has kept a row locked for longer than our connections wait for one."""


class Shut(Exception):
    """The gate is shut: this call was done before, or its caller has no row yet."""


class Taken(Exception):
    """A key that was to be new is there already."""


class Fewer(Exception):
    """Not all of the rows were as they were thought to be."""


class Broken(Exception):
    """The driver cannot make sense of what it read: the connection was cut in the middle, or is out of step."""


UNREADABLE = (AttributeError, AssertionError, IndexError, TypeError, ValueError, RuntimeError, struct.error)
"""What the driver may raise where an answer ends too early."""


def meaning(error: BaseException, where: str, *, adding: bool = False) -> Exception:
    """What to raise, or to act on, for `error` of a statement. Defects of our own come back as they are."""
    if isinstance(error, BideError | NotSent | Lost | Again | Shut | Taken | Fewer):
        return error
    if isinstance(error, UnicodeEncodeError):
        return BadInput("task", str(error), "text without lone surrogates")
    if isinstance(error, MySQLError):
        code = error.args[0] if error.args and isinstance(error.args[0], int) else 0
        return by_code(code, f"{where}: {said(error)}", adding=adding)
    if isinstance(error, Broken | OSError | TimeoutError | EOFError):
        return Lost(f"{where}: {said(error)}")
    assert isinstance(error, Exception)
    return error


def by_code(code: int, text: str, *, adding: bool = False) -> Exception:
    """What an error means that the server, or the driver, reported under this number."""
    found: StoreError
    if code == _SHUT:
        return Shut(text)
    if code == _TAKEN:
        return Taken(text)
    if code == _FEWER:
        return Fewer(text)
    if code in _LOCKED:
        return Locked(text)
    if code in _AGAIN:
        return Again(text)
    if code in _ELSEWHERE or code in _NOT_THERE:
        return NotSent(text)
    if code in _ENDED or code == 0:
        return Lost(text)
    if code in _FULL:
        what = "free some of its disk"
        return StoreFull(f"{text}: {what}") if adding else StoreUnavailable(f"{text}: {what}")
    if code in _INPUT:
        return BadInput("task", text, "names and holders of at most 255 bytes, and integers of at most 64 bits")
    if code in _DAMAGED:
        found = StoreCorrupt(f"{text}; look with CHECK TABLE, or restore a backup")
    elif code in _MISSING:
        found = StoreMismatch(f"{text}; run `bide migrate`")
    elif code in _RIGHTS:
        found = StoreUnavailable(f"{text}; grant this user SELECT, INSERT, UPDATE and DELETE on bide's tables")
    elif code in _ACCOUNT:
        found = StoreUnavailable(f"{text}; check the user and the password in the URL")
    elif code == _STATEMENT_LOG:
        found = StoreUnavailable(f"{text}; set binlog_format to ROW or MIXED")
    else:
        found = StoreUnavailable(text)
    return found


def said(error: BaseException) -> str:
    """What an error says, or what it is if it says nothing."""
    return str(error.args[1]) if len(error.args) > 1 else str(error) or type(error).__name__
