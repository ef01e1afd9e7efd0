"""One MariaDB server of our own, on 127.0.0.1: to be started, paused, killed and started again on the same data."""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tests.servers.child import Child, ServerMissing
from tests.servers.own_server import HOST as HOST
from tests.servers.own_server import OwnServer

PACKAGES = "mariadb-server"
USER = "bide"
ADMINISTRATOR = "root"
DATABASE = "bide"

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


class MariaDbServer(OwnServer):
    """A server with its data and its log below `directory`, or in a temporary folder where we are root.

    With `follows` it begins empty, replays everything from that server, and follows it until it is promoted; both
    write a log of what they do, by GTID.

    It writes at each commit and does not wait for the disk, so that what was committed survives a kill of the process
    and not one of the machine, unless `options` say {"innodb-flush-log-at-trx-commit": "1"}. `options` are those of
    mariadbd.
    """

    program = "MariaDB"
    account = "mysql"

    def __init__(
        self,
        directory: Path,
        *,
        port: int | None = None,
        options: Mapping[str, str] | None = None,
        follows: MariaDbServer | None = None,
    ) -> None:
        super().__init__(directory, port=port, options=options)
        self.follows = follows

    @property
    def url(self) -> str:
        return f"mysql://{USER}@{HOST}:{self.port}/{DATABASE}"

    @property
    def administrators_url(self) -> str:
        return f"mysql://{ADMINISTRATOR}@{HOST}:{self.port}/{DATABASE}"

    def _begun(self) -> None:
        if self.follows is not None:
            self.ask(
                f"CHANGE MASTER TO MASTER_HOST = '{HOST}', MASTER_PORT = {self.follows.port}, "
                f"MASTER_USER = '{ADMINISTRATOR}', MASTER_USE_GTID = slave_pos, MASTER_CONNECT_RETRY = 1"
            )
            self.ask("START SLAVE")

    def _make(self) -> None:
        """The folder and the data in it."""
        super()._make()
        self._begin()
        (self.home / "beginning.sql").write_text(_BEGINNING)
        (self.home / "beginning.sql").chmod(0o644)

    def _install(self, folder: Path) -> None:
        self._run(
            binary("mariadb-install-db"), "--no-defaults", f"--datadir={folder / 'data'}",
            "--auth-root-authentication-method=normal", "--skip-test-db", "--skip-name-resolve",
            "--innodb-log-file-size=64M", "--innodb-flush-method=nosync",
            f"--tmpdir={folder}",  # names of temporary files are unique within one only
        )  # fmt: skip

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

    def _answers(self) -> bool:
        with socket.create_connection((HOST, self.port), timeout=1.0) as probe:
            return bool(probe.recv(1))  # the greeting; before, it may listen and not answer yet

    def promote(self) -> None:
        """Follows nobody any more, and may be written to."""
        self.ask("STOP SLAVE")
        self.ask("SET GLOBAL read_only = 0")

    def ask(self, statement: str) -> list[Any]:
        """One statement of an administrator's, on a connection of its own."""
        return ask(self.administrators_url, statement)


def ask(url: str, statement: str) -> list[Any]:
    """The rows of one statement, on a connection of its own."""
    with _connected(url) as cursor:
        cursor.execute(statement)
        return list(cursor.fetchall()) if cursor.description else []


def drop_databases(url: str, beginning: str) -> None:
    """All whose names begin so."""
    with _connected(url) as cursor:
        cursor.execute(f"SHOW DATABASES LIKE '{beginning}%'")
        for (name,) in cursor.fetchall():
            cursor.execute(f"DROP DATABASE `{name}`")


@contextmanager
def _connected(url: str) -> Iterator[Any]:
    """A cursor of the driver's."""
    import pymysql

    parts = urlsplit(url)
    connection = pymysql.connect(
        host=parts.hostname, port=parts.port or 3306, user=parts.username or "root",
        password=parts.password or "", database=parts.path.removeprefix("/") or None, autocommit=True,
        init_command="SET SESSION lock_wait_timeout = 60",  # for a table that an open transaction has used
        ssl_disabled=True,  # to read the certificates of this machine costs more than the statement
    )  # fmt: skip
    with closing(connection), connection.cursor() as cursor:
        yield cursor
