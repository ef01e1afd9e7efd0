"""Lists, one task in full, counts and the forecast; and `bide top`, in a terminal of any size."""

from __future__ import annotations

import asyncio
import fcntl
import io
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
from rich.cells import cell_len
from rich.console import Console
from tests.cli.conftest import CommandLine, dies, worked
from tests.service.calling import Api, running
from tests.service.test_access import make
from tests.waiting import wait_until

from bide import Bide, Task
from bide.cli.context import without_password
from bide.cli.output import length_words, local_words, relative_words
from bide.cli.tables import print_events
from bide.cli.top import Screen
from bide.core.events import Event, EventKind
from bide.engine.history import History
from bide.engine.pauses import Pauses
from bide.insight.overview import Overview, Overviews
from bide.service.access import Verb
from bide.service.health import Check, Level


@pytest.mark.parametrize(
    "words", ["ls", "show t k", "tally", "events", "top", "pause", "cancel t k", "doctor", "token ls"]
)
def test_a_mistyped_path_makes_no_file(line: CommandLine, words: str) -> None:
    said = line.run(*words.split(), "--store", "sqlite:///tsaks.db", code=1 if words == "doctor" else 3)
    assert "tsaks.db: there is no such file; `bide schedule`" in said.output
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


def test_in_eighty_columns_names_are_folded_and_no_date_is(line: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    line.run("schedule", "order.close", "--delay", "15m", "--group", "user-7")
    monkeypatch.setattr("bide.cli.tables.console", lambda: Console(width=80))
    shown = line.run("ls").stdout
    assert len(re.findall(r"\d{4}-\d\d-\d\d +\n", shown)) == 1
    assert max(map(cell_len, shown.splitlines())) == 80


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
    worked(line.url, dies, *(f"{number:05}" for number in range(3)))
    assert "3 dead: `bide ls --state dead`" in line.run("ls").stdout
    assert "no such order…" in line.run("ls", "--state", "dead").stdout
    shown = line.run("show", "t", "00001").stdout
    assert "and more" in shown
    assert "dead: no such order" in shown
    assert "--yes" in line.error("redrive", "--all-dead")
    assert line.one("redrive", "t", "00001")["answer"] == "redriven"
    assert line.one("redrive", "t", "00001", code=1)["answer"] == "under_way"
    assert line.run("redrive", "--all-dead", "--topic", "u", "--yes").stdout == "no dead tasks in topic u\n"
    redriven = line.json("redrive", "--all-dead", "--topic", "t", "--yes")
    assert [one["answer"] for one in redriven] == ["redriven"] * 2
    assert line.run("redrive", "--all-dead").stdout == "no dead tasks\n"


def test_show_has_the_trace_and_a_list_has_not(line: CommandLine) -> None:
    def fail(task: Task[Any]) -> None:
        raise LookupError("\x1bno such order")

    worked(line.url, fail, "k")
    shown = line.run("show", "t", "k").stdout
    assert 'raise LookupError("\\x1bno such order")' in " ".join(shown.split())
    assert re.search(r"^trace +Traceback", shown, re.MULTILINE)
    assert line.one("show", "t", "k")["task"]["trace"].startswith("Traceback")
    assert "trace" not in line.one("ls", "--state", "dead")
    assert "Traceback" not in line.run("ls", "--state", "dead").stdout + line.run("events").stdout


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
    worked(line.url, lambda task: None, "k", wait=0.3)
    delivery = line.one("show", "t", "k")["delivery"]
    assert (delivery["number"], delivery["late_ms"] >= 300, delivery["took_ms"] >= 0) == (1, True, True)
    assert delivery["why"][0].startswith("Delivery 1 began ")
    shown = line.run("show", "t", "k").stdout
    for name in ("began", "late by", "took", "why"):
        assert re.search(rf"^{name} +\S", shown, re.MULTILINE), name


def test_why_is_shown_without_the_marks_around_names(line: CommandLine) -> None:
    line.run("schedule", "t", "--key", "k", "--delay", "1h")
    line.run("pause", "t")
    shown = line.run("show", "t", "k").stdout
    assert "paused the topic at" in shown
    assert "u2068" not in shown
    assert "u2069" not in shown


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


@pytest.mark.parametrize("kind", EventKind)
def test_each_kind_of_event_is_printed(kind: EventKind, capsys: pytest.CaptureFixture[str]) -> None:
    print_events([Event(at=0, topic="t", key="k", id="1", kind=kind, what="so it was")], of_one=True)
    assert "so it was" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("millis", "words"),
    [
        (0, "0ms"), (250, "250ms"), (4_250, "4.2s"), (59_499, "59s"), (59_999, "1m"), (843_000, "14m 3s"),
        (3_600_000, "1h"), (3_601_000, "1h"), (90_000_000, "1d 1h"), (31_536_000_000, "365d"),
    ],
)  # fmt: skip
def test_lengths_in_words(millis: int, words: str) -> None:
    assert length_words(millis) == words


