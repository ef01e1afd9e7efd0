"""What the system says of processes: read as it is, and None or an error where there is nothing to be seen."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from bide.cli.bench.processes import ProcessorWatch, family, spent, spent_by_family, started_at, stat

SELF = Path("/proc") / str(os.getpid())
WORKS = "import sys, time\nfor line in sys.stdin:\n    ends = time.process_time() + 0.1\n" \
    "    while time.process_time() < ends: pass\n    print('done', flush=True)"  # fmt: skip

pytestmark = pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="this system does not tell")


@pytest.fixture
def child() -> Iterator[subprocess.Popen[str]]:
    """Takes a tenth of a second of a processor for each line that it is sent."""
    with subprocess.Popen(
        [sys.executable, "-c", WORKS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        yield process
        process.kill()


def work(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write("go\n")
    process.stdin.flush()
    assert process.stdout.readline() == "done\n"


def test_a_process_is_known_by_its_parent_and_its_beginning(child: subprocess.Popen[str]) -> None:
    place = Path("/proc") / str(child.pid)
    work(child)
    assert stat(place).parent == os.getpid()
    assert place in family(SELF)
    assert SELF in family(SELF)
    assert started_at(place) >= started_at(SELF)


def test_what_it_takes_is_counted_while_it_lives_and_afterwards(child: subprocess.Popen[str]) -> None:
    place = Path("/proc") / str(child.pid)
    work(child)
    before, in_all = spent(place), spent_by_family(SELF)
    work(child)
    assert spent(place) - before > 0.09
    assert spent_by_family(SELF) - in_all > 0.09
    assert stat(place).used > 0.15
    waited = stat(SELF).waited
    child.kill()
    child.wait()
    assert stat(SELF).waited - waited > 0.15, "its time is its parent's now"


def test_a_watch_counts_what_those_take_whom_it_asks_for(child: subprocess.Popen[str]) -> None:
    place = Path("/proc") / str(child.pid)
    watch = ProcessorWatch(lambda: [place])
    work(child)
    watch.start()
    work(child)
    assert watch.stop() > 90_000
    watch.start()
    child.kill()
    child.wait()
    assert watch.stop() == 0.0, "it has ended"


def test_what_is_not_there_is_an_error() -> None:
    for look in (stat, spent, started_at):
        with pytest.raises(OSError):
            look(Path("/proc/0"))
