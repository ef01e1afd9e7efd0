"""The one sleep of a worker: until the next wake, exact, capped, and cut short by tidings of an earlier one.

Timers ring early or late (uvloop's up to 1.2 ms early, and any may after a suspend), so an alarm is only a reason
to look at the clock: not there yet, arm again. Nothing is ever delivered because a timer fired, only because the clock
says so. A lost tiding costs lateness of at most the cap, never a task.
"""

from __future__ import annotations

import asyncio

from bide.core.instants import Millis
from bide.engine.alarm import Alarm, new_alarm
from bide.ports import Clock


class Waker:
    """`kick` ends the sleep; `hear` brings the alarm forward; `sleep` sleeps."""

    def __init__(self, clock: Clock, cap: Millis) -> None:
        self._clock = clock
        self._cap = cap / 1000
        self._loop = asyncio.get_running_loop()
        self._heard: Millis | None = None
        self._kicked = False
        self._sleeper: asyncio.Future[None] | None = None
        self._alarm: Alarm | None = None
        self._wake: Millis | None = None
        self._latest = 0.0

    def kick(self) -> None:
        """Look again now: a slot is free, or we are stopping."""
        self._kicked = True
        self._end()

    def hear(self, wake: Millis) -> None:
        """Something wakes at `wake`. It only ever shortens the sleep, also one that has not begun."""
        if self._heard is None or wake < self._heard:
            self._heard = wake
            if self._sleeper is not None and (self._wake is None or wake < self._wake):
                self._wake = wake
                self._arm()

    def forget(self) -> None:
        """Call just before a lease is sent: what was heard until here, the lease will see for itself."""
        self._heard = None
        self._kicked = False

    async def sleep(self, wake: Millis | None) -> None:
        """Until `wake` or what was heard since `forget`, at most the cap; or until kicked."""
        if self._kicked:
            return
        heard = self._heard
        self._wake = wake if heard is None or (wake is not None and wake < heard) else heard
        self._latest = self._loop.time() + self._cap
        self._sleeper = self._loop.create_future()
        self._arm()
        try:
            await self._sleeper
        finally:
            self._sleeper = None
            if self._alarm is not None:
                self._alarm.cancel()

    def close(self) -> None:
        """The end of all sleep."""
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
