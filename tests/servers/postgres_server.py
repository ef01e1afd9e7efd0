"""One PostgreSQL server of our own, on 127.0.0.1: to be started, paused, killed and started again on the same data.

PostgreSQL refuses to run as root. Where the tests are root, as in a container, it runs as the user `postgres` that its
package makes, and its data lies in a folder of that user's, since pytest's own are closed to others.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests.servers.child import Child, Running, ServerFailed, ServerMissing
from tests.servers.ports import free_port

HOST = "127.0.0.1"
PACKAGES = "postgresql"
USER = "bide"
DATABASE = "postgres"
_ACCOUNT = "postgres"
_PATIENCE = 60.0
"""Seconds for a server to answer; it takes half a second, but machines that test do much at once."""
_TRIES = 5


def binary(name: str) -> str:
    """Where `name` is: of the newest version that Debian's packages put beside each other, or in the path."""
    homes = sorted(Path("/usr/lib/postgresql").glob("*/bin"), key=lambda home: float(home.parent.name), reverse=True)
    for home in homes:
        if (home / name).exists():
            return str(home / name)
    found = shutil.which(name)
    if found is None:
        raise ServerMissing(f"{name} is not installed: scripts/services install, or apt-get install {PACKAGES}")
    return found


class PostgresServer(Running):
    """A server with its data and its log below `directory`, or in a temporary folder where we are root.

    With `follows` it begins as a copy of that server, which has to run, and follows it until it is promoted.

    It does not wait for the disk, so that what was committed survives a kill of the process and not one of the
    machine, unless `options` say `{"fsync": "on"}`. `options` are settings of postgresql.conf.
    """

    def __init__(
        self,
        directory: Path,
        *,
        port: int | None = None,
        options: Mapping[str, str] | None = None,
        follows: PostgresServer | None = None,
    ) -> None:
        self.directory = directory
        self.options = dict(options or {})
        self.follows = follows
        self._port = port
        self._chooses = port is None
        self._child: Child | None = None
        self._own: Path | None = None

    @property
    def port(self) -> int:
        """Known from the first start on."""
        assert self._port is not None, "start it first"
        return self._port

    @property
    def url(self) -> str:
        return f"postgresql://{USER}@{HOST}:{self.port}/{DATABASE}"

    @property
    def pid(self) -> int:
        assert self._child is not None, "it does not run"
        return self._child.pid

    @property
    def running(self) -> bool:
        return self._child is not None and self._child.running

    @property
    def home(self) -> Path:
        """Where its data and its log are."""
        return self.directory if self._own is None else self._own

    def start(self) -> None:
        """Runs and answers. Raises `ServerMissing`, `ServerFailed`."""
        assert not self.running, "it runs already"
        fresh = not (self.home / "data").exists()
        if fresh:
            self._make()
        for _ in range(_TRIES):
            if self._port is None:
                self._port = free_port()
            self._launch()
            try:
                self._await_answer()
                self._chooses = False
                return
            except ServerFailed as error:
                if not self._chooses or "Address already in use" not in str(error):
                    if fresh:
                        self._tidy()
                    raise
            self._port = None
        raise ServerFailed("others kept taking the ports")

    def _make(self) -> None:
        """The folder and the data in it."""
        initdb = binary("initdb")
        self.directory.mkdir(parents=True, exist_ok=True)
        if os.geteuid() == 0:
            if shutil.which("setpriv") is None:
                raise ServerMissing("setpriv is not installed, and PostgreSQL does not run as root")
            self._own = Path(tempfile.mkdtemp(prefix="bide-postgres-"))
            shutil.chown(self._own, _ACCOUNT, _ACCOUNT)
        data = str(self.home / "data")
        words = [initdb, "-D", data, "-U", USER, "--auth=trust", "-E", "UTF8", "--locale=C", "--no-sync"]
        if self.follows is not None:
            words = [
                binary("pg_basebackup"), "-h", HOST, "-p", str(self.follows.port), "-U", USER, "-D", data,
                "--write-recovery-conf", "--checkpoint=fast", "--no-sync",
            ]  # fmt: skip
        done = subprocess.run([*self._account(), *words], cwd=self.home, capture_output=True, text=True, check=False)
        if done.returncode:
            raise ServerFailed(f"{words[0]}: {done.stdout[-1000:]}{done.stderr[-1000:]}")

    def _account(self) -> list[str]:
        if os.geteuid() != 0:
            return []
        return ["setpriv", f"--reuid={_ACCOUNT}", f"--regid={_ACCOUNT}", "--clear-groups", "--"]

    def _launch(self) -> None:
        settings = {
            "listen_addresses": HOST,
            "port": str(self.port),
            "unix_socket_directories": "",
            "fsync": "off",
            "max_connections": "300",
            "shared_buffers": "64MB",
            "max_wal_size": "1GB",
            "deadlock_timeout": "200ms",
            **self.options,
        }
        words = [f"--{name}={value}" for name, value in settings.items()]
        self._child = Child(
            [*self._account(), binary("postgres"), "-D", str(self.home / "data"), *words], self.home / "log"
        )

    def _await_answer(self) -> None:
        assert self._child is not None
        until = time.monotonic() + _PATIENCE
        pid_file = self.home / "data" / "postmaster.pid"
        while time.monotonic() < until:
            if not self._child.running:
                failure = self._child.failed("ended while it started")
                self._end(signal.SIGKILL)
                raise failure
            with contextlib.suppress(OSError, ValueError, IndexError):
                lines = pid_file.read_text().splitlines()
                if int(lines[0]) == self._child.pid and lines[7].strip() in ("ready", "standby"):
                    return
            time.sleep(0.01)
        failure = self._child.failed(f"did not answer within {_PATIENCE:.0f} s")
        self._end(signal.SIGKILL)
        raise failure

    def stop(self) -> None:
        """Ended in order, without waiting for its clients, and forgotten; nothing if it does not run."""
        self.halt()
        self._tidy()

    def _tidy(self) -> None:
        if self._own is not None:
            shutil.rmtree(self._own, ignore_errors=True)
            self._own = None

    def halt(self) -> None:
        """Ended in order; its data stays."""
        self._end(signal.SIGINT)

    def kill(self) -> None:
        """Ended by SIGKILL. The processes that serve its clients see that, and end by themselves."""
        self._end(signal.SIGKILL)

    def _end(self, number: signal.Signals) -> None:
        if self._child is not None:
            self._child.end(number)
            self._child = None

    def restart(self) -> None:
        """The same port, the same data; stopped before, if it runs."""
        self.halt()
        self.start()

    def promote(self) -> None:
        """Follows nobody any more, and may be written to."""
        self.ask("SELECT pg_promote()")

    def pause(self) -> None:
        """Takes no new clients until `resume`; those that it has go on."""
        assert self._child is not None, "it does not run"
        self._child.send(signal.SIGSTOP)

    def resume(self) -> None:
        assert self._child is not None, "it does not run"
        self._child.send(signal.SIGCONT)

    def ask(self, statement: str) -> list[Any]:
        """One statement on a connection of its own."""
        return ask(self.url, statement)


def ask(url: str, statement: str) -> list[Any]:
    """The rows of one statement, on a connection of its own; in a thread, since the caller may be on a loop."""

    async def asking() -> list[Any]:
        import asyncpg

        connection = await asyncpg.connect(url)
        try:
            return list(await connection.fetch(statement))
        finally:
            await connection.close()

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(lambda: asyncio.run(asking())).result()
