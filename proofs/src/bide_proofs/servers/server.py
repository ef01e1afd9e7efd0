"""One server of our own: a process with its data, to be paused, killed and started again on the same data.

Its clock can be set while it runs, by libfaketime. Of several servers that are one to their clients the base is here
too, and `bide serve` as a server over a store that is not its.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import shutil
import signal
import sys
import tempfile
import urllib.request
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

from bide_proofs.servers.process import (
    HOST,
    PATIENCE,
    Process,
    ServerFailed,
    ServerMissing,
    as_account,
    free_port,
    give_to,
    run,
    until,
)

PACKAGES = "libfaketime"
CLOCK_FILE = "FAKETIME_TIMESTAMP_FILE"
"""In the environment of a process whose clock can be set."""
_NAME = "faketime/libfaketimeMT.so.1"
_TRIES = 5
"""Starts, if others keep taking the port first."""
_UNLUCKY = "libfaketime: In ft_shm_init()"
"""In the log of a server whose pid another user's process had, of which libfaketime has left a file: the next start
has another pid."""
_BEGINNINGS: dict[type[ServerProcess], Path] = {}
"""The data that every new server of a kind begins with: its own program takes a second of processor time to make it."""


def library() -> Path:
    """The library that is put before the system's clock. Raises ServerMissing."""
    for folder in (Path("/usr/lib"), Path("/usr/local/lib")):
        for found in sorted((*folder.glob(_NAME), *folder.glob(f"*/{_NAME}"))):
            return found
    raise ServerMissing(f"libfaketime is not installed: scripts/services install, or apt-get install {PACKAGES}")


class ServerClock:
    """A time of day, for servers and other processes, that can be set; the monotonic clock stays the machine's.

    Each process has a file in a folder that its account may read, which it reads whenever it reads the clock (some
    10 us): what is cached would jump at another moment in each process of a server, which no clock does. Raises
    ServerMissing.
    """

    def __init__(self) -> None:
        self.ahead = 0.0
        """Seconds by which it is ahead of the machine's."""
        self._library = library()
        self._files: set[Path] = set()

    def environment(self, folder: Path) -> Mapping[str, str]:
        """Variables for a process that may read what is in `folder`."""
        file = folder / "clock"
        self._files.add(file)
        _set(file, self.ahead)
        return {
            # The library asks for memory while it is loaded, and jemalloc, which Redis uses, for the time when it is
            # asked: neither would come to an end, so memory is the C library's here.
            "LD_PRELOAD": f"{self._library}:libc.so.6",
            CLOCK_FILE: str(file),
            "FAKETIME_NO_CACHE": "1",
            "DONT_FAKE_MONOTONIC": "1",
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        }

    def shift(self, seconds: float) -> None:
        """Set it so far ahead of the machine's, or behind if that is negative: from its next reading on."""
        for file in self._files:
            _set(file, seconds)
        self.ahead = seconds


def _set(file: Path, ahead: float) -> None:
    written = file.with_suffix(".new")
    written.write_text(f"{ahead:+f}\n", encoding="ascii")
    written.chmod(0o644)
    os.replace(written, file)  # at no moment is there half of it


