"""From what MySQL or MariaDB and their drivers report to the kinds of `sql.dialect`, or to what bide raises."""

from __future__ import annotations

import struct

from asyncmy.errors import MySQLError

from bide.core.errors import BadInput, StoreCorrupt, StoreMismatch, StoreUnavailable
from bide.stores.sql.dialect import OURS, Again, Fewer, Locked, Lost, Meanings, NotSent, Shut, Taken

_INPUT = frozenset({1264, 1265, 1366, 1406, 1048, 1300})
_MEANINGS: Meanings[int] = Meanings(
    {
        # what the gate provokes: a subquery with two rows
        Shut: (1242,),
        Taken: (1062,),
        # what `all_of_them` provokes: a number that is too large
        Fewer: (1690,),
        # lock wait timeout, and NOWAIT of MySQL
        Locked: (1205, 3572),
        # deadlock, record changed, table definition changed, statement to be prepared anew
        Again: (1213, 1020, 1412, 1479, 1615),
        # read-only (it was a replica, or has become one), too many clients, shutting down, not there: not done
        NotSent: (1290, 1792, 1836, 3100, 1040, 1203, 1053, 1226, 3168, 1927, 2001, 2002, 2003, 2004, 2005, 2007),
        # the connection is of no use any more; 0 is the driver's own
        Lost: (
            0, 2000, 2006, 2012, 2013, 2014, 2027, 2055, 1152, 1153, 1154, 1155, 1156, 1157, 1158, 1159, 1160, 1161,
            1184, 4031,
        ),
    },
    # disk full, table full, an error of the storage engine (that a full disk gives, too), out of memory
    full=(1021, 1114, 1030, 1041, 1037, 1038, 3, 28),
    refusals=(
        (StoreCorrupt, (1034, 1035, 126, 127, 1712, 1817), "look with CHECK TABLE, or restore a backup"),
        (StoreMismatch, (1146, 1054, 1049, 1305, 1176), "run `bide migrate`"),
        (
            StoreUnavailable, (1142, 1143, 1044, 1227, 1370),
            "grant this user SELECT, INSERT, UPDATE and DELETE on bide's tables",
        ),
        (StoreUnavailable, (1045, 1698, 1251, 2059, 1275, 1862), "check the user and the password in the URL"),
        (StoreUnavailable, (1665,), "set binlog_format to ROW or MIXED"),
    ),
)  # fmt: skip


class Broken(Exception):
    """The driver cannot make sense of what it read: the connection was cut in the middle, or is out of step."""


UNREADABLE = (AttributeError, AssertionError, IndexError, TypeError, ValueError, RuntimeError, struct.error)
"""What the driver may raise where an answer ends too early."""
AWAY = (MySQLError, Broken, NotSent, OSError, EOFError, TimeoutError)
"""The driver's errors, of the server as of the way to it, and ours where there is no way."""


def meaning(error: BaseException, where: str, *, adding: bool = False) -> Exception:
    """What to raise, or to act on, for `error` of a statement. Defects of our own come back as they are."""
    if isinstance(error, OURS):
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
    if code in _INPUT:
        return BadInput("task", text, "names and holders of at most 255 bytes, and integers of at most 64 bits")
    return _MEANINGS.meaning(code, text, adding=adding)


def said(error: BaseException) -> str:
    """What an error says, or what it is if it says nothing."""
    return str(error.args[1]) if len(error.args) > 1 else str(error) or type(error).__name__
