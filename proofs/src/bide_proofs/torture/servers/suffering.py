"""Troubles that most servers can have: killed, restarted, stood still, a full disk, another time of day.

Each is a function of random numbers, waits as long as it lasts, mends what it broke, also when it is cancelled, and
returns what it did in words.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable

from bide_proofs.torture.server import Trouble
from bide_proofs.torture.servers.clocks import FARTHEST, FakeClock
from bide_proofs.torture.servers.disks import Disk
from bide_proofs.torture.servers.node import Node

Pick = Callable[[random.Random], Awaitable[Node]]
"""Whom it befalls."""

KILLED_FOR_MEMORY = "the kernel's killer sends the process SIGKILL, as 'kill -9 of the server' does"
"""Why servers of one process have no trouble OOM beside KILL."""
KILL, RESTART, STILL, FAILOVER, HAND_OVER, MEMORY, CROWDED, DISK, CLOCK, OOM = (
    "kill -9 of the server", "server restart", "SIGSTOP of the server", "failover", "hand-over", "memory full",
    "too many connections", "disk full", "clock jump", "OOM",
)  # fmt: skip
"""What troubles are called."""
_LONGEST_AWAY = 2.0
"""Seconds that a dead server is left dead."""
_STILL = (0.2, 5.0)
_FULL = (1.0, 4.0)
_JUMPED = (1.0, 4.0)
"""Seconds until it is set back."""


def killed(pick: Pick) -> Trouble:
    """By SIGKILL, and started again on the same data."""

    async def trouble(chance: random.Random) -> str:
        node, away = await pick(chance), chance.uniform(0, _LONGEST_AWAY)
        took = 0.0
        try:
            await node.kill()
            await asyncio.sleep(away)
        finally:
            took = await node.mend()
        return f"killed {node.name}, started it again after {away:.1f} s; it answered {took:.1f} s later"

    return trouble


def restarted(pick: Pick) -> Trouble:
    """Ended in order, and started again."""

    async def trouble(chance: random.Random) -> str:
        node, took = await pick(chance), 0.0
        try:
            await node.halt()
        finally:
            took = await node.mend()
        return f"restarted {node.name}; it answered {took:.1f} s after it had ended"

    return trouble


def stood_still(pick: Pick) -> Trouble:
    """By SIGSTOP, until SIGCONT."""

    async def trouble(chance: random.Random) -> str:
        node, lasts = await pick(chance), chance.uniform(*_STILL)
        try:
            node.pause()
            await asyncio.sleep(lasts)
        finally:
            node.resume()
        return f"let {node.name} stand still for {lasts:.1f} s"

    return trouble


async def _nothing() -> None:
    """What need not be provoked."""


def disk_full(
    pick: Pick, disk_of: Callable[[Node], Disk], provoke: Callable[[], Awaitable[None]] = _nothing
) -> Trouble:
    """Nothing more may be written, and then it may again. Who has ended over it is started again, as by a person.

    `provoke` lets a server need room at once that has some put by.
    """

    async def trouble(chance: random.Random) -> str:
        node, lasts = await pick(chance), chance.uniform(*_FULL)
        disk, used, ended = disk_of(node), 0, False
        try:
            used = await disk.fill()
            await provoke()
            await asyncio.sleep(lasts)
        finally:
            disk.free()
            ended = not node.running
            await node.mend()
            await node.has_room()
        end = ", over which it ended, and was started again" if ended else ""
        return f"let the disk of {node.name} be full for {lasts:.1f} s with {used / 1e6:.1f} MB on it{end}"

    return trouble


def clock_set(clock: FakeClock) -> Trouble:
    """The server's time of day jumps ahead, or back, and some seconds later the other way."""

    async def trouble(chance: random.Random) -> str:
        jump, lasts = chance.uniform(-FARTHEST, FARTHEST), chance.uniform(*_JUMPED)
        try:
            clock.shift(jump)
            await asyncio.sleep(lasts)
        finally:
            clock.shift(0)
        way = "ahead" if jump > 0 else "back"
        return f"set the server's clock {abs(jump):.1f} s {way}, and right again after {lasts:.1f} s"

    return trouble
