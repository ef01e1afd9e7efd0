"""The demo: every scenario comes to its right end, also when it is stopped, killed and started again."""

from __future__ import annotations

import asyncio
import io
import re
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from rich.console import Console
from tests.waiting import wait_until

from bide import Bide
from bide.cli.demo.board import board
from bide.cli.demo.pace import Pace, Scale
from bide.cli.demo.publishing import EVENING, TOMORROW_8
from bide.cli.demo.run import Demo
from bide.cli.demo.watching import Lines
from bide.cli.exits import Exit

if TYPE_CHECKING:
    from tests.cli.conftest import CommandLine

QUICK = ("demo", "--plain", "--speed", "8")
SLOWER = ("demo", "--plain", "--speed", "3")
"""So that it has not ended before it is killed."""
HANGS = "180"
LAST_WORD = ("Bold claims", "whatever was told of them last")
"""The author takes them back before they are due: on a machine that stands still just then that may be too late."""
ENDS: dict[str, set[tuple[str | int, str | int]]] = {
    "SELECT title, status FROM demo_post": {
        ("Morning news", "published"), ("Price list", "published"), ("Big surprise", "published"), LAST_WORD,
    },
    "SELECT number, status FROM demo_order": {(1041, "paid"), (1042, "paid"), (1043, "closed")},
    "SELECT passenger, stars FROM demo_ride": {("Ada's ride", 5), ("Ben's ride", 4), ("Cem's ride", 5)},
    "SELECT name, meals FROM demo_pet": {("Mia's cat", 1), ("Mia's dog", 2), ("Ben's rabbit", 1)},
}  # fmt: skip


def assert_right_ends(path: Path) -> None:
    with closing(sqlite3.connect(path)) as connection:

        def told(thing: str) -> list[str]:
            lines = "SELECT words FROM demo_line WHERE thing = ? ORDER BY line"
            return [words for (words,) in connection.execute(lines, (thing,))]

        claims = ("Bold claims", {"back to draft": "draft"}.get(told("Bold claims")[-1], "published"))
        for query, rows in ENDS.items():
            assert set(connection.execute(query).fetchall()) == {claims if row is LAST_WORD else row for row in rows}
        for thing in ("book-shop", "tea-house", "noodle-bar"):
            assert told(thing)[-1] == "200"
            assert told(thing).count("200") == 1


def test_it_comes_to_its_end(line: CommandLine) -> None:
    result = line.run(*QUICK, "--seconds", HANGS)
    for code in ("E1", "E2", "E3", "E5", "E7"):
        assert re.search(f"{code} .*: came to its end", result.stdout)
    assert "never early" in result.stdout
    assert "What to try next" in result.stdout
    assert_right_ends(line.directory / "bide-demo.db")
    assert line.json("ls", "--store", "sqlite:///bide-demo.db") == []
    assert len(line.json("ls", "--state", "done", "--store", "sqlite:///bide-demo.db")) > 8

    again = line.run(*QUICK, "--seconds", "0.5", code=Exit.NOT_DONE).stdout
    assert "continuing" not in again
    assert "Stopped before the end" in again


@pytest.fixture
def killed(line: CommandLine) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "bide", *SLOWER, "--store", "sqlite:///own.db"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    yield process
    if process.poll() is None:
        process.kill()
    process.wait()
    assert process.stdout is not None
    process.stdout.close()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_started_again_it_goes_on(line: CommandLine, killed: subprocess.Popen[str], number: signal.Signals) -> None:
    assert killed.stdout is not None
    assert any("Big surprise: now!" in said for said in killed.stdout)
    assert f"a demo is running, process {killed.pid}" in line.error("demo", "--store", "sqlite:///own.db")
    killed.send_signal(number)
    said, _ = killed.communicate(timeout=60)
    if number is signal.SIGINT:
        assert killed.returncode == Exit.INTERRUPTED
        assert "`bide demo --store sqlite:///own.db` goes on from here" in said
    due = ("ls", "--topic", "blog.publish", "--before", "0s", "--store", "sqlite:///own.db")
    wait_until(lambda: "Morning news" in {one["key"] for one in line.json(*due)}, "the news to be due meanwhile")
    result = line.run(*QUICK, "--store", "sqlite:///own.db", "--seconds", HANGS)
    assert "continuing: the stories began" in result.stdout
    assert "was stopped" in result.stdout
    assert_right_ends(line.directory / "own.db")


def test_fresh_begins_anew(line: CommandLine) -> None:
    line.run(*QUICK, "--seconds", "0.8", code=Exit.NOT_DONE)
    assert "continuing" in line.run(*QUICK, "--seconds", "0.3", code=Exit.NOT_DONE).stdout
    assert "continuing" not in line.run(*QUICK, "--seconds", "0.3", "--fresh", code=Exit.NOT_DONE).stdout


def test_the_board_stays_within_its_window(line: CommandLine) -> None:
    store = "sqlite:///bide-demo.db"
    demo = Demo(Bide(store), "bide-demo.db", speed=8, fresh=True)
    asyncio.run(demo.play(Lines(store), seconds=3))
    for width, height in ((80, 24), (120, 35), (200, 60), (60, 24)):
        console = Console(file=io.StringIO(), width=width, height=height)
        drawn = board(demo.stories, demo.lateness, store, "", int(time.time() * 1000), width, height)
        with console.capture() as captured:
            console.print(drawn)
        lines = captured.get().splitlines()
        assert max(map(len, lines)) <= width
        assert len(lines) <= height


def test_quickened_time() -> None:
    scale = Scale("1m", "1s", then=Scale("1h", "1s", after="15m"))
    assert scale.words == "1m = 1s, after 15m 1h = 1s"
    for story, real in ((0, 0), (60_000, 1_000), (900_000, 15_000), (900_000 + 3_600_000, 16_000)):
        assert scale.to_real(story) == real
        assert scale.to_story(real) == story
    pace = Pace(Scale("1h", "1.5s"), begins=1_000_000, speed=2, opens=EVENING)
    assert pace.real_at(3_600_000) == 1_000_750
    assert pace.at(TOMORROW_8).timestamp() == 1_009
    assert pace.words(1_009_000) == "Fri 08:00"
    assert pace.length("2h") == timedelta(seconds=1.5)
