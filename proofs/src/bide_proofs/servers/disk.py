"""A server's own disk, small and in memory, which can be full for a while."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any, ClassVar

from bide_proofs.servers.process import Guard, ServerFailed, give_to, until
from bide_proofs.servers.server import ServerProcess

_PAGE = 4_096
ROOM = 16 * _PAGE
"""Bytes left free on a full disk: the file system itself writes, too."""


class Disk:
    """A folder that is a file system of `size` bytes (a tmpfs, which takes only the memory in use), if one may be
    mounted here; else an ordinary folder, and `refused` is the reason.

    To fill the disk, its size is reduced by the free space. This costs nothing; a large file would cost memory.
    """

    def __init__(self, size: int, *, account: str | None = None) -> None:
        self.place: Path | None = None
        """Its path while it exists."""
        self.size = size
        self._account = account
        self._guard: Guard | None = None
        self.refused = ""

    @property
    def mounted(self) -> bool:
        return self._guard is not None

    def make(self, place: Path) -> None:
        """Make the folder, unless it exists, and mount it if that is allowed."""
        if self.place is not None:
            return
        place.mkdir(parents=True)
        self.place, self.refused = place, ""
        if os.geteuid() != 0 or shutil.which("mount") is None:
            self.refused = "only root may mount a small file system"
        else:
            tried = self._mount("-t", "tmpfs", "-o", f"size={self.size},mode=0700", "tmpfs")
            if tried.returncode:
                self.refused = f"no small file system may be mounted here: {tried.stderr.strip()}"
            else:
                self._guard = Guard('sleep 1; umount -l "$1"', str(place))
        give_to(self._account, place)

    def remove(self) -> None:
        """Unmount the disk with its contents; do nothing if it does not exist."""
        place, self.place = str(self.place), None
        if self._guard is not None:
            done = subprocess.run(["umount", place], capture_output=True, text=True, check=False)
            if done.returncode:  # a process uses it, which is reported below; the disk is unmounted nevertheless
                subprocess.run(["umount", "-l", place], check=True)
            self._guard.dismiss()
            self._guard = None
            if done.returncode:
                raise ServerFailed(f"{place} was in use when it was unmounted: {done.stderr.strip()}")

    def fill(self, left: int = ROOM) -> int:
        """Fill the disk except for `left` bytes; return the bytes in use.

        Raises ServerFailed if other processes write too fast.
        """
        used = 0

        def is_full() -> bool:
            nonlocal used
            assert self.place is not None, "make it first"
            found = os.statvfs(self.place)
            used = (found.f_blocks - found.f_bfree) * found.f_frsize
            return not self._mount("-o", f"remount,size={used + left}").returncode

        until(is_full, f"{self.place} to be full", patience=2)
        return used

    def free(self) -> None:
        """Restore the disk's room."""
        if (done := self._mount("-o", f"remount,size={self.size}")).returncode:
            raise ServerFailed(f"{self.place} could not be given its room back: {done.stderr.strip()}")

    def _mount(self, *words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(["mount", *words, str(self.place)], capture_output=True, text=True, check=False)


class OnDisk(ServerProcess):
    """A server with its data on its own disk."""

    size: ClassVar[int]
    """The size of the disk in bytes."""

    def __init__(self, directory: Path, **given: Any) -> None:
        super().__init__(directory, **given)
        self.disk = Disk(self.size, account=self.account)

    @property
    def disk_place(self) -> Path:
        return self.home / "disk"

    def fill(self) -> None:
        self.disk.make(self.disk_place)
        super().fill()

    def need_room(self) -> None:
        """Make the server need room on the full disk at once, even if it has preallocated some."""

    def has_room(self) -> None:
        """Do what an operator does when the disk has room again."""

    def tidy(self) -> None:
        self.disk.remove()
        super().tidy()
