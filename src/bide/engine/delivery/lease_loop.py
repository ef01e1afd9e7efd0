"""The loop of everything that leases: sleep until the next wake time, lease what is due, repeat.

These rules ensure that no wake-up is lost. Subscribe first, then lease. The answer to a lease says how long to sleep.
A notification counts if it arrived after the lease was *sent*. It can only shorten the sleep. Every sleep is capped.
`WakeLoop` is that loop, `Waker` its sleep. `LeaseLoop` adds the handling of pauses, which workers and the long poll
share: it does not request tasks of paused topics, their notifications do not wake it, and it returns their tasks if the
pause came while the lease was in flight.

Timers fire early or late (uvloop's up to 1.2 ms early, and any may after a suspend). So an alarm only makes the loop
read the clock, and arm the alarm again if it is too early. The clock alone decides that a task is delivered, never a
timer. A lost notification makes a task late by at most the cap, and never loses it.

If the system has a fine enough timer, the alarm is accurate to a tenth of a millisecond. An event loop waits in whole
milliseconds, rounded up (`EpollSelector.select` of asyncio, libuv under uvloop), which would make every task half a
millisecond late. On Linux a timer can be a file descriptor that becomes readable on time (timerfd_create(2)), and every
loop waits for descriptors without rounding. Setting it is one system call.
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from math import inf

from bide.core.errors import BadInput, StoreError
from bide.core.events import EventKind, event_of
from bide.core.instants import Due, Millis
from bide.core.records import Leased, NewTask, Record, Settlement, Topic
from bide.core.recurrence.rules import refresh_zones
from bide.engine.background import begin, repeat
from bide.engine.client import Client
from bide.engine.delivery.occurrences import Refusal, is_delivered, next_life, passed_over
from bide.engine.delivery.settlement import dead, reject_reason, release
from bide.engine.pauses import PauseGate
from bide.engine.registry import RouteSettings, announce_for_ever
from bide.ports import Clock, Policy, Wakes, all_answers

_UNNOTICED: Millis = 100
"""A task that is due for this long when a capped sleep ends counts as a lost notification."""
_MONOTONIC = 1
_NONBLOCK, _CLOEXEC = os.O_NONBLOCK, getattr(os, "O_CLOEXEC", 0)
_NANOSECONDS = 1_000_000_000
_OWN_TIME = 1.0
"""Seconds by which a loop's time may differ from the system's before it counts as simulated."""


class Waker:
    """`sleep` waits for the next wake; `notify` brings that forward; `kick` ends the sleep."""

    def __init__(self, clock: Clock, cap: Millis) -> None:
        self._clock = clock
        self._cap = cap / 1000
        self._loop = asyncio.get_running_loop()
        self._notified: Millis | None = None
        self.kicked = False
        """True after a kick until the next lease."""
        self._sleeper: asyncio.Future[None] | None = None
        self._alarm: LoopAlarm | DescriptorAlarm | None = None
        self._wake: Millis | None = None
        self._latest = 0.0
        self._asked_at: float | None = None
        self._look_by = inf
        self._by_notification = False
        self.capped = False
        """True after a sleep of the greatest length."""
        self.wakes = Wakes()

    def kick(self) -> None:
        """End the sleep now, because a slot is free or the loop is to stop."""
        self.kicked = True
        self._end()

    def notify(self, wake: Millis) -> None:
        """Accept that a task wakes at `wake`. This only shortens the sleep, even one that has not begun."""
        self.wakes.notifications += 1
        self.wakes.heard_at = time.monotonic()
        if self._notified is None or wake < self._notified:
            self._notified = wake
            if self._sleeper is not None and (self._wake is None or wake < self._wake):
                self._wake = wake
                self._by_notification = True
                self._arm()

    def forget(self) -> None:
        """Drop the notifications so far. Call it just before a lease is sent, since that lease sees their tasks."""
        self._notified = None
        self.kicked = False
        self._asked_at = self._loop.time()

    def look_by(self, at: float) -> None:
        """End the next sleep at `at`, by the loop's time, as the cap would."""
        self._look_by = at

    async def sleep(self, wake: Millis | None) -> None:
        """Sleep until `wake`, an earlier time notified since `forget`, the cap, or a kick.

        The cap counts from `forget`, not from the answer to the lease: a store need not notify of a task that was added
        in between and wakes later than the cap from that moment.
        """
        self.capped = False
        asked_at, self._asked_at = self._asked_at, None
        look_by, self._look_by = self._look_by, inf
        await asyncio.sleep(0)  # leased tasks begin first: a handler that blocks would hold up the next lease
        if self.kicked:
            return
        notified = self._notified
        self._by_notification = notified is not None and (wake is None or notified < wake)
        self._wake = notified if self._by_notification else wake
        self._latest = min(look_by, (self._loop.time() if asked_at is None else asked_at) + self._cap)
        self._sleeper = self._loop.create_future()
        self._arm()
        try:
            await self._sleeper
        finally:
            self._sleeper = None
            if self._alarm is not None:
                self._alarm.cancel()
        if not self.kicked:
            self._count()

    def record_miss(self, planned: Millis, now: Millis) -> None:
        """Count a lost notification if, after a capped sleep, a task planned for `planned` was already overdue."""
        self.capped = False
        if now - planned >= _UNNOTICED:
            self.wakes.missed += 1

    def _count(self) -> None:
        if self._wake is None or self._clock.seconds_until(self._wake) > 0:
            self.capped = True
            self.wakes.by_cap += 1
        elif self._by_notification:
            self.wakes.by_notification += 1
        else:
            self.wakes.by_alarm += 1

    def close(self) -> None:
        """Release the alarm. Call it after the last sleep."""
        if self._alarm is not None:
            self._alarm.close()
            self._alarm = None

    def _arm(self) -> None:
        """Set the alarm for the wake time or the cap; end the sleep if that time has come."""
        if self._sleeper is None:
            return
        left = self._latest - self._loop.time()
        if self._wake is not None:
            left = min(left, self._clock.seconds_until(self._wake))
        if left <= 0:
            self._end()
        else:
            if self._alarm is None:
                self._alarm = new_alarm(self._arm)
            self._alarm.set(left)

    def _end(self) -> None:
        if self._sleeper is not None and not self._sleeper.done():
            self._sleeper.set_result(None)


