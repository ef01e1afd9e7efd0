"""PostgreSQL: a primary, and a standby that has every commit before it is answered, so that a failover loses none."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
from collections.abc import Mapping
from contextlib import AbstractContextManager, closing
from pathlib import Path
from typing import TYPE_CHECKING

from bide_proofs.servers.disk import OnDisk
from bide_proofs.servers.postgres import PostgresServer
from bide_proofs.servers.process import until
from bide_proofs.torture.server import CONNECTIONS, Common, TorturedPair, Trouble, Wait

if TYPE_CHECKING:
    import psycopg

_STRANGER = "stranger"
_OTHERS = (
    "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE backend_type = 'client backend'"
    f" AND pid <> pg_backend_pid() AND application_name <> '{_STRANGER}'"
)
_BACKENDS = (
    "SELECT pid FROM pg_stat_activity WHERE backend_type = 'client backend' AND application_name = 'bide' ORDER BY pid"
)
_SYNCHRONOUS = "synchronous_standby_names"
_OPTIONS = {
    "fsync": "on",
    "max_connections": str(CONNECTIONS),
    "max_wal_size": "128MB",
    "min_wal_size": "2MB",
    "wal_keep_size": "64MB",
    "wal_retrieve_retry_interval": "200ms",
    # its shared memory is a file in its data, which needs no clean-up after a kill
    "dynamic_shared_memory_type": "mmap",
}
"""In addition to PostgreSQL's defaults, in which synchronous_commit is on."""


class PostgresOnDisk(OnDisk, PostgresServer):
    """A server with all its data, including the write-ahead log, on its own disk."""

    size = 768 << 20
    installs = ("--no-sync", "--wal-segsize=1")

    @property
    def data(self) -> Path:
        return self.disk_place / "data"

    def fill(self) -> None:
        super().fill()
        # a promoted server must not wait for a standby until it has one
        settings = self.data / "postgresql.auto.conf"
        lines = settings.read_text(encoding="utf-8").splitlines(keepends=True)
        settings.write_text("".join(line for line in lines if _SYNCHRONOUS not in line), encoding="utf-8")

    def answers(self) -> bool:
        """Query it, too: its files say "ready" even while it recovers from the death of one of its processes."""
        return super().answers() and self.value("SELECT 1") == 1

    def need_room(self) -> None:
        """Make the write-ahead log need another file, as it does every megabyte."""
        import psycopg

        with contextlib.suppress(OSError, psycopg.Error):  # this should be refused, and may end the server
            self.ask("SELECT pg_switch_wal()", "CREATE TABLE one_more ()", "DROP TABLE one_more")

    def stranger(self) -> AbstractContextManager[psycopg.Connection]:
        import psycopg

        try:
            return closing(psycopg.connect(f"{self.url}?application_name={_STRANGER}", autocommit=True))
        except psycopg.OperationalError as error:
            raise OSError(str(error)) from error

    def throw_out(self, stranger: psycopg.Connection) -> None:
        stranger.execute(_OTHERS)

    def discard(self) -> None:
        shutil.rmtree(self.data, ignore_errors=True)

    def await_follower(self, other: OnDisk) -> None:
        follows = "SELECT count(*) FROM pg_stat_replication WHERE state = 'streaming'"
        until(lambda: self.value(follows), f"{other.name} to follow {self.name}")
        self.ask(f"ALTER SYSTEM SET {_SYNCHRONOUS} = '*'", "SELECT pg_reload_conf()")
        target = self.value("SELECT pg_current_wal_lsn()::text")
        reached = f"SELECT bool_or(flush_lsn >= '{target}' AND sync_state = 'sync') FROM pg_stat_replication"
        until(lambda: self.value(reached), f"{other.name} to have what {self.name} has")


class TorturedPostgres(TorturedPair):
    """A primary and a synchronous standby."""

    name = "postgres"
    node = PostgresOnDisk
    follower = "standby"
    options = _OPTIONS
    query = "target_session_attrs=read-write"
    asks_version = "SHOW server_version"
    durability = (
        "fsync and synchronous_commit on, synchronous_standby_names '*': what was answered is on two "
        "disks; leases are committed without waiting (docs/sql.md), so a crash or a failover may undo the newest"
    )
    set_up = f"a primary and a synchronous standby, each behind a proxy, replication not; {CONNECTIONS} connections"

    def further_troubles(self) -> Mapping[str, Trouble]:
        return {**super().further_troubles(), Common.OOM: self._one_killed}

    def _one_killed(self, chance: random.Random, wait: Wait) -> str:
        """Kill one of its processes, as the kernel does when memory runs out. All others end, and it recovers."""
        node = self.primary
        found = {int(row[0]) for row in node.ask(_BACKENDS)}
        there = sorted(found & set(node.family()[1:]))
        if not there:
            return "no client was connected whose process could be killed"
        with contextlib.suppress(ProcessLookupError):  # it has ended since
            os.kill(chance.choice(there), signal.SIGKILL)
        wait(chance.uniform(0.5, 1.5))
        return f"killed one of the {len(there)} processes of {node.name} that serve clients"
