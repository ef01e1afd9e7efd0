"""`bide work` as it is run: real processes, real signals."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.waiting import wait_until

from bide.cli.exits import Exit

if TYPE_CHECKING:
    from tests.cli.conftest import CommandLine, Write

SHOP = """
import asyncio, os
from bide import Bide, Dead, Task

app = Bide(lease=os.environ.get("SHOP_LEASE", "10m"), grace="10m")

@app.handler("work", retry="never")
async def work(task: Task[dict]) -> None:
    told("begun", task)
    await asyncio.sleep(task.payload.get("takes", 0))
    if task.payload.get("dies"):
        raise Dead("as it was told")
    told("ended", task)

@app.handler("other")
async def other(task: Task[object]) -> None:
    told("other", task)

def told(what, task):
    with open("told.txt", "a") as file:
        file.write(f"{what} {task.key} {os.getpid()}\\n")
"""
Begin = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def begin(line: CommandLine, write: Write) -> Iterator[Begin]:
    """Start `bide work`; whatever is left of it ends with the test."""
    write("shop.py", SHOP)
    begun: list[subprocess.Popen[str]] = []

    def start(*args: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "bide", "work", *args]
        process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)
        begun.append(process)
        return process

    yield start
    for process in begun:
        if process.poll() is None:
            process.kill()
        process.wait()
        assert process.stderr is not None
        process.stderr.close()


def until(path: Path, pattern: str) -> list[str]:
    """Wait until a line of the file matches; all lines."""
    wait_until(lambda: any(re.fullmatch(pattern, one) for one in path.read_text().splitlines()), pattern)
    return path.read_text().splitlines()


def end_of(process: subprocess.Popen[str]) -> str:
    """Wait for its end; what it said on stderr."""
    process.wait(timeout=60)
    assert process.stderr is not None
    return process.stderr.read()


def test_sigterm_drains(line: CommandLine, begin: Begin) -> None:
    line.run("schedule", "work", '{"takes": 1}', "--key", "long", "--delay", "0s")
    line.run("schedule", "work", '{"dies": true}', "--key", "mortal", "--delay", "0s")
    process = begin("shop:app")
    for key in ("long", "mortal"):
        until(line.directory / "told.txt", f"begun {key} .*")
    process.send_signal(signal.SIGTERM)
    said = end_of(process)
    assert process.returncode == Exit.DONE
    assert "ended long" in (line.directory / "told.txt").read_text()
    assert f"bide work shop:app: other, work from {line.url}, pid {process.pid}" in said
    assert "ERROR bide.work" in said
    assert "work/mortal is dead" in said
    assert "SIGTERM: draining" in said


def test_a_second_signal_ends_at_once_and_the_task_comes_back(
    line: CommandLine, begin: Begin, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHOP_LEASE", "1s")
    line.run("schedule", "work", '{"takes": 600}', "--key", "long", "--delay", "0s")
    process = begin("shop:app")
    until(line.directory / "told.txt", "begun long .*")
    process.send_signal(signal.SIGINT)
    assert process.stderr is not None
    assert any("SIGINT: draining" in said for said in process.stderr)
    process.send_signal(signal.SIGINT)
    end_of(process)
    assert process.returncode == Exit.INTERRUPTED
    assert line.one("show", "work", "long")["task"]["state"] == "leased"
    again = begin("shop:app", "--topic", "work")
    until(line.directory / "told.txt", f"begun long {again.pid}")


def test_only_some_topics(line: CommandLine, begin: Begin) -> None:
    line.run("schedule", "work", "{}", "--key", "a", "--delay", "0s")
    line.run("schedule", "other", "--key", "b", "--delay", "0s")
    process = begin("shop:app", "--topic", "other", "--uvloop", "--quiet")
    lines = until(line.directory / "told.txt", "other b .*")
    assert not [one for one in lines if "begun" in one]
    assert "no live worker has a handler" in line.run("doctor", code=1).stdout
    assert "--topic: 'more' is not accepted; give topics that have a handler: other, work" in line.error(
        "work", "shop:app", "--topic", "more"
    )
    process.send_signal(signal.SIGTERM)
    assert end_of(process) == ""


def two_children_of(process: subprocess.Popen[str], *, but: int = 0) -> list[int]:
    path = Path(f"/proc/{process.pid}/task/{process.pid}/children")

    def both() -> list[int]:
        found = [int(one) for one in path.read_text().split()]
        return found if len(found) == 2 and but not in found else []

    return wait_until(both, "two processes")


def test_two_processes_and_one_that_is_killed(line: CommandLine, begin: Begin) -> None:
    process = begin("shop:app", "--processes", "2")
    first, second = two_children_of(process)
    line.run("schedule", "work", "{}", "--key", "first", "--delay", "0s")
    until(line.directory / "told.txt", "ended first .*")
    os.kill(first, signal.SIGKILL)
    assert second in two_children_of(process, but=first)
    line.run("schedule", "work", '{"takes": 1}', "--key", "last", "--delay", "0s")
    until(line.directory / "told.txt", "begun last .*")
    process.send_signal(signal.SIGTERM)
    said = end_of(process)
    assert process.returncode == Exit.DONE
    assert f"process {first} was killed by SIGKILL; another one starts in 0.5 s" in said
    assert "ended last" in (line.directory / "told.txt").read_text()


def test_processes_drain_when_their_supervisor_is_killed(line: CommandLine, begin: Begin) -> None:
    process = begin("shop:app", "--processes", "2")
    children = two_children_of(process)
    line.run("schedule", "work", '{"takes": 0.5}', "--key", "k", "--delay", "0s")
    until(line.directory / "told.txt", "begun k .*")
    process.kill()
    until(line.directory / "told.txt", "ended k .*")
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in children), "both to end")


def test_what_cannot_start_is_not_started_for_ever(line: CommandLine, begin: Begin, write: Write) -> None:
    broken = SHOP + "\nimport sys\nif '--supervised' in sys.argv: raise RuntimeError('only in the children')\n"
    write("shop.py", broken)
    process = begin("shop:app", "--processes", "2")
    said = end_of(process)
    assert process.returncode == Exit.SETUP
    assert "shop: cannot be imported: RuntimeError: only in the children" in said
    assert "would fail again" in said


def test_an_app_without_handlers(line: CommandLine, write: Write) -> None:
    write("empty_shop.py", "from bide import Bide\napp = Bide()\n")
    assert "no handlers" in line.error("work", "empty_shop:app", code=Exit.SETUP)
    write("broken_shop.py", "import nothing_like_it\n")
    assert "nothing_like_it" in line.error("work", "broken_shop:app", code=Exit.SETUP)
