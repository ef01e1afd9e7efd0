"""One MariaDB server of our own, and a pair in which one follows the other."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from bide_proofs.servers.process import HOST, program, until
from bide_proofs.servers.server import SeveralServers, SqlServer

PACKAGES = "mariadb-server"
USER = "bide"
ADMINISTRATOR = "root"
DATABASE = "bide"
LAG = 3
"""The replica's lag in seconds, MariaDB's finest unit: longer than the delays of tasks, so that the lag shows."""
BINARY_LOG = {"log-bin": "binlog", "gtid-strict-mode": "1"}
"""Options of a server that follows another, or is followed."""

_BEGINNING = f"""
SET SESSION sql_log_bin = 0;
CREATE DATABASE IF NOT EXISTS {DATABASE};
CREATE OR REPLACE USER {ADMINISTRATOR}@'%';
GRANT ALL PRIVILEGES ON *.* TO {ADMINISTRATOR}@'%' WITH GRANT OPTION;
CREATE OR REPLACE USER {USER}@'%';
GRANT SELECT, INSERT, UPDATE, DELETE, CREATE, DROP, ALTER, INDEX, PROCESS, LOCK TABLES, REPLICATION CLIENT
    ON *.* TO {USER}@'%';
"""
"""Two users without passwords: `bide` may do everything with tables, and nothing while the server is read-only."""


class MariaDbServer(SqlServer):
    """A server with its data and its log below `directory`, or in a temporary folder if this process is root.

    With `follows` it replays all changes of that server; both write a binary log with GTIDs.

    It writes at each commit and does not wait for the disk, so commits survive a kill of the process but not a crash of
    the machine, unless `options` contain {"innodb-flush-log-at-trx-commit": "1"}. `options` are those of mariadbd.
    """

    title = "MariaDB"
    account = "mysql"

    @property
    def url(self) -> str:
        return f"mysql://{USER}@{HOST}:{self.port}/{DATABASE}"

    @property
    def administrators_url(self) -> str:
        return f"mysql://{ADMINISTRATOR}@{HOST}:{self.port}/{DATABASE}"

    def start(self) -> float:
        fresh = not self.data.exists()
        took = super().start()
        if fresh and self.follows is not None:
            self.follow(self.follows)
        return took

    def fill(self) -> None:
        self.copy_beginning()
        beginning = self.home / "beginning.sql"
        beginning.write_text(_BEGINNING, encoding="utf-8")
        beginning.chmod(0o644)

    def install(self, folder: Path) -> None:
        self.run(
            program("mariadb-install-db", PACKAGES), "--no-defaults", f"--datadir={folder / 'data'}",
            "--auth-root-authentication-method=normal", "--skip-test-db", "--skip-name-resolve",
            "--innodb-log-file-size=64M", "--innodb-flush-method=nosync",
            f"--tmpdir={folder}",  # names of temporary files are unique within one only
        )  # fmt: skip

    def settings(self) -> dict[str, str]:
        """Options that `options` can replace."""
        return {
            "server-id": str(self.port),
            "innodb-flush-log-at-trx-commit": "2",
            "innodb-buffer-pool-size": "128M",
            "innodb-fast-shutdown": "2",
            "read-only": str(int(self.follows is not None)),
        }

    def command(self) -> Sequence[str]:
        settings = {
            "datadir": str(self.data),
            "tmpdir": str(self.home),
            "socket": str(self.home / "socket"),
            "pid-file": str(self.home / "pid"),
            "bind-address": HOST,
            "port": str(self.port),
            "init-file": str(self.home / "beginning.sql"),
            "skip-name-resolve": "1",
            "max-connections": "300",
            "innodb-log-file-size": "64M",
            **self.settings(),
            **self.options,
        }
        return [
            program("mariadbd", PACKAGES), "--no-defaults", *(f"--{name}={value}" for name, value in settings.items())
        ]  # fmt: skip

    def answers(self) -> bool:
        with socket.create_connection((HOST, self.port), timeout=1.0) as probe:
            return bool(probe.recv(1))  # the greeting; before that it may listen without answering

    def follow(self, primary: MariaDbServer) -> None:
        """Follow the primary from the position that this server has reached."""
        self.ask(
            f"CHANGE MASTER TO MASTER_HOST = '{HOST}', MASTER_PORT = {primary.port}, MASTER_USER = '{ADMINISTRATOR}', "
            "MASTER_USE_GTID = slave_pos, MASTER_CONNECT_RETRY = 1",
            "START SLAVE",
        )

    def promote(self) -> None:
        """Make it a writable primary."""
        self.ask("STOP SLAVE", "SET GLOBAL read_only = 0")
        self.follows = None

    def ask(self, *statements: str) -> list[Any]:
        """Run the statements as the administrator; return the rows of the last."""
        return ask(self.administrators_url, *statements)


def connect(url: str) -> Any:
    """A connection that commits each statement. Raises OSError if no server answers."""
    import pymysql

    parts = urlsplit(url)
    try:
        return pymysql.connect(
            host=parts.hostname, port=parts.port or 3306, user=unquote(parts.username or "root"),
            password=unquote(parts.password or ""), database=parts.path.removeprefix("/") or None, autocommit=True,
            # seconds to wait for the locks of an open transaction
            init_command="SET SESSION lock_wait_timeout = 60, innodb_lock_wait_timeout = 60",
            ssl_disabled=True,  # reading this machine's certificates costs more than the statement
        )  # fmt: skip
    except pymysql.OperationalError as error:
        raise OSError(str(error)) from error


def ask(url: str, *statements: str) -> list[Any]:
    """Run the statements on a new connection; return the rows of the last. Raises OSError if no server answers."""
    with closing(connect(url)) as connection, connection.cursor() as cursor:
        for statement in statements:
            cursor.execute(statement)
        return list(cursor.fetchall()) if cursor.description else []


class MariaDbPair(SeveralServers):
    """A writable server, and one that follows it `LAG` seconds behind, with their data below `directory`."""

    def __init__(self, directory: Path) -> None:
        self.primary = MariaDbServer(directory / "primary", options=BINARY_LOG)
        self.replica = MariaDbServer(directory / "replica", options=BINARY_LOG, follows=self.primary)

    @property
    def url(self) -> str:
        """The URL of the writable server, with the other as `replica`."""
        return f"{self.primary.url}?replica={HOST}:{self.replica.port}"

    @property
    def parts(self) -> Sequence[MariaDbServer]:
        return self.replica, self.primary

    def start_parts(self) -> None:
        self.primary.start()
        self.replica.start()
        self.replica.ask("STOP SLAVE", f"CHANGE MASTER TO MASTER_DELAY = {LAG}", "START SLAVE")
        self.primary.ask("CREATE TABLE followed (word INT)")
        until(lambda: self.replica.ask("SHOW TABLES LIKE 'followed'"), "the replica to follow")
        self.primary.ask("DROP TABLE followed")
