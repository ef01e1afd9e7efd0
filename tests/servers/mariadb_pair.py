"""Two MariaDB servers of our own: one is written to, the other follows it, some seconds behind as it is told to be."""

from __future__ import annotations

from pathlib import Path

from tests.servers.child import Running
from tests.servers.mariadb_server import HOST, MariaDbServer
from tests.waiting import wait_until

LAG = 3
"""Seconds, which is as finely as MariaDB can be told: longer than tasks are scheduled ahead, so that it shows."""


class MariaDbPair(Running):
    """A server and its replica, with their data below `directory` as `MariaDbServer` says."""

    def __init__(self, directory: Path) -> None:
        log = {"log-bin": "binlog", "gtid-strict-mode": "1"}
        self.primary = MariaDbServer(directory / "primary", options={**log, "server-id": "1"})
        self.replica = MariaDbServer(
            directory / "replica", options={**log, "server-id": "2"}, follows=self.primary
        )  # fmt: skip

    @property
    def url(self) -> str:
        """That of the one that is written to, with the other as `replica`."""
        return f"{self.primary.url}?replica={HOST}:{self.replica.port}"

    def start(self) -> None:
        """Both run, and the one follows the other. Raises `ServerMissing`, `ServerFailed`."""
        try:
            self.primary.start()
            self.replica.start()
            self.replica.ask("STOP SLAVE")
            self.replica.ask(f"CHANGE MASTER TO MASTER_DELAY = {LAG}")
            self.replica.ask("START SLAVE")
            self.primary.ask("CREATE TABLE followed (word INT)")
            wait_until(lambda: self.replica.ask("SHOW TABLES LIKE 'followed'") != [], "the replica to follow")
            self.primary.ask("DROP TABLE followed")
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        self.replica.stop()
        self.primary.stop()
