"""One PostgreSQL server, durable as it comes, which may follow another and be promoted."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bide.core.instants import Millis
from bide_proofs.torture.servers.clocks import FakeClock
from bide_proofs.torture.servers.disks import Disk
from bide_proofs.torture.servers.node import Node
from bide_proofs.torture.servers.processes import HOST, program, run, until

USER = "bide"
DATABASE = "postgres"
PACKAGE = "postgresql"
CONNECTIONS = 150
_DISK = 768 << 20
_SETTINGS = {
    "listen_addresses": HOST,
    "unix_socket_directories": "",
    "max_connections": str(CONNECTIONS),
    "shared_buffers": "64MB",
    "max_wal_size": "128MB",
    "min_wal_size": "2MB",
    "wal_keep_size": "64MB",
    "deadlock_timeout": "200ms",
    "wal_retrieve_retry_interval": "200ms",
    # its shared memory is a file of its data, which nobody has to tidy up after a kill
    "dynamic_shared_memory_type": "mmap",
}
"""Besides what PostgreSQL comes with: fsync and synchronous_commit are on."""
_SYNCHRONOUS = "synchronous_standby_names"


def binary(name: str) -> str:
    """Where `name` is, of the newest version that Debian's packages put beside each other. Raises ServerMissing."""
    homes = sorted(Path("/usr/lib/postgresql").glob("*/bin"), key=lambda home: float(home.parent.name), reverse=True)
    return program(name, PACKAGE, *map(str, homes))


class PostgresNode(Node):
    """With all its data, also the log of changes, on a disk of its own."""

    account = "postgres"
    halts_by = signal.SIGINT

    def __init__(self, name: str, folder: Path, clock: FakeClock) -> None:
        super().__init__(name, folder, clock)
        self.disk = Disk(folder, size=_DISK, account=self.account)

    @property
    def url(self) -> str:
        """Past the proxy."""
        return f"postgresql://{USER}@{HOST}:{self.port}/{DATABASE}"

    @property
    def _data(self) -> Path:
        return self.disk.place / "data"

    async def prepare(self) -> None:
        """The folders and the proxy are there; nothing runs yet."""
        binary("initdb")
        self.home.make()
        self.disk.place = self.home.path / "disk"
        self.disk.make()
        await self.proxy.accept()

    async def make(self) -> None:
        """An empty database."""
        words = ["-D", str(self._data), "-U", USER, "--auth=trust", "-E", "UTF8", "--locale=C", "--wal-segsize=1"]
        await run([binary("initdb"), *words], folder=self.home.path, log=self.log, account=self.account)

    async def copy(self, primary: PostgresNode) -> None:
        """A copy of what that one has, which follows it from its start on; what was here is gone."""
        shutil.rmtree(self._data, ignore_errors=True)
        words = ["-h", HOST, "-p", str(primary.port), "-U", USER, "-D", str(self._data), "--checkpoint=fast"]
        await run(
            [binary("pg_basebackup"), *words, "--write-recovery-conf"],
            folder=self.home.path, log=self.log, account=self.account,
        )  # fmt: skip
        # who is promoted waits for nobody until somebody follows it
        settings = self._data / "postgresql.auto.conf"
        lines = settings.read_text(encoding="utf-8").splitlines(keepends=True)
        settings.write_text("".join(line for line in lines if _SYNCHRONOUS not in line), encoding="utf-8")

    def command(self) -> Sequence[str]:
        words = [f"--{name}={value}" for name, value in {**_SETTINGS, "port": str(self.port)}.items()]
        return [binary("postgres"), "-D", str(self._data), *words]

    async def answers(self) -> bool:
        try:
            lines = (self._data / "postmaster.pid").read_text(encoding="utf-8").splitlines()
            return int(lines[0]) == self.pid and lines[7].strip() in ("ready", "standby")
        except (ValueError, IndexError):  # it is being written
            return False

    async def connect(self) -> Any:
        """A connection of asyncpg, past the proxy. Raises OSError."""
        import asyncpg

        try:
            return await asyncpg.connect(self.url, timeout=60, command_timeout=120)
        except asyncpg.PostgresError as error:  # it starts, or ends
            raise OSError(f"{self.name}: {error}") from error

    async def ask(self, *statements: str) -> Any:
        """The first value that the last of them finds. Raises OSError where nobody answers, and asyncpg's errors."""
        connection, found = await self.connect(), None
        try:
            for statement in statements:
                found = await connection.fetchval(statement)
            return found
        finally:
            await connection.close(timeout=60)

    async def time(self) -> Millis:
        """Milliseconds, by its own clock."""
        return int(await self.ask("SELECT (extract(epoch FROM clock_timestamp()) * 1000)::bigint"))

    async def wait_for_standby(self) -> None:
        """From now on every commit that is answered is with the standby, and so is all that was before.

        Raises ServerFailed if there is none.
        """

        async def follows() -> bool:
            return bool(await self.ask("SELECT count(*) FROM pg_stat_replication WHERE state = 'streaming'"))

        await until(follows, f"a standby to follow {self.name}")
        await self.ask(f"ALTER SYSTEM SET {_SYNCHRONOUS} = '*'", "SELECT pg_reload_conf()")
        target = await self.ask("SELECT pg_current_wal_lsn()::text")

        async def has_all() -> bool:
            reached = f"SELECT bool_or(flush_lsn >= '{target}' AND sync_state = 'sync') FROM pg_stat_replication"
            return bool(await self.ask(reached))

        await until(has_all, f"the standby to have what {self.name} has")

    async def remove(self) -> None:
        """As Node."""
        await self.halt()
        self.disk.remove()
        await super().remove()