class Running:
    """A thing to start and stop, also as a context."""

    @property
    def url(self) -> str:
        """The URL for clients, once it is started."""
        raise NotImplementedError

    def start(self) -> object:
        """Start it, and wait until it answers. Raises ServerMissing, ServerFailed."""
        raise NotImplementedError

    def stop(self) -> None:
        """End it, if it runs."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *failure: object) -> None:
        self.stop()


class SeveralServers(Running):
    """Several that are one to their clients. Where they do not all start, all are stopped."""

    @property
    def parts(self) -> Sequence[Running]:
        """All of them, in the order in which they are stopped."""
        raise NotImplementedError

    def start(self) -> None:
        try:
            self.start_parts()
        except BaseException:
            self.stop()
            raise

    def start_parts(self) -> None:
        """Start all of them, and wait until they are one."""
        raise NotImplementedError

    def stop(self) -> None:
        stop_all(self.parts)


def start_all(servers: Collection[ServerProcess]) -> None:
    """Start them at once, and wait until each answers."""
    for server in servers:
        server.launch()
    for server in servers:
        server.await_ready()


def stop_all(servers: Sequence[Running]) -> None:
    """Stop one after the other, whatever becomes of each. Raises what one has failed with."""
    with contextlib.ExitStack() as stopping:
        for server in reversed(servers):
            stopping.callback(server.stop)


class ServerProcess(Running):
    """One process with its data and its log in `home`: below `directory`, or in a temporary folder of its account's
    where we are root and it does not want to be.

    Without `port` a free one is taken at the first start, and kept. With a `clock` it goes by that one. A subclass says
    what to run, what that begins with, and when it answers.
    """

    title: ClassVar[str]
    """The name in errors of a server without `name`."""
    account: ClassVar[str | None] = None
    """The account that runs it where we are root; None: root."""
    host: ClassVar[str] = HOST
    taken: ClassVar[Sequence[str]] = ("Address already in use",)
    """Words in its log that say that a port of its is taken."""
    patience: ClassVar[float] = PATIENCE
    """Seconds until a start counts as a hang."""
    halts_by: ClassVar[signal.Signals] = signal.SIGTERM
    """Ends it in order."""
    stops_by: ClassVar[signal.Signals] = signal.SIGKILL
    """Ends it where it is not needed any more."""

    def __init__(
        self,
        directory: Path,
        *,
        port: int | None = None,
        options: Mapping[str, str] | None = None,
        clock: ServerClock | None = None,
        name: str | None = None,
    ) -> None:
        self.directory = directory
        self.options = dict(options or {})
        self.name = name or self.title
        self._clock = clock
        self._port = port
        self._chooses = port is None
        self._home: Path | None = None
        self._process: Process | None = None
        self._beside: Process | None = None

    @property
    def port(self) -> int:
        """Known from the first start on."""
        assert self._port is not None, "start it first"
        return self._port

    @property
    def home(self) -> Path:
        return self.directory if self._home is None else self._home

    @property
    def data(self) -> Path:
        """Made when it is not there at a start."""
        return self.home / "data"

    @property
    def log(self) -> Path:
        return self.home / "log"

    @property
    def pid(self) -> int:
        assert self._process is not None, "it does not run"
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.running

    def family(self) -> list[int]:
        """The pids of the process and all below it, none if it does not run."""
        return [] if self._process is None else self._process.family()

    # what a subclass says

    def fill(self) -> None:
        """Make what has to be in `data` before a start; the home is there."""

    def prepare(self) -> None:
        """Write what a start needs besides the data, such as its configuration; the port is known."""

    def command(self) -> Sequence[str]:
        """The command to run."""
        raise NotImplementedError

    def environment(self) -> Mapping[str, str]:
        """Variables of the server's own."""
        return {}

    def answers(self) -> bool:
        """True once it takes clients. May raise an OSError instead of False."""
        raise NotImplementedError

    # starting

    def start(self) -> float:
        """Start it, and wait until it answers. Returns the seconds that this took.

        Raises ServerMissing, ServerFailed.
        """
        fresh = not self.data.exists()
        try:
            self.launch()
            return self.await_ready()
        except BaseException:
            if fresh:
                self.stop()
            else:
                self.kill()
            raise

    def launch(self) -> None:
        """Start it without waiting: `await_ready` is to follow. So several start at once."""
        assert not self.running, "it runs already"
        if not self.data.exists():
            self._make()
        if self._port is None:
            self._port = free_port()
        self.prepare()
        self._process = self._begun(self.command(), self.log)

    def begin_beside(self, command: Sequence[str], name: str) -> None:
        """Start another process that the server needs, by `name`, which ends with it."""
        self._beside = self._begun(command, self.home / f"{name}.log")

    def _begun(self, command: Sequence[str], log: Path) -> Process:
        # by `env`, and so only by the server itself: libfaketime makes something that only its user may open
        given = {**self.environment(), **({} if self._clock is None else self._clock.environment(self.home))}
        forgotten = [word for name in os.environ if name.startswith("BIDE_") for word in ("-u", name)]
        variables = [f"{name}={value}" for name, value in given.items()]
        words = [*as_account(self.account), "/usr/bin/env", *forgotten, *variables, *command]
        return Process(words, log, name=self.name)

    def await_ready(self) -> float:
        """Wait until it answers. Returns the seconds that this took. Raises ServerFailed."""
        tries = 1
        while True:
            process = self._process
            assert process is not None, "launch it first"
            try:
                took = until(lambda: not self.running or self.answers(), "an answer", patience=self.patience)
            except ServerFailed as error:
                raise process.failed(str(error)) from error
            if process.running:
                self._chooses = False
                return took
            failed = process.failed(f"ended with {process.code} while it started")
            self.kill()
            if tries == _TRIES or not any(words in str(failed) for words in (_UNLUCKY, *self.taken)):
                raise failed
            if self._chooses:
                self._port = None
            tries += 1
            self.launch()

    def _make(self) -> None:
        if self._home is None:
            self.directory.mkdir(parents=True, exist_ok=True)
            self._home = self._folder() if as_account(self.account) else self.directory
        self.fill()

    def _folder(self) -> Path:
        """A new temporary one, of the account's where we are root."""
        folder = Path(tempfile.mkdtemp(prefix=f"bide-{self.title.lower()}-"))
        give_to(self.account, folder)
        return folder

    def copy_beginning(self) -> None:
        """Put a copy of the beginning at `data`; that is made once in this process, and goes when it ends."""
        kind = type(self)
        if kind not in _BEGINNINGS:
            folder = self._folder()
            atexit.register(shutil.rmtree, folder, ignore_errors=True)
            self.install(folder)
            _BEGINNINGS[kind] = folder / "data"
        self.run("cp", "-a", "--sparse=always", str(_BEGINNINGS[kind]), str(self.data))

    def install(self, folder: Path) -> None:
        """Make the data that a new server begins with, at `folder / "data"`."""
        raise NotImplementedError

    def run(self, *words: str, feed: Path | None = None) -> None:
        """A command of the server's account, to its end. Raises ServerFailed."""
        run(words, folder=self.home, account=self.account, feed=feed)

    # ending

    def kill(self) -> None:
        """End it by SIGKILL, with all processes of its: what the operating system does not have yet is lost."""
        self._end(signal.SIGKILL)

    def halt(self, *, patience: float = PATIENCE) -> None:
        """End it in order, or by SIGKILL if that takes longer than `patience` seconds; its data stays."""
        self._end(self.halts_by, patience)

    def restart(self) -> float:
        """End it in order, and start it again on the same port and data."""
        self.halt()
        return self.start()

    def mend(self) -> float:
        """Start it again, if it does not run, and wait until it answers. Returns the seconds that this took."""
        if self.running:
            try:
                return self.await_ready()
            except ServerFailed:
                if self.running:
                    raise
        self.kill()  # reaped, if it has ended by itself
        return self.start()

    def stop(self) -> None:
        """End it without waiting for its clients, and forget a temporary folder; its log goes to `directory`."""
        self._end(self.stops_by)
        self.tidy()

    def tidy(self) -> None:
        """Remove a temporary home."""
        if self._home is not None and self._home != self.directory:
            for log in self._home.glob("*log"):
                shutil.copy(log, self.directory)
            shutil.rmtree(self._home, ignore_errors=True)
        self._home = None

    def _end(self, number: signal.Signals, patience: float = PATIENCE) -> None:
        if self._process is not None:
            self._process.end(number, patience=patience)
            self._process = None
        if self._beside is not None:
            self._beside.end(signal.SIGKILL)
            self._beside = None

    # standing still

    def pause(self) -> None:
        """Stop it and all its processes by SIGSTOP, with their connections open, until `resume`."""
        assert self._process is not None, "it does not run"
        self._process.send(signal.SIGSTOP)
        self._process.send(signal.SIGSTOP)  # and those that the first time were just being made

    def resume(self) -> None:
        if self._process is not None:
            self._process.send(signal.SIGCONT)


