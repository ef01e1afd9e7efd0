"""The loop of everything that leases: sleep until the next wake, lease what is due, and again.

So that no wake-up is lost: subscribe first, then lease; the answer of a lease says how long to sleep; a notification
since the lease was *sent* counts; it only ever shortens the sleep; every sleep is capped. `WakeLoop` is that loop,
`Waker` its sleep. `LeaseLoop` adds what workers and consumers elsewhere share: it does not ask for what is paused, is
not woken by it, and gives it back where the pause came while the lease was under way.

Timers ring early or late (uvloop's up to 1.2 ms early, and any may after a suspend), so an alarm is only a reason to
read the clock: not there yet, arm again. Nothing is ever delivered because a timer fired, only because the clock says
so. A lost notification costs lateness of at most the cap, never a task.

The alarm rings to the tenth of a millisecond where the system has a timer so fine. An event loop waits in whole
milliseconds, rounded up (`EpollSelector.select` of asyncio, libuv under uvloop): half a millisecond of lateness for
every task. On Linux a timer can be a file descriptor that becomes readable on time (timerfd_create(2)), and any loop
waits for those without rounding. Setting it is one system call.
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial

from bide.core.errors import StoreError
from bide.core.events import Event, EventKind
from bide.core.instants import Due, Millis
from bide.core.records import Leased, Record, Settlement, Topic
from bide.engine.background import begin
from bide.engine.client import Client
from bide.engine.delivery.executor import lease_in_turn
from bide.engine.delivery.settlement import dead, reject_reason, release
from bide.engine.pauses import PauseGate
from bide.engine.registry import RouteSettings, announce_for_ever
from bide.ports import Clock, Policy, Wakes

_UNNOTICED: Millis = 100
"""Due for so long at the end of a sleep, something should have ended it."""
_MONOTONIC = 1
_NONBLOCK, _CLOEXEC = os.O_NONBLOCK, getattr(os, "O_CLOEXEC", 0)
_NANOSECONDS = 1_000_000_000
_OWN_TIME = 1.0
"""Seconds that a loop's time may differ from the system's before it is taken for a time of its own."""


class Waker:
    """`sleep` waits for the next wake; `notify` brings that forward; `kick` ends the sleep."""

    def __init__(self, clock: Clock, cap: Millis) -> None:
        self._clock = clock
        self._cap = cap / 1000
        self._loop = asyncio.get_running_loop()
        self._notified: Millis | None = None
        self._kicked = False
        self._sleeper: asyncio.Future[None] | None = None
        self._alarm: LoopAlarm | DescriptorAlarm | None = None
        self._wake: Millis | None = None
        self._latest = 0.0
        self._asked_at: float | None = None
        self._by_notification = False
        self.capped = False
        """True after a sleep that was as long as a sleep may be."""
        self.wakes = Wakes()

    def kick(self) -> None:
        """End the sleep now: a slot is free, or the loop is to stop."""
        self._kicked = True
        self._end()

    def notify(self, wake: Millis) -> None:
        """Something wakes at `wake`: it only ever shortens the sleep, also one that has not begun."""
        self.wakes.notifications += 1
        self.wakes.heard_at = time.monotonic()
        if self._notified is None or wake < self._notified:
            self._notified = wake
            if self._sleeper is not None and (self._wake is None or wake < self._wake):
                self._wake = wake
                self._by_notification = True
                self._arm()

    def forget(self) -> None:
        """Call just before a lease is sent: it will see for itself what was notified until here."""
        self._notified = None
        self._kicked = False
        self._asked_at = self._loop.time()

    async def sleep(self, wake: Millis | None) -> None:
        """Sleep until `wake`, or what was notified since `forget`, at most the cap; or until kicked.

        The cap counts from `forget`, and not from when the lease was answered: a store need not tell of what was added
        in between and wakes later than the cap from then.
        """
        self.capped = False
        asked_at, self._asked_at = self._asked_at, None
        await asyncio.sleep(0)  # what was leased begins first: a handler that blocks would hold up the next lease
        if self._kicked:
            return
        notified = self._notified
        self._by_notification = notified is not None and (wake is None or notified < wake)
        self._wake = notified if self._by_notification else wake
        self._latest = (self._loop.time() if asked_at is None else asked_at) + self._cap
        self._sleeper = self._loop.create_future()
        self._arm()
        try:
            await self._sleeper
        finally:
            self._sleeper = None
            if self._alarm is not None:
                self._alarm.cancel()
        if not self._kicked:
            self._count()

    def record_miss(self, planned: Millis, now: Millis) -> None:
        """After a capped sleep the lease took a task that was planned for `planned`: count a lost notification."""
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
        """Release the alarm; nothing sleeps any more."""
        if self._alarm is not None:
            self._alarm.close()
            self._alarm = None

    def _arm(self) -> None:
        """Set the alarm for the wake or the cap; when the time has come, end the sleep."""
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
    """Rings once, the given seconds after it was last set, by the event loop's own timers."""

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

    def close(self) -> None:
        self.cancel()


