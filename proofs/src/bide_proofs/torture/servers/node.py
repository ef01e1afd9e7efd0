"""One process of a server with its data, which it keeps however it is ended, and the proxy before it."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar

from bide.testing.proxy import FaultProxy
from bide_proofs.torture.servers.clocks import FakeClock
from bide_proofs.torture.servers.processes import (
    HOST,
    Process,
    ServerFailed,
    as_account,
    free_port,
    until,
)

_PATIENCE = 60.0
"""Seconds for a server to answer; it takes one or three, but machines that are tortured do much at once."""

_TRIES = 3
_UNLUCKY = "libfaketime: In ft_shm_init()"
"""What a server's log says whose number was once that of another user's process, of which libfaketime has left
something: the next one has another number."""


class Home:
    """Where a server's data and log are: `folder`, or a temporary one of its account's, where we are root and it does
    not want to be. Its log is kept in `folder`."""

    def __init__(self, folder: Path, account: str | None) -> None:
        self._folder = folder
        self._account = account if os.geteuid() == 0 else None
        self.path = folder

    def make(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        if self._account is not None:
            self.path = Path(tempfile.mkdtemp(prefix="bide-server-"))
            shutil.chown(self.path, self._account, self._account)

    def remove(self) -> None:
        if self.path != self._folder:
            for log in self.path.glob("*log"):
                shutil.copy(log, self._folder)
            shutil.rmtree(self.path)
            self.path = self._folder


class Node:
    """A subclass says what to run and when it answers."""

    account: ClassVar[str | None] = None
    """Who it runs as where we are root."""
    bus: ClassVar[bool] = False
    """Whether it needs a second port."""
    host: ClassVar[str] = HOST
    """Where it listens."""
    halts_by: ClassVar[signal.Signals] = signal.SIGTERM

    def __init__(self, name: str, folder: Path, clock: FakeClock | None = None) -> None:
        self.name = name
        self.home = Home(folder, self.account)
        self.port = free_port(bus=self.bus)
        self.proxy = FaultProxy(self.host, self.port)
        self._clock = clock
        self._environment: Mapping[str, str] = {}
        self._process: Process | None = None
        self._ending = False

    @property
    def log(self) -> Path:
        return self.home.path / "log"

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.running and not self._ending

    @property
    def pid(self) -> int:
        assert self._process is not None, "it does not run"
        return self._process.pid

    def family(self) -> list[int]:
        """The pids of the process and all below it, none if it does not run."""
        return [] if self._process is None else self._process.family()

    def command(self) -> Sequence[str]:
        """What to run."""
        raise NotImplementedError

    async def answers(self) -> bool:
        """Whether it takes clients by now. May raise an OSError instead of False."""
        raise NotImplementedError

    def launch(self) -> None:
        """Started and not waited for: `ready` is to follow. So several start at once."""
        assert self._process is None, "it runs already"
        # by `env`, and so by nobody but the server itself: libfaketime makes something that only its user may open
        forgotten = (f"--unset={name}" for name in os.environ if name.startswith("BIDE_"))
        given = {**self._environment, **({} if self._clock is None else self._clock.environment(self.home.path))}
        environment = ["env", *forgotten, *(f"{name}={value}" for name, value in given.items())]
        words = [*as_account(self.account), *environment, *self.command()]
        self._process = Process(words, self.log, folder=self.home.path, name=self.name)

    async def ready(self) -> float:
        """Until it answers; in how many seconds. Raises ServerFailed."""
        for tries in range(_TRIES):
            process = self._process
            assert process is not None, "launch it first"

            async def answers(process: Process = process) -> bool:
                return not process.running or await self.answers()

            try:
                took = await until(answers, f"{self.name} to answer", patience=_PATIENCE)
            except ServerFailed as error:
                raise process.failed("did not answer in time") from error
            if process.running:
                return took
            failed = process.failed(f"ended with {process.code} while it started")
            if _UNLUCKY not in str(failed) or tries == _TRIES - 1:
                raise failed
            await self.kill()
            self.launch()
        raise AssertionError("it has been started so often")

    async def start(self) -> float:
        """Runs and answers; in how many seconds. Raises ServerMissing, ServerFailed."""
        self.launch()
        return await self.ready()

    async def kill(self) -> None:
        """Ended by SIGKILL, with all processes of its; nothing if it does not run."""
        await self._end(signal.SIGKILL)

    async def halt(self) -> None:
        """Ended in order."""
        await self._end(self.halts_by)

    async def _end(self, number: signal.Signals) -> None:
        if self._process is not None:
            self._ending = True
            await self._process.end(number)
            self._process, self._ending = None, False

    async def mend(self) -> float:
        """Runs and answers again, if by now it does not; in how many seconds."""
        if self.running:
            try:
                return await self.ready()
            except ServerFailed:
                if self.running:
                    raise
        await self.kill()  # reaped, if it has ended by itself, or somebody who was killing it was cancelled
        return await self.start()

    async def has_room(self) -> None:
        """There is room on its disk again: what whoever runs such a server does then."""

    def pause(self) -> None:
        """It and all its processes stand still, with their connections open, until `resume`."""
        assert self._process is not None, "it does not run"
        self._process.send_all(signal.SIGSTOP)
        self._process.send_all(signal.SIGSTOP)  # and those that the first time were just being made

    def kill_one(self, pid: int) -> None:
        """SIGKILL to one of the processes below it."""
        assert pid in self.family()[1:], f"{pid} is no process of {self.name}"
        with contextlib.suppress(ProcessLookupError):  # it has ended since
            os.kill(pid, signal.SIGKILL)

    def resume(self) -> None:
        if self._process is not None:
            self._process.send_all(signal.SIGCONT)

    async def remove(self) -> None:
        """Ended, in order if it can be, and forgotten, its log apart."""
        try:
            with contextlib.suppress(ServerFailed):  # it has not ended in time, and was killed
                await self.halt()
            await self.kill()
            await self.proxy.close()
        finally:
            self.home.remove()
