"""A drive: it runs one timer, on an event loop or in a thread, and calls back for each item when it is due.

**The idea.** A timer knows what is due and when to look again; it does not wake by itself. A drive does the waking, in
one loop that is the same everywhere:

    read the clock -> take out what is due -> call back for each -> sleep until the next deadline -> read the clock ...

**Never early, although sleeps are.** What an operating system or event loop calls "after 20 ms" may end after 18.8
(uvloop rounds to its own cached time, and about every third short timer comes up to 1.2 ms too soon). So a wake-up
proves nothing: the clock is read again, and if it is not time yet the drive sleeps once more.

**Never asleep for too long.** An item that is added for an earlier time than the drive sleeps for wakes it. And no
sleep is longer than `longest_sleep` (1 s), for clocks are set and machines are suspended; waking once a second to
find nothing costs some 30 microseconds, 0.003 % of a core. With nothing to wait for, it does not wake at all.

**A clock that is set back** stops nothing early: until it shows again what it showed before, nothing is called. So
for time-outs, where only the length matters, use `SteadyClock`, which is never set; an idle ring does so by itself.

The callback is a plain function and should be short: on an event loop it runs there, in thread form in the drive's
thread, one at a time. What has to wait belongs in a task or a pool that the callback starts. A callback that raises
is logged, and the next one is called.

The clock of a machine that only measures and is never set; `ports.SystemClock` tells the date, and may be set.
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
from typing import Generic, Self, TypeVar, overload

from bide.core.instants import Millis
from bide.ports import Clock, SystemClock, Timer
from bide.timers.idle import IdleRing


class SteadyClock(SystemClock):
    """Milliseconds since some moment in the past, rounded down. Never set: for lengths of time, not for dates."""

    __slots__ = ()

    def now(self) -> Millis:
        return time.monotonic_ns() // 1_000_000

    def seconds_until(self, at: Millis) -> float:
        return at / 1000 - time.monotonic()


Item = TypeVar("Item", bound=Hashable)

LONGEST_SLEEP = 1.0
"""Seconds of real time, whatever the clock's pace."""

_SLICE = 256
"""Callbacks in a row on an event loop, before others get a turn."""

_SHORTEST_WAIT = 0.0001
"""Seconds. What is left when a sleep ended early, is never nothing: nothing means that something is due."""

_SHORTEST_LOOP_SLEEP = 0.001
"""Seconds. Event loops round less to nothing, and would spin."""

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
        """Something is due earlier than the present sleep ends. The drive's lock is held."""
        self.close()
        self.start()

    def close(self) -> None:
        """Leave nothing behind. The drive's lock is not held, unless it is woken."""
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
        # before the callbacks: one of them may close the drive, or be cut off by an interrupt
        self.start()
        for _ in range(_SLICE):
            if not drive._call_next():
                break


class _ThreadRunner(Generic[Item]):
    """A drive in a thread of its own."""

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
    """The common part of drives of timers and of idle rings: due items, the set sleep, beginning and ending."""

    def __init__(
        self,
        timer: Timer[Item] | IdleRing[Item],
        callback: Callable[[Item], object],
        clock: Clock,
        longest_sleep: float,
    ) -> None:
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
        # taken out of the timer, not called yet: can still be cancelled and moved
        self._due: OrderedDict[Item, None] = OrderedDict()
        # what the drive sleeps for; anything added for an earlier time wakes it
        self._sleeps_until: float = -math.inf
        self._latest: float = -math.inf
        # how much later than the clock says what is counted from a reading of it may be due
        self._rounding: Millis = 0

    def now(self) -> Millis:
        """The time on the drive's clock: times for this timer are counted from here."""
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
        """Stop calling. What is not due stays in the timer. A second close does nothing.

        In thread form it waits for the callback that is running, unless that is who calls it.
        """
        runner, self._runner = self._runner, None
        if runner is not None:
            runner.close()

    def _begin(self, kind: type[_LoopRunner[Item]] | type[_ThreadRunner[Item]]) -> None:
        if self._runner is not None:
            raise RuntimeError("this drive is running already")
        self._sleeps_until = -math.inf
        # known before it starts, so that no change from another thread finds nobody to wake
        self._runner = kind(self)
        self._runner.start()

    def _wake_for(self, at: float) -> None:
        if at < self._sleeps_until:
            # once is enough: until the drive has looked, nothing else need wake it
            self._sleeps_until = -math.inf
            if self._runner is not None:
                self._runner.wake()

    def _collect(self) -> float | None:
        """Take out what is due. 0: something is; None: nothing waits; else how many seconds to sleep."""
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
        # a clock that was set back is waited for
        self._sleeps_until = max(deadline + self._rounding, self._latest)
        seconds = self._clock.seconds_until(int(self._sleeps_until))
        return min(max(seconds, _SHORTEST_WAIT), self._longest_sleep)

    def _call_next(self) -> bool:
        """Call back for one item that is due; False: there is none, or the drive was closed."""
        with self._lock:
            if not self._due or self._runner is None:
                return False
            item, _ = self._due.popitem(last=False)
        try:
            self._callback(item)
        except (Exception, asyncio.CancelledError):
            _logger.exception("the callback for %r failed; the drive goes on", item)
        return True

    def __len__(self) -> int:
        with self._lock:
            return len(self._timed) + len(self._due)

    def __contains__(self, item: object) -> bool:
        with self._lock:
            return item in self._timed or item in self._due


