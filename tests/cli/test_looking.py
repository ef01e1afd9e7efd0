"""Lists, one task in full, counts and the forecast."""

from __future__ import annotations

import asyncio
import json
import re
import shlex
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from tests.waiting import pause, until

from bide import Bide, Dead, Task
from bide.cli.output import length_words, local_words, relative_words

if TYPE_CHECKING:
    from tests.cli.conftest import CommandLine


def kill_some(url: str, number: int) -> None:
    """So many tasks of topic t die."""

    async def work() -> None:
        app = Bide(url)

        @app.handler("t")
        async def handle(task: Task[object]) -> None:
            raise Dead("no such order\nand more")

        async with app.worker() as worker:
            await app.schedule_many([app.new("t", key=f"{place:05}", delay="0s") for place in range(number)])
            await until(lambda: worker.stats.dead == number, "all of them")

    asyncio.run(work())


@pytest.mark.parametrize(
    "words", ["ls", "show t k", "tally", "events", "top", "pause", "cancel t k", "doctor", "token ls"]
)
def test_a_mistyped_path_makes_no_file(line: CommandLine, words: str) -> None:
    said = line.run(*words.split(), "--store", "sqlite:///tsaks.db", code=1 if words == "doctor" else 3)
    assert "tsaks.db: there is no such file" in said.output
    assert not (line.directory / "tsaks.db").exists()


def test_ls(line: CommandLine) -> None:
    assert "no task waits in sqlite:///" in line.run("ls").stdout
    line.run("schedule", "b", "--key", "late", "--delay", "2h")
    line.run("schedule", "b", "--key", "early", "--delay", "1h", "--group", "g")
    line.run("schedule", "a", "--key", "[bold]x[/]", "--delay", "3h")
    assert [task["key"] for task in line.json("ls")] == ["[bold]x[/]", "early", "late"]
    assert [task["key"] for task in line.json("ls", "--before", "90m")] == ["early"]
    assert [task["key"] for task in line.json("ls", "--group", "g")] == ["early"]
    assert [task["key"] for task in line.json("ls", "--topic", "b", "--limit", "1")] == ["early"]
    shown = line.run("ls").stdout
    assert "[bold]x[/]" in shown
    assert "in 2h" in shown or "in 1h 59m" in shown
    assert "the first 2 are shown" in line.run("ls", "--limit", "2").stderr
    assert line.run("ls", "--limit", "3").stderr == ""
    assert line.run("ls", "--limit", "1", "--all").stdout.count("waiting") == 3
    assert len(line.json("ls", "--state", "all")) == 3
    assert "no task is dead" in line.run("ls", "--state", "dead").stdout


def test_a_long_list_is_one_table_printed_page_by_page(line: CommandLine) -> None:
    given = "".join(json.dumps({"key": f"{number:04}", "delay": "1h"}) + "\n" for number in range(1_100))
    line.run("schedule", "t", "--many", "-", given=given)
    head, _, *rows = line.run("ls", "--all").stdout.splitlines()
    assert "last error" in head
    assert [row.split()[1] for row in rows] == [f"{number:04}" for number in range(1_100)]
    assert {row.index("waiting") for row in rows} == {head.index("state")}


def test_what_is_listed_can_be_scheduled_elsewhere(line: CommandLine) -> None:
    line.run("schedule", "t", '{"n": 1.10}', "--key", "a", "--delay", "1h", "--group", "g")
    line.run("schedule", "t", "\u00e9", "--key", "b", "--delay", "2h", "--bytes")
    listed = line.run("ls", "--json").stdout
    elsewhere = ("--store", f"sqlite:///{line.directory}/other.db")
    assert line.run("schedule", "--many", "-", *elsewhere, given=listed).stdout == "2 tasks: 2 created\n"
    same = ("topic", "key", "group", "wake_at", "payload", "payload_base64")
    there = [{name: task.get(name) for name in same} for task in line.json("ls", *elsewhere)]
    assert there == [{name: task.get(name) for name in same} for task in line.json("ls")]


