"""The alarm of a worker: one timer that rings to the tenth of a millisecond, where the system has one so fine.

An event loop waits in whole milliseconds, rounded up (`EpollSelector.select` of asyncio, libuv under uvloop): half a
millisecond of lateness for every task. On Linux a timer can be a file descriptor that becomes readable on time
(timerfd_create(2)), and any loop waits for those without rounding. Setting it is one system call.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import time
from collections.abc import Callable
from typing import Protocol

_MONOTONIC = 1
_NONBLOCK, _CLOEXEC = os.O_NONBLOCK, getattr(os, "O_CLOEXEC", 0)
_NANOSECONDS = 1_000_000_000
_OWN_TIME = 1.0
"""Seconds that a loop's time may differ from the system's before it is taken for a time of its own."""


class Alarm(Protocol):
    """Rings once, some seconds after it was last set; never early by more than the system's timers are."""

    def set(self, seconds: float) -> None:
        """Ring then, and not when it was set to before."""
        ...

    def cancel(self) -> None:
        """Need not ring any more."""
        ...

    def close(self) -> None: ...


class LoopAlarm:
    """By the event loop's own timers."""

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
    """By a timer of the system that the loop waits for as for a socket. Raises OSError where there is none."""

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
        """Costs nothing: it may ring once, and whoever hears it looks at the clock."""

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


def new_alarm(ring: Callable[[], None]) -> Alarm:
    """The finest that there is. A loop that keeps a time of its own, as those of tests do, is asked for its own."""
    if abs(asyncio.get_running_loop().time() - time.monotonic()) < _OWN_TIME:
        try:
            return DescriptorAlarm(ring)
        except (OSError, NotImplementedError):  # another system, or a loop that waits for sockets alone
            return LoopAlarm(ring)
    return LoopAlarm(ring)
