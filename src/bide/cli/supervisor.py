"""Several worker processes: started, told to stop, and started again when one dies.

There is nothing to coordinate, since the lease decides who has a task: the supervisor only keeps their number up.
"""

from __future__ import annotations

import logging
import math
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress

from bide.cli.exits import Exit
from bide.cli.stopping import SETTLING, SIGNALS, on_signals

_log = logging.getLogger("bide.supervisor")
SHORTEST_PAUSE = 0.5
LONGEST_PAUSE = 30.0
HEALTHY_AFTER = 30.0
"""Seconds of life after which a death counts as the first again."""
_HOPELESS = frozenset({Exit.BAD_INPUT, Exit.DAMAGED, Exit.SETUP})
"""How a process ends that would end the same way again."""
_SLACK = 2.0
"""Seconds after the longest drain of a process until it is killed: it ends itself, unless it is frozen."""


class _Place:
    """One of the processes, and when it may be started again."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[bytes] | None = None
        self.line: socket.socket | None = None
        """The other end of its standard input. It says there that it is at work, and drains when this is closed."""
        self.started = 0.0
        self.deaths = 0
        self.not_before = 0.0

    def close(self) -> None:
        if self.line is not None:
            self.line.close()
            self.line = None


class Supervisor:
    """Runs the command that it was itself started with, once per place, with `--processes 1`.

    It loads nothing of the app. The first process does, and when that is at work the others are started.
    """

    def __init__(self, command: Sequence[str], processes: int, environ: Mapping[str, str]) -> None:
        self._command = [sys.executable, "-m", "bide", *command[1:], "--processes", "1", "--supervised"]
        self._environ = {**environ}
        self._places = [_Place() for _ in range(processes)]
        self._signals: list[int] = []
        self._ready = False
        """True once the first process has been at work."""
        self._longest = 30.0 + SETTLING
        """Seconds that a process takes at most to drain, as the first one says."""
        self._ends_by: float | None = None
        """When all have to have ended; None as long as they shall work."""
        self._hear: socket.socket
        self._code: int = Exit.DONE

    def run(self) -> int:
        """Until all processes have ended: after a signal, or since one cannot even start."""
        self._hear, tell = socket.socketpair()
        self._hear.setblocking(False)
        tell.setblocking(False)
        signal.set_wakeup_fd(tell.fileno(), warn_on_full_buffer=False)
        on_signals(lambda number, frame: self._signals.append(number))  # and `_obey` does the rest
        signal.signal(signal.SIGCHLD, lambda number, frame: None)  # that it arrives is all: it ends the sleep
        while True:
            self._reap()
            self._obey()
            for place in self._places:
                self._tend(place)
            if self._ends_by is not None and not any(place.process for place in self._places):
                return self._code
            self._sleep()

    def _sleep(self) -> None:
        """Until a signal, until a place may be filled, or until the first process is at work. Nothing polls."""
        ahead = [place.not_before for place in self._places if self._is_free(place)]
        until = min(ahead, default=math.inf) if self._ends_by is None else self._ends_by
        lines = [place.line for place in self._places[:1] if place.line is not None and not self._ready]
        select.select([self._hear, *lines], [], [], None if until == math.inf else max(0.0, until - time.monotonic()))
        with suppress(BlockingIOError):
            self._hear.recv(4096)

    def _reap(self) -> None:
        """Take the exit codes of all children. Process 1 is also given those that handlers have left behind."""
        with suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                for place in self._places:
                    if place.process is not None and place.process.pid == ended[0]:
                        place.process.returncode = os.waitstatus_to_exitcode(ended[1])

    def _obey(self) -> None:
        """The first signal drains. A second one kills, and so does the end of the time to drain."""
        if self._signals and self._ends_by is None:
            self._drain()
        overdue = self._ends_by is not None and time.monotonic() >= self._ends_by
        if not overdue and len(self._signals) < 2:
            return
        why = "not drained in time" if overdue else f"{signal.Signals(self._signals[-1]).name} again"
        _log.warning("%s: ending at once; what was running is delivered again when its lease is over", why)
        self._code = Exit.DEFECT if overdue else 128 + self._signals[-1]
        self._ends_by = math.inf
        del self._signals[1:]
        for place in self._places:
            if place.process is not None:
                place.process.kill()

    def _drain(self) -> None:
        self._ends_by = time.monotonic() + self._longest + _SLACK
        for place in self._places:
            place.close()

    def _is_free(self, place: _Place) -> bool:
        return place.process is None and (self._ready or place is self._places[0])

    def _tend(self, place: _Place) -> None:
        if place.process is None:
            if self._ends_by is None and self._is_free(place) and time.monotonic() >= place.not_before:
                self._start(place)
        elif place.process.returncode is not None:
            place.close()
            pid, code, place.process = place.process.pid, place.process.returncode, None
            self._ended(place, pid, code)
        elif not self._ready and place.line is not None:
            self._hear_of(place, place.line)

    def _start(self, place: _Place) -> None:
        place.started = time.monotonic()
        place.line, theirs = socket.socketpair()
        place.line.setblocking(False)
        shown = 0 if self._ready else len(self._places)
        # A session of its own: Ctrl-C and the end of a terminal reach us alone. That its standard input ends tells it
        # to drain, by us or by our own end; a signal to all processes of a unit tells it the same once more, and waits
        # until it has a handler.
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        with theirs:
            try:
                place.process = subprocess.Popen(
                    [*self._command, str(shown)], env=self._environ, stdin=theirs.fileno(), start_new_session=True
                )
            except OSError as error:  # no memory, or as many processes as there may be
                place.close()
                self._rest(place, f"no process could be started ({error})")
                return
            finally:
                signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        _log.info("process %d started", place.process.pid)

    def _hear_of(self, place: _Place, line: socket.socket) -> None:
        with suppress(BlockingIOError):
            if said := line.recv(64):
                self._longest = float(said)
                self._ready = True
            else:
                place.close()

    def _ended(self, place: _Place, pid: int, code: int) -> None:
        if self._ends_by is not None:
            if code != 0 and self._code == Exit.DONE:
                self._code = Exit.DEFECT
        elif code in _HOPELESS and not self._ready:
            _log.error("process %d cannot work, and would not at a second start", pid)
            self._code = code
            self._drain()
        else:
            how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"ended with {code}"
            self._rest(place, f"process {pid} was {how}")

    def _rest(self, place: _Place, why: str) -> None:
        """Until it is started again, longer from death to death."""
        now = time.monotonic()
        place.deaths = 1 if now - place.started >= HEALTHY_AFTER else place.deaths + 1
        pause = min(SHORTEST_PAUSE * 2 ** (place.deaths - 1), LONGEST_PAUSE)
        place.not_before = now + pause
        _log.warning("%s; another one starts in %.1f s", why, pause)
