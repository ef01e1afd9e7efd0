"""Standard streams that are closed, full, or of a narrow encoding: what changes something is done to its end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from tests.waiting import wait_until

from bide.cli.exits import Exit

if TYPE_CHECKING:
    from tests.cli.conftest import CommandLine, Write


def run(script: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run a line of bash in which `bide` is the command; ends with the exit code of the first of a pipe."""
    return subprocess.run(
        ["bash", "-c", f'bide() {{ "{sys.executable}" -m bide "$@"; }}; {script}; exit ${{PIPESTATUS[0]}}'],
        env=os.environ | environ, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip


@pytest.fixture
def many(write: Write) -> None:
    write("many", "".join(f'{{"key": "{number}", "delay": "1h"}}\n' for number in range(2_500)))


def test_a_reader_that_is_gone_ends_no_command_that_changes(line: CommandLine, many: None) -> None:
    done = run("bide schedule t --many many --json | head -n 1")
    assert (done.returncode, done.stdout.count("\n"), done.stderr) == (Exit.DONE, 1, "")
    assert line.one("tally")["counts"][0]["number"] == 2_500
    assert run("bide move t nobody --delay 1h --json | true").returncode == Exit.NOT_DONE
    assert run("bide ls --all --json | head -n 1").returncode == Exit.DONE
    assert run("bide ls --help | true").returncode == Exit.DONE


def test_no_output_at_all(line: CommandLine) -> None:
    done = run("bide schedule t --key a --delay 1h >&-")
    assert (done.returncode, done.stderr) == (Exit.DONE, "")
    assert run("bide cancel t nobody <&- >&- 2>&-").returncode == Exit.NOT_DONE
    assert line.one("show", "t", "a")["task"]["state"] == "waiting"


def test_a_full_output_is_said(line: CommandLine) -> None:
    done = run("bide schedule t --key a --delay 1h > /dev/full")
    assert done.returncode == Exit.DONE
    assert "the output cannot be written and is dropped: [Errno 28]" in done.stderr
    assert run("bide ls > /dev/full").returncode == Exit.DEFECT


def test_a_worker_goes_on_without_a_reader_of_its_log(line: CommandLine, write: Write) -> None:
    write(
        "shop.py",
        "from bide import Bide, Task\napp = Bide()\n"
        "@app.handler('t')\nasync def t(task: Task[None]) -> None: open('ended', 'w')\n",
    )
    line.run("schedule", "t", "--delay", "0s")
    process = subprocess.Popen(
        [sys.executable, "-m", "bide", "work", "shop:app", "--processes", "2"], stderr=subprocess.PIPE
    )
    assert process.stderr is not None
    process.stderr.close()
    wait_until(lambda: (line.directory / "ended").exists() or process.poll() is not None, "the task")
    process.terminate()
    assert process.wait(60) == Exit.DONE
    assert (line.directory / "ended").exists()


@pytest.mark.parametrize(
    "environ",
    [{"PYTHONIOENCODING": "latin-1"}, {"LC_ALL": "POSIX", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}],
    ids=["latin-1", "POSIX"],
)
def test_a_name_beyond_the_encoding_of_the_terminal(line: CommandLine, environ: dict[str, str]) -> None:
    key = "caf\u00e9 \U0001f680"
    line.run("schedule", "t", json.dumps(key), "--key", key, "--delay", "1h")
    done = run("bide ls > shown", **environ)
    assert (done.returncode, done.stderr) == (Exit.DONE, "")
    done = run("bide ls --json", **environ)
    assert json.loads(done.stdout)["key"] == json.loads(done.stdout)["payload"] == key