class DescriptorAlarm:
    """The same by a timer of the system, for which the loop waits as for a socket. Raises OSError where there is
    none.
    """

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
        """Costs nothing: it may ring once more, and the callee reads the clock before it acts."""

    def _readable(self) -> None:
        try:
            os.read(self._descriptor, 8)
        except BlockingIOError:  # it was set anew in the meantime
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
    """Make the finest alarm there is; in a loop that keeps a time of its own, as those of tests do, the loop's."""
    if abs(asyncio.get_running_loop().time() - time.monotonic()) < _OWN_TIME:
        try:
            return DescriptorAlarm(ring)
        except (OSError, NotImplementedError):  # another system, or a loop that waits for sockets alone
            return LoopAlarm(ring)
    return LoopAlarm(ring)


class WakeLoop(ABC):
    """Repeats a turn as its next wake comes, as it is notified of an earlier one, or as it is kicked."""

    def __init__(self, clock: Clock, cap: Millis) -> None:
        self.clock = clock
        self._waker = Waker(clock, cap)
        self._stopping = False

    def _wants_turn(self) -> object:
        """Something true while a turn could find anything to do."""
        return True

    @abstractmethod
    async def _turn(self) -> Millis | None:
        """Do what is due; the next wake."""

    @abstractmethod
    async def _turn_failed(self, error: Exception) -> None:
        """Report the error of a turn, and wait for as long as there is to be none."""

    async def _run(self) -> None:
        while not self._stopping:
            wake: Millis | None = None
            wanted = self._wants_turn()
            if wanted:
                self._waker.forget()
                try:
                    wake = await self._turn()
                except Exception as error:  # noqa: BLE001 - the loop outlives its defects, loudly
                    await self._turn_failed(error)
                    continue
            await self._waker.sleep(wake)
            if not wanted:
                self._waker.forget()


_PAUSE_AFTER_ERROR = 0.25


class LeaseLoop(WakeLoop):
    """A loop that leases from the store of an open client, which has to stay open."""

    _log: logging.Logger

    def __init__(self, client: Client, *, of: Collection[Topic] = ()) -> None:
        super().__init__(client.clock, client.config.cap)
        self.store, self.config = client.store, client.config
        self._recorder, self._history, self._pause_gates = client.recorder, client.history, client.pause_gates
        self.wakes = self._waker.wakes
        self.pause_gate = PauseGate(self.store, self.clock, self._waker.kick, of=of)
        self._leasing: list[asyncio.Task[None]] = []

    def _start_leasing(self) -> None:
        """Call it once the store is subscribed to."""
        self._pause_gates.append(self.pause_gate)
        self._leasing += begin(self._run(), "leasing"), begin(self.pause_gate.refresh_for_ever(), "pauses")

    def _announce(self, routes: Sequence[RouteSettings]) -> None:
        """Announce how the topics are worked on, as long as the loop runs."""
        self._leasing.append(begin(announce_for_ever(self.store, self.clock, self.config, routes), "routes"))

    async def _stop_leasing(self) -> None:
        """Lease no more, once the turn that is under way has ended."""
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
            return Leased([], None, now)
        until = now + self.clock.span(length)
        leased = await lease_in_turn(partial(self.store.lease, now=now, until=until, holder=holder), wants)
        if self._waker.capped and leased.tasks:
            self._waker.record_miss(min(record.planned_at for record in leased.tasks), leased.now)
        return leased

    def _refusal(self, record: Record, policy: Policy, now: Millis, holder: str) -> Settlement | None:
        """The settlement of a task that was leased and must not be delivered; None: deliver it. Notes a loss."""
        if record.topic in self.pause_gate.topics:  # since the lease was sent
            return release(record)
        if record.losses:
            self._note(EventKind.LOSS, record, f"lease lost, {record.losses} in a row", holder)
        elif record.deadline is None:
            return None
        why = reject_reason(record, policy, now)
        return None if why is None else dead(record, why, self.config.retentions.of(record.topic), now)

    def _note(self, kind: EventKind, record: Record, what: str, holder: str, wake: Due | None = None) -> None:
        """Write into the event log how a delivery of `record` ended; it wakes again at `wake`."""
        at, began = self.clock.now(), None if kind is EventKind.LOSS else record.started_at
        wake_at = None if wake is None else wake.resolve(at)
        event = Event(
            at=at, topic=record.topic, key=record.key, id=record.id, kind=kind, attempt=record.attempt, who=holder,
            what=what, was=began, wake_at=wake_at,
        )  # fmt: skip
        self._recorder.note(event)

    def _on_wake(self, topic: Topic, wake: Millis) -> None:
        """Take a notification of the store."""
        if topic not in self.pause_gate.topics:
            self._waker.notify(wake)