class LoopAlarm:
    """Rings once, the given seconds after it was last set, using the event loop's own timers."""

    def __init__(self, ring: Callable[[], None]) -> None:
        self._ring = ring
        self._loop = asyncio.get_running_loop()
        self._handle: asyncio.TimerHandle | None = None

    def set(self, seconds: float) -> None:
        self.cancel()
        self._handle = self._loop.call_later(seconds, self._ring)

    def cancel(self) -> None:
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None

    close = cancel


class DescriptorAlarm:
    """Rings like `LoopAlarm`, by a system timer that the loop waits for like a socket. OSError: there is none."""

    def __init__(self, ring: Callable[[], None]) -> None:
        self._ring = ring
        self._loop = asyncio.get_running_loop()
        self._libc = ctypes.CDLL(None, use_errno=True)
        try:
            self._descriptor = self._checked(self._libc.timerfd_create(_MONOTONIC, _NONBLOCK | _CLOEXEC))
        except AttributeError as error:
            raise OSError("this system has no timerfd") from error
        # struct itimerspec: the interval (none), then the time until it rings, each in seconds and nanoseconds
        self._spec = (ctypes.c_long * 4)()
        self._loop.add_reader(self._descriptor, self._readable)

    def set(self, seconds: float) -> None:
        whole = int(seconds)
        self._spec[2] = whole
        self._spec[3] = max(1, int((seconds - whole) * _NANOSECONDS))  # both 0 would mean never
        self._checked(self._libc.timerfd_settime(self._descriptor, 0, self._spec, None))

    def cancel(self) -> None:
        """Do nothing. The alarm may ring once more, and the callback reads the clock before it acts."""

    def _readable(self) -> None:
        try:
            os.read(self._descriptor, 8)
        except BlockingIOError:  # it was set again in the meantime
            return
        self._ring()

    def close(self) -> None:
        if self._descriptor >= 0:
            self._loop.remove_reader(self._descriptor)
            os.close(self._descriptor)
            self._descriptor = -1

    @staticmethod
    def _checked(answer: int) -> int:
        if answer < 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
        return answer


