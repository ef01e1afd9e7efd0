"""One PostgreSQL server of our own.

PostgreSQL refuses to run as root. If this process is root, as in a container, the server runs as the user `postgres`
of its package, with its data in a folder of that user, who has no access to pytest's folders.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from bide_proofs.servers.process import HOST, program
from bide_proofs.servers.server import SqlServer

PACKAGES = "postgresql"
USER = "bide"
DATABASE = "postgres"


def binary(name: str) -> str:
    """Find program `name`: in the newest version installed by Debian's packages, or in the path."""
    homes = sorted(Path("/usr/lib/postgresql").glob("*/bin"), key=lambda home: float(home.parent.name), reverse=True)
    return program(name, PACKAGES, *map(str, homes))


class PostgresServer(SqlServer):
    """A server with its data and its log below `directory`, or in a temporary folder if this process is root.

    It does not wait for the disk, so commits survive a kill of the process but not a crash of the machine, unless
    `options` contain `{"fsync": "on"}`. `options` are settings of postgresql.conf.
    """

    title = "PostgreSQL"
    account = "postgres"
    halts_by = stops_by = signal.SIGINT
    installs: ClassVar[Sequence[str]] = ("--no-sync",)
    """Further arguments of initdb."""

    @property
    def url(self) -> str:
        return f"postgresql://{USER}@{HOST}:{self.port}/{DATABASE}"

    def fill(self) -> None:
        if self.follows is None:
            self.copy_beginning()
        else:
            self.run(
                binary("pg_basebackup"), "-h", HOST, "-p", str(self.follows.port), "-U", USER, "-D", str(self.data),
                "--write-recovery-conf", "--checkpoint=fast", "--no-sync",
            )  # fmt: skip

    def install(self, folder: Path) -> None:
        self.run(
            binary("initdb"), "-D", str(folder / "data"), "-U", USER, "--auth=trust", "-E", "UTF8", "--locale=C",
            *self.installs,
        )  # fmt: skip

    def command(self) -> Sequence[str]:
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
        return [binary("postgres"), "-D", str(self.data), *words]

    def answers(self) -> bool:
        with contextlib.suppress(ValueError, IndexError):  # the file is being written
            lines = (self.data / "postmaster.pid").read_text(encoding="utf-8").splitlines()
            return int(lines[0]) == self.pid and lines[7].strip() in ("ready", "standby")
        return False

    def promote(self) -> None:
        """Make it a writable primary."""
        self.ask("SELECT pg_promote()")

    def ask(self, *statements: str) -> list[Any]:
        return ask(self.url, *statements)


def ask(url: str, *statements: str) -> list[Any]:
    """Run the statements on a new connection; return the rows of the last. Raises OSError if no server answers."""
    import psycopg

    rows: list[Any] = []
    try:
        with contextlib.closing(psycopg.connect(url, autocommit=True)) as connection:
            for statement in statements:
                done = connection.execute(statement.encode())
                found = done.pgresult is not None and done.pgresult.status == psycopg.pq.ExecStatus.TUPLES_OK
                rows = done.fetchall() if found else []
    except psycopg.OperationalError as error:
        raise OSError(str(error)) from error
    return rows
