"""What is tortured: a store somewhere, the ways to it that can be disturbed, and what it can suffer itself."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

from bide.testing.proxy import FaultProxy

Trouble: TypeAlias = Callable[[random.Random], Awaitable[str]]
"""Causes one trouble, waits as long as it lasts (a choice of the random numbers), mends it, and returns in words what
it did. What it raises ends the run: it is a mistake of the harness. If it is cancelled it mends what it broke."""


class Server(Protocol):
    """One store under torture. Everything is asked on the event loop that has started it."""

    name: str
    """Of the report: "redis", "postgres"."""
    urls: Sequence[str]
    """What clients and workers are given, one each in turn; through `proxies` where that is possible. Known once it is
    started, and the same until it is stopped."""
    direct: str
    """The store without a proxy between, for the last look at it."""
    proxies: Sequence[FaultProxy]
    """Whose connections may be reset, held, delayed, throttled and robbed of replies. Empty where nothing goes over
    TCP."""
    cannot: Mapping[str, str]
    """Troubles that the server cannot have here, with the reason, for the report: {"disk full": "no filesystem of its
    own may be mounted: needs root"}."""

    environment: Mapping[str, str]
    """Of clients and workers, besides the run's own: a BIDE_TOKEN where the store asks for one. Mostly empty."""
    farthest: float
    """The greatest `ahead`, either way, that a trouble may set; 0 where the clock cannot be set. What a history shows
    of times is judged with twice so much tolerance, what the store tells of its own leases with none."""

    gives_back: bool
    """Whether the store itself ends leases that its callers were never told of (`history.events.Header`)."""

    @property
    def ahead(self) -> float:
        """Seconds by which the store's clock is ahead of this machine's at this moment; 0 unless a trouble has set it.
        The frame looks at it twenty times a second, so that histories tell the store's clock."""
        ...

    async def start(self) -> None:
        """Ready for clients, with an empty store. Raises ServerMissing of servers/, or an OSError."""
        ...

    def troubles(self) -> Mapping[str, Trouble]:
        """What it can suffer beyond what befalls its connections, by name: "restart", "failover", "disk full". One at a
        time is caused."""
        ...

    async def stop(self) -> None:
        """Nothing of it is left: no process, no proxy, no file outside its folder."""
        ...

    def about(self) -> dict[str, Any]:
        """For the report: version, durability, how it is set up. Known once it is started."""
        ...