def new_alarm(ring: Callable[[], None]) -> LoopAlarm | DescriptorAlarm:
    """Make the finest alarm available; in a loop with simulated time, as in tests, a `LoopAlarm`."""
    if abs(asyncio.get_running_loop().time() - time.monotonic()) < _OWN_TIME:
        with suppress(OSError, NotImplementedError):  # another system, or a loop that can only wait for sockets
            return DescriptorAlarm(ring)
    return LoopAlarm(ring)


_STOPPED = "the worker has stopped, and what waits goes on waiting"


class WakeLoop(ABC):
    """Repeats a turn at its next wake time, or earlier after a notification or a kick."""

    def __init__(self, clock: Clock, cap: Millis) -> None:
        self.clock = clock
        self._waker = Waker(clock, cap)
        self._stopping = False
        self._emptied: list[asyncio.Future[None]] = []
        """One for each caller that waits until nothing is left."""

    def _wants_turn(self) -> object:
        """A true value while a turn could find work."""
        return True

    @abstractmethod
    async def _turn(self) -> Millis | None:
        """Do what is due. Returns the next wake time."""

    @abstractmethod
    async def _turn_failed(self, error: Exception) -> None:
        """Report the error of a turn, and wait until the next turn may begin."""

    async def _run(self) -> None:
        while not self._stopping:
            wake: Millis | None = None
            wanted = self._wants_turn()
            if wanted:
                self._waker.forget()
                try:
                    wake = await self._turn()
                except Exception as error:  # noqa: BLE001 - a defect is logged and does not end the loop
                    await self._turn_failed(error)
                    continue
            await self._waker.sleep(wake)
            if not wanted:
                self._waker.forget()

    async def _until_nothing_left(self) -> None:
        """Wait until a turn that began after this call ends the wait. Raises RuntimeError if the loop stops first."""
        if self._stopping:
            raise RuntimeError(_STOPPED)
        emptied = asyncio.get_running_loop().create_future()
        self._emptied.append(emptied)
        self._waker.kick()
        try:
            await emptied
        finally:
            self._emptied.remove(emptied)

    def _end_waits(self, emptied: Sequence[asyncio.Future[None]]) -> None:
        """End these waits: nothing is left, or the loop has stopped."""
        for one in emptied:
            if not one.done():
                one.set_exception(RuntimeError(_STOPPED)) if self._stopping else one.set_result(None)


_PAUSE_AFTER_ERROR = 0.25
_ZONES_EVERY = 3_600.0
"""Seconds between two readings of the time zone database, which may change while the program runs."""


async def _read_zones() -> None:
    refresh_zones()


