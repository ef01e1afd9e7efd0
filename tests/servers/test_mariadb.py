"""The MariaDB servers that tests start: they answer, keep what they acknowledged, follow, and outlive nobody."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from tests.servers.child import ServerFailed, ServerMissing
from tests.servers.fixtures import StartsMariaDb
from tests.servers.mariadb_server import HOST, MariaDbServer, ask
from tests.servers.waiting import wait_until

pytestmark = pytest.mark.faults


def test_what_was_committed_survives_a_kill(mariadb_server: StartsMariaDb) -> None:
    server = mariadb_server(options={"max-allowed-packet": "2M"})
    assert server.url == f"mysql://bide@127.0.0.1:{server.port}/bide"
    assert server.ask("SELECT @@max_allowed_packet") == [(2 * 1024 * 1024,)]
    server.ask("CREATE TABLE promise SELECT 'kept' AS word")
    pid, port = server.pid, server.port
    server.kill()
    assert not server.running
    server.start()
    assert server.pid != pid
    assert server.port == port
    assert ask(server.url, "SELECT word FROM promise") == [("kept",)]
    server.restart()
    assert ask(server.url, "SELECT word FROM promise") == [("kept",)]
    home = server.home
    server.stop()
    if os.geteuid() == 0:
        assert not home.exists(), "a folder of its own is gone with it"


def test_one_that_follows_sees_everything_and_is_read_only_until_it_is_promoted(mariadb_server: StartsMariaDb) -> None:
    log = {"log-bin": "binlog", "gtid-strict-mode": "1"}
    primary = mariadb_server(options={**log, "server-id": "1"})
    primary.ask("CREATE TABLE promise SELECT 'kept' AS word")
    replica = mariadb_server(options={**log, "server-id": "2"}, follows=primary)

    def followed() -> bool:
        return replica.ask("SHOW TABLES LIKE 'promise'") != [] and replica.ask("SELECT * FROM promise") == [("kept",)]

    wait_until(followed, "the replica to follow", patience=20)
    with pytest.raises(Exception, match="read-only"):
        ask(replica.url, "INSERT INTO promise VALUES ('mine')")
    primary.kill()
    replica.promote()
    assert ask(replica.url, "INSERT INTO promise VALUES ('mine')") == []


def test_what_is_wrong_is_said(mariadb_server: StartsMariaDb, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ServerFailed, match="no-such-setting"):
        mariadb_server(options={"no-such-setting": "1"})

    def missing(name: str) -> str:
        raise ServerMissing(f"{name} is not installed")

    monkeypatch.setattr("tests.servers.mariadb_server.binary", missing)
    with pytest.raises(ServerMissing, match="mariadb-install-db is not installed"):
        MariaDbServer(tmp_path).start()


def test_no_server_outlives_who_started_it(tmp_path: Path, root: Path, mysql_url: str) -> None:
    program = (
        "import os, pathlib, signal, sys\n"
        "from tests.servers.mariadb_server import MariaDbServer\n"
        "server = MariaDbServer(pathlib.Path(sys.argv[1]))\n"
        "server.start()\n"
        "print(server.port, server.home, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], cwd=root, capture_output=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    port, home = done.stdout.decode().split()

    def gone() -> bool:
        with socket.socket() as probe:
            return probe.connect_ex((HOST, int(port))) != 0

    wait_until(gone, "the server to be killed", patience=10)
    if home != str(tmp_path):
        subprocess.run(["rm", "-rf", home], check=True)
