"""A clock for a server that a test can set while the server runs, by libfaketime."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from tests.servers.child import ServerMissing

PACKAGES = "libfaketime"
_NAME = "faketime/libfaketimeMT.so.1"


def library() -> Path:
    """The library that is put before the system's clock. Raises `ServerMissing`."""
    for folder in (Path("/usr/lib"), Path("/usr/local/lib")):
        for found in sorted((*folder.glob(_NAME), *folder.glob(f"*/{_NAME}"))):
            return found
    raise ServerMissing(f"libfaketime is not installed: scripts/services install, or apt-get install {PACKAGES}")


class ServerClock:
    """What a server takes for the time of day; how fast time goes by, the monotonic clock, stays the machine's.

    Give its `environment` to the server. Raises `ServerMissing`.
    """

    def __init__(self, folder: Path) -> None:
        self._file = folder / "clock"
        # The library asks for memory while it is loaded, and jemalloc, which Redis uses, for the time when it is asked:
        # neither would come to an end, so memory is the C library's here.
        self.environment: Mapping[str, str] = {
            "LD_PRELOAD": f"{library()}:libc.so.6",
            "FAKETIME_TIMESTAMP_FILE": str(self._file),
            "FAKETIME_NO_CACHE": "1",
            "DONT_FAKE_MONOTONIC": "1",
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        }
        self.shift(0)

    def shift(self, seconds: float) -> None:
        """It is ahead of the machine's by so much, or behind if that is negative: from the next look at it on."""
        written = self._file.with_suffix(".new")
        written.write_text(f"{seconds:+f}\n", encoding="ascii")
        os.replace(written, self._file)  # at no moment is there half of it
