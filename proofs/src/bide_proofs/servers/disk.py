"""A disk of a server's own, small and in memory, that can be full for a while."""

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
    """A folder that is a file system of `size` bytes (a tmpfs, which takes only the memory that is used), if one may
    be mounted here; else a folder like others, and `refused` says why.

    It is made full by taking from its size what is free, which costs nothing: a file as large as that would cost as
    much memory.
    """

    def __init__(self, place: Path, *, size: int, account: str | None = None) -> None:
        self.place = place
        self.size = size
        self._account = account
        self._guard: Guard | None = None
        self.refused = ""

    @property
    def mounted(self) -> bool:
        return self._guard is not None

    def make(self) -> None:
        """The folder is there, and mounted where that is allowed."""
        self.place.mkdir(parents=True)
        if os.geteuid() != 0 or shutil.which("mount") is None:
            self.refused = "only root may mount a small file system"
        else:
            tried = self._mount("-t", "tmpfs", "-o", f"size={self.size},mode=0700", "tmpfs")
            if tried.returncode:
                self.refused = f"no small file system may be mounted here: {tried.stderr.strip()}"
            else:
                self._guard = Guard('sleep 1; umount -l "$1"', str(self.place))
        give_to(self._account, self.place)

    def remove(self) -> None:
        """Unmounted, with all that was on it; nothing if it is not there."""
        if self._guard is not None:
            done = subprocess.run(["umount", str(self.place)], capture_output=True, text=True, check=False)
            if done.returncode:  # a process is in it, which is to be found; nothing stays mounted for that
                subprocess.run(["umount", "-l", str(self.place)], check=True)
            self._guard.dismiss()
            self._guard = None
            if done.returncode:
                raise ServerFailed(f"{self.place} was in use when it was unmounted: {done.stderr.strip()}")

    def fill(self, left: int = ROOM) -> int:
        """From now on it is full, but for the bytes `left`; how many are on it.

        Raises ServerFailed if others write too fast for that.
        """
        used = 0

        def is_full() -> bool:
            nonlocal used
            found = os.statvfs(self.place)
            used = (found.f_blocks - found.f_bfree) * found.f_frsize
            return not self._mount("-o", f"remount,size={used + left}").returncode

        until(is_full, f"{self.place} to be full", patience=2)
        return used

    def free(self) -> None:
        """There is room again."""
        if (done := self._mount("-o", f"remount,size={self.size}")).returncode:
            raise ServerFailed(f"{self.place} could not be given its room back: {done.stderr.strip()}")

    def _mount(self, *words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(["mount", *words, str(self.place)], capture_output=True, text=True, check=False)


class OnDisk(ServerProcess):
    """A server with its data on a disk of its own."""

    size: ClassVar[int]
    """Bytes of the disk."""

    def __init__(self, directory: Path, **given: Any) -> None:
        super().__init__(directory, **given)
        self._disk: Disk | None = None

    @property
    def disk(self) -> Disk:
        assert self._disk is not None, "start it first"
        return self._disk

    @property
    def disk_place(self) -> Path:
        return self.home / "disk"

    def make_disk(self) -> None:
        """Make the disk, if it is not there; the home is."""
        if self._disk is None:
            self._disk = Disk(self.disk_place, size=self.size, account=self.account)
            self._disk.make()

    def fill(self) -> None:
        self.make_disk()
        super().fill()

    def need_room(self) -> None:
        """Need room on the full disk at once, though some was put by."""

    def has_room(self) -> None:
        """Do what an operator does once there is room on the disk again."""

    def remove_disk(self) -> None:
        """Unmount it, with all that is on it."""
        if self._disk is not None:
            self._disk.remove()
            self._disk = None

    def tidy(self) -> None:
        self.remove_disk()
        super().tidy()
