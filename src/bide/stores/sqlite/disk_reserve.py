"""The disk space that is kept free: new tasks are refused while there is still enough left to finish the old ones."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

from bide.core.errors import StoreUnavailable
from bide.core.records import NewTask
from bide.stores.sqlite.errors import full

_EVERY = 1.0
"""Seconds between looks at most: asking costs three system calls."""
_FASTEST = 512 * 1024 * 1024
"""Bytes a second that no disk takes: a small one is looked at before it can be full."""


class DiskReserve:
    """Looks at the file, and at the free space beside it."""

    def __init__(self, path: str, reserve: int, identity: tuple[int, int] | None = None) -> None:
        """`identity`: device and inode of the file that is open. None: whether it is there still is not looked at."""
        self._path = path
        self._identity = identity
        self._folder = os.path.dirname(path)
        self._reserve = reserve
        self._look_again = 0.0
        self._free = self._kept = 0

    def check(self, tasks: Sequence[NewTask] = ()) -> None:
        """Raises StoreFull when with these fewer bytes than are kept would be free, StoreUnavailable when the file is
        gone."""
        now = time.monotonic()
        if now >= self._look_again:
            self._check_file()
            # In this order: until the first look is over, whoever comes from another loop's thread looks too.
            self._free, self._kept = free_bytes(self._folder), kept_bytes(self._path, self._reserve)
            self._look_again = now + min(_EVERY, max(0, self._free - self._kept) / _FASTEST)
        size = sum(_size(task.payload) for task in tasks)
        if self._free - 2 * size < self._kept:
            raise full(self._path, f"{self._free} bytes free, {self._kept} are kept for what is there")
        self._free -= 2 * size  # once in the WAL and once in the file

    def _check_file(self) -> None:
        if self._identity is None:
            return
        try:
            there = os.stat(self._path)
        except FileNotFoundError:
            there = None
        if there is None or (there.st_dev, there.st_ino) != self._identity:
            raise StoreUnavailable(
                f"{self._path}: the file was removed or replaced while it is open here, and what is written now would "
                "be lost: open it anew, or start this process again"
            )


def _size(payload: object) -> int:
    return len(payload) if isinstance(payload, bytes) else 0  # one of another type is refused later, alone


def kept_bytes(path: str, reserve: int) -> int:
    """Bytes that are not for new tasks: the reserve, or a quarter of a small disk, and as much as the WAL holds, since
    that has to find room in the file."""
    if reserve == 0:
        return 0
    try:
        held = os.stat(f"{path}-wal").st_size
    except FileNotFoundError:
        held = 0
    return min(reserve, disk_bytes(path) // 4) + held


def disk_bytes(path: str) -> int:
    """The size of the file system that a file is on."""
    found = os.statvfs(os.path.dirname(path))
    return found.f_blocks * found.f_frsize


def free_bytes(folder: str) -> int:
    """Bytes that somebody without privileges may still write there."""
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize
