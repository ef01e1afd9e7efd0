"""How a command ends: the exit codes, and the signals that stop a process which serves or works.

`--help` and docs/cli.md show the table of codes. The first signal drains, a second one ends the process at once; the
table in docs/deploy.md has every process and moment. A signal handler may run between any two instructions of the main
thread, so it only sets a flag and hands over to the loop.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from enum import IntEnum
from types import FrameType
from typing import Any, Self

from bide.core import errors
from bide.core.errors import BideError, MissingExtra
from bide.core.instants import Millis


class Exit(IntEnum):
    """The exit codes, each with what a script may conclude from it. A number never changes its meaning."""

    meaning: str

    def __new__(cls, code: int, meaning: str = "") -> Self:
        one = int.__new__(cls, code)
        one._value_ = code
        one.meaning = meaning
        return one

    DONE = 0, "done as asked"
    NOT_DONE = 1, "not done, and the answer says why: not found, finished, under way, refused, stale token"
    BAD_INPUT = 2, "wrong usage or bad input; nothing was done"
    UNAVAILABLE = 3, "the store is locked, away or full; nothing was done, and trying again is safe"
    DAMAGED = 4, "the store is damaged, is not a bide store, or is of another version"
    SETUP = 5, "the setup is wrong: a missing package, an app that cannot be loaded, a token that does not allow it"
    UNKNOWN = 6, "the answer was lost: the call was done once or not at all; check before you try again"
    PARTLY = 7, "part of it is done, or may be, and the message says which; the rest is not"
    DEFECT = 70, "a defect in bide or in the loaded app; --debug shows where"
    INTERRUPTED = 130, "interrupted (Ctrl-C) before the end"


class PartlyDone(BideError):
    """A command ended part-way; the message says how far it came."""


_EXITS: Mapping[type[BideError], Exit] = {
    errors.BadInput: Exit.BAD_INPUT,
    errors.StoreCorrupt: Exit.DAMAGED,
    errors.StoreMismatch: Exit.DAMAGED,
    PartlyDone: Exit.PARTLY,
    errors.PartlyFailed: Exit.PARTLY,
    errors.OutcomeUnknown: Exit.UNKNOWN,
    errors.SetupError: Exit.SETUP,  # before StoreError: a token that is refused is both
    errors.StoreError: Exit.UNAVAILABLE,
    errors.LeaseLost: Exit.NOT_DONE,
}
"""By the kind of error, special cases first."""


def exit_of(error: BideError) -> Exit:
    return next((code for kind, code in _EXITS.items() if isinstance(error, kind)), Exit.DEFECT)


SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
SETTLING = 10.0
"""Seconds after the grace for settling the cancelled tasks and closing everything."""


def on_signals(handler: Callable[[int, FrameType | None], object]) -> None:
    """Install `handler` for the signals that stop. A SIGHUP that is ignored, as under `nohup`, stays ignored."""
    for number in SIGNALS:
        if number is not signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, handler)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)  # the supervisor starts its children with all of them blocked


def end_at_once(number: int, frame: FrameType | None) -> None:
    """End the process: the handler until work begins. Without one, the kernel ignores the signal for process 1."""
    os._exit(Exit.DONE)


class Shutdown:
    """Stops a process on a signal, or when its supervisor says so: at once before work begins, by draining after that.

    A second signal ends it at once.
    """

    def __init__(self, *, only_drains: bool = False) -> None:
        self._only_drains = only_drains
        self._drain: Callable[[str], object] | None = None
        self._requested = False

    def begin(self, drain: Callable[[str], object], grace: Millis) -> float:
        """From now on, stop by calling `drain` in this loop with the reason; return the most seconds that takes."""
        self._loop = asyncio.get_running_loop()
        self._drain_seconds = grace / 1000 + SETTLING
        self._drain = drain
        signal.signal(signal.SIGALRM, self._overdue)
        on_signals(lambda number, frame: self.request(signal.Signals(number).name, 128 + number))
        return self._drain_seconds

    def request(self, why: str, code: int = Exit.DONE) -> None:
        """Ask for the shutdown, from any thread, at any time."""
        if self._drain is None:
            os._exit(Exit.DONE)
        elif not self._requested:
            self._requested = True
            signal.setitimer(signal.ITIMER_REAL, self._drain_seconds)  # a loop that a handler blocks has no timers
            with suppress(RuntimeError):  # the loop is closed: the process is ending anyway
                self._loop.call_soon_threadsafe(self._drain, why)
        elif not self._only_drains:
            _end(f"{why} again: ending at once", code)

    def _overdue(self, number: int, frame: FrameType | None) -> None:
        _end(f"not drained after {self._drain_seconds:g} s: ending at once", Exit.DEFECT)


def _end(what: str, code: int) -> None:
    """End the process. The message is written without locks and buffers, which the main thread may hold."""
    try:
        os.write(2, f"bide: {what}; running tasks are delivered again when their leases expire\n".encode())
    finally:
        os._exit(code)


def run_loop(working: Coroutine[Any, Any, None], *, uvloop: bool) -> None:
    """Run the coroutine to its end, on uvloop if asked. Raises MissingExtra, and what `working` raises."""
    if not uvloop:
        asyncio.run(working)
        return
    try:
        from uvloop import new_event_loop
    except ImportError:
        working.close()
        raise MissingExtra("uvloop", "--uvloop") from None
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        runner.run(working)
