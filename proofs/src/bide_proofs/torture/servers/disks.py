"""A disk of a server's own, small and in memory, that can be full for a while."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
from pathlib import Path

from bide_proofs.torture.servers.processes import Guard, ServerFailed

_TRIES = 100
_PAGE = 4_096
_ROOM = 16 * _PAGE
"""What is left of a full disk: the file system itself writes, too."""


class Disk:
    """A folder that is a file system of `size` bytes (a tmpfs, which takes only the memory that is used), if one may
    be mounted here; else a folder like others, and `refused` says why.

    It is made full by taking from its size what is free, which costs nothing: a file as large as that would cost as
    much memory.
    """

    def __init__(self, place: Path, *, size: int, account: str | None = None) -> None:
        self.place = place
        self.size = size
        self._account = account if os.geteuid() == 0 else None
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
        if self._account is not None:
            shutil.chown(self.place, self._account, self._account)

    def remove(self) -> None:
        """Unmounted, with all that was on it; nothing if it is not there."""
        if self._guard is not None:
            done = subprocess.run(["umount", str(self.place)], capture_output=True, text=True, check=False)
            if done.returncode:  # somebody is in it, who is to be found; nothing stays mounted for that
                subprocess.run(["umount", "-l", str(self.place)], check=True)
            self._guard.dismiss()
            self._guard = None
            if done.returncode:
                raise ServerFailed(f"{self.place} was in use when it was unmounted: {done.stderr.strip()}")

    async def fill(self) -> int:
        """From now on it is full; how many bytes are on it. Raises ServerFailed if others write too fast for that."""
        for _ in range(_TRIES):
            found = os.statvfs(self.place)
            used = (found.f_blocks - found.f_bfree) * found.f_frsize
            if not self._mount("-o", f"remount,size={used + _ROOM}").returncode:
                return used
            await asyncio.sleep(0.01)
        raise ServerFailed(f"{self.place} could not be made full")

    def free(self) -> None:
        """There is room again."""
        if (done := self._mount("-o", f"remount,size={self.size}")).returncode:
            raise ServerFailed(f"{self.place} could not be given its room back: {done.stderr.strip()}")

    def _mount(self, *words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(["mount", *words, str(self.place)], capture_output=True, text=True, check=False)
