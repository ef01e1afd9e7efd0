"""Several worker processes: started, told to stop, and started again when one dies.

There is nothing to coordinate, since the lease decides who has a task: the supervisor only keeps their number up.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from types import FrameType

from bide.cli.exits import Exit

_log = logging.getLogger("bide.supervisor")
SHORTEST_PAUSE = 0.5
LONGEST_PAUSE = 30.0
HEALTHY_AFTER = 30.0
"""Seconds of life after which a death counts as the first again."""
_HOPELESS = frozenset({Exit.BAD_INPUT, Exit.DAMAGED, Exit.SETUP})
"""How a process ends that would end the same way again."""


_WORKS_AFTER = 5.0
"""Seconds of life after which a process has shown that the command as such is good."""


class _Place:
    """One of the processes, and when it may be started again."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[bytes] | None = None
        self.started = 0.0
        self.deaths = 0
        self.not_before = 0.0


class Supervisor:
    """Runs the command that it was itself started with, once per place, with `--processes 1`."""

    def __init__(self, command: Sequence[str], processes: int, environ: Mapping[str, str]) -> None:
        self._command = [sys.executable, "-m", "bide", *command[1:], "--processes", "1", "--supervised"]
        self._environ = {**environ}
        self._places = [_Place() for _ in range(processes)]
        self._signals = 0
        self._worked = False
        self._hear: socket.socket
        self._ending = False
        self._code = Exit.DONE

    def run(self) -> Exit:
        """Until all processes have ended: after a signal, or since one cannot even start."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._signalled)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)  # that it arrives is all: it ends the sleep
        hear, tell = socket.socketpair()
        self._hear = hear
        hear.setblocking(False)
        tell.setblocking(False)
        signal.set_wakeup_fd(tell.fileno(), warn_on_full_buffer=False)
        while True:
            for place in self._places:
                self._tend(place)
            if self._ending and not any(place.process for place in self._places):
                return self._code
            self._sleep()

    def _sleep(self) -> None:
        """Until a signal, or until a place may be filled again. Nothing polls."""
        ahead = [place.not_before for place in self._places if place.process is None and not self._ending]
        timeout = max(0.0, min(ahead) - time.monotonic()) if ahead else None
        select.select([self._hear], [], [], timeout)
        with suppress(BlockingIOError):
            self._hear.recv(4096)

    def _tend(self, place: _Place) -> None:
        now = time.monotonic()
        if place.process is None:
            if not self._ending and now >= place.not_before:
                self._start(place, now)
            return
        code = place.process.poll()
        if code is None:
            return
        pid, place.process = place.process.pid, None
        if self._ending:
            if code not in (0, -signal.SIGTERM) and self._code is Exit.DONE and self._signals < 2:
                self._code = Exit.DEFECT
            return
        self._worked = self._worked or now - place.started >= _WORKS_AFTER
        if code in _HOPELESS and not self._worked:
            _log.error("process %d cannot work, and would not at a second start: all are stopped", pid)
            self._code = Exit(code)
            self._stop()
            return
        place.deaths = 1 if now - place.started >= HEALTHY_AFTER else place.deaths + 1
        pause = min(SHORTEST_PAUSE * 2 ** (place.deaths - 1), LONGEST_PAUSE)
        place.not_before = now + pause
        how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"ended with {code}"
        _log.warning("process %d was %s; another one starts in %.1f s", pid, how, pause)

    def _start(self, place: _Place, now: float) -> None:
        place.started = now
        # A session of its own: Ctrl-C reaches us alone, and each process gets every signal once. Its standard input is
        # a pipe that only we hold, so that it drains when we are gone.
        place.process = subprocess.Popen(
            self._command, env=self._environ, stdin=subprocess.PIPE, start_new_session=True
        )
        _log.info("process %d started", place.process.pid)

    def _signalled(self, number: int, frame: FrameType | None) -> None:
        self._signals += 1
        if self._signals > 1:
            self._code = Exit(Exit.INTERRUPTED)
        self._stop()

    def _stop(self) -> None:
        self._ending = True
        for place in self._places:
            if place.process is not None and place.process.poll() is None:
                os.kill(place.process.pid, signal.SIGTERM)
