"""One MariaDB server of our own, on 127.0.0.1: to be started, paused, killed and started again on the same data."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tests.servers.child import Child, Running, ServerFailed, ServerMissing
from tests.servers.ports import free_port

HOST = "127.0.0.1"
PACKAGES = "mariadb-server"
USER = "bide"
ADMINISTRATOR = "root"
DATABASE = "bide"
_ACCOUNT = "mysql"
_PATIENCE = 60.0
"""Seconds for a server to answer; it takes half a second, but machines that test do much at once."""
_TRIES = 5

_BEGINNING = (
    "SET SESSION sql_log_bin = 0;\n"
    f"CREATE DATABASE IF NOT EXISTS {DATABASE};\n"
    f"CREATE OR REPLACE USER {ADMINISTRATOR}@'%';\n"
    f"GRANT ALL PRIVILEGES ON *.* TO {ADMINISTRATOR}@'%' WITH GRANT OPTION;\n"
    f"CREATE OR REPLACE USER {USER}@'%';\n"
    "GRANT SELECT, INSERT, UPDATE, DELETE, CREATE, DROP, ALTER, INDEX, PROCESS, LOCK TABLES, REPLICATION CLIENT\n"
    f"    ON *.* TO {USER}@'%';\n"
)
"""Two users without passwords: `bide` may do everything with tables, and nothing while the server is read-only."""


def binary(name: str) -> str:
    """Where `name` is: in the path, or where Debian puts what is for administrators."""
    found = shutil.which(name, path=f"{os.environ.get('PATH', os.defpath)}:/usr/sbin")
    if found is None:
        raise ServerMissing(f"{name} is not installed: scripts/services install, or apt-get install {PACKAGES}")
    return found


class MariaDbServer(Running):
    """A server with its data and its log below `directory`, or in a temporary folder where we are root.

    With `follows` it begins empty, replays everything from that server, and follows it until it is promoted; both
    write a log of what they do, by GTID.

    It writes at each commit and does not wait for the disk, so that what was committed survives a kill of the process
    and not one of the machine, unless `options` say {"innodb-flush-log-at-trx-commit": "1"}. `options` are those of
    mariadbd.
    """

    def __init__(
        self,
        directory: Path,
        *,
        port: int | None = None,
        options: Mapping[str, str] | None = None,
        follows: MariaDbServer | None = None,
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
        return f"mysql://{USER}@{HOST}:{self.port}/{DATABASE}"

    @property
    def administrators_url(self) -> str:
        return f"mysql://{ADMINISTRATOR}@{HOST}:{self.port}/{DATABASE}"

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
                break
            except ServerFailed as error:
                if not self._chooses or "Address already in use" not in str(error):
                    if fresh:
                        self._tidy()
                    raise
            self._port = None
        else:
            raise ServerFailed("others kept taking the ports")
        if fresh and self.follows is not None:
            self.ask(
                f"CHANGE MASTER TO MASTER_HOST = '{HOST}', MASTER_PORT = {self.follows.port}, "
                f"MASTER_USER = '{ADMINISTRATOR}', MASTER_USE_GTID = slave_pos, MASTER_CONNECT_RETRY = 1"
            )
            self.ask("START SLAVE")

    def _make(self) -> None:
        """The folder and the data in it."""
        install = binary("mariadb-install-db")
        self.directory.mkdir(parents=True, exist_ok=True)
        if os.geteuid() == 0:
            if shutil.which("setpriv") is None:
                raise ServerMissing("setpriv is not installed, and MariaDB is not to run as root")
            self._own = Path(tempfile.mkdtemp(prefix="bide-mariadb-"))
            shutil.chown(self._own, _ACCOUNT, _ACCOUNT)
        (self.home / "beginning.sql").write_text(_BEGINNING)
        (self.home / "beginning.sql").chmod(0o644)
        words = [
            install, "--no-defaults", f"--datadir={self.home / 'data'}", "--auth-root-authentication-method=normal",
            "--skip-test-db", "--skip-name-resolve", "--innodb-log-file-size=64M", "--innodb-flush-method=nosync",
            f"--tmpdir={self.home}",  # names of temporary files are unique within one only
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
            "datadir": str(self.home / "data"),
            "tmpdir": str(self.home),
            "socket": str(self.home / "socket"),
            "pid-file": str(self.home / "pid"),
            "bind-address": HOST,
            "port": str(self.port),
            "init-file": str(self.home / "beginning.sql"),
            "skip-name-resolve": "1",
            "max-connections": "300",
            "innodb-flush-log-at-trx-commit": "2",
            "innodb-log-file-size": "64M",
            "innodb-buffer-pool-size": "128M",
            "innodb-fast-shutdown": "2",
            **self.options,
        }
        if self.follows is not None:
            settings |= {"read-only": "1"}
        words = [f"--{name}={value}" for name, value in settings.items()]
        self._child = Child([*self._account(), binary("mariadbd"), "--no-defaults", *words], self.home / "log")

    def _await_answer(self) -> None:
        assert self._child is not None
        until = time.monotonic() + _PATIENCE
        while time.monotonic() < until:
            if not self._child.running:
                failure = self._child.failed("ended while it started")
                self._end(signal.SIGKILL)
                raise failure
            with contextlib.suppress(OSError), socket.create_connection((HOST, self.port), timeout=1.0) as probe:
                if probe.recv(1):  # the greeting; before, it may listen and not answer yet
                    return
            time.sleep(0.01)
        failure = self._child.failed(f"did not answer within {_PATIENCE:.0f} s")
        self._end(signal.SIGKILL)
        raise failure

    def stop(self) -> None:
        """Ended without waiting for its clients, and forgotten; nothing if it does not run."""
        self._end(signal.SIGKILL)
        self._tidy()

    def _tidy(self) -> None:
        if self._own is not None:
            shutil.rmtree(self._own, ignore_errors=True)
            self._own = None

    def halt(self) -> None:
        """Ended in order; its data stays."""
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        """Ended by SIGKILL."""
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
        self.ask("STOP SLAVE")
        self.ask("SET GLOBAL read_only = 0")

    def pause(self) -> None:
        """Does nothing until `resume`."""
        assert self._child is not None, "it does not run"
        self._child.send(signal.SIGSTOP)

    def resume(self) -> None:
        assert self._child is not None, "it does not run"
        self._child.send(signal.SIGCONT)

    def ask(self, statement: str) -> list[Any]:
        """One statement of an administrator's, on a connection of its own."""
        return ask(self.administrators_url, statement)


def ask(url: str, statement: str) -> list[Any]:
    """The rows of one statement, on a connection of its own; in a thread, since the caller may be on a loop."""

    async def asking() -> list[Any]:
        import asyncmy

        parts = urlsplit(url)
        connection = await asyncmy.connect(
            host=parts.hostname, port=parts.port or 3306, user=parts.username or "root",
            password=parts.password or "", database=parts.path.removeprefix("/"), autocommit=True,
            init_command="SET SESSION lock_wait_timeout = 20",  # for a table that an open transaction has used
        )  # fmt: skip
        try:
            async with connection.cursor() as cursor:
                await cursor.execute(statement)
                return list(await cursor.fetchall() or ()) if cursor.description else []
        finally:
            await connection.ensure_closed()

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(lambda: asyncio.run(asking())).result()
