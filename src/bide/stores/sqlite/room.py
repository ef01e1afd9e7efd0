"""Whether the disk has room for new tasks: those are refused while there is still enough left to finish the old."""

from __future__ import annotations

import os
import time

from bide.stores.sqlite.errors import full

_EVERY = 1.0
"""Seconds between looks: asking costs a system call, and a disk does not fill within one at our rates."""


class Room:
    """Watches the free space beside a file."""

    def __init__(self, path: str, reserve: int) -> None:
        self._path = path
        self._folder = os.path.dirname(path)
        self._reserve = reserve
        self._look_again = 0.0
        self._free = 0

    def check(self) -> None:
        """Raises StoreFull when fewer bytes than the reserve are free."""
        now = time.monotonic()
        if now >= self._look_again:
            # In this order: until the first look is over, whoever comes from another loop's thread looks too.
            self._free = free_bytes(self._folder)
            self._look_again = now + _EVERY
        if self._free < self._reserve:
            raise full(self._path, f"{self._free} bytes free, {self._reserve} are kept for what is there")


def free_bytes(folder: str) -> int:
    """What may still be written there by somebody without privileges."""
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize
