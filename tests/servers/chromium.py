"""The browser of the console's tests: Debian's Chromium, or the one that TEST_CHROMIUM names."""

from __future__ import annotations

import os
import shutil

from tests.servers.child import ServerMissing

_NAMES = ("chromium", "chromium-browser", "google-chrome")


def chromium() -> str:
    """Where its program is. Raises `ServerMissing`."""
    named = os.environ.get("TEST_CHROMIUM")
    names = (named,) if named else _NAMES
    found = next((place for name in names if (place := shutil.which(name))), None)
    if found is None:
        if named:
            raise ServerMissing(f"TEST_CHROMIUM names {named!r}, which is no program")
        raise ServerMissing("chromium is not installed: scripts/services install, or apt-get install chromium")
    return found
