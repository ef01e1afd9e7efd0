"""How many deliveries each host is given at once, so that one that hangs takes no place that another needs.

A worker has so many slots for a topic. A receiver that takes 30 seconds to answer would soon hold all of them, and
every other receiver of the topic would wait. So each host (with its port) has a number of places, by default a fifth of
a topic's slots. A delivery that finds none free gives its slot back: it is deferred, which counts no attempt.

Three numbers are kept per host, and the rest is arithmetic:

- `allowed`: its places. Halved, down to one, by each delivery that was not answered at all (no connection, no answer in
  time), doubled by each that was, whatever the status: a host that is down costs one slot and not twenty, and one that
  comes back has all its places after five answers.
- `typical`: how long a delivery holds a place, a moving average. The age of the oldest one under way, if that is more,
  counts in its place where it is asked how soon a place becomes free: so a host that has just begun to hang is known
  for it before its first timeout.
- `ahead`: how many are deferred and not back yet, by this arithmetic.

`typical / allowed` is how often a place becomes free. A delivery whose turn comes within 20 ms waits for it: deferring
costs the store two calls. Any other is deferred until the place that is its own by that arithmetic, behind all that
were deferred before: N deliveries to a host that hangs come back one by one, and not all at once, again and again.
The distance between two is at most 20 ms, so that a thousand of them are back 20 seconds after a host's recovery. And
none comes back before it has waited for as long as the host has been silent: so each is deferred a few times more as a
silence doubles, and a host that stood still for half a second has its whole backlog back about as soon.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Callable

PATIENCE = 0.02
"""Seconds that a delivery may wait for a place, holding a slot of its topic."""
FARTHEST = 600.0
"""Seconds: the longest pause, however many are deferred."""
_CLOSEST, _WIDEST = 0.00025, 0.02
"""Seconds between two that come back: so few deferrals that they are no load, and so many that few are late."""
_FIRST_GUESS = 0.05
_WEIGHT = 0.2
"""Of the newest delivery, in the moving average of how long they take."""
_MOST_HOSTS = 4_096
"""Hosts that are remembered; when there are more, those without a delivery under way are forgotten."""


class _Host:
    __slots__ = ("ahead", "allowed", "counted_at", "started", "typical", "waiting")

    def __init__(self, allowed: int) -> None:
        self.allowed = allowed
        self.typical = _FIRST_GUESS
        self.ahead = 0.0
        self.counted_at = 0.0
        self.started: dict[HostSlot, float] = {}
        """When each delivery under way began, the oldest first."""
        self.waiting: deque[asyncio.Future[HostSlot | None]] = deque()

    def oldest(self, now: float) -> float:
        """Seconds since the oldest delivery under way began."""
        return now - next(iter(self.started.values())) if self.started else 0.0

    def spacing(self, now: float) -> float:
        """Seconds between two places that become free."""
        return max(self.typical, self.oldest(now)) / self.allowed


class HostSlot:
    """One of a host's places, held by one delivery until it is left."""

    __slots__ = ("_host", "_hosts")

    def __init__(self, hosts: HostLimits, host: _Host) -> None:
        self._hosts = hosts
        self._host = host

    def leave(self, answered: bool | None) -> None:
        """Give it to the next. `answered`: whether the host said anything; None: the delivery was broken off by us."""
        self._hosts._left(self, self._host, answered)


class HostLimits:
    """The places of all hosts. `most`: places of one host. For one event loop."""

    def __init__(self, most: int, chance: Callable[[], float] = random.random) -> None:
        self._most = most
        self._chance = chance
        self._hosts: dict[str, _Host] = {}
        self._now: Callable[[], float] = asyncio.get_running_loop().time

    def enter(self, name: str) -> HostSlot | None:
        """A place, if one is free at once. O(1)."""
        host = self._hosts.get(name)
        if host is None:
            if len(self._hosts) >= _MOST_HOSTS:
                self._forget()
            host = self._hosts[name] = _Host(self._most)
        if host.waiting or len(host.started) >= host.allowed:
            return None
        return self._take(host)

    async def wait(self, name: str) -> HostSlot | None:
        """A place, if it is to be had within `PATIENCE`. To be called when `enter` had none."""
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
        """Seconds after which one that got no place shall come back, with a random part; see above. O(1)."""
        host, now = self._hosts.get(name), self._now()
        if host is None:
            return PATIENCE  # all its places were left meanwhile, and it was forgotten
        spacing = min(max(host.typical / host.allowed, _CLOSEST), _WIDEST)
        still_ahead = max(host.ahead - (now - host.counted_at) / spacing, 0.0)
        host.ahead, host.counted_at = min(still_ahead + 1.0, FARTHEST / spacing), now
        return max(host.ahead * spacing, host.oldest(now), PATIENCE) * (1.0 + 0.25 * self._chance())

    def allowed(self, name: str) -> int:
        """How many deliveries the host is given at once, as of now."""
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
