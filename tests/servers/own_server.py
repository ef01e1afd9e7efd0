"""What servers of our own have in common whose programs do not want to be root: folder, account, port, process."""

from __future__ import annotations

import atexit
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar

from tests.servers.child import OneProcess, ServerFailed, ServerMissing
from tests.servers.ports import free_port

HOST = "127.0.0.1"
_TRIES = 5
"""Ports that are tried, if others keep taking them first."""


class OwnServer(OneProcess):
    """A server with its data and its log below `directory`, or in a temporary folder where we are root."""

    program: ClassVar[str]
    """What it is called in errors."""
    account: ClassVar[str]
    """Who it runs as where we are root."""
    taken: ClassVar[Sequence[str]] = ("Address already in use",)
    """What its log says where somebody has a port of its."""
    more_ports: ClassVar[bool] = False
    """Whether it takes ports besides that one, others at each try."""
    _beginning: ClassVar[Path | None] = None
    """The data that every new server begins with: its own program takes half a second of processor time to make it."""
    stops_by: ClassVar[signal.Signals] = signal.SIGKILL

    def __init__(self, directory: Path, *, port: int | None = None, options: Mapping[str, str] | None = None) -> None:
        super().__init__(directory, port=port, options=options)
        self._own: Path | None = None

    @property
    def home(self) -> Path:
        """Where its data and its log are."""
        return self.directory if self._own is None else self._own

    def start(self) -> None:
        """Runs and answers. Raises `ServerMissing`, `ServerFailed`."""
        assert not self.running, "it runs already"
        fresh = not (self.home / "data").exists()
        if fresh:
            try:
                self._make()
            except BaseException:
                self._tidy()
                raise
        self._start(fresh)
        if fresh:
            self._begun()

    def _start(self, fresh: bool) -> None:
        for _ in range(_TRIES):
            if self._port is None:
                self._port = free_port()
            try:
                self._launch()
                assert self._child is not None
                self._child.await_ready(self._answers)
                self._chooses = False
                return
            except ServerFailed as error:
                self._end(signal.SIGKILL)
                again = self._chooses or self.more_ports
                if not again or not any(words in str(error) for words in self.taken):
                    if fresh:
                        self._tidy()
                    raise
            if self._chooses:
                self._port = None
        raise ServerFailed("others kept taking the ports")

    def _make(self) -> None:
        """The folder, and what has to be in it before the first start."""
        self.directory.mkdir(parents=True, exist_ok=True)
        if os.geteuid() == 0:
            if shutil.which("setpriv") is None:
                raise ServerMissing(f"setpriv is not installed, and {self.program} is not to run as root")
            self._own = self._folder()

    def _folder(self) -> Path:
        """A new temporary one, of the account's where we are root."""
        folder = Path(tempfile.mkdtemp(prefix=f"bide-{self.program.lower()}-"))
        if os.geteuid() == 0:
            shutil.chown(folder, self.account, self.account)
        return folder

    def _begin(self) -> None:
        """Put a copy of the beginning at `home / "data"`; it is made once in this process, and goes when that ends."""
        kind = type(self)
        if kind._beginning is None:
            folder = self._folder()
            atexit.register(shutil.rmtree, folder, ignore_errors=True)
            self._install(folder)
            kind._beginning = folder / "data"
        self._run("cp", "-a", "--sparse=always", str(kind._beginning), str(self.home / "data"))

    def _install(self, folder: Path) -> None:
        """Make the data that a new server begins with, at `folder / "data"`."""
        raise NotImplementedError

    def _run(self, *words: str) -> None:
        """A command of the server's account, to its end. Raises `ServerFailed`."""
        done = subprocess.run([*self._account(), *words], cwd=self.home, capture_output=True, text=True, check=False)
        if done.returncode:
            raise ServerFailed(f"{words[0]}: {done.stdout[-1000:]}{done.stderr[-1000:]}")

    def _account(self) -> list[str]:
        """The words that a command begins with."""
        if os.geteuid() != 0:
            return []
        return ["setpriv", f"--reuid={self.account}", f"--regid={self.account}", "--clear-groups", "--"]

    def _launch(self) -> None:
        """Set `_child`."""
        raise NotImplementedError

    def _answers(self) -> bool:
        """Whether it takes clients by now. May raise OSError instead of False."""
        raise NotImplementedError

    def _begun(self) -> None:
        """After the first start."""

    def stop(self) -> None:
        """Ended without waiting for its clients, and forgotten; nothing if it does not run."""
        self._end(self.stops_by)
        self._tidy()

    def _tidy(self) -> None:
        if self._own is not None:
            shutil.rmtree(self._own, ignore_errors=True)
            self._own = None
