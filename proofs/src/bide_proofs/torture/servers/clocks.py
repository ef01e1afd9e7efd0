"""A clock for servers that can be set while they run, by libfaketime."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from bide_proofs.torture.clock import library

FARTHEST = 2.0
"""Seconds by which it is set wrong at most, either way."""


class FakeClock:
    """What servers with its environment take for the time of day; how fast time goes by, the monotonic clock, stays the
    machine's. Without the library `refused` says so, and nothing is changed.

    Each server has a file of its own, in a folder that its account may read, and looks there whenever it looks at the
    clock (some 10 us): what is cached would jump at another moment in each process of a server, which no clock does.
    """

    def __init__(self) -> None:
        self.ahead = 0.0
        """Seconds by which it is ahead of the machine's."""
        self._files: list[Path] = []
        self._library = library()
        self.refused = "" if self._library else "libfaketime is not installed: apt-get install libfaketime"

    @property
    def farthest(self) -> float:
        """Seconds by which it may be set wrong, either way."""
        return 0.0 if self.refused else FARTHEST

    def environment(self, folder: Path) -> Mapping[str, str]:
        """To be added to that of a server which may read what is in `folder`."""
        if self._library is None:
            return {}
        file = folder / "clock"
        if file not in self._files:
            self._files.append(file)
        _write(file, self.ahead)
        # The library asks for memory while it is loaded, and jemalloc, which Redis uses, for the time when it is asked:
        # neither would come to an end, so memory is the C library's here.
        return {
            "LD_PRELOAD": f"{self._library}:libc.so.6",
            "FAKETIME_TIMESTAMP_FILE": str(file),
            "FAKETIME_NO_CACHE": "1",
            "DONT_FAKE_MONOTONIC": "1",
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        }

    def shift(self, seconds: float) -> None:
        """It is ahead of the machine's by so much, or behind if that is negative: from the next look at it on."""
        for file in self._files:
            _write(file, seconds)
        self.ahead = seconds


def _write(file: Path, seconds: float) -> None:
    written = file.with_suffix(".new")
    written.write_text(f"{seconds:+f}\n", encoding="ascii")
    written.chmod(0o644)
    os.replace(written, file)  # at no moment is there half of it
