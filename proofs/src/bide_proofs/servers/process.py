"""Processes of servers: started from the system's programs on free ports, ended by their pids, and never outliving us.

Each has a guard, a shell that waits on a pipe from this process. The pipe breaks when this process ends in any way,
including SIGKILL, and the guard then undoes one thing: it kills a process, or unmounts a folder.
`prctl(PR_SET_PDEATHSIG)` would need no second process, but it exists only on Linux, fires when the *thread* that
started the server ends, and must be called between fork and exec, which is unsafe in a program with threads. A guard
costs a megabyte and a millisecond.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

HOST = "127.0.0.1"
BUS = 10_000
"""The distance between the two ports of a node of a Redis Cluster."""
_FIRST, _LAST = 11_000, 22_000
"""The range of ports. With `BUS` added it stays below 32768, where Linux begins to assign ports to clients."""
PATIENCE = 60.0
"""Seconds after which a wait counts as a hang: a server takes one to three, but machines may be busy."""
_STEP = 0.02
_GUARD = 'trap "" HUP INT TERM; read -r dismissed || '
_TAIL = 3_000
"""Characters of a log that an error shows."""
_SHARED_MEMORY = Path("/dev/shm")
_PROGRAMS = ("/usr/sbin", "/usr/local/sbin")
"""Debian's folders of programs for administrators, which are not in every user's path."""


class ServerMissing(Exception):
    """A server's program is not installed; the message names the package."""


class ServerFailed(OSError):
    """A server ended, or did not reach the expected state; the message shows the end of its log, if it has one."""


def program(name: str, packages: str, *folders: str) -> str:
    """Find program `name`, in `folders` first. Raises ServerMissing, which names Debian's `packages`."""
    path = os.pathsep.join((*folders, os.environ.get("PATH", os.defpath), *_PROGRAMS))
    found = shutil.which(name, path=path)
    if found is None:
        raise ServerMissing(f"{name} is not installed: scripts/services install, or apt-get install {packages}")
    return found


def free_port() -> int:
    """A port that is free now, as is the matching port for the bus of a Redis Cluster.

    It is chosen at random, since other processes start servers at the same time. One of them may still take the port
    first; a start that fails for this reason tries again with another port.
    """
    chance = random.SystemRandom()
    for _ in range(1_000):
        port = chance.randrange(_FIRST, _LAST)
        if _free(port) and _free(port + BUS):
            return port
    raise OSError(f"no free port was found from {_FIRST} to {_LAST}")


def _free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))  # fails if the port is taken on any address of this machine
        except OSError:
            return False
    return True


def listens(port: int) -> bool:
    """Return True if the port accepts connections, else raise OSError."""
    socket.create_connection((HOST, port), timeout=1.0).close()
    return True


def until(holds: Callable[[], object], what: str, *, patience: float = PATIENCE) -> float:
    """Wait until `holds()` is true; its OSErrors count as false. Returns the seconds. Raises ServerFailed."""
    began = time.monotonic()
    while True:
        problem: OSError | None = None
        try:
            if holds():
                return time.monotonic() - began
        except OSError as error:
            problem = error
        if time.monotonic() > began + patience:
            raise ServerFailed(f"waited {patience:g} s in vain for {what}") from problem
        time.sleep(_STEP)


def as_account(account: str | None) -> list[str]:
    """The beginning of a command that runs a program as `account` if this process is root; else empty."""
    if account is None or os.geteuid() != 0:
        return []
    return [program("setpriv", "util-linux"), f"--reuid={account}", f"--regid={account}", "--clear-groups", "--"]


def give_to(account: str | None, folder: Path) -> None:
    """Make `account` the owner of `folder`, if this process is root."""
    if account is not None and os.geteuid() == 0:
        shutil.chown(folder, account, account)


def run(words: Sequence[str], *, folder: Path, account: str | None = None, feed: Path | None = None) -> None:
    """Run a command to its end, with `feed` as its input. Raises ServerFailed with the end of its output."""
    with (feed or Path(os.devnull)).open("rb") as given:
        done = subprocess.run(
            [*as_account(account), *words], cwd=folder, stdin=given, capture_output=True, text=True, check=False
        )
    if done.returncode:
        said = (done.stdout + done.stderr)[-_TAIL:]
        raise ServerFailed(f"{words[0]} ended with {done.returncode}, having said\n{said}")


class Guard:
    """Runs `script`, a line of shell with `$1`, if this process ends without dismissing the guard."""

    def __init__(self, script: str, argument: str) -> None:
        self._shell = subprocess.Popen(
            ["/bin/sh", "-c", f"{_GUARD}{script}", "guard", argument],
            stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip

    def dismiss(self) -> None:
        with contextlib.suppress(BrokenPipeError):  # the guard was ended from outside
            self._shell.communicate(b"dismissed\n")


class Process:
    """One process with its guard, in the folder of `log`, to which its output is appended."""

    def __init__(self, command: Sequence[str], log: Path, *, name: str) -> None:
        self.log = log
        self._name = name
        # its own session: Ctrl-C in a terminal reaches only this process, which then stops it in order
        with log.open("ab") as output:
            self._log_began = output.tell()
            self._process = subprocess.Popen(
                command, cwd=log.parent,
                stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True,
            )  # fmt: skip
        self.pid = self._process.pid
        self._guard = Guard('kill -KILL "$1"', str(self.pid))

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    @property
    def code(self) -> int | None:
        """The exit code, or the negative number of the signal that ended it; None while it runs."""
        return self._process.poll()

    def family(self) -> list[int]:
        """The pids of this process and all its descendants, according to Linux; its own first."""
        found = [self.pid] if self.running else []
        for pid in found:
            with contextlib.suppress(OSError):  # it has ended since
                for children in Path(f"/proc/{pid}/task").glob("*/children"):
                    with contextlib.suppress(OSError):  # a thread of it has
                        found += map(int, children.read_text().split())
        return found

    def send(self, number: signal.Signals) -> None:
        """Signal the process and all its descendants, but never a reaped pid."""
        _signal(self.family(), number)

    def end(self, number: signal.Signals) -> None:
        """End the process and its descendants by `number`, or by SIGKILL after `PATIENCE`; reap it."""
        below = self.family()[1:]
        if number is signal.SIGKILL:
            self.send(number)
        else:
            self._process.send_signal(number)  # it ends its descendants itself
        self.send(signal.SIGCONT)  # a stopped process handles a SIGTERM only when it continues
        try:
            self._process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            below = self.family()[1:]
            self.send(signal.SIGKILL)
            self._process.wait()
        # the next start may fail while a descendant is left, and only this code knows their pids
        while left := [pid for pid in below if _lives(pid)]:
            _signal(left, signal.SIGKILL)
            time.sleep(_STEP / 4)
        self._guard.dismiss()
        for kept in ("faketime_shm_", "sem.faketime_sem_"):  # files of libfaketime that a kill leaves behind
            (_SHARED_MEMORY / f"{kept}{self.pid}").unlink(missing_ok=True)

    def failed(self, why: str) -> ServerFailed:
        """An error with the end of the process's output."""
        with self.log.open("rb") as log:
            log.seek(self._log_began)
            said = log.read().decode("utf-8", "replace")[-_TAIL:]
        return ServerFailed(f"{self._name} {why}; its log {self.log} ends with\n{said}")


def _signal(pids: Sequence[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def _lives(pid: int) -> bool:
    """True if the process exists and is not a zombie."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"