def test_moments_in_words() -> None:
    assert relative_words(10_000, 10_020) == "now"
    assert relative_words(853_000, 10_000) == "in 14m 3s"
    assert relative_words(10_000, 13_000) == "3s ago"
    assert local_words(253_402_300_799_999).startswith(("9999-12-31", "10000"))


def test_passwords_are_not_shown() -> None:
    assert without_password("redis://user:secret@host/0") == "redis://user:***@host/0"
    assert without_password("sqlite:///a.db") == "sqlite:///a.db"
    options = without_password("postgresql://h/d?user=u&password=a%40b&sslmode=require&sslpassword=b")
    assert options == "postgresql://h/d?user=u&password=***&sslmode=require&sslpassword=***"
    assert "secret" not in repr(Bide("postgresql://h/d?password=secret"))


FINE = [Check("store", Level.OK, "it answers"), Check("clock", Level.WARNING, "this machine's clock is 2.1 s ahead")]


async def busy(app: Bide, topics: int = 3) -> None:
    """Tasks, workers, a pause and a past."""
    store: Any = app.store
    for number in range(topics):
        await app.schedule(f"topic-{number}", None, key="due", delay="0s")
        await app.schedule(f"topic-{number}", None, key="later", delay="1h")
        now = app.clock.now()
        await store.announce(f"worker-{number}", [f"topic-{number}", "多字节的主题"], now + 60_000, now=now)
    now = app.clock.now()
    await store.lease({"topic-0": 1}, now=now, until=now + 60_000, holder="worker-0")
    await Pauses(app.store, app.clock).pause("topic-1", who="anna")
    history = History(app.store, app.clock)
    history.scheduled(12)
    history.began("topic-0", [now - 40] * 9, now)
    await history.flush()


async def seen(app: Bide, prepared: Callable[[Bide], Awaitable[None]]) -> Overview:
    async with app:
        await prepared(app)
        overviews = Overviews(app)
        try:
            return (await overviews.get()).overview()
        finally:
            await overviews.close()


def drawn(seen: Overview, width: int, height: int, failed: str = "") -> list[str]:
    console = Console(file=io.StringIO(), width=width, height=height)
    with console.capture() as captured:
        console.print(Screen("sqlite:///tasks.db").draw(seen, FINE, width, height, failed))
    return captured.get().splitlines()


def test_it_prints_once_where_nobody_watches_and_json_is_one_object(line: CommandLine) -> None:
    said = line.run("top").stdout
    assert "there are no tasks" in said
    assert "no worker is alive" in said
    asyncio.run(seen(Bide(line.url), busy))
    said = line.run("top", "--once").stdout
    waits = "paused, with tasks due: topic-1 1"
    for words in ("pending", "topic-0", "worker-0", "late p99", "● store it answers", waits):
        assert words in said, words
    assert "there are no tasks" not in said

    found = line.one("top")
    assert (found["pending"]["number"], found["pending"]["exact"]) == (5, True)
    assert (found["due"]["number"], found["leased"]["number"], found["dead"]["number"]) == (2, 1, 0)
    assert found["last_minute"]["scheduled"] == 12
    assert 40 <= found["last_minute"]["lateness_p99_ms"] <= 45
    assert sum(found["deliveries_by_minute"]) == 9
    assert found["held_back"] == ["topic-1"]
    assert found["workers_known"] is True
    first = found["holders"][0]
    held = [{"topic": "topic-0", "number": 1, "lost": 0}]
    assert (first["name"], first["worker"], first["held"]) == ("worker-0", True, held)
    assert {one["name"]: one["level"] for one in found["health"]}["store"] == "ok"
    by_topic = {one["topic"]: one for one in found["topics"]}
    assert by_topic["topic-1"]["paused"]["who"] == "anna"
    assert by_topic["topic-2"]["paused"] is None


@pytest.mark.parametrize("topics", [1, 3, 60])
def test_it_stays_within_its_window(topics: int) -> None:
    overview = asyncio.run(seen(Bide("memory:"), partial(busy, topics=topics)))
    for width, height in ((80, 24), (120, 35), (200, 60), (60, 24), (40, 10), (24, 6)):
        lines = drawn(overview, width, height, "the store is away: " + "a long reason " * 20)
        assert max(map(cell_len, lines)) <= width
        assert len(lines) < height
        if width >= 80 and height >= 24:
            said = "\n".join(lines)
            assert "topic-0" in said
            assert "worker-0" in said
            assert ("more" in said) is (topics > 3)


def test_control_characters_are_not_obeyed() -> None:
    async def hostile(app: Bide) -> None:
        await app.schedule("a\u202eb", None, delay="0s")
        now, store = app.clock.now(), cast(Any, app.store)
        await store.announce("\x1b[2J worker", ["a\u202eb"], now + 60_000, now=now)

    said = "\n".join(drawn(asyncio.run(seen(Bide("memory:"), hostile)), 120, 35))
    assert "\x1b" not in said
    assert "\u202e" not in said
    assert "\\x1b[2J worker" in said


