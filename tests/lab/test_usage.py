"""What the servers of a cell use, seen from outside: of every thread, found by the port that it listens on."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from tests.servers.ports import free_port
from tests.waiting import wait_until

from bide.lab.usage import ServerUse

BUSY = """
import socket, sys, threading, time
listener = socket.create_server(("127.0.0.1", int(sys.argv[1])))
def work():
    while True:
        pass
print("listens", flush=True)
sys.stdin.readline()
threading.Thread(target=work, daemon=True).start()
time.sleep(60)
"""


@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="the system does not show it")
def test_a_thread_beside_the_first_is_counted_and_a_port_of_nobody_is_not_known() -> None:
    port = free_port()
    with subprocess.Popen(
        [sys.executable, "-c", BUSY, str(port)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == "listens\n"
            server = ServerUse({"redis": f"redis://127.0.0.1:{port}/0"})
            before = server.cpu()
            process.stdin.write("go\n")
            process.stdin.flush()
            assert before is not None
            wait_until(lambda: (server.cpu() or 0) >= before + 0.1, "a tenth of a second of its second thread")
        finally:
            process.kill()
    assert ServerUse({"redis": f"redis://127.0.0.1:{port}/0"}).cpu() is None
