"""An event loop whose time advances only when nothing else is left to do: hours pass in milliseconds.

When every coroutine waits, an ordinary loop sleeps in `select` until the next timer. This loop polls its selector and,
if there is no event, moves its own clock forward by the time it would have slept, like trio's MockClock with autojump.
Time stands still while a call in a thread is outstanding (`run_in_executor`, or any work within `hold()`), since its
answer could come "before" the next timer.
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
"""Seconds of each real wait while a thread's answer is outstanding; the answer ends the wait earlier."""
_PATIENCE = 20
"""The number of such waits in a row, with nothing outstanding and no timer set, that counts as a deadlock."""


class _JumpingSelector(selectors.DefaultSelector):
    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.outstanding = 0
        self.stuck = 0
        """The number of waits in a row in which nothing happened."""

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is not None and timeout <= 0:
            return super().select(0)
        if self.outstanding:
            return super().select(_REAL_WAIT)
        events: list[Any] = super().select(0)
        if not events:
            if timeout is None:
                return self._wait_for_others()
            later = round(self.now + timeout, 9)  # sums of floats drift: by a fraction of a second in a month
            self.now = max(later, self.now + 1e-9)  # time must move even if the timeout is below its resolution
        self.stuck = 0
        return events

    def _wait_for_others(self) -> list[Any]:
        """Give another thread a second to wake the loop: nothing will happen in this thread by itself."""
        self.stuck += 1
        if self.stuck > _PATIENCE:
            raise RuntimeError("deadlock: every coroutine waits, no timer is set and no thread is at work")
        events = super().select(_REAL_WAIT)
        if events:
            self.stuck = 0
        return events


class VirtualLoop(asyncio.SelectorEventLoop):
    """A loop whose `time()` starts at 0 and jumps. Raises RuntimeError on a deadlock."""

    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Stop time within this block, while work goes on outside the loop."""
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
    """A `Clock` on a virtual loop: `start` plus the loop's `time()`."""

    grain: Millis = 0
    """0: the loop stops when a timer is due, which is at a whole millisecond."""

    def __init__(self, loop: VirtualLoop, start: Millis = FIRST_INSTANT) -> None:
        self._loop = loop
        self._start = start

    def now(self) -> Millis:
        # a timer's due time is a float that may be slightly below its millisecond
        return self._start + int(self._loop.time() * 1000 + 1e-6)

    def seconds_until(self, at: Millis) -> float:
        return (at - self._start) / 1000 - self._loop.time()

    def span(self, length: Millis) -> Millis:
        return length


def run_virtual(main: Callable[[VirtualLoop], Coroutine[Any, Any, R]]) -> R:
    """Run `main(loop)` to its end in virtual time, like `asyncio.run`."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        loop = runner.get_loop()
        assert isinstance(loop, VirtualLoop)
        return runner.run(main(loop))
