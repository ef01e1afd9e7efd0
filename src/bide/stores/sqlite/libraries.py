"""Which SQLite libraries this process has: a file may be touched through one of them only.

POSIX locks belong to a process, and closing any descriptor of a file lets go of all of them. One SQLite library knows
that and keeps count; two copies of it (apsw and pysqlite3 carry their own) do not know of each other, so one takes away
the other's locks, and two writers at once lose what was acknowledged.
"""

from __future__ import annotations

import os
import re
import sqlite3
import sys

from bide.core.errors import StoreMismatch

_RESETS_SAFELY = (((3, 44, 6), (3, 45, 0)), ((3, 50, 7), (3, 51, 0)), ((3, 51, 3), (1000, 0, 0)))


def resets_safely(version: tuple[int, int, int] = sqlite3.sqlite_version_info) -> bool:
    """Whether this SQLite has the WAL-reset race closed (3.51.3, and what that was carried back to).

    Before, a checkpoint that starts when there is nothing left to write back, at the instant at which a commit lets
    the WAL start over, could take the new commit for one that is in the file already: it was then lost.
    """
    return any(first <= version < end for first, end in _RESETS_SAFELY)


_MAPPED = re.compile(r"(/\S*(?:libsqlite3|_sqlite3|/pysqlite3/|/apsw/)\S*\.so\S*)$", re.MULTILINE)


def refuse_others(path: str) -> None:
    """Raises StoreMismatch if apsw has the file open in this process."""
    if opened_by_apsw(path):
        raise StoreMismatch(
            f"{path}: apsw has this file open in this process. apsw carries its own SQLite library, and two of them on "
            "one file lose each other's locks, and with them acknowledged writes: use the standard library's sqlite3 "
            "for that file here, or another process"
        )


def opened_by_apsw(path: str) -> bool:
    """Whether a connection of apsw's, if that is loaded at all, is to this file."""
    apsw = sys.modules.get("apsw")
    if apsw is None or not os.path.exists(path):
        return False
    for connection in apsw.connections():
        try:
            name = connection.db_filename("main")
        except apsw.Error:  # being closed
            continue
        if name and os.path.exists(name) and os.path.samefile(name, path):
            return True
    return False


def mapped_libraries() -> list[str]:
    """The files of this process that hold a SQLite library; empty where the system does not tell."""
    try:
        with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
            names = set(_MAPPED.findall(maps.read()))
    except OSError:
        return []
    libraries = {name for name in names if "_sqlite3" not in os.path.basename(name).removeprefix("py")}
    shared = any("libsqlite3" in os.path.basename(name) for name in libraries)
    if not shared:  # then the standard library's module holds one itself
        libraries |= {name for name in names if os.path.basename(name).startswith("_sqlite3")}
    return sorted(libraries)
