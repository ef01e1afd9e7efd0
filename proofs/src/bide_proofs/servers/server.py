"""One server of our own: a process with its data, which can be paused, killed and started again on the same data.

libfaketime can set its clock while it runs. The module also has the base class of several servers that serve their
clients as one, and `bide serve` as a server over another store.
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
"""The environment variable of a process whose clock can be set."""
_NAME = "faketime/libfaketimeMT.so.1"
_TRIES = 5
"""The most starts, if other processes keep taking the port first."""
_UNLUCKY = "libfaketime: In ft_shm_init()"
"""Text in the log of a server whose pid was earlier that of another user's process, of which libfaketime left a file.
The next start has another pid."""
_BEGINNINGS: dict[type[ServerProcess], Path] = {}
"""The initial data of every new server of a kind, cached: its program takes a second of processor time to make it."""


def library() -> Path:
    """The path of libfaketime, which replaces the system's clock. Raises ServerMissing."""
    for folder in (Path("/usr/lib"), Path("/usr/local/lib")):
        for found in sorted((*folder.glob(_NAME), *folder.glob(f"*/{_NAME}"))):
            return found
    raise ServerMissing(f"libfaketime is not installed: scripts/services install, or apt-get install {PACKAGES}")


class ServerClock:
    """A settable time of day for servers and other processes; the monotonic clock stays the machine's.

    Each process has a file in a folder that its account may read. It reads the file at each reading of the clock (some
    10 us): with a cache the clock would jump at a different moment in each process of a server, which no real clock
    does. Raises ServerMissing.
    """

    def __init__(self) -> None:
        self.ahead = 0.0
        """Seconds by which the clock is ahead of the machine's."""
        self._library = library()
        self._files: set[Path] = set()

    def environment(self, folder: Path) -> Mapping[str, str]:
        """Variables for a process that may read files in `folder`."""
        file = folder / "clock"
        self._files.add(file)
        _set(file, self.ahead)
        return {
            # The library allocates memory while it is loaded, and jemalloc, which Redis uses, reads the clock for each
            # allocation: this would recurse endlessly, so the C library allocates memory here.
            "LD_PRELOAD": f"{self._library}:libc.so.6",
            CLOCK_FILE: str(file),
            "FAKETIME_NO_CACHE": "1",
            "DONT_FAKE_MONOTONIC": "1",
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        }

    def shift(self, seconds: float) -> None:
        """Set the clock to `seconds` ahead of the machine's, or behind if negative, from its next reading on."""
        for file in self._files:
            _set(file, seconds)
        self.ahead = seconds


def _set(file: Path, ahead: float) -> None:
    written = file.with_suffix(".new")
    written.write_text(f"{ahead:+f}\n", encoding="ascii")
    written.chmod(0o644)
    os.replace(written, file)  # atomic, so that no process reads half of it


class Running:
    """A server, or several, to start and stop, also as a context."""

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
    """Several servers that serve their clients as one. If one fails to start, all are stopped."""

    @property
    def parts(self) -> Sequence[Running]:
        """All servers, in the order in which they are stopped."""
        raise NotImplementedError

    def start(self) -> None:
        try:
            self.start_parts()
        except BaseException:
            self.stop()
            raise

    def start_parts(self) -> None:
        """Start all servers, and wait until they work together."""
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
    """Stop one after the other, even if one fails. Raises the error of one that failed."""
    with contextlib.ExitStack() as stopping:
        for server in reversed(servers):
            stopping.callback(server.stop)


