"""The PostgreSQL servers that tests start: they answer, keep what they acknowledged, and outlive nobody."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from tests.servers import postgres_server
from tests.servers.child import ServerFailed, ServerMissing
from tests.servers.fixtures import StartsPostgres
from tests.servers.postgres_server import HOST, PostgresServer
from tests.servers.waiting import wait_until

pytestmark = pytest.mark.faults


def test_what_was_committed_survives_a_kill(postgres_server: StartsPostgres) -> None:
    server = postgres_server(options={"work_mem": "5MB"})
    assert server.url == f"postgresql://bide@127.0.0.1:{server.port}/postgres"
    assert server.ask("SHOW work_mem") == [("5MB",)]
    server.ask("CREATE TABLE promise AS SELECT 'kept' AS word")
    pid, port = server.pid, server.port
    server.kill()
    assert not server.running
    server.start()
    assert server.pid != pid
    assert server.port == port
    assert server.ask("SELECT word FROM promise") == [("kept",)]
    server.restart()
    assert server.ask("SELECT word FROM promise") == [("kept",)]
    home = server.home
    server.stop()
    if os.geteuid() == 0:
        assert not home.exists(), "a folder of its own is gone with it"


def test_what_is_wrong_is_said(
    postgres_server: StartsPostgres, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ServerFailed, match="no_such_setting"):
        postgres_server(options={"no_such_setting": "1"})

    def missing(name: str) -> str:
        raise ServerMissing(f"{name} is not installed")

    monkeypatch.setattr("tests.servers.postgres_server.binary", missing)
    with pytest.raises(ServerMissing, match="initdb is not installed"):
        PostgresServer(tmp_path).start()


def test_no_server_outlives_who_started_it(tmp_path: Path, root: Path, postgres_url: str) -> None:
    program = (
        "import os, pathlib, signal, sys\n"
        "from tests.servers.postgres_server import PostgresServer\n"
        "server = PostgresServer(pathlib.Path(sys.argv[1]))\n"
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


def test_the_newest_version_is_taken() -> None:
    try:
        found = postgres_server.binary("postgres")
    except ServerMissing:
        pytest.skip("no PostgreSQL here")
    assert Path(found).exists()
