"""A drive runs one timer, on an event loop or in a thread, and calls back for each item when it is due.

**The idea.** A timer knows which items are due and when to check again, but does not wake by itself. A drive does, in
one loop:

    read the clock -> take out due items -> call back for each -> sleep until the next deadline -> read the clock ...

**Never early, although sleeps are.** A sleep of 20 ms may end after 18.8 (uvloop rounds to its own cached time, and
about every third short timer fires up to 1.2 ms early). So after a wake-up the drive reads the clock again, and sleeps
once more if the time has not come.

**Never asleep for too long.** Adding an item that is due before the end of the sleep wakes the drive. No sleep is
longer than `longest_sleep` (1 s), since clocks are set and machines are suspended. A needless wake-up costs some 30
microseconds, which once a second is 0.003 % of a core. While the timer is empty, the drive does not wake at all.

**A clock that is set back** makes nothing early: there are no callbacks until it shows its latest time again. So for
time-outs, where only the duration matters, use `SteadyClock`, which is never set; an idle ring does so by default.

The callback is a plain function and should be short: it runs on the event loop, or in the drive's thread, one at a
time. Slow work belongs in a task or a pool that the callback starts. An exception in a callback is logged, and the next
callback is called.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import math
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from operator import index
from typing import Generic, Self, TypeVar, overload

from bide.core.instants import Millis
from bide.ports import Clock, SystemClock, Timer
from bide.timers.idle import IdleRing


class SteadyClock(SystemClock):
    """A clock of milliseconds since an arbitrary moment, rounded down. It is never set, so it measures durations."""

    __slots__ = ()

    def now(self) -> Millis:
        return time.monotonic_ns() // 1_000_000

    def seconds_until(self, at: Millis) -> float:
        return at / 1000 - time.monotonic()


Item = TypeVar("Item", bound=Hashable)

LONGEST_SLEEP = 1.0
"""Seconds of real time, whatever the speed of the clock."""

_SLICE = 256
"""The number of successive callbacks on an event loop before other work gets a turn."""

_SHORTEST_WAIT = 0.0001
"""The least seconds of the rest of a sleep that ended early, since 0 means that an item is due."""

_SHORTEST_LOOP_SLEEP = 0.001
"""The least seconds of a sleep. Event loops round shorter ones to 0, and would spin."""

_logger = logging.getLogger(__name__)


class _LoopRunner(Generic[Item]):
    """A drive on an asyncio event loop: one handle, no task."""

    def __init__(self, drive: _BaseDrive[Item]) -> None:
        self._drive = drive
        self._loop = asyncio.get_running_loop()
        self._handle: asyncio.Handle | None = None

    def start(self) -> None:
        self._handle = self._loop.call_soon(self._turn)

    def wake(self) -> None:
        """Wake, since an item is due before the end of the sleep. The drive's lock is held."""
        self.close()
        self.start()

    def close(self) -> None:
        """Cancel the handle. The drive's lock is held only if called by `wake`."""
        if self._handle is not None:
            self._handle.cancel()

    def _turn(self) -> None:
        drive = self._drive
        seconds = drive._collect()
        if seconds is None:
            return
        if seconds > 0:
            self._handle = self._loop.call_later(max(seconds, _SHORTEST_LOOP_SLEEP), self._turn)
            return
        # before the callbacks: one of them may close the drive, or be interrupted
        self.start()
        for _ in range(_SLICE):
            if not drive._call_next():
                break


class _ThreadRunner(Generic[Item]):
    """A drive in its own thread."""

    def __init__(self, drive: _BaseDrive[Item]) -> None:
        self._drive = drive
        self._changed = threading.Condition(drive._lock)
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="bide-timers", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def wake(self) -> None:
        self._changed.notify()

    def close(self) -> None:
        with self._changed:
            self._closing = True
            self._changed.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        while self._sleep_until_due():
            self._drive._call_next()

    def _sleep_until_due(self) -> bool:
        with self._changed:
            while not self._closing:
                seconds = self._drive._collect()
                if seconds == 0:
                    return True
                self._changed.wait(seconds)
        return False


