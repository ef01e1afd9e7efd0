"""The parts of private servers: processes that outlive nobody, and disks that can be full."""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from tests.waiting import until

from bide_proofs.servers.disk import Disk
from bide_proofs.servers.process import Process, ServerFailed
from bide_proofs.servers.server import ServerProcess

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="/proc tells the processes of a server")

_UNLUCKY = "libfaketime: In ft_shm_init(), sem_open failed and recreation attempts failed: Permission denied"


class Script(ServerProcess):
    """Runs one shell script at each start, and answers once it has said so."""

    title = "the script"
    scripts: Sequence[str] = ()
    starts = 0

    def command(self) -> Sequence[str]:
        self.starts += 1
        return ["/bin/sh", "-c", self.scripts[min(self.starts, len(self.scripts)) - 1]]

    def answers(self) -> bool:
        return "ready" in self.log.read_text()


def test_a_server_with_an_unlucky_number_is_started_again(tmp_path: Path) -> None:
    node = Script(tmp_path)
    node.scripts = [f"echo '{_UNLUCKY}'; exit 1", f"echo '{_UNLUCKY}'; exit 1", "echo ready; sleep 60"]
    node.start()
    assert node.starts == 3
    node.stop()
    assert not node.running


async def test_a_kill_takes_the_processes_below_along(tmp_path: Path) -> None:
    process = Process(["/bin/sh", "-c", "sleep 60 & sleep 60"], tmp_path / "log", name="two")
    await until(lambda: len(process.family()) == 3, "two children")
    pids = process.family()
    process.send(signal.SIGSTOP)
    process.end(signal.SIGKILL)
    assert process.code == -signal.SIGKILL
    assert not any(Path(f"/proc/{pid}/exe").exists() for pid in pids)  # noqa: ASYNC240


def test_what_is_in_use_is_unmounted_and_told(tmp_path: Path) -> None:
    disk, place = Disk(8 << 20), tmp_path / "disk"
    disk.make(place)
    if not disk.mounted:
        pytest.skip(disk.refused)
    with (place / "open").open("w"), pytest.raises(ServerFailed, match="was in use"):
        disk.remove()
    assert str(place) not in Path("/proc/self/mounts").read_text()
