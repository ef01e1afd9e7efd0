"""Free ports on 127.0.0.1 for servers that are about to start."""

from __future__ import annotations

import random
import socket

BUS = 10_000
"""How far above its own port a Redis Cluster node has its second one."""

_FIRST, _LAST = 11_000, 22_000
"""Both ports stay below 32768, where Linux begins to hand out ports to clients, so that no client is in the way."""


def free_port(*, bus: bool = False) -> int:
    """A port that nobody has at this moment, with `bus` the one for the cluster bus too.

    At random, since others start servers at the same time; and still a guess that somebody may be quicker to take, so
    whoever starts a server tries again with another.
    """
    for _ in range(1_000):
        port = random.randrange(_FIRST, _LAST)
        if _free(port) and (not bus or _free(port + BUS)):
            return port
    raise OSError(f"no free port was found from {_FIRST} to {_LAST}")


def listens(port: int) -> bool:
    """Whether somebody takes connections there. Raises `OSError` where nobody does."""
    socket.create_connection(("127.0.0.1", port), timeout=1.0).close()
    return True


def _free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
