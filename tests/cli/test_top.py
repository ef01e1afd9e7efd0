"""`bide top`: the overview in a terminal of any size, as JSON, over a service, and until Ctrl-C."""

from __future__ import annotations

import asyncio
import fcntl
import io
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from rich.cells import cell_len
from rich.console import Console
from tests.service.calling import Api, running
from tests.service.test_access import make
from tests.waiting import wait_until

from bide import Bide
from bide.cli.top import Screen
from bide.engine.history import History
from bide.engine.pauses import Pauses
from bide.insight.overview import Overview, Overviews
from bide.service.authz import Verb
from bide.service.health import Check, Level

if TYPE_CHECKING:
    from tests.cli.conftest import CommandLine

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


async def seen_of(topics: int) -> Overview:
    async with Bide("memory:") as app:
        await busy(app, topics)
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


def test_it_prints_once_where_nobody_watches(line: CommandLine) -> None:
    said = line.run("top").stdout
    assert "there are no tasks" in said
    assert "no worker is alive" in said

    async def work() -> None:
        async with Bide(line.url) as app:
            await busy(app)

    asyncio.run(work())
    said = line.run("top", "--once").stdout
    for words in (
        "pending",
        "topic-0",
        "worker-0",
        "late p99",
        "● store it answers",
        "paused, with tasks due: topic-1 1",
    ):
        assert words in said, words
    assert "there are no tasks" not in said


def test_json_is_one_object(line: CommandLine) -> None:
    async def work() -> None:
        async with Bide(line.url) as app:
            await busy(app)

    asyncio.run(work())
    found = line.one("top")
    assert (found["pending"]["number"], found["pending"]["exact"]) == (5, True)
    assert (found["due"]["number"], found["leased"]["number"], found["dead"]["number"]) == (2, 1, 0)
    assert found["last_minute"]["scheduled"] == 12
    assert 40 <= found["last_minute"]["lateness_p99_ms"] <= 45
    assert sum(found["deliveries_by_minute"]) == 9
    assert found["held_back"] == ["topic-1"]
    assert found["workers_known"] is True
    [first, *_] = found["holders"]
    assert (first["name"], first["worker"], first["held"]) == (
        "worker-0", True, [{"topic": "topic-0", "number": 1, "lost": 0}],
    )  # fmt: skip
    assert {one["name"]: one["level"] for one in found["health"]}["store"] == "ok"
    by_topic = {one["topic"]: one for one in found["topics"]}
    assert by_topic["topic-1"]["paused"]["who"] == "anna"
    assert by_topic["topic-2"]["paused"] is None


@pytest.mark.parametrize("size", [(80, 24), (120, 35), (200, 60), (60, 24), (40, 10), (24, 6)])
@pytest.mark.parametrize("topics", [1, 3, 60])
def test_it_stays_within_its_window(size: tuple[int, int], topics: int) -> None:
    width, height = size
    lines = drawn(asyncio.run(seen_of(topics)), width, height, "the store is away: " + "a long reason " * 20)
    assert max(map(cell_len, lines)) <= width
    assert len(lines) < height
    if width >= 80 and height >= 24:
        said = "\n".join(lines)
        assert "topic-0" in said
        assert "worker-0" in said
        assert ("more" in said) is (topics > 3)


def test_control_characters_are_not_obeyed() -> None:
    async def work() -> Overview:
        async with Bide("memory:") as app:
            await app.schedule("a\u202eb", None, delay="0s")
            now = app.clock.now()
            store: Any = app.store
            await store.announce("\x1b[2J worker", ["a\u202eb"], now + 60_000, now=now)
            overviews = Overviews(app)
            try:
                return (await overviews.get()).overview()
            finally:
                await overviews.close()

    said = "\n".join(drawn(asyncio.run(work()), 120, 35))
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
        one.run(_two(one.app))
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


async def _two(app: Bide) -> None:
    for topic in ("mine", "yours"):
        await app.schedule(topic, None, delay="1h")


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
