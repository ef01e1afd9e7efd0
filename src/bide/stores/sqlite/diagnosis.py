"""What `doctor` asks of a SQLite file: is anything about it, or around it, a danger?"""

from __future__ import annotations

import os
import sqlite3
import stat

from bide.ports import Finding
from bide.stores.sqlite.connection import STOP_BYTES
from bide.stores.sqlite.libraries import mapped_libraries, opened_by_apsw, resets_safely
from bide.stores.sqlite.room import free_bytes, kept_bytes
from bide.stores.sqlite.schema import VERSION, found_version

QUICK_CHECK_BYTES = 256 * 1024 * 1024
"""A larger file is not read through: that takes seconds."""
_REMOTE = ("nfs", "nfs4", "cifs", "smb3", "9p", "ceph", "glusterfs", "fuse.sshfs")


def diagnose(cursor: sqlite3.Cursor, path: str, reserve: int) -> list[Finding]:
    """Look at the library, the file, its schema and its disk."""
    return [
        _library(),
        _one_library(path),
        _schema(cursor),
        _journal(path),
        _readers(path),
        _disk(path, reserve),
        _file_system(path),
        _pages(cursor, path),
    ]


def _library() -> Finding:
    safe = resets_safely()
    return Finding(
        safe,
        f"SQLite {sqlite3.sqlite_version}",
        ""
        if safe
        else "3.51.3 closes a rare race of a checkpoint with a commit, which other users of the file may meet",
    )


def _one_library(path: str) -> Finding:
    if opened_by_apsw(path):
        return Finding(
            False,
            "apsw has this file open too",
            "use the standard library's sqlite3 for it in this process",
            severe=True,
        )
    libraries = mapped_libraries()
    if len(libraries) > 1:
        return Finding(
            False,
            f"{len(libraries)} SQLite libraries in this process: {', '.join(libraries)}",
            "make sure that only one of them ever opens this file: they lose each other's locks",
        )
    return Finding(True, "one SQLite library in this process")


def _schema(cursor: sqlite3.Cursor) -> Finding:
    found = found_version(cursor)
    return Finding(found == VERSION, f"schema version {found}", "" if found == VERSION else f"migrate to {VERSION}")


def _journal(path: str) -> Finding:
    size = os.stat(f"{path}-wal").st_size if os.path.exists(f"{path}-wal") else 0
    small = size <= STOP_BYTES
    return Finding(
        small,
        f"write-ahead log of {size} bytes",
        "" if small else "some process reads in one long transaction, so that the log cannot start over: find it",
    )


def _readers(path: str) -> Finding:
    mode = stat.S_IMODE(os.stat(path).st_mode)
    own = not mode & stat.S_IRWXO
    return Finding(
        own,
        f"file mode {mode:04o}",
        "" if own else f"every user of this machine may read the tasks: chmod o= {path} {path}-wal {path}-shm",
    )


def _disk(path: str, reserve: int) -> Finding:
    free, kept = free_bytes(os.path.dirname(path)), kept_bytes(path, reserve)
    room = free >= 2 * kept
    return Finding(room, f"{free} bytes free on the disk", "" if room else f"new tasks are refused below {kept}")


def _file_system(path: str) -> Finding:
    kind = _kind_of_file_system(path)
    local = kind not in _REMOTE
    return Finding(
        local,
        f"file system {kind or 'not known'}",
        "" if local else "locks and shared memory fail there: use a local disk",
    )


def _kind_of_file_system(path: str) -> str:
    try:
        with open("/proc/self/mounts", encoding="utf-8") as mounts:
            fields = [line.split() for line in mounts]
    except OSError:
        return ""
    real = os.path.realpath(path)
    above = [(point, kind) for _, point, kind, *_ in fields if os.path.commonpath((real, point)) == point]
    return max(above, key=lambda one: len(one[0]), default=("", ""))[1]


def _pages(cursor: sqlite3.Cursor, path: str) -> Finding:
    if os.stat(path).st_size > QUICK_CHECK_BYTES:
        return Finding(
            True, "the file is large and was not read through", "look with 'PRAGMA quick_check' now and then"
        )
    (said,) = cursor.execute("PRAGMA quick_check(1)").fetchone()
    return Finding(
        said == "ok", f"quick_check: {said}", "" if said == "ok" else "restore a backup, or use '.recover'", severe=True
    )
