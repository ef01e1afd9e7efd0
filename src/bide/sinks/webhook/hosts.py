"""Limits the concurrent deliveries to each host, so that a host that hangs does not use up the slots of others.

A worker has a number of slots for a topic. A receiver that takes 30 seconds to answer would soon hold all of them, and
every other receiver of the topic would wait. So each host (with its port) gets its own slots, by default a fifth of the
topic's. A delivery that finds no free slot is deferred, which counts no attempt and frees the topic's slot.

Three numbers are kept per host:

- `allowed`: its slots. Each delivery without any answer (no connection, or a timeout) halves it, down to one; each with
  an answer of any status doubles it. So a host that is down costs one slot instead of twenty, and has all its slots
  back within five answers after its recovery.
- `typical`: the moving average of the time for which a delivery holds a slot. If the oldest running delivery is older,
  its age is used to estimate when a slot becomes free. So a hanging host is noticed before a timeout.
- `ahead`: the estimated number of deferred deliveries that are not back yet.

`typical / allowed` is the interval at which slots become free. A delivery whose turn comes within 20 ms waits for it,
since a deferral costs two store calls. Other deliveries are deferred until their own estimated turn, behind those
deferred earlier. So N deliveries to a hanging host come back one by one, not all at once every time. The interval is at
most 20 ms, so that a thousand of them are back 20 seconds after the host's recovery. A delivery waits for at least as
long as the host has been silent. So it is deferred again only when the silence doubles, and a host that stalled for
half a second gets its whole backlog back after about another half second.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Callable

PATIENCE = 0.02
"""The most seconds that a delivery waits for a slot of the host, while it holds one of its topic."""
FARTHEST = 600.0
"""The longest deferral in seconds, however many deliveries are deferred."""
_CLOSEST, _WIDEST = 0.00025, 0.02
"""The least and most seconds between two returns, so that deferrals cause little load and few come back late."""
_FIRST_GUESS = 0.05
_WEIGHT = 0.2
"""Weight of the newest delivery in the moving average."""
_MOST_HOSTS = 4_096
"""The number of tracked hosts; beyond it, those without a running delivery are dropped."""


class _Host:
    __slots__ = ("ahead", "allowed", "counted_at", "started", "typical", "waiting")

    def __init__(self, allowed: int) -> None:
        self.allowed = allowed
        self.typical = _FIRST_GUESS
        self.ahead = 0.0
        self.counted_at = 0.0
        self.started: dict[HostSlot, float] = {}
        self.waiting: deque[asyncio.Future[HostSlot | None]] = deque()

    def oldest(self, now: float) -> float:
        """Seconds since the oldest running delivery began."""
        return now - next(iter(self.started.values())) if self.started else 0.0

    def spacing(self, now: float) -> float:
        """The estimated seconds between the release of two slots."""
        return max(self.typical, self.oldest(now)) / self.allowed


class HostSlot:
    """A slot of a host, held by one delivery until it leaves."""

    __slots__ = ("_host", "_hosts")

    def __init__(self, hosts: HostLimits, host: _Host) -> None:
        self._hosts = hosts
        self._host = host

    def leave(self, answered: bool | None) -> None:
        """Free the slot. `answered`: True if the host sent an answer; None if the delivery was cancelled."""
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
        """Wait for a slot if one is expected to become free within `PATIENCE`. Call it after `enter` returned None."""
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
        host = self._hosts.get(name)
        return self._most if host is None else host.allowed

    def busy(self, name: str) -> int:
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