class LeaseLoop(WakeLoop):
    """A loop that leases from the store of an open client, which must stay open."""

    _log: logging.Logger

    def __init__(self, client: Client, *, of: Collection[Topic] = ()) -> None:
        super().__init__(client.clock, client.config.cap)
        self.store, self.config = client.store, client.config
        self._recorder, self._history, self._pause_gates = client.recorder, client.history, client.pause_gates
        self.wakes = self._waker.wakes
        self._instruments = client.instruments
        self.pause_gate = PauseGate(self.store, self.clock, self._waker.kick, of=of)
        self._leasing: list[asyncio.Task[None]] = []

    def _start_leasing(self) -> None:
        """Start the loop. Call it after subscribing to the store."""
        self._pause_gates.append(self.pause_gate)
        self._leasing += begin(self._run(), "leasing"), begin(self.pause_gate.refresh_for_ever(), "pauses")
        zones = repeat("reading the time zones", _read_zones, _ZONES_EVERY, log=self._log, first_after=_ZONES_EVERY)
        self._leasing.append(begin(zones, "zones"))

    def _announce(self, routes: Sequence[RouteSettings]) -> None:
        self._leasing.append(begin(announce_for_ever(self.store, self.clock, self.config, routes), "routes"))

    async def _stop_leasing(self) -> None:
        """Stop leasing after the turn in progress."""
        self._stopping = True
        self._waker.kick()
        if self.pause_gate in self._pause_gates:
            self._pause_gates.remove(self.pause_gate)
        if self._leasing:
            await asyncio.wait(self._leasing[:1])
            for task in self._leasing[1:]:
                task.cancel()
            await asyncio.wait(self._leasing)
        self._waker.close()

    async def _turn_failed(self, error: Exception) -> None:
        say = self._log.warning if isinstance(error, StoreError) else self._log.exception
        say("leasing failed, trying again in %.2f s: %s", _PAUSE_AFTER_ERROR, error)
        await asyncio.sleep(_PAUSE_AFTER_ERROR)

    async def _lease(self, wants: Mapping[Topic, int], length: Millis, holder: str) -> Leased:
        now = self.clock.now()
        if not wants:
            return Leased([], {}, now)
        leased = await self.store.lease(wants, now=now, until=now + self.clock.span(length), holder=holder)
        if self._waker.capped and leased.tasks:
            self._waker.record_miss(min(record.planned_at for record in leased.tasks), leased.now)
        return leased

    def _refusal(self, record: Record, policy: Policy, now: Millis, holder: str) -> Refusal | None:
        """The end of a leased task that must not be delivered; None: deliver it. Records a loss."""
        if record.topic in self.pause_gate.topics:  # paused since the lease was sent
            return Refusal(release(record))
        if record.losses:
            self._note(EventKind.LOSS, record, f"lease lost, {record.losses} in a row", holder)
        elif record.deadline is None and (not record.options or is_delivered(record.options, record.due_at, now)):
            return None
        keep = self.config.retentions.of(record.topic)
        try:
            if record.options and (over := passed_over(record, keep, now)) is not None:
                return over
        except BadInput as error:  # a damaged rule, or a zone that this machine does not know
            return Refusal(dead(record, f"rule: {error}", keep, now))
        why = reject_reason(record, policy, now)
        if why is None:
            return None
        died = dead(record, why, keep, now)
        return Refusal(next_life(record, keep, now, died) or died)

    async def _start_own(self, own: NewTask) -> bool:
        """Add an occurrence that is a task of its own. False: the store is unavailable; the lease ends by itself."""
        try:
            await all_answers(await self.store.add([own], now=self.clock.now()))
        except StoreError as error:
            self._log.warning("%s/%s could not be started: %s", own.topic, own.key, error)
            return False
        return True

    def _note_dropped(self, record: Record, settlement: Settlement, holder: str) -> None:
        """Record the occurrences that did not run before the next one."""
        if settlement.dropped_why is not None:
            for one in self._instruments:
                one.dropped(record.topic, settlement.dropped_why.partition(":")[0], settlement.dropped)
            self._note(EventKind.DROPPED, record, settlement.dropped_why, holder, settlement.next_at)

    def _note(self, kind: EventKind, record: Record, what: str, holder: str, wake: Due | None = None) -> None:
        """Record in the event log how a delivery of `record` ended; it wakes again at `wake`."""
        at, began = self.clock.now(), None if kind is EventKind.LOSS else record.started_at
        wake_at = None if wake is None else wake.resolve(at)
        self._recorder.note(event_of(record, kind, at, holder, what, was=began, wake_at=wake_at))

    def _on_wake(self, topic: Topic, wake: Millis) -> None:
        if topic not in self.pause_gate.topics:
            self._waker.notify(wake)
