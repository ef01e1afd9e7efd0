"""PgBouncer in front of a PostgreSQL server."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

from bide_proofs.servers.process import HOST, listens, program
from bide_proofs.servers.server import ServerProcess


class PostgresPooler(ServerProcess):
    """PgBouncer, which hands each transaction another of three connections to the server that `url` names."""

    title = "PgBouncer"
    account = "postgres"

    def __init__(self, directory: Path, url: str) -> None:
        super().__init__(directory)
        self.target = urlsplit(url)

    @property
    def url(self) -> str:
        return f"postgresql://{self.target.username}@{HOST}:{self.port}{self.target.path}"

    @property
    def _settings(self) -> Path:
        return self.home / "pgbouncer.ini"

    def prepare(self) -> None:
        self._settings.write_text(
            f"[databases]\n* = host={self.target.hostname} port={self.target.port} user={self.target.username}\n"
            f"[pgbouncer]\nlisten_addr = {HOST}\nlisten_port = {self.port}\nunix_socket_dir =\nauth_type = any\n"
            "pool_mode = transaction\n"
            f"default_pool_size = 3\nserver_round_robin = 1\nmax_client_conn = 200\n",
            encoding="utf-8",
        )
        self._settings.chmod(0o644)

    def command(self) -> Sequence[str]:
        return [program("pgbouncer", "pgbouncer"), str(self._settings)]

    def answers(self) -> bool:
        return listens(self.port)
