"""How long a machine or its servers stood still, so that a test of real time blames nobody else for it."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from tests.servers.keyspace import masters_of
from tests.servers.resp import Connection

_EVERY = 0.01
_USUAL = 0.05
"""Seconds that a round past every server may take."""


class Stalls:
    """What a thread of its own saw, which waits for nothing but the machine and the servers."""

    def __init__(self) -> None:
        self.seconds = 0.0
        """In all, where a round took longer than usual."""
        self.over = threading.Event()

    def watch(self, servers: list[Connection]) -> None:
        before = time.monotonic()
        while not self.over.wait(_EVERY):
            for server in servers:
                server.ask("PING")
            now = time.monotonic()
            if now - before > _USUAL:
                self.seconds += now - before
            before = now


@contextmanager
def watched(url: str) -> Iterator[Stalls]:
    """Watch the machine and every master of the deployment that `url` names (see `keyspace`)."""
    stalls = Stalls()
    with ExitStack() as opened:
        servers = [opened.enter_context(master) for master in masters_of(url)]
        thread = threading.Thread(target=stalls.watch, args=(servers,), daemon=True)
        thread.start()
        opened.callback(thread.join)
        opened.callback(stalls.over.set)
        yield stalls
