"""An event loop in which time passes only when nothing else is left to do: hours of it in milliseconds.

When every coroutine waits, a usual loop sleeps in `select` until the next timer. This one asks its selector without
waiting, and if no event is there it moves its own clock forward by what it would have slept. The idea is that of trio's
MockClock with autojump. Time stands still while a call in a thread is outstanding (`run_in_executor`, or anything done
within `hold()`), since its answer could come "before" the next timer.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from bide.core.instants import Millis
from bide.testing.clock import FIRST_INSTANT

R = TypeVar("R")
_REAL_WAIT = 0.05
"""Seconds of real waiting at a time while a thread is outstanding; its answer ends the wait earlier."""
_PATIENCE = 20
"""So many of these waits in a row, with nothing outstanding and no timer set, are a deadlock."""


class _JumpingSelector(selectors.DefaultSelector):
    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.outstanding = 0
        self.stuck = 0
        """How often in a row nothing happened while everything waited."""

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is not None and timeout <= 0:
            return super().select(0)
        if self.outstanding:
            return super().select(_REAL_WAIT)
        events: list[Any] = super().select(0)
        if not events:
            if timeout is None:
                return self._wait_for_others()
            later = round(self.now + timeout, 9)  # sums of floats drift: by a part of a second in a month
            self.now = max(later, self.now + 1e-9)  # and who waits for less than is told apart must not wait for ever
        self.stuck = 0
        return events

    def _wait_for_others(self) -> list[Any]:
        """Nothing here will ever happen by itself. Another thread may yet wake the loop: give it a second."""
        self.stuck += 1
        if self.stuck > _PATIENCE:
            raise RuntimeError("deadlock: every coroutine waits, no timer is set and no thread is at work")
        events = super().select(_REAL_WAIT)
        if events:
            self.stuck = 0
        return events


class VirtualLoop(asyncio.SelectorEventLoop):
    """Its `time()` starts at 0 and jumps. Raises RuntimeError when everything waits for ever."""

    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Time stands still within this block: something outside the loop is working for it."""
        self._jumping.outstanding += 1
        try:
            yield
        finally:
            self._jumping.outstanding -= 1

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> Any:  # type: ignore[override]
        future = super().run_in_executor(executor, func, *args)
        self._jumping.outstanding += 1
        future.add_done_callback(self._returned)
        return future

    def _returned(self, _: object) -> None:
        self._jumping.outstanding -= 1


class VirtualClock:
    """A `Clock` that reads a virtual loop: `start` plus what its `time()` says."""

    grain: Millis = 0
    """Its loop stops where a timer is due, which is at a whole millisecond."""

    def __init__(self, loop: VirtualLoop, start: Millis = FIRST_INSTANT) -> None:
        self._loop = loop
        self._start = start

    def now(self) -> Millis:
        # a timer is due at a float that may lie a hair below its millisecond
        return self._start + int(self._loop.time() * 1000 + 1e-6)

    def seconds_until(self, at: Millis) -> float:
        return (at - self._start) / 1000 - self._loop.time()

    def span(self, length: Millis) -> Millis:
        return length


def run_virtual(main: Callable[[VirtualLoop], Coroutine[Any, Any, R]]) -> R:
    """Run `main(loop)` to its end in virtual time; like `asyncio.run`."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        loop = runner.get_loop()
        assert isinstance(loop, VirtualLoop)
        return runner.run(main(loop))
