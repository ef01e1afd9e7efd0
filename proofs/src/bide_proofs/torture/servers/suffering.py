"""Troubles that most servers can have: killed, restarted, stood still, a full disk, another time of day.

Each is a function of random numbers and of a way to wait, which is cut short when the run is over. It mends what it
broke, and returns what it did in words. It blocks, and so runs on a thread beside the event loop of the proxies.
"""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar

from bide_proofs.servers.clock import ServerClock
from bide_proofs.servers.disk import OnDisk
from bide_proofs.servers.server import ServerProcess
from bide_proofs.torture.server import Trouble

T = TypeVar("T")
Wait: TypeAlias = Callable[[float], bool]
"""Waits so many seconds, or until the run is over; whether it is."""
Suffering: TypeAlias = Callable[[random.Random, Wait], str]
Pick: TypeAlias = Callable[[random.Random], ServerProcess]
"""Choose the server that suffers."""

KILLED_FOR_MEMORY = "the kernel's killer sends the process SIGKILL, as 'kill -9 of the server' does"
"""Why servers of one process have no trouble OOM beside KILL."""
KILL, RESTART, STILL, FAILOVER, HAND_OVER, MEMORY, CROWDED, DISK, CLOCK, OOM = (
    "kill -9 of the server", "server restart", "SIGSTOP of the server", "failover", "hand-over", "memory full",
    "too many connections", "disk full", "clock jump", "OOM",
)  # fmt: skip
"""The names of troubles."""
FARTHEST = 2.0
"""Seconds by which a server's clock is set wrong at most, either way."""
LONGEST_AWAY = 2.0
"""Seconds that a dead server is left dead."""
CROWDED_FOR = (0.5, 2.0)
_STILL = (0.2, 5.0)
FULL_FOR = (1.0, 4.0)
_JUMPED = (1.0, 4.0)
"""Seconds until it is set back."""


async def in_thread(call: Callable[..., T], *given: Any, over: threading.Event | None = None) -> T:
    """Run `call` on a thread. When cancelled, set `over` and wait for its end."""
    running = asyncio.ensure_future(asyncio.to_thread(call, *given))
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        if over is not None:
            over.set()
        await asyncio.wait([running])
        running.result()
        raise


def trouble_of(suffering: Suffering) -> Trouble:
    """Run `suffering` on a thread, for an event loop."""

    async def trouble(chance: random.Random) -> str:
        over = threading.Event()
        return await in_thread(suffering, chance, over.wait, over=over)

    return trouble


def killed(pick: Pick) -> Suffering:
    """Kill it by SIGKILL, and start it again on the same data."""

    def suffering(chance: random.Random, wait: Wait) -> str:
        node, away = pick(chance), chance.uniform(0, LONGEST_AWAY)
        took = 0.0
        try:
            node.kill()
            wait(away)
        finally:
            took = node.mend()
        return f"killed {node.name}, started it again after {away:.1f} s; it answered {took:.1f} s later"

    return suffering


def restarted(pick: Pick) -> Suffering:
    """End it in order, and start it again."""

    def suffering(chance: random.Random, wait: Wait) -> str:
        node, took = pick(chance), 0.0
        try:
            node.halt()
        finally:
            took = node.mend()
        return f"restarted {node.name}; it answered {took:.1f} s after it had ended"

    return suffering


def stood_still(pick: Pick) -> Suffering:
    """Stop it by SIGSTOP, until SIGCONT."""

    def suffering(chance: random.Random, wait: Wait) -> str:
        node, lasts = pick(chance), chance.uniform(*_STILL)
        try:
            node.pause()
            wait(lasts)
        finally:
            node.resume()
        return f"let {node.name} stand still for {lasts:.1f} s"

    return suffering


def disk_full(pick: Callable[[random.Random], OnDisk], provoke: Callable[[], object] = lambda: None) -> Suffering:
    """Fill its disk for a while. If it ended over this, start it again, as a person would.

    `provoke` lets a server need room at once that has some put by.
    """

    def suffering(chance: random.Random, wait: Wait) -> str:
        node, lasts = pick(chance), chance.uniform(*FULL_FOR)
        used, ended = 0, False
        try:
            used = node.disk.fill()
            provoke()
            wait(lasts)
        finally:
            node.disk.free()
            ended = not node.running
            node.mend()
            node.has_room()
        end = ", over which it ended, and was started again" if ended else ""
        return f"let the disk of {node.name} be full for {lasts:.1f} s with {used / 1e6:.1f} MB on it{end}"

    return suffering


def clock_set(clock: ServerClock) -> Suffering:
    """Set the server's clock ahead or back, and right again some seconds later."""

    def suffering(chance: random.Random, wait: Wait) -> str:
        jump, lasts = chance.uniform(-FARTHEST, FARTHEST), chance.uniform(*_JUMPED)
        try:
            clock.shift(jump)
            wait(lasts)
        finally:
            clock.shift(0)
        way = "ahead" if jump > 0 else "back"
        return f"set the server's clock {abs(jump):.1f} s {way}, and right again after {lasts:.1f} s"

    return suffering
