"""Clocks of processes that can be set while they run, by libfaketime."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from bide_proofs.servers.process import ServerMissing

PACKAGES = "libfaketime"
CLOCK_FILE = "FAKETIME_TIMESTAMP_FILE"
"""In the environment of a process whose clock can be set."""
_NAME = "faketime/libfaketimeMT.so.1"


def library() -> Path:
    """The library that is put before the system's clock. Raises ServerMissing."""
    for folder in (Path("/usr/lib"), Path("/usr/local/lib")):
        for found in sorted((*folder.glob(_NAME), *folder.glob(f"*/{_NAME}"))):
            return found
    raise ServerMissing(f"libfaketime is not installed: scripts/services install, or apt-get install {PACKAGES}")


class ServerClock:
    """A time of day, for servers and other processes, that can be set; the monotonic clock stays the machine's.

    Each process has a file in a folder that its account may read, and looks there whenever it looks at the clock (some
    10 us): what is cached would jump at another moment in each process of a server, which no clock does. Raises
    ServerMissing.
    """

    def __init__(self) -> None:
        self.ahead = 0.0
        """Seconds by which it is ahead of the machine's."""
        self._library = library()
        self._files: set[Path] = set()

    def environment(self, folder: Path) -> Mapping[str, str]:
        """Variables for a process that may read what is in `folder`."""
        file = folder / "clock"
        self._files.add(file)
        _set(file, self.ahead)
        return {
            # The library asks for memory while it is loaded, and jemalloc, which Redis uses, for the time when it is
            # asked: neither would come to an end, so memory is the C library's here.
            "LD_PRELOAD": f"{self._library}:libc.so.6",
            CLOCK_FILE: str(file),
            "FAKETIME_NO_CACHE": "1",
            "DONT_FAKE_MONOTONIC": "1",
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        }

    def shift(self, seconds: float) -> None:
        """Set it so far ahead of the machine's, or behind if that is negative: from the next look at it on."""
        for file in self._files:
            _set(file, seconds)
        self.ahead = seconds


def _set(file: Path, ahead: float) -> None:
    written = file.with_suffix(".new")
    written.write_text(f"{ahead:+f}\n", encoding="ascii")
    written.chmod(0o644)
    os.replace(written, file)  # at no moment is there half of it
