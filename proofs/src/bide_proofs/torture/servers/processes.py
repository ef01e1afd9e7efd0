"""Processes of servers: started from Debian's programs on free ports, ended by their pids, and outliving nobody.

Beside each runs a guard, a shell that waits on a pipe of ours. The pipe breaks when this process ends in whatever way,
SIGKILL too, and the guard then undoes the one thing that it was given: it kills a process, or unmounts a folder.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

HOST = "127.0.0.1"
BUS = 10_000
"""How far above its own port a node of a Redis Cluster has its second one."""
_FIRST, _LAST = 11_000, 22_000
"""Both stay below 32768, where Linux begins to hand out ports to clients, so that no client is in the way."""
_GUARD = 'trap "" HUP INT TERM; read -r dismissed || '
_TAIL = 3_000
"""Characters of a log that an error shows."""
_SHARED_MEMORY = Path("/dev/shm")
_PROGRAMS = ("/usr/sbin", "/usr/local/sbin")
"""Where Debian puts what is for administrators, which is not in everybody's path."""


class ServerMissing(Exception):
    """A server's program is not installed; says what to install."""


class ServerFailed(OSError):
    """A server ended, or did not come to what was waited for; shows the end of its log where it has one."""


def program(name: str, package: str, *folders: str) -> str:
    """Where `name` is installed; `folders` are looked into first. Raises ServerMissing, naming Debian's `package`."""
    path = os.pathsep.join((*folders, os.environ.get("PATH", os.defpath), *_PROGRAMS))
    found = shutil.which(name, path=path)
    if found is None:
        raise ServerMissing(f"{name} is not installed: scripts/services install, or apt-get install {package}")
    return found


def free_port(*, bus: bool = False) -> int:
    """A port that nobody has at this moment, with `bus` the one for the cluster bus too. At random, since others start
    servers at the same time."""
    chance = random.SystemRandom()
    for _ in range(1_000):
        port = chance.randrange(_FIRST, _LAST)
        if _free(port) and (not bus or _free(port + BUS)):
            return port
    raise OSError(f"no free port was found from {_FIRST} to {_LAST}")


def _free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))  # at no address of this machine
        except OSError:
            return False
    return True


def as_account(account: str | None) -> list[str]:
    """The words that a command begins with, for a program that does not want to be root where we are."""
    if account is None or os.geteuid() != 0:
        return []
    return [program("setpriv", "util-linux"), f"--reuid={account}", f"--regid={account}", "--clear-groups", "--"]


class Guard:
    """Runs `script`, a line of shell with `$1`, when this process ends without having dismissed it."""

    def __init__(self, script: str, argument: str) -> None:
        self._shell = subprocess.Popen(
            ["/bin/sh", "-c", f"{_GUARD}{script}", "guard", argument],
            stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip

    def dismiss(self) -> None:
        with contextlib.suppress(BrokenPipeError):  # somebody else ended it
            self._shell.communicate(b"dismissed\n")


class Process:
    """One process with its guard. Its output goes to the end of `log`."""

    def __init__(self, command: Sequence[str], log: Path, *, folder: Path, name: str) -> None:
        self.log = log
        self._name = name
        # a session of its own: Ctrl-C in a terminal is for us, who then stop it in order
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                command, cwd=folder,
                stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True,
            )  # fmt: skip
        self.pid = self._process.pid
        self._guard: Guard | None = Guard('kill -KILL "$1"', str(self.pid))

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    @property
    def code(self) -> int | None:
        """What it ended with; the negative number of a signal."""
        return self._process.poll()

    def family(self) -> list[int]:
        """It and all processes below it, by what Linux says of them; itself first."""
        found = [self.pid] if self.running else []
        for pid in found:
            with contextlib.suppress(OSError):  # it has ended since
                for children in Path(f"/proc/{pid}/task").glob("*/children"):
                    with contextlib.suppress(OSError):  # a thread of it has
                        found += map(int, children.read_text().split())
        return found

    def send(self, number: signal.Signals) -> None:
        """To the process alone, if it still runs; a pid that was reaped is never signalled."""
        self._process.send_signal(number)

    def send_all(self, number: signal.Signals) -> None:
        """To it and all below it."""
        for pid in self.family():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    async def end(self, number: signal.Signals, *, patience: float = 20.0) -> None:
        """Ended by `number`, by SIGKILL if it has not after `patience` seconds, with all below it, and reaped."""
        below = self.family()[1:]
        if number is signal.SIGKILL:
            self.send_all(number)
        else:
            self.send(number)
        self.send_all(signal.SIGCONT)  # what stands still sees a SIGTERM when it goes on
        until = time.monotonic() + patience
        while self.running:
            if time.monotonic() > until:
                self.send_all(signal.SIGKILL)
            await asyncio.sleep(0.005)
        # who is started next may refuse while one is left, and nobody else knows of them any more
        while left := [pid for pid in below if _lives(pid)]:
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            await asyncio.sleep(0.005)
        self.forget()

    def forget(self) -> None:
        """It has ended, and its number may be another's now."""
        if self._guard is not None:
            self._guard.dismiss()
            self._guard = None
            for left in ("faketime_shm_", "sem.faketime_sem_"):  # which a kill leaves of a clock that can be set
                (_SHARED_MEMORY / f"{left}{self.pid}").unlink(missing_ok=True)

    def failed(self, why: str) -> ServerFailed:
        return ServerFailed(f"{self._name} {why}; its log {self.log} ends with\n{_end_of(self.log)}")


def _lives(pid: int) -> bool:
    """Whether there is such a process, dead ones that nobody has looked after apart."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


async def until(holds: Callable[[], Awaitable[bool]], what: str, *, patience: float = 60.0) -> float:
    """Seconds that it took until `holds()`; an OSError of it counts as no. Raises ServerFailed after `patience` s."""
    began = time.monotonic()
    problem: OSError | None = None
    while time.monotonic() < began + patience:
        try:
            if await holds():
                return time.monotonic() - began
            problem = None
        except OSError as error:
            problem = error
        await asyncio.sleep(0.02)
    raise ServerFailed(f"waited {patience:.0f} s in vain for {what}") from problem


async def run(
    words: Sequence[str], *, folder: Path, log: Path, account: str | None = None, feed: Path | None = None
) -> None:
    """A command to its end, what it says at the end of `log`. Raises ServerFailed."""
    with log.open("ab") as output, (feed or Path(os.devnull)).open("rb") as given:
        process = await asyncio.create_subprocess_exec(
            *as_account(account), *words, cwd=folder, stdin=given, stdout=output, stderr=output
        )
        code = await process.wait()
    if code:
        raise ServerFailed(f"{words[0]} ended with {code}; {log} ends with\n{_end_of(log)}")


def _end_of(log: Path) -> str:
    return log.read_text(encoding="utf-8", errors="replace")[-_TAIL:]