class Drive(_BaseDrive[Item]):
    """A timer that runs. `async with` runs it on the event loop, `with` in a thread; made by `drive`.

    Use the drive's verbs, not the timer's, while it runs: they wake it where needed. In thread form any thread may
    call them; on an event loop only that loop's. A `cancel` that answers True means that no callback follows.
    """

    def __init__(
        self, timer: Timer[Item], callback: Callable[[Item], object], clock: Clock, longest_sleep: float
    ) -> None:
        super().__init__(timer, callback, clock, longest_sleep)
        self._timer = timer

    def add(self, item: Item, at: Millis) -> None:
        """Call back with `item` once the clock shows `at`; an item that is there already is moved."""
        with self._lock:
            self._due.pop(item, None)
            self._timer.add(item, at)
            self._wake_for(at)

    def after(self, item: Item, delay: Millis) -> None:
        """The same, `delay` ms from now: not a part of a millisecond less, and at most one millisecond more."""
        self.add(item, self._clock.now() + delay + self._clock.grain)

    def cancel(self, item: Item) -> bool:
        """Forget it; False: it was not there, or its callback has begun."""
        with self._lock:
            return self._timer.cancel(item) or self._withdraw(item)

    def move(self, item: Item, at: Millis) -> bool:
        """Another time for it; False: it was not there, or its callback has begun, and it is not added."""
        with self._lock:
            if self._withdraw(item):
                self._timer.add(item, at)
            elif not self._timer.move(item, at):
                return False
            self._wake_for(at)
            return True

    def _withdraw(self, item: Item) -> bool:
        if item not in self._due:
            return False
        del self._due[item]
        return True


class IdleDrive(_BaseDrive[Item]):
    """An idle ring that runs. `async with` runs it on the event loop, `with` in a thread; made by `drive`."""

    def __init__(
        self, ring: IdleRing[Item], callback: Callable[[Item], object], clock: Clock, longest_sleep: float
    ) -> None:
        super().__init__(ring, callback, clock, longest_sleep)
        self._ring = ring
        # a touch is counted from a clock that rounds down: without this it would be called idle a moment too early
        self._rounding = clock.grain

    def touch(self, uid: Item) -> None:
        """Heard of `uid`, maybe for the first time: its time-out begins anew."""
        with self._lock:
            self._due.pop(uid, None)
            self._ring.touch(uid, self._clock.now())
            # a touch only ever puts something at the end; only an empty ring sleeps without an end
            if self._sleeps_until == math.inf:
                self._wake_for(-math.inf)

    def remove(self, uid: Item) -> bool:
        """Forget `uid`; False: it was not there, or its callback has begun."""
        with self._lock:
            if uid in self._due:
                del self._due[uid]
                return True
            return self._ring.remove(uid)


@overload
def drive(
    timer: IdleRing[Item],
    callback: Callable[[Item], object],
    *,
    clock: Clock | None = None,
    longest_sleep: float = LONGEST_SLEEP,
) -> IdleDrive[Item]: ...


@overload
def drive(
    timer: Timer[Item],
    callback: Callable[[Item], object],
    *,
    clock: Clock | None = None,
    longest_sleep: float = LONGEST_SLEEP,
) -> Drive[Item]: ...


def drive(
    timer: Timer[Item] | IdleRing[Item],
    callback: Callable[[Item], object],
    *,
    clock: Clock | None = None,
    longest_sleep: float = LONGEST_SLEEP,
) -> Drive[Item] | IdleDrive[Item]:
    """Run a timer: `async with drive(...)` on the event loop, `with drive(...)` in a thread of its own.

    `clock` is the wall clock when not given, or `SteadyClock` for an idle ring; `longest_sleep` (seconds of real time)
    bounds how late a change of the clock is noticed.

    Raises TypeError for a coroutine function as callback, ValueError for a `longest_sleep` that is not above 0.
    """
    if isinstance(timer, IdleRing):
        return IdleDrive(timer, callback, clock or SteadyClock(), longest_sleep)
    return Drive(timer, callback, clock or SystemClock(), longest_sleep)
