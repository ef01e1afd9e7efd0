"""A server's process: started from here, ended by its pid, and never outliving who started it.

Beside each server runs a guard, a shell that waits on a pipe of ours. The pipe breaks when this process ends in
whatever way, SIGKILL too, and the guard then kills the one pid that it was given. `prctl(PR_SET_PDEATHSIG)` would do
without a second process, but is for Linux alone, fires when the *thread* that started the server ends, and has to be
called between fork and exec, which a program with threads should not do. A guard is a megabyte and a millisecond.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.waiting import wait_until

_GUARD = 'trap "" HUP INT TERM; read -r dismissed || kill -KILL "$1"'
_TAIL = 3_000
"""Characters of the log that an error shows."""


class ServerMissing(Exception):
    """A server's program is not installed; says what to install."""


class ServerFailed(Exception):
    """A server ended, or was not ready in time; shows the end of its log."""


def program(name: str, packages: str) -> str:
    """Where `name` is installed. Raises `ServerMissing`, with the Debian `packages` that bring it."""
    found = shutil.which(name)
    if found is None:
        raise ServerMissing(f"{name} is not installed: scripts/services install, or apt-get install {packages}")
    return found


class Child:
    """One process and its guard. Its output goes to the end of `log`."""

    def __init__(self, command: Sequence[str], log: Path, *, environment: Mapping[str, str] | None = None) -> None:
        self.log = log
        # a session of their own: Ctrl-C in a terminal is for us, who then stop them in order
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                command, cwd=log.parent, env={**os.environ, **(environment or {})},
                stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True,
            )  # fmt: skip
        self.pid = self._process.pid
        self._guard = subprocess.Popen(
            ["/bin/sh", "-c", _GUARD, "guard", str(self.pid)],
            stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    def send(self, number: signal.Signals) -> None:
        """Sent if it still runs; a pid that was reaped is never signalled."""
        self._process.send_signal(number)

    def end(self, number: signal.Signals, *, patience: float = 60.0) -> None:
        """Ended by `number`, by SIGKILL if it has not after `patience` seconds, and reaped."""
        self.send(number)
        self.send(signal.SIGCONT)  # one that is paused sees a SIGTERM when it goes on
        try:
            self._process.wait(patience)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        with contextlib.suppress(BrokenPipeError):  # somebody else ended the guard
            self._guard.communicate(b"dismissed\n")

    def await_ready(self, answers: Callable[[], bool], *, passes: tuple[type[Exception], ...] = (OSError,)) -> None:
        """Until `answers()`; an error of `passes` counts as no. Raises `ServerFailed`, at once where it has ended."""

        def ready() -> bool:
            if not self.running:
                raise self.failed("ended while it started")
            return answers()

        try:
            wait_until(ready, "an answer", passes=passes)
        except AssertionError as error:
            raise self.failed(str(error)) from error

    def failed(self, why: str) -> ServerFailed:
        tail = self.log.read_text(encoding="utf-8", errors="replace")[-_TAIL:]
        return ServerFailed(f"{self._process.args[0]!s} {why}; its log {self.log} ends with\n{tail}")  # type: ignore[index]


class Running:
    """What can be started and stopped, and is both as a context."""

    def start(self) -> None:
        raise NotImplementedError

    def stop(self) -> None:
        raise NotImplementedError

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


class OneProcess(Running):
    """A server that is one process of ours, below `directory`.

    Without `port` a free one is taken at the first start, and kept.
    """

    def __init__(self, directory: Path, *, port: int | None = None, options: Mapping[str, str] | None = None) -> None:
        self.directory = directory
        self.options = dict(options or {})
        self._port = port
        self._chooses = port is None
        self._child: Child | None = None

    @property
    def port(self) -> int:
        """Known from the first start on."""
        assert self._port is not None, "start it first"
        return self._port

    @property
    def url(self) -> str:
        raise NotImplementedError

    @property
    def pid(self) -> int:
        assert self._child is not None, "it does not run"
        return self._child.pid

    @property
    def running(self) -> bool:
        return self._child is not None and self._child.running

    def kill(self) -> None:
        """Ended by SIGKILL: what the operating system does not have yet is lost.

        Processes that serve its clients, where it has such, see that and end by themselves.
        """
        self._end(signal.SIGKILL)

    def _end(self, number: signal.Signals) -> None:
        if self._child is not None:
            self._child.end(number)
            self._child = None

    def pause(self) -> None:
        """Stops in the middle of whatever it does, with its connections open, until `resume`.

        Processes of its that serve clients already go on.
        """
        assert self._child is not None, "it does not run"
        self._child.send(signal.SIGSTOP)

    def resume(self) -> None:
        assert self._child is not None, "it does not run"
        self._child.send(signal.SIGCONT)