def test_over_a_service_there_is_what_it_tells(line: CommandLine, tmp_path: Path) -> None:
    with running(f"sqlite:///{tmp_path}/served.db") as one:
        api = Api(one.url)
        api.put("a", "1", delay="0s")
        api.lease("a")
        api.put("a", "2", delay="1h")
        api.close()
        one.run(one.app.history.flush())
        found = line.one("top", "--store", one.url)
        assert (found["pending"]["number"], found["leased"]["number"]) == (1, 1)
        assert (found["last_minute"]["scheduled"], found["last_minute"]["begun"]) == (2, 1)
        assert sum(found["deliveries_by_minute"]) == 1
        assert {one["name"]: one["level"] for one in found["health"]} == {"store": "ok", "clock": "ok"}
        assert [one["held"] for one in found["holders"]] == [[{"topic": "a", "number": 1, "lost": 0}]]
        said = line.run("top", "--store", one.url).stdout
        assert "● store it answers" in said
        assert "not shown" not in said


def test_with_a_token_that_may_only_read(line: CommandLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with running(f"sqlite:///{tmp_path}/served.db") as one:
        token = one.run(make(one.app, "reads", frozenset({Verb.READ}), ("mine",)))[1].split()[1]
        one.run(one.app.schedule_many([one.app.new(topic, delay="1h") for topic in ("mine", "yours")]))
        monkeypatch.setenv("BIDE_TOKEN", token)
        found = line.one("top", "--store", one.url)
        assert found["pending"]["number"] == 1
        assert [one["topic"] for one in found["topics"]] == ["mine"]
        assert found["workers_known"] is False
        assert found["last_minute"] is None
        assert found["health"][0] == {"name": "store", "level": "ok", "what": "it answers"}
        said = line.run("top", "--store", one.url).stdout
        assert "no worker is alive" not in said
        assert "not shown: the token may not read every topic" in said


def test_doctor_makes_the_checks_that_the_token_allows(
    line: CommandLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running(f"sqlite:///{tmp_path}/served.db") as one:
        token = one.run(make(one.app, "reads", frozenset({Verb.READ})))[1].split()[1]
        narrow = one.run(make(one.app, "events", frozenset({Verb.EVENTS})))[1].split()[1]
        monkeypatch.setenv("BIDE_TOKEN", token)
        found = line.json("doctor", "--store", one.url)
        assert "no dead tasks" in [note["what"] for note in found]
        workers, events = [note["what"] for note in found if note["level"] == "warning"]
        assert "'reads' may not work" in workers
        assert "'reads' may not events" in events
        monkeypatch.setenv("BIDE_TOKEN", narrow)
        found = line.json("doctor", "--store", one.url)
        assert "event log: empty" in [note["what"] for note in found]
        assert ["'events' may not read" in note["what"] for note in found if note["level"] == "warning"] == [True] * 2


@pytest.mark.parametrize("every", ["2", "0s", "100ms", "2h", "often"])
def test_how_often(line: CommandLine, every: str) -> None:
    assert "--every" in line.error("top", "--every", every)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_it_stays_until_told_to_end(line: CommandLine, number: signal.Signals) -> None:
    line.run("schedule", "greeting", '"hello"', "--delay", "1h")
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    environment = {**os.environ, "TERM": "xterm-256color"}
    for name in ("COLUMNS", "LINES"):
        environment.pop(name, None)
    process = subprocess.Popen(
        [sys.executable, "-m", "bide", "top", "--every", "200ms"],
        stdin=theirs, stdout=theirs, stderr=theirs, env=environment, close_fds=True,
    )  # fmt: skip
    os.close(theirs)
    said = b""

    def hear() -> bytes:
        nonlocal said
        said += (more := _read(ours))
        return more

    try:
        wait_until(lambda: hear() and said.count(b"bide top") >= 3, "three looks")
        assert b"greeting" in said
        process.send_signal(number)
        wait_until(lambda: not hear() and process.poll() is not None, "the end")
        assert process.returncode == 0, said
        assert said.count(b"\x1b[?1049h") == said.count(b"\x1b[?1049l") == 1, "the other screen is left again"
        assert b"Traceback" not in said
        assert said.rpartition(b"\x1b[?1049l")[2].count(b"bide top") == 1, "what was seen last stays on the screen"
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()
        os.close(ours)


def _read(terminal: int) -> bytes:
    """What there is to be read within a moment; nothing at the end."""
    ready, _, _ = select.select([terminal], [], [], 0.1)
    if not ready:
        return b""
    try:
        return os.read(terminal, 65_536)
    except OSError:  # the other end is closed
        return b""
