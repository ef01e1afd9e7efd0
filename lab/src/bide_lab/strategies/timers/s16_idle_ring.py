"""S16: time-out of very many connections, where every packet puts the time-out off."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any

from bide.core.instants import Millis
from bide.timers import IdleRing, drive
from bide_lab.figures import Figures
from bide_lab.strategy import Effect, Flaw, Item, Setting, Strategy, now, when

SLOTS = 30
"""Of one second each, of strategy time: the time-out."""


class IdleConnections(Strategy):
    """One time-out for all, whatever is asked, on the event loop that serves the connections.

    `schedule` is the first packet, `reschedule` another one, `cancel` the end of the connection.
    """

    in_process = True
    precision = 1.0
    shows = ("touch",)
    unfit = "its only delay is the one time-out of all connections"
    _effect: Effect

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self.time_out_after = setting.span(SLOTS)
        """Seconds of silence."""
        self.slot = setting.span(1)
        self._alive: dict[str, Any] = {}
        """The connections that are there, and not idle yet."""
        self._effects: set[asyncio.Task[None]] = set()
        self._looks: list[int] = []
        """Nanoseconds of processor time of each."""

    def touch(self, uid: str) -> None:
        """A packet of `uid`, maybe its first."""
        raise NotImplementedError

    def forget(self, uid: str) -> bool:
        """Its connection is closed; False: it was not there."""
        return self._alive.pop(uid, None) is not None

    def knows(self, uid: str) -> bool:
        return uid in self._alive

    async def schedule(self, items: Sequence[Item]) -> None:
        for item in items:
            self.touch(item.key)

    async def reschedule(self, item: Item) -> bool:
        known = self.knows(item.key)
        if known:
            self.touch(item.key)
        return known

    async def cancel(self, key: str) -> bool:
        return self.forget(key)

    async def fire_now(self, key: str) -> bool:
        known = self.forget(key)
        if known:
            self.idle([key])
        return known

    def idle(self, uids: Iterable[str]) -> None:
        """Close them, at the same time."""
        for uid in uids:
            task = asyncio.get_running_loop().create_task(self._effect(uid, now()))
            self._effects.add(task)
            task.add_done_callback(self._effects.discard)

    async def run(self, role: str, effect: Effect) -> None:
        self._effect = effect
        loop = asyncio.get_running_loop()
        at = loop.time()
        while True:
            at += self.slot
            await asyncio.sleep(at - loop.time())
            self.idle(self.timed(self.turn))

    def turn(self) -> Sequence[str]:
        """A slot's time has passed: who is idle."""
        raise NotImplementedError

    def timed(self, look: Callable[[], Sequence[str]]) -> Sequence[str]:
        """The result of a look; counted."""
        began = time.thread_time_ns()
        silent = look()
        self._looks.append(time.thread_time_ns() - began)
        return silent

    def counts(self) -> Mapping[str, float]:
        """`tick_us`: microseconds of processor time of a look on average, `tick_longest_us` of the longest."""
        us = [spent / 1e3 for spent in self._looks]
        return {"ticks": len(us), "tick_us": round(fmean(us), 2), "tick_longest_us": round(max(us), 1)} if us else {}


def _early(seen: Figures) -> str:
    if not seen.early or not seen.late:
        return ""
    return f"{seen.early} of {seen.fired} called idle early, by {-seen.late[0]:.0f} ms at most"


class PublishedRing(IdleConnections):
    """Thirty slots, and every packet moves its connection behind the hand."""

    name = "S16-ring"
    title = "idle ring, as published"
    flaws = (Flaw("a connection is called idle up to two slots before its time-out", "touch", _early),)

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self._slots: list[set[str]] = [set() for _ in range(SLOTS)]
        self._hand = 0

    def touch(self, uid: str) -> None:
        self.forget(uid)
        behind = self._alive[uid] = (self._hand - 1) % SLOTS
        self._slots[behind].add(uid)

    def forget(self, uid: str) -> bool:
        if uid in self._alive:
            self._slots[self._alive[uid]].discard(uid)
        return super().forget(uid)

    def turn(self) -> Sequence[str]:
        self._hand = (self._hand + 1) % SLOTS
        silent = list(self._slots[self._hand])
        for uid in silent:
            self.forget(uid)
        return silent


class LazyRing(IdleConnections):
    """bide's ring: a packet overwrites its connection's time, and the hand, when it comes there, moves it on."""

    name = "S16-lazy"
    title = "idle ring that moves lazily, bide's"

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self._ring = _MeasuredRing(
            self, timeout=round(self.time_out_after * 1000), tick=max(1, round(self.slot * 1000))
        )
        self._drive = drive(self._ring, lambda uid: self.idle([uid]))

    def touch(self, uid: str) -> None:
        self._drive.touch(uid)

    def forget(self, uid: str) -> bool:
        return self._drive.remove(uid)

    def knows(self, uid: str) -> bool:
        return uid in self._drive

    async def run(self, role: str, effect: Effect) -> None:
        self._effect = effect
        async with self._drive:
            await asyncio.Event().wait()


class _MeasuredRing(IdleRing[str]):
    """Tells how long its looks take."""

    def __init__(self, owner: LazyRing, *, timeout: Millis, tick: Millis) -> None:
        super().__init__(timeout=timeout, tick=tick)
        self._owner = owner

    def advance(self, now: Millis) -> list[str]:
        return list(self._owner.timed(lambda: super(_MeasuredRing, self).advance(now)))


class WholeScan(IdleConnections):
    """A map of last times, and every second a look at all of them."""

    name = "S16-scan"
    title = "map of last times, scanned whole"
    flaws = (
        Flaw(
            "every look is at all connections, and holds up all else meanwhile", "touch",
            when("tick_us", "{tick_us:,.0f} us a look, with {scheduled:,} connections", over=100),
        ),
    )  # fmt: skip

    def touch(self, uid: str) -> None:
        self._alive[uid] = time.monotonic()

    def turn(self) -> Sequence[str]:
        since = time.monotonic() - self.time_out_after
        silent = [uid for uid, last in self._alive.items() if last <= since]
        for uid in silent:
            self.forget(uid)
        return silent


class TimerEach(IdleConnections):
    """A timer of the event loop for each connection, cancelled and made anew by every packet."""

    name = "S16-timers"
    title = "a timer per connection"
    precision = 0.0
    flaws = (
        Flaw(
            "every packet cancels a timer and makes another", "touch",
            when("touch_ns", "{touch_ns:,.0f} ns and {client_bytes_per_task:,.0f} bytes a connection"),
        ),
    )  # fmt: skip

    def touch(self, uid: str) -> None:
        self.forget(uid)
        self._alive[uid] = asyncio.get_running_loop().call_later(self.time_out_after, self._silent, uid)

    def forget(self, uid: str) -> bool:
        if uid in self._alive:
            self._alive[uid].cancel()
        return super().forget(uid)

    def _silent(self, uid: str) -> None:
        self.forget(uid)
        self.idle([uid])

    async def run(self, role: str, effect: Effect) -> None:
        self._effect = effect
        await asyncio.Event().wait()

    async def close(self) -> None:
        for uid in list(self._alive):
            self.forget(uid)
