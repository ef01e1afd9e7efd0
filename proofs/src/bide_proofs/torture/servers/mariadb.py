"""MariaDB: a primary, and a replica that has every commit before it is answered, so that a failover loses none."""

from __future__ import annotations

import contextlib
import shutil
from contextlib import AbstractContextManager, closing
from pathlib import Path
from typing import Any

from bide_proofs.servers.disk import OnDisk
from bide_proofs.servers.mariadb import ADMINISTRATOR, BINARY_LOG, DATABASE, PACKAGES, USER, MariaDbServer, connect
from bide_proofs.servers.process import HOST, ServerFailed, program, until
from bide_proofs.torture.server import CONNECTIONS, TorturedPair

_WAIT = 3_000
"""Milliseconds for which a commit waits for the replica; after that no commit waits until the replica is back. Without
this limit MariaDB 10.11 can hang forever: a replica that reconnects while a commit waits for it is not accepted before
its old connection ends, which does not end before the commit does."""
_OPTIONS = {
    **BINARY_LOG,
    "max-connections": str(CONNECTIONS),
    "innodb-flush-log-at-trx-commit": "1",
    "innodb-fast-shutdown": "1",
    "sync-binlog": "1",
    "innodb-buffer-pool-size": "64M",
    "log-slave-updates": "1",
    "rpl-semi-sync-master-wait-point": "AFTER_SYNC",
    "rpl-semi-sync-master-timeout": str(_WAIT),
}


class MariaDbOnDisk(OnDisk, MariaDbServer):
    """A server with its tables on its own disk. Its logs are elsewhere: without room for them it waits for a minute, or
    ends, whatever a client does."""

    size = 256 << 20
    followed = False
    """True once it has had a replica; from then on it waits for replicas."""

    @property
    def disk_place(self) -> Path:
        return self.data / DATABASE  # a folder of the data is a database

    def fill(self) -> None:
        MariaDbServer.fill(self)  # the disk is a folder of its data
        self.disk.make(self.disk_place)

    def stranger(self) -> AbstractContextManager[Any]:
        return closing(connect(self.administrators_url))

    def throw_out(self, stranger: Any) -> None:
        with stranger.cursor() as cursor:
            cursor.execute(f"SELECT id FROM information_schema.processlist WHERE user = '{USER}'")
            for (client,) in cursor.fetchall():
                with contextlib.suppress(Exception):  # the client has disconnected since
                    cursor.execute(f"KILL {client}")

    def discard(self) -> None:
        self.disk.remove()
        shutil.rmtree(self.data, ignore_errors=True)

    def settings(self) -> dict[str, str]:
        leads = self.follows is None
        return {
            **super().settings(),
            "rpl-semi-sync-master-enabled": str(int(leads and self.followed)),
            "rpl-semi-sync-slave-enabled": str(int(not leads)),
        }

    def follow(self, primary: MariaDbServer) -> None:
        """Load a copy of the primary's data, then follow it from there."""
        copy = self.home / "copy.sql"
        there = ["--no-defaults", f"--host={HOST}", f"--user={ADMINISTRATOR}"]
        self.run(
            program("mariadb-dump", PACKAGES), *there, f"--port={primary.port}", "--single-transaction", "--gtid",
            "--master-data=1", f"--result-file={copy}", DATABASE,
        )  # fmt: skip
        # the dump begins with the position of the primary's log, from which this server continues
        self.run(
            program("mariadb", PACKAGES), *there, f"--port={self.port}",
            "--init-command=SET SESSION sql_log_bin = 0", DATABASE, feed=copy,
        )  # fmt: skip
        super().follow(primary)

    def await_follower(self, other: MariaDbServer) -> None:
        self.followed = True
        self.ask("SET GLOBAL rpl_semi_sync_master_enabled = 1")

        def follows() -> bool:
            status = dict(self.ask("SHOW STATUS LIKE 'Rpl_semi_sync_master_%'"))
            if status["Rpl_semi_sync_master_clients"] == "0":
                return False
            if status["Rpl_semi_sync_master_status"] != "ON":  # it gave up waiting, until the next commit
                self.ask(
                    "SET GLOBAL rpl_semi_sync_master_enabled = 0", "SET GLOBAL rpl_semi_sync_master_enabled = 1"
                )  # fmt: skip
                return False
            return True

        until(follows, f"{other.name} to follow {self.name}")
        _await_position(other, str(self.value("SELECT @@gtid_binlog_pos") or ""))

    def promote(self) -> None:
        """Apply all changes received from the primary first, then promote."""
        from pymysql.cursors import DictCursor

        self.ask("STOP SLAVE IO_THREAD")
        with closing(connect(self.administrators_url)) as connection, connection.cursor(DictCursor) as cursor:
            cursor.execute("SHOW SLAVE STATUS")
            heard = cursor.fetchone()["Gtid_IO_Pos"]
        _await_position(self, heard)
        super().promote()
        self.ask("RESET SLAVE ALL", "SET GLOBAL rpl_semi_sync_slave_enabled = 0")


def _await_position(server: MariaDbServer, position: str) -> None:
    """Wait until the server has applied all changes up to `position`, a GTID. Raises ServerFailed."""
    if position and server.value(f"SELECT MASTER_GTID_WAIT('{position}', 50)") != 0:
        raise ServerFailed(f"{server.name} has not done all up to {position}")


class TorturedMariaDb(TorturedPair):
    """A primary and a semi-synchronous replica."""

    name = "mariadb"
    node = MariaDbOnDisk
    follower = "replica"
    options = _OPTIONS
    asks_version = "SELECT VERSION()"
    durability = (
        "innodb_flush_log_at_trx_commit 1, sync_binlog 1, semi-synchronous replication after the "
        "flush of the log: what was answered is on two disks, unless the replica was away for longer than 3 s; a "
        "failover waits until it is not"
    )
    set_up = (
        f"a primary and a replica, each behind a proxy, replication not; {CONNECTIONS} connections; only "
        "the tables are on the disk that can be full"
    )
