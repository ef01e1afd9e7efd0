"""The store under torture: where it is, the ways to it that can be disturbed, and the troubles that it has itself."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from typing import Any, TypeAlias, TypeVar

from bide.testing.proxy import FaultProxy

T = TypeVar("T")
Wait: TypeAlias = Callable[[float], bool]
"""Waits so many seconds, or until the run is over; whether it is."""
Trouble: TypeAlias = Callable[[random.Random, Wait], str]
"""Causes one trouble, waits as long as it lasts (a choice of the random numbers), mends it, and returns in words what
it did. It blocks, and so runs on a thread beside the event loop of the proxies. What it raises ends the run: it is a
mistake of the harness."""


class Common(StrEnum):
    """Troubles that more than one kind of store has."""

    KILL = "kill -9 of the server"
    RESTART = "server restart"
    STILL = "SIGSTOP of the server"
    FAILOVER = "failover"
    HAND_OVER = "hand-over"
    MEMORY = "memory full"
    CROWDED = "too many connections"
    DISK = "disk full"
    CLOCK = "clock jump"
    OOM = "OOM"


FARTHEST = 2.0
"""Seconds by which a store's clock is set wrong at most, either way."""


class Server:
    """One store under torture, and what is true of most. It is started, asked and stopped on one event loop."""

    name: str
    """Of the report: "redis", "postgres"."""
    gives_back = False
    """True if the store itself ends leases that its callers were never told of (`history.events.Header`)."""
    ahead = 0.0
    """Seconds by which the store's clock is ahead of this machine's at this moment; 0 unless a trouble has set it. The
    run looks at it twenty times a second, so that histories tell the store's clock."""
    farthest = 0.0
    """The greatest `ahead`, either way, that a trouble may set; 0 where the clock cannot be set. What a history shows
    of times is judged with twice so much tolerance, what the store tells of its own leases with none."""

    def __init__(self, direct: str = "") -> None:
        self.direct = direct
        """The store without a proxy between, for the last look at it."""
        self.urls: Sequence[str] = ()
        """The URLs for clients and workers, one each in turn; through `proxies` where that is possible. Known once it
        is started, and the same until it is stopped."""
        self.worker_url: str | None = None
        """The URL for workers instead, where they are the way by which clients reach the store."""
        self.proxies: Sequence[FaultProxy] = ()
        """Their connections may be reset, held, delayed, throttled and robbed of replies. Empty where nothing goes over
        TCP."""
        self.cannot: dict[str, str] = {}
        """Troubles that the server cannot have here, with the reason, for the report."""
        self.environment: Mapping[str, str] = {}
        """Of clients and workers, besides the run's own."""

    async def start(self) -> None:
        """Ready for clients, with an empty store. Raises ServerMissing of servers/, or an OSError; then too it is to be
        stopped."""
        raise NotImplementedError

    def troubles(self) -> Mapping[str, Trouble]:
        """The troubles that it can have beyond those of its connections, by name. One at a time is caused."""
        return {}

    async def stop(self) -> None:
        """Nothing of it is left: no process, no proxy, no file outside its folder."""

    def about(self) -> dict[str, Any]:
        """For the report: version, durability, how it is set up. Known once it is started."""
        raise NotImplementedError


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