def test_a_topic_that_is_mistyped(line: CommandLine) -> None:
    line.run("schedule", "order.close", "--delay", "1h")
    said = line.run("ls", "--topic", "order.clsoe").stdout
    assert said.startswith("no task of topic order.clsoe waits in sqlite:///")
    assert said.endswith("; did you mean order.close?\n")
    assert line.run("ls", "--topic", "invoice", "--state", "dead").stdout == (
        f"no task of topic invoice is dead in {line.url}\n"
    )


def test_the_dead(line: CommandLine) -> None:
    kill_some(line.url, 3)
    assert "3 dead: `bide ls --state dead`" in line.run("ls").stdout
    assert "no such order…" in line.run("ls", "--state", "dead").stdout
    shown = line.run("show", "t", "00001").stdout
    assert "and more" in shown
    assert "dead: no such order" in shown
    assert "--yes" in line.error("redrive", "--all-dead")
    assert line.one("redrive", "t", "00001")["answer"] == "redriven"
    assert line.one("redrive", "t", "00001", code=1)["answer"] == "under_way"
    assert line.run("redrive", "--all-dead", "--topic", "u", "--yes").stdout == "no dead tasks in topic u\n"
    assert line.run("redrive", "--all-dead", "--topic", "t", "--yes").stdout == "2 redriven\n"
    assert line.run("redrive", "--all-dead").stdout == "no dead tasks\n"


def test_show_has_the_trace_and_a_list_has_not(line: CommandLine) -> None:
    async def fail() -> None:
        async with Bide(line.url) as app:
            app.handler("t", retry="never")(handle)
            await app.schedule("t", None, key="k", delay="0s")
            async with app.worker() as worker:
                await worker.until_empty()

    async def handle(task: Task[None]) -> None:
        raise LookupError("\x1bno such order")

    asyncio.run(fail())
    shown = line.run("show", "t", "k").stdout
    assert 'raise LookupError("\\x1bno such order")' in " ".join(shown.split())
    assert re.search(r"^trace +Traceback", shown, re.MULTILINE)
    assert line.one("show", "t", "k")["task"]["trace"].startswith("Traceback")
    assert "trace" not in line.one("ls", "--state", "dead")
    assert "Traceback" not in line.run("ls", "--state", "dead").stdout + line.run("events").stdout


def test_redriving_goes_page_by_page(line: CommandLine) -> None:
    kill_some(line.url, 1_203)
    assert len(line.json("redrive", "--all-dead", "--yes")) == 1_203
    [counts] = line.one("tally")["counts"]
    assert (counts["state"], counts["number"]) == ("waiting", 1_203)


def test_a_reader_that_has_seen_enough_is_no_failure(line: CommandLine) -> None:
    lines = "\n".join('{"delay": "1h"}' for _ in range(3_000))
    line.run("schedule", "t", "--many", "-", given=lines)
    bide = f"{shlex.quote(sys.executable)} -m bide"
    script = f"{bide} ls --all --json | head -n 2; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[2] == "0"
    assert done.stderr == ""


