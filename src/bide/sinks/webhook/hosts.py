"""Limits the concurrent deliveries to each host, so that a host that hangs does not use up the slots of others.

A worker has a number of slots for a topic. A receiver that takes 30 seconds to answer would soon hold all of them, and
every other receiver of the topic would wait. So each host (with its port) gets slots of its own, by default a fifth of
the topic's. A delivery that finds none free is deferred, which counts no attempt and frees the topic's slot.

Three numbers are kept per host:

- `allowed`: its slots. Halved, down to one, by each delivery without any answer (no connection, or a timeout), doubled
  by each with an answer, whatever its status: a host that is down costs one slot instead of twenty, and after its
  recovery it has all of them back within five answers.
- `typical`: how long a delivery holds a slot, a moving average. If the oldest delivery under way is older than that,
  its age is used to estimate when a slot becomes free: so a host that begins to hang is noticed before a timeout.
- `ahead`: the estimated number of deferred deliveries that are not back yet.

`typical / allowed` is the interval at which slots become free. A delivery whose turn comes within 20 ms waits for it,
since a deferral costs two calls of the store. Any other is deferred until its own estimated turn, behind all that were
deferred before: N deliveries to a hanging host come back one by one, not all at once, again and again. The interval is
at most 20 ms, so that a thousand of them are back 20 seconds after the host's recovery. And none comes back before it
has waited for as long as the host has been silent: so a delivery is deferred again only as the silence doubles, and a
host that stalled for half a second has its whole backlog back about as soon.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Callable

PATIENCE = 0.02
"""Most seconds that a delivery waits for a slot of the host, while it holds one of its topic."""
FARTHEST = 600.0
"""Seconds: the longest deferral, however many deliveries are deferred."""
_CLOSEST, _WIDEST = 0.00025, 0.02
"""Least and most seconds between two that come back: deferrals are no load, and few come back late."""
_FIRST_GUESS = 0.05
_WEIGHT = 0.2
"""Weight of the newest delivery in the moving average."""
_MOST_HOSTS = 4_096
"""Hosts that are remembered; beyond them, those without a delivery under way are forgotten."""


class _Host:
    __slots__ = ("ahead", "allowed", "counted_at", "started", "typical", "waiting")

    def __init__(self, allowed: int) -> None:
        self.allowed = allowed
        self.typical = _FIRST_GUESS
        self.ahead = 0.0
        self.counted_at = 0.0
        self.started: dict[HostSlot, float] = {}
        """The start of each delivery under way, the oldest first."""
        self.waiting: deque[asyncio.Future[HostSlot | None]] = deque()

    def oldest(self, now: float) -> float:
        """Seconds since the oldest delivery under way began."""
        return now - next(iter(self.started.values())) if self.started else 0.0

    def spacing(self, now: float) -> float:
        """Estimated seconds between two slots that become free."""
        return max(self.typical, self.oldest(now)) / self.allowed


class HostSlot:
    """A slot of a host, held by one delivery until it leaves."""

    __slots__ = ("_host", "_hosts")

    def __init__(self, hosts: HostLimits, host: _Host) -> None:
        self._hosts = hosts
        self._host = host

    def leave(self, answered: bool | None) -> None:
        """Free the slot. `answered`: whether the host sent an answer; None: the delivery was cancelled."""
        self._hosts._left(self, self._host, answered)


class HostLimits:
    """The slots of all hosts, at most `most` for each. Belongs to one event loop."""

    def __init__(self, most: int, chance: Callable[[], float] = random.random) -> None:
        self._most = most
        self._chance = chance
        self._hosts: dict[str, _Host] = {}
        self._now: Callable[[], float] = asyncio.get_running_loop().time

    def enter(self, name: str) -> HostSlot | None:
        """Take a slot, if one is free. O(1)."""
        host = self._hosts.get(name)
        if host is None:
            if len(self._hosts) >= _MOST_HOSTS:
                self._forget()
            host = self._hosts[name] = _Host(self._most)
        if host.waiting or len(host.started) >= host.allowed:
            return None
        return self._take(host)

    async def wait(self, name: str) -> HostSlot | None:
        """Wait for a slot, if one should become free within `PATIENCE`. Call it after `enter` returned None."""
        host = self._hosts[name]
        if (len(host.waiting) + 1) * host.spacing(self._now()) > PATIENCE:
            return None
        loop = asyncio.get_running_loop()
        turn: asyncio.Future[HostSlot | None] = loop.create_future()
        host.waiting.append(turn)
        timer = loop.call_later(PATIENCE, _tell_none, turn)
        try:
            return await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                slot = turn.result()
                if slot is not None:
                    slot.leave(None)
            raise
        finally:
            timer.cancel()
            if turn in host.waiting:
                host.waiting.remove(turn)

    def pause(self, name: str) -> float:
        """Seconds to defer a delivery that got no slot, with a random part; see above. O(1)."""
        host, now = self._hosts.get(name), self._now()
        if host is None:
            return PATIENCE  # all its slots were freed meanwhile, and it was forgotten
        spacing = min(max(host.typical / host.allowed, _CLOSEST), _WIDEST)
        still_ahead = max(host.ahead - (now - host.counted_at) / spacing, 0.0)
        host.ahead, host.counted_at = min(still_ahead + 1.0, FARTHEST / spacing), now
        return max(host.ahead * spacing, host.oldest(now), PATIENCE) * (1.0 + 0.25 * self._chance())

    def allowed(self, name: str) -> int:
        """How many concurrent deliveries the host may have now."""
        host = self._hosts.get(name)
        return self._most if host is None else host.allowed

    def busy(self, name: str) -> int:
        """How many deliveries to the host are under way."""
        host = self._hosts.get(name)
        return 0 if host is None else len(host.started)

    def _take(self, host: _Host) -> HostSlot:
        slot = HostSlot(self, host)
        host.started[slot] = self._now()
        return slot

    def _left(self, slot: HostSlot, host: _Host, answered: bool | None) -> None:
        took = self._now() - host.started.pop(slot)
        if answered is not None:
            host.typical += (took - host.typical) * _WEIGHT
            host.allowed = min(host.allowed * 2, self._most) if answered else max(host.allowed // 2, 1)
        while host.waiting and len(host.started) < host.allowed:
            turn = host.waiting.popleft()
            if not turn.done():
                turn.set_result(self._take(host))

    def _forget(self) -> None:
        idle = [name for name, host in self._hosts.items() if not host.started and not host.waiting]
        for name in idle:
            del self._hosts[name]


def _tell_none(turn: asyncio.Future[HostSlot | None]) -> None:
    if not turn.done():
        turn.set_result(None)
