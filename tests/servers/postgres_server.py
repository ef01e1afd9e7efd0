"""One PostgreSQL server of our own, on 127.0.0.1: to be started, paused, killed and started again on the same data.

PostgreSQL refuses to run as root. Where the tests are root, as in a container, it runs as the user `postgres` that its
package makes, and its data lies in a folder of that user's, since pytest's own are closed to others.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import signal
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests.servers.child import Child, ServerMissing
from tests.servers.own_server import HOST as HOST
from tests.servers.own_server import OwnServer

PACKAGES = "postgresql"
USER = "bide"
DATABASE = "postgres"


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


class PostgresServer(OwnServer):
    """A server with its data and its log below `directory`, or in a temporary folder where we are root.

    With `follows` it begins as a copy of that server, which has to run, and follows it until it is promoted.

    It does not wait for the disk, so that what was committed survives a kill of the process and not one of the
    machine, unless `options` say `{"fsync": "on"}`. `options` are settings of postgresql.conf.
    """

    program = "PostgreSQL"
    account = "postgres"
    stops_by = signal.SIGINT

    def __init__(
        self,
        directory: Path,
        *,
        port: int | None = None,
        options: Mapping[str, str] | None = None,
        follows: PostgresServer | None = None,
    ) -> None:
        super().__init__(directory, port=port, options=options)
        self.follows = follows

    @property
    def url(self) -> str:
        return f"postgresql://{USER}@{HOST}:{self.port}/{DATABASE}"

    def _make(self) -> None:
        """The folder and the data in it."""
        super()._make()
        if self.follows is None:
            self._begin()
            return
        self._run(
            binary("pg_basebackup"), "-h", HOST, "-p", str(self.follows.port), "-U", USER, "-D",
            str(self.home / "data"), "--write-recovery-conf", "--checkpoint=fast", "--no-sync",
        )  # fmt: skip

    def _install(self, folder: Path) -> None:
        self._run(
            binary("initdb"), "-D", str(folder / "data"), "-U", USER, "--auth=trust", "-E", "UTF8", "--locale=C",
            "--no-sync",
        )  # fmt: skip

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

    def _answers(self) -> bool:
        with contextlib.suppress(ValueError, IndexError):  # it is being written
            lines = (self.home / "data" / "postmaster.pid").read_text().splitlines()
            return int(lines[0]) == self.pid and lines[7].strip() in ("ready", "standby")
        return False

    def promote(self) -> None:
        """Follows nobody any more, and may be written to."""
        self.ask("SELECT pg_promote()")

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
