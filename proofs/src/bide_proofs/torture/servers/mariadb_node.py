"""One MariaDB server, durable as it comes, which may follow another and be promoted."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bide.core.instants import Millis
from bide_proofs.torture.servers.clocks import FakeClock
from bide_proofs.torture.servers.disks import Disk
from bide_proofs.torture.servers.node import Node
from bide_proofs.torture.servers.processes import HOST, ServerFailed, program, run, until

USER = "bide"
ADMINISTRATOR = "root"
DATABASE = "bide"
PACKAGE = "mariadb-server"
CONNECTIONS = 150
_DISK = 256 << 20
_WAIT = 3_000
"""Milliseconds for which a commit waits for the replica; then none does until that is there again. Without an end
MariaDB 10.11 can stand still for ever: a replica that comes back while a commit waits for it is not let in before its
old connection is gone, and that is not before the commit is."""
_BEGINNING = f"""
SET SESSION sql_log_bin = 0;
CREATE OR REPLACE USER {ADMINISTRATOR}@'%';
GRANT ALL PRIVILEGES ON *.* TO {ADMINISTRATOR}@'%' WITH GRANT OPTION;
CREATE OR REPLACE USER {USER}@'%';
GRANT SELECT, INSERT, UPDATE, DELETE, CREATE, DROP, ALTER, INDEX, PROCESS, LOCK TABLES ON *.* TO {USER}@'%';
"""
"""Two users without passwords: `bide` may do everything with tables, and nothing while the server is read-only."""
_SETTINGS = {
    "bind-address": HOST,
    "skip-name-resolve": "1",
    "max-connections": str(CONNECTIONS),
    "innodb-flush-log-at-trx-commit": "1",
    "sync-binlog": "1",
    "innodb-log-file-size": "64M",
    "innodb-buffer-pool-size": "64M",
    "log-bin": "binlog",
    "log-slave-updates": "1",
    "gtid-strict-mode": "1",
    "rpl-semi-sync-master-wait-point": "AFTER_SYNC",
    "rpl-semi-sync-master-timeout": str(_WAIT),
}


class MariaDbNode(Node):
    """Its tables are on a disk of its own; its logs are not, since without room for those it waits for a minute, or
    ends, whatever a client does."""

    account = "mysql"

    def __init__(self, number: int, folder: Path, clock: FakeClock) -> None:
        super().__init__(f"server {number}", folder, clock)
        self.leads = number == 1
        """Whether it may be written to, and waits for who follows it."""
        self._number = number
        self.disk = Disk(folder, size=_DISK, account=self.account)

    @property
    def _data(self) -> Path:
        return self.home.path / "data"

    async def prepare(self) -> None:
        """An empty server that does not run yet; the proxy is there."""
        program("mariadb-dump", PACKAGE)
        self.home.make()
        beginning = self.home.path / "beginning.sql"
        beginning.write_text(_BEGINNING, encoding="utf-8")
        beginning.chmod(0o644)
        await self.make()
        await self.proxy.accept()

    async def make(self) -> None:
        """The data of an empty server; what was there is gone."""
        self.disk.remove()
        shutil.rmtree(self._data, ignore_errors=True)
        install = program("mariadb-install-db", PACKAGE)
        words = [
            "--no-defaults", f"--datadir={self._data}", "--auth-root-authentication-method=normal", "--skip-test-db",
            "--skip-name-resolve", "--innodb-log-file-size=64M", f"--tmpdir={self.home.path}",
        ]  # fmt: skip
        await run([install, *words], folder=self.home.path, log=self.log, account=self.account)
        self.disk.place = self._data / DATABASE  # a folder of the data is a database
        self.disk.make()

    def command(self) -> Sequence[str]:
        home = self.home.path
        settings = {
            **_SETTINGS,
            "datadir": str(self._data),
            "tmpdir": str(home),
            "socket": str(home / "socket"),
            "pid-file": str(home / "pid"),
            "port": str(self.port),
            "server-id": str(self._number),
            "init-file": str(home / "beginning.sql"),
            "rpl-semi-sync-master-enabled": str(int(self.leads)),
            "rpl-semi-sync-slave-enabled": str(int(not self.leads)),
            "read-only": str(int(not self.leads)),
        }
        return [
            program("mariadbd", PACKAGE), "--no-defaults", *(f"--{name}={value}" for name, value in settings.items())
        ]  # fmt: skip

    async def answers(self) -> bool:
        return bool(await self.ask("SELECT 1"))

    async def connect(self, **options: Any) -> Any:
        """A connection of asyncmy, past the proxy. Raises OSError."""
        import asyncmy
        from asyncmy.errors import MySQLError

        try:
            return await asyncmy.connect(
                host=HOST, port=self.port, user=ADMINISTRATOR, autocommit=True, connect_timeout=60, **options
            )
        except (MySQLError, EOFError) as error:
            raise OSError(f"{self.name}: {error}") from error

    async def ask(self, *statements: str) -> list[dict[str, Any]]:
        """The rows that the last of them finds, by names of columns, on a connection of its own. Raises OSError."""
        from asyncmy.cursors import DictCursor
        from asyncmy.errors import MySQLError

        connection = await self.connect(read_timeout=120)
        found: list[dict[str, Any]] = []
        try:
            async with connection.cursor(DictCursor) as cursor:
                for statement in statements:
                    await cursor.execute(statement)
                    found = list(await cursor.fetchall() or ()) if cursor.description else []
            return found
        except (MySQLError, EOFError) as error:
            raise OSError(f"{self.name}: {error}") from error
        finally:
            connection.close()

    async def value(self, statement: str) -> Any:
        """The first column of the first row."""
        rows = await self.ask(statement)
        return next(iter(rows[0].values())) if rows else None

    async def time(self) -> Millis:
        """Milliseconds, by its own clock."""
        return int(await self.value("SELECT CAST(1000 * UNIX_TIMESTAMP(NOW(3)) AS SIGNED)"))

    # replication

    async def follow(self, primary: MariaDbNode) -> None:
        """A copy of what that one has, following it; this one runs, is empty and is only read."""
        copy = self.home.path / "copy.sql"
        words = [
            program("mariadb-dump", PACKAGE), "--no-defaults", f"--host={HOST}", f"--port={primary.port}",
            f"--user={ADMINISTRATOR}", "--single-transaction", "--gtid", "--master-data=1",
            f"--result-file={copy}", DATABASE,
        ]  # fmt: skip
        await run(words, folder=self.home.path, log=self.log, account=self.account)
        words = [
            program("mariadb", PACKAGE), "--no-defaults", f"--host={HOST}", f"--port={self.port}",
            f"--user={ADMINISTRATOR}", "--init-command=SET SESSION sql_log_bin = 0", DATABASE,
        ]  # fmt: skip
        # the dump begins with where the primary's log stood, which is where this one goes on
        await run(words, folder=self.home.path, log=self.log, account=self.account, feed=copy)
        await self.ask(
            f"CHANGE MASTER TO MASTER_HOST = '{HOST}', MASTER_PORT = {primary.port}, MASTER_USER = '{ADMINISTRATOR}', "
            "MASTER_USE_GTID = slave_pos, MASTER_CONNECT_RETRY = 1",
            "START SLAVE",
        )

    async def wait_for(self, replica: MariaDbNode) -> None:
        """From now on every commit that is answered is with the replica, and so is all that was before.

        Raises ServerFailed if there is none.
        """
        await self.ask("SET GLOBAL rpl_semi_sync_master_enabled = 1")

        async def follows() -> bool:
            rows = await self.ask("SHOW STATUS LIKE 'Rpl_semi_sync_master_%'")
            status = {str(row["Variable_name"]): str(row["Value"]) for row in rows}
            if status["Rpl_semi_sync_master_clients"] == "0":
                return False
            if status["Rpl_semi_sync_master_status"] != "ON":  # it gave up, and comes to know better only by a commit
                await self.ask("SET GLOBAL rpl_semi_sync_master_enabled = 0")
                await self.ask("SET GLOBAL rpl_semi_sync_master_enabled = 1")
                return False
            return True

        await until(follows, f"a replica to follow {self.name}")
        await replica.await_position(str(await self.value("SELECT @@gtid_binlog_pos") or ""))

    async def await_position(self, position: str) -> None:
        """Until it has done all up to this, a GTID. Raises ServerFailed."""
        if position and await self.value(f"SELECT MASTER_GTID_WAIT('{position}', 50)") != 0:
            raise ServerFailed(f"{self.name} has not done all up to {position}")

    async def promote(self) -> None:
        """Does what it has heard from its primary and not done yet, follows nobody any more, and may be written to."""
        await self.ask("STOP SLAVE IO_THREAD")
        [told] = await self.ask("SHOW SLAVE STATUS")
        await self.await_position(told["Gtid_IO_Pos"])
        await self.ask(
            "STOP SLAVE", "RESET SLAVE ALL", "SET GLOBAL rpl_semi_sync_slave_enabled = 0", "SET GLOBAL read_only = 0"
        )
        self.leads = True

    async def remove(self) -> None:
        """As Node."""
        # in order it would wait for who follows it
        await self.kill()
        self.disk.remove()
        await super().remove()
