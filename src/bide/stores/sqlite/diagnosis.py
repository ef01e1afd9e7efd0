"""Checks that `doctor` makes of a SQLite file: is anything about it, or around it, a danger?"""

from __future__ import annotations

import os
import re
import sqlite3
import stat

from bide.ports import Finding
from bide.stores.sqlite.checkpoint import resets_safely
from bide.stores.sqlite.connection import STOP_BYTES, opened_by_apsw
from bide.stores.sqlite.database import VERSION, found_version
from bide.stores.sqlite.disk_reserve import free_bytes, kept_bytes

QUICK_CHECK_BYTES = 256 * 1024 * 1024
"""A larger file is not read through: that takes seconds."""
_REMOTE = ("nfs", "nfs4", "cifs", "smb3", "9p", "ceph", "glusterfs", "fuse.sshfs")
_MAPPED = re.compile(r"(/\S*(?:libsqlite3|_sqlite3|/pysqlite3/|/apsw/)\S*\.so\S*)$", re.MULTILINE)


def diagnose(cursor: sqlite3.Cursor, path: str, reserve: int) -> list[Finding]:
    """Look at the library, the file, its schema and its disk."""
    version = found_version(cursor)
    wal = os.stat(f"{path}-wal").st_size if os.path.exists(f"{path}-wal") else 0
    mode = stat.S_IMODE(os.stat(path).st_mode)
    free, kept = free_bytes(os.path.dirname(path)), kept_bytes(path, reserve)
    kind = _kind_of_file_system(path)
    return [
        _found(
            resets_safely(),
            f"SQLite {sqlite3.sqlite_version}",
            "3.51.3 closes a rare race of a checkpoint with a commit, which other users of the file may meet",
        ),
        _one_library(path),
        _found(version == VERSION, f"schema version {version}", f"migrate to {VERSION}"),
        _found(
            wal <= STOP_BYTES,
            f"write-ahead log of {wal} bytes",
            "some process reads in one long transaction, so that the log cannot start over: find it",
        ),
        _found(
            not mode & stat.S_IRWXO,
            f"file mode {mode:04o}",
            f"every user of this machine may read the tasks: chmod o= {path} {path}-wal {path}-shm",
        ),
        _found(free >= 2 * kept, f"{free} bytes free on the disk", f"new tasks are refused below {kept}"),
        _found(
            kind not in _REMOTE,
            f"file system {kind or 'not known'}",
            "locks and shared memory fail there: use a local disk",
        ),
        _pages(cursor, path),
    ]


def _found(ok: bool, what: str, advice: str, *, severe: bool = False) -> Finding:
    """`advice`: for the case that it is not `ok`."""
    return Finding(ok, what, "" if ok else advice, severe=severe)


def _one_library(path: str) -> Finding:
    if opened_by_apsw(path):
        advice = "use the standard library's sqlite3 for it in this process"
        return _found(False, "apsw has this file open too", advice, severe=True)
    libraries = mapped_libraries()
    if len(libraries) > 1:
        what = f"{len(libraries)} SQLite libraries in this process: {', '.join(libraries)}"
        return _found(False, what, "make sure that only one of them ever opens this file: they lose each other's locks")
    return Finding(True, "one SQLite library in this process")


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
        what = "the file is large and was not read through"
        return Finding(True, what, "look with 'PRAGMA quick_check' now and then")
    (said,) = cursor.execute("PRAGMA quick_check(1)").fetchone()
    return _found(said == "ok", f"quick_check: {said}", "restore a backup, or use '.recover'", severe=True)
