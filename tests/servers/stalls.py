"""How long a machine or its servers stood still, so that a test of real time does not blame bide for it.

On a machine that does not stand still this is 0, and a bar is as high as it says. A call that keeps the interpreter for
itself looks like a machine that stands still: what bide does to the event loop is for other tests to see.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager

from tests.servers.resp import Connection

_EVERY = 0.01
_USUAL = 0.05
"""Seconds that a round past every server may take."""


class Stalls:
    """What a thread of its own saw, which waits for nothing but the machine and the servers."""

    def __init__(self) -> None:
        self.over = threading.Event()
        self._before = 0.0
        self._begun = time.monotonic()

    @property
    def seconds(self) -> float:
        """In all, where a round took longer than usual; the one under way too."""
        return self._before + self._longer_than_usual()

    def watch(self, servers: list[Connection]) -> None:
        while not self.over.wait(_EVERY):
            for server in servers:
                server.ask("PING")
            self._before += self._longer_than_usual()
            self._begun = time.monotonic()

    def _longer_than_usual(self) -> float:
        lasts = time.monotonic() - self._begun
        return lasts if lasts > _USUAL else 0.0


@contextmanager
def watched(servers: Iterable[Connection] = ()) -> Iterator[Stalls]:
    """Watch the machine, and servers of Redis (see `keyspace.masters_of`), whose connections are closed in the end."""
    stalls = Stalls()
    with ExitStack() as opened:
        servers = [opened.enter_context(server) for server in servers]
        thread = threading.Thread(target=stalls.watch, args=(servers,), daemon=True)
        thread.start()
        opened.callback(thread.join)
        opened.callback(stalls.over.set)
        yield stalls