class ServerProcess(Running):
    """One process with its data and its log in `home`: below `directory`, or in a temporary folder of its account if
    this process is root and the server refuses to run as root.

    Without `port` a free one is chosen at the first start, and kept. With a `clock` the server uses that clock. A
    subclass defines the command, the initial data, and when the server answers.
    """

    title: ClassVar[str]
    """The name in errors of a server without `name`."""
    account: ClassVar[str | None] = None
    """The account that runs it if this process is root; None: root."""
    host: ClassVar[str] = HOST
    taken: ClassVar[Sequence[str]] = ("Address already in use",)
    """Texts in its log that mean that one of its ports is taken."""
    patience: ClassVar[float] = PATIENCE
    """Seconds after which a start counts as a hang."""
    halts_by: ClassVar[signal.Signals] = signal.SIGTERM
    """The signal that ends it in order."""
    stops_by: ClassVar[signal.Signals] = signal.SIGKILL
    """The signal that ends it when it is no longer needed."""

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
        """The port, known from the first start on."""
        assert self._port is not None, "start it first"
        return self._port

    @property
    def home(self) -> Path:
        return self.directory if self._home is None else self._home

    @property
    def data(self) -> Path:
        """The folder of its data, created by a start if it does not exist."""
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
        """The pids of the process and all its descendants; empty if it does not run."""
        return [] if self._process is None else self._process.family()

    # defined by a subclass

    def fill(self) -> None:
        """Make the initial data in `data`; the home exists."""

    def prepare(self) -> None:
        """Write other files that a start needs, such as the configuration; the port is known."""

    def command(self) -> Sequence[str]:
        """The command to run."""
        raise NotImplementedError

    def environment(self) -> Mapping[str, str]:
        """Environment variables for the server."""
        return {}

    def answers(self) -> bool:
        """True once it accepts clients. May raise an OSError instead of False."""
        raise NotImplementedError

    # starting

    def start(self) -> float:
        """Start it, and wait until it answers. Returns the seconds.

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
        """Start it without waiting, so that several can start at once; call `await_ready` afterwards."""
        assert not self.running, "it runs already"
        if not self.data.exists():
            self._make()
        if self._port is None:
            self._port = free_port()
        self.prepare()
        self._process = self._begun(self.command(), self.log)

    def begin_beside(self, command: Sequence[str], name: str) -> None:
        """Start another process that the server needs, called `name`, which ends with the server."""
        self._beside = self._begun(command, self.home / f"{name}.log")

    def _begun(self, command: Sequence[str], log: Path) -> Process:
        # set by `env`, and so only for the server itself: libfaketime creates files that only its user may open
        given = {**self.environment(), **({} if self._clock is None else self._clock.environment(self.home))}
        forgotten = [word for name in os.environ if name.startswith("BIDE_") for word in ("-u", name)]
        variables = [f"{name}={value}" for name, value in given.items()]
        words = [*as_account(self.account), "/usr/bin/env", *forgotten, *variables, *command]
        return Process(words, log, name=self.name)

    def await_ready(self) -> float:
        """Wait until it answers. Returns the seconds. Raises ServerFailed."""
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
        """Make a temporary folder, owned by the account if this process is root."""
        folder = Path(tempfile.mkdtemp(prefix=f"bide-{self.title.lower()}-"))
        give_to(self.account, folder)
        return folder

    def copy_beginning(self) -> None:
        """Copy the initial data to `data`. It is made once in this process, and removed when that ends."""
        kind = type(self)
        if kind not in _BEGINNINGS:
            folder = self._folder()
            atexit.register(shutil.rmtree, folder, ignore_errors=True)
            self.install(folder)
            _BEGINNINGS[kind] = folder / "data"
        self.run("cp", "-a", "--sparse=always", str(_BEGINNINGS[kind]), str(self.data))

    def install(self, folder: Path) -> None:
        """Make the initial data of a new server, at `folder / "data"`."""
        raise NotImplementedError

    def run(self, *words: str, feed: Path | None = None) -> None:
        """Run a command to its end, as the server's account. Raises ServerFailed."""
        run(words, folder=self.home, account=self.account, feed=feed)

    # ending

    def kill(self) -> None:
        """End all its processes by SIGKILL: data that the operating system does not have yet is lost."""
        self._end(signal.SIGKILL)

    def halt(self) -> None:
        """End it in order, or by SIGKILL if that takes longer than `PATIENCE`; its data stays."""
        self._end(self.halts_by)

    def restart(self) -> float:
        """End it in order, and start it again on the same port and data."""
        self.halt()
        return self.start()

    def mend(self) -> float:
        """Start it again, if it does not run, and wait until it answers. Returns the seconds."""
        if self.running:
            try:
                return self.await_ready()
            except ServerFailed:
                if self.running:
                    raise
        self.kill()  # reaped, if it has ended by itself
        return self.start()

    def stop(self) -> None:
        """End it without waiting for its clients, and remove a temporary home; its log is copied to `directory`."""
        self._end(self.stops_by)
        self.tidy()

    def tidy(self) -> None:
        """Remove a temporary home."""
        if self._home is not None and self._home != self.directory:
            for log in self._home.glob("*log"):
                shutil.copy(log, self.directory)
            shutil.rmtree(self._home, ignore_errors=True)
        self._home = None

    def _end(self, number: signal.Signals) -> None:
        if self._process is not None:
            self._process.end(number)
            self._process = None
        if self._beside is not None:
            self._beside.end(signal.SIGKILL)
            self._beside = None

    # pausing

    def pause(self) -> None:
        """Stop all its processes by SIGSTOP, with their connections open, until `resume`."""
        assert self._process is not None, "it does not run"
        self._process.send(signal.SIGSTOP)
        self._process.send(signal.SIGSTOP)  # also processes that were being created during the first

    def resume(self) -> None:
        if self._process is not None:
            self._process.send(signal.SIGCONT)


class SqlServer(ServerProcess):
    """A database server, which may follow another: then it starts with a copy of that server's data, and follows it
    until it is promoted."""

    def __init__(self, directory: Path, *, follows: Self | None = None, **given: Any) -> None:
        super().__init__(directory, **given)
        self.follows = follows

    def ask(self, *statements: str) -> list[Any]:
        """Run the statements on one connection; return the rows of the last. Raises OSError if no server answers."""
        raise NotImplementedError

    def value(self, *statements: str) -> Any:
        """Run the statements; return the first value of the last one's rows."""
        rows = self.ask(*statements)
        return rows[0][0] if rows else None


class ServiceProcess(ServerProcess):
    """One instance of `bide serve`, which keeps its port over a restart. `store` is a URL, set before the start."""

    title = "bide serve"
    store = ""
    words: tuple[str, ...] = ()
    """Further arguments of its command line."""

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
