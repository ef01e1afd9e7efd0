"""PgBouncer in front of a PostgreSQL server, handing each transaction another connection."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path
from urllib.parse import urlsplit

from tests.servers.child import Child, Running, ServerFailed, ServerMissing
from tests.servers.ports import free_port, listens
from tests.servers.postgres_server import HOST

PACKAGES = "pgbouncer"


class PostgresPooler(Running):
    """`pool_mode = transaction`, `connections` of them to the server that `url` names."""

    def __init__(self, directory: Path, url: str, *, connections: int = 3) -> None:
        self.directory = directory
        self.target = urlsplit(url)
        self.connections = connections
        self.port = 0
        """Known once it is started."""
        self._child: Child | None = None

    @property
    def url(self) -> str:
        return f"postgresql://{self.target.username}@{HOST}:{self.port}{self.target.path}"

    def start(self) -> None:
        command = shutil.which("pgbouncer") or shutil.which("pgbouncer", path="/usr/sbin")
        if command is None:
            raise ServerMissing(f"pgbouncer is not installed: scripts/services install, or apt-get install {PACKAGES}")
        self.directory.mkdir(parents=True, exist_ok=True)
        self.port = free_port()
        (self.directory / "pgbouncer.ini").write_text(
            f"[databases]\n* = host={self.target.hostname} port={self.target.port} user={self.target.username}\n"
            f"[pgbouncer]\nlisten_addr = {HOST}\nlisten_port = {self.port}\nunix_socket_dir =\nauth_type = any\n"
            "pool_mode = transaction\n"
            f"default_pool_size = {self.connections}\nserver_round_robin = 1\nmax_client_conn = 200\n",
            encoding="utf-8",
        )
        # it does not run as root; it reads its files before it becomes the other user
        user = ["-u", "postgres"] if os.geteuid() == 0 else []
        self._child = Child([command, *user, str(self.directory / "pgbouncer.ini")], self.directory / "log")
        try:
            self._child.await_ready(lambda: listens(self.port))
        except ServerFailed:
            self.stop()
            raise

    def stop(self) -> None:
        if self._child is not None:
            self._child.end(signal.SIGTERM)
            self._child = None
