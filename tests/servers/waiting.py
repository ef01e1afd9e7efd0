"""Waiting for what other processes come to by themselves."""

from __future__ import annotations

import time
from collections.abc import Callable

from tests.servers.child import ServerFailed
from tests.servers.resp import Refused


def wait_until(holds: Callable[[], bool], what: str, *, patience: float = 30.0) -> None:
    """Until `holds()`; a server that does not answer counts as no. Raises `ServerFailed` after `patience` seconds."""
    until = time.monotonic() + patience
    problem: Exception | None = None
    while time.monotonic() < until:
        try:
            if holds():
                return
            problem = None
        except (OSError, Refused) as error:
            problem = error
        time.sleep(0.02)
    raise ServerFailed(f"waited {patience:.0f} s in vain for {what}") from problem