def test_show(line: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    options = ("--key", "k", "--delay", "15m", "--deadline", "1d", "--retry", "quick")
    line.run("schedule", "t", '{"deep": {"number": 42}}', *options)
    line.run("move", "t", "k", "--delay", "1h")
    shape = line.one("show", "t", "k")
    assert shape["task"]["payload"] == {"deep": {"number": 42}}
    assert shape["details"]["retry"]["policy"] == "exponential"
    assert shape["details"]["deadline"] is not None
    assert [event["what"] for event in shape["events"]] == ["reschedule: moved", "schedule: created"]
    shown = line.run("show", "t", "k").stdout
    assert '    "number": 42' in shown
    assert re.search(r"in (1h|59m \d+s) \(", shown)
    monkeypatch.setenv("BIDE_KEEP_CANCELLED", "0s")
    line.run("cancel", "t", "k")
    assert "finished and forgotten" in line.run("show", "t", "k", code=1).stdout
    assert line.one("show", "t", "never", code=1) == {"task": None, "details": None, "delivery": None, "events": []}
    assert "not found" in line.run("show", "t", "never", code=1).stdout


def test_show_says_how_late_it_ran_and_why(line: CommandLine) -> None:
    async def late() -> None:
        async with Bide(line.url) as app:
            app.handler("t")(handle)
            await app.schedule("t", None, key="k", delay="0s")
            await pause(0.3, why="it is to be late by more than what counts as on time")
            async with app.worker() as worker:
                await worker.until_empty()

    async def handle(task: Task[None]) -> None:
        pass

    asyncio.run(late())
    delivery = line.one("show", "t", "k")["delivery"]
    assert (delivery["number"], delivery["late_ms"] >= 300, delivery["took_ms"] >= 0) == (1, True, True)
    assert delivery["why"][0].startswith("Delivery 1 began ")
    shown = line.run("show", "t", "k").stdout
    for name in ("began", "late by", "took", "why"):
        assert re.search(rf"^{name} +\S", shown, re.MULTILINE), name


def test_a_terminal_is_not_obeyed(line: CommandLine) -> None:
    line.run("schedule", "t", "-", "--bytes", "--key", "k", "--delay", "1h", given="\x1b[2J\x07")
    line.run("schedule", "t", '"\x7f\u202e"', "--key", "j", "--delay", "1h")
    for key in "kj":
        shown = line.run("show", "t", key).stdout
        assert not {"\x1b", "\x07", "\x7f", "\u202e"} & set(shown)


def test_tally_and_its_forecast(line: CommandLine) -> None:
    assert "no tasks in" in line.run("tally").stdout
    line.run("schedule", "t", "--delay", "0s")
    for delay in ("30m", "90m", "91m"):
        line.run("schedule", "t", "--delay", delay)
    shape = line.one("tally", "--ahead", "3h", "--step", "1h")
    assert [step["number"] for step in shape["forecast"]] == [1, 2, 0]
    assert shape["due"] == [{"topic": "t", "number": 1, "exact": True}]
    shown = line.run("tally", "--ahead", "2h", "--step", "1h").stdout
    assert shown.count("█") > 3
    assert len(line.one("tally", "--ahead", "1d")["forecast"]) == 24


def test_events_in_words(line: CommandLine) -> None:
    assert "nothing unusual" in line.run("events").stdout
    line.run("schedule", "t", "--key", "k", "--delay", "1h")
    assert "schedule: created" in line.run("events").stdout
    assert "t/k" in line.run("events").stdout


@pytest.mark.parametrize(
    ("millis", "words"),
    [
        (0, "0ms"),
        (250, "250ms"),
        (4_250, "4.2s"),
        (59_499, "59s"),
        (59_999, "1m"),
        (843_000, "14m 3s"),
        (3_600_000, "1h"),
        (3_601_000, "1h"),
        (90_000_000, "1d 1h"),
        (31_536_000_000, "365d"),
    ],
)
def test_lengths_in_words(millis: int, words: str) -> None:
    assert length_words(millis) == words


def test_moments_in_words() -> None:
    assert relative_words(10_000, 10_020) == "now"
    assert relative_words(853_000, 10_000) == "in 14m 3s"
    assert relative_words(10_000, 13_000) == "3s ago"
    assert local_words(253_402_300_799_999).startswith(("9999-12-31", "10000"))


def test_passwords_are_not_shown() -> None:
    from bide.cli.context import without_password

    assert without_password("redis://user:secret@host/0") == "redis://user:***@host/0"
    assert without_password("sqlite:///a.db") == "sqlite:///a.db"