class SqlServer(ServerProcess):
    """A database server, which may follow another: then it begins with the data of that, and follows it until it is
    promoted."""

    def __init__(self, directory: Path, *, follows: Self | None = None, **given: Any) -> None:
        super().__init__(directory, **given)
        self.follows = follows

    def ask(self, *statements: str) -> list[Any]:
        """The rows of the last of them, all on one connection. Raises OSError where no server answers."""
        raise NotImplementedError

    def value(self, *statements: str) -> Any:
        """The first value that the last of them finds."""
        rows = self.ask(*statements)
        return rows[0][0] if rows else None


class ServiceProcess(ServerProcess):
    """One instance, which keeps its port over a restart. Its `store` is a URL, set before it starts."""

    title = "bide serve"
    store = ""
    words: tuple[str, ...] = ()
    """Further ones of its command line."""

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}"

    def environment(self) -> Mapping[str, str]:
        return {"BIDE_STORE": self.store}

    def command(self) -> Sequence[str]:
        words = [sys.executable, "-m", "bide", "serve", "--port", str(self.port), "--log-level", "warning"]
        return [*words, *self.words]

    def answers(self) -> bool:
        with urllib.request.urlopen(f"{self.url}/healthz", timeout=2.0) as answer:
            return bool(answer.status == 200)