class _BaseDrive(Generic[Item]):
    """The common part of the drives of timers and idle rings: due items, sleeping, starting and closing."""

    def __init__(
        self, timer: Timer[Item] | IdleRing[Item], callback: Callable[[Item], object], clock: Clock,
        longest_sleep: float,
    ) -> None:  # fmt: skip
        if inspect.iscoroutinefunction(callback):
            raise TypeError(f"callback must be a plain function, which may start a task; {callback!r} is a coroutine's")
        if not longest_sleep > 0:
            raise ValueError(f"longest_sleep must be more than 0 seconds, not {longest_sleep}")
        self._timed = timer
        self._callback = callback
        self._clock = clock
        self._longest_sleep = longest_sleep
        self._lock = threading.Lock()
        self._runner: _LoopRunner[Item] | _ThreadRunner[Item] | None = None
        # items taken out of the timer and not called yet; they can still be cancelled and moved
        self._due: OrderedDict[Item, None] = OrderedDict()
        # the time until which the drive sleeps; adding an earlier item wakes it
        self._sleeps_until: float = -math.inf
        self._latest: float = -math.inf
        # added to due times computed from the clock, since it rounds down
        self._rounding: Millis = 0

    def now(self) -> Millis:
        """The time on the drive's clock, which the times of items refer to."""
        return self._clock.now()

    async def __aenter__(self) -> Self:
        self._begin(_LoopRunner)
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self.close()

    def __enter__(self) -> Self:
        self._begin(_ThreadRunner)
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop calling back. Items that are not due stay in the timer. A second close does nothing.

        A drive in a thread waits for the running callback, unless that is the caller.
        """
        runner, self._runner = self._runner, None
        if runner is not None:
            runner.close()

    def _begin(self, kind: type[_LoopRunner[Item]] | type[_ThreadRunner[Item]]) -> None:
        if self._runner is not None:
            raise RuntimeError("this drive is running already")
        self._sleeps_until = -math.inf
        # set before it starts, so that a change from another thread can wake it
        self._runner = kind(self)
        self._runner.start()

    def _wake_for(self, at: float) -> None:
        if at < self._sleeps_until:
            # one wake-up is enough until the drive has checked
            self._sleeps_until = -math.inf
            if self._runner is not None:
                self._runner.wake()

    def _collect(self) -> float | None:
        """Take out due items. Returns 0 if there are any, None if the timer is empty, else the seconds to sleep."""
        now = self._clock.now()
        if now >= self._latest:
            self._latest = now
            self._due.update(dict.fromkeys(self._timed.advance(now - self._rounding)))
        if self._due:
            self._sleeps_until = -math.inf
            return 0
        deadline = self._timed.next_deadline()
        if deadline is None:
            self._sleeps_until = math.inf
            return None
        # if the clock was set back, wait until it catches up
        self._sleeps_until = max(deadline + self._rounding, self._latest)
        seconds = self._clock.seconds_until(int(self._sleeps_until))
        return min(max(seconds, _SHORTEST_WAIT), self._longest_sleep)

    def _call_next(self) -> bool:
        """Call back for one due item; False: there was none, or the drive was closed."""
        with self._lock:
            if not self._due or self._runner is None:
                return False
            item, _ = self._due.popitem(last=False)
        try:
            self._callback(item)
        except (Exception, asyncio.CancelledError):
            _logger.exception("the callback for %r failed; the drive goes on", item)
        return True

    def _withdraw(self, item: Item) -> bool:
        """Take back an item that is due and not called yet; False: there is none."""
        if item not in self._due:
            return False
        del self._due[item]
        return True

    def __len__(self) -> int:
        with self._lock:
            return len(self._timed) + len(self._due)

    def __contains__(self, item: object) -> bool:
        with self._lock:
            return item in self._timed or item in self._due


class Drive(_BaseDrive[Item]):
    """A running timer, made by `drive`: `async with` runs it on the event loop, `with` in a thread.

    While it runs, use the drive's methods, not the timer's: they wake the drive if needed. Any thread may call them if
    it runs in a thread; otherwise only the loop's thread. A `cancel` that returns True means that no callback follows.
    """

    _timed: Timer[Item]

    def add(self, item: Item, at: Millis) -> None:
        """Call back with `item` once the clock shows `at`; an existing item is moved. TypeError: not a whole number."""
        at = index(at)  # in the timer it would stop the drive, and every other item with it
        with self._lock:
            self._due.pop(item, None)
            self._timed.add(item, at)
            self._wake_for(at)

    def after(self, item: Item, delay: Millis) -> None:
        """Call back with `item` `delay` ms from now; never earlier, and at most a millisecond later."""
        self.add(item, self._clock.now() + delay + self._clock.grain)

    def cancel(self, item: Item) -> bool:
        """Remove `item`; False: it was absent, or its callback has begun."""
        with self._lock:
            return self._timed.cancel(item) or self._withdraw(item)

    def move(self, item: Item, at: Millis) -> bool:
        """Move `item` to another time; False: it was absent or its callback has begun, and it is not added."""
        at = index(at)
        with self._lock:
            if self._withdraw(item):
                self._timed.add(item, at)
            elif not self._timed.move(item, at):
                return False
            self._wake_for(at)
            return True


class IdleDrive(_BaseDrive[Item]):
    """A running idle ring, made by `drive`: `async with` runs it on the event loop, `with` in a thread."""

    _timed: IdleRing[Item]

    def __init__(
        self, ring: IdleRing[Item], callback: Callable[[Item], object], clock: Clock, longest_sleep: float
    ) -> None:
        super().__init__(ring, callback, clock, longest_sleep)
        # a touch reads a clock that rounds down; without this, a time-out would end slightly early
        self._rounding = clock.grain

    def touch(self, uid: Item) -> None:
        """Restart the time-out of `uid`, which may be new."""
        with self._lock:
            self._due.pop(uid, None)
            self._timed.touch(uid, self._clock.now())
            # a touch only adds at the end, so only an empty ring's drive must be woken
            if self._sleeps_until == math.inf:
                self._wake_for(-math.inf)

    def remove(self, uid: Item) -> bool:
        """Remove `uid`; False: it was absent, or its callback has begun."""
        with self._lock:
            return self._withdraw(uid) or self._timed.remove(uid)


@overload
def drive(
    timer: IdleRing[Item], callback: Callable[[Item], object], *, clock: Clock | None = None,
    longest_sleep: float = LONGEST_SLEEP,
) -> IdleDrive[Item]: ...  # fmt: skip


@overload
def drive(
    timer: Timer[Item], callback: Callable[[Item], object], *, clock: Clock | None = None,
    longest_sleep: float = LONGEST_SLEEP,
) -> Drive[Item]: ...  # fmt: skip


def drive(
    timer: Timer[Item] | IdleRing[Item], callback: Callable[[Item], object], *, clock: Clock | None = None,
    longest_sleep: float = LONGEST_SLEEP,
) -> Drive[Item] | IdleDrive[Item]:  # fmt: skip
    """Run a timer: `async with drive(...)` on the event loop, `with drive(...)` in its own thread.

    `clock` is the wall clock by default, or `SteadyClock` for an idle ring. `longest_sleep` (seconds of real time)
    limits the delay until a change of the clock is noticed.

    Raises TypeError for a coroutine function as callback, ValueError for a `longest_sleep` that is not above 0.
    """
    if isinstance(timer, IdleRing):
        return IdleDrive(timer, callback, clock or SteadyClock(), longest_sleep)
    return Drive(timer, callback, clock or SystemClock(), longest_sleep)
