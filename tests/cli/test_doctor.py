"""`bide doctor`: what is well, what is not, and what to do."""

from __future__ import annotations

import asyncio
import re
from typing import TYPE_CHECKING, Any

import pytest
from tests.servers.fixtures import StartsRedis
from tests.waiting import forever

from bide import Bide, Dead, Event, EventKind, Task
from bide.cli.exits import Exit
from bide_proofs.servers.server import ServerClock

if TYPE_CHECKING:
    from tests.cli.conftest import CommandLine


def notes(line: CommandLine, code: int = 0) -> list[tuple[str, str]]:
    found: list[Any] = line.json("doctor", code=code)
    assert all(set(note) == {"level", "what", "advice"} for note in found)
    assert all(note["advice"] for note in found if note["level"] == "error")
    return [(note["level"], note["what"]) for note in found]


def test_all_is_well(line: CommandLine) -> None:
    said = line.run("doctor").stdout
    assert f"the store opens: {line.url}" in said
    assert "settings from the environment: BIDE_STORE" in said
    assert "0 live workers" in said
    assert "no dead tasks" in said
    assert not [what for level, what in notes(line) if level == "error"]


def test_a_topic_that_nobody_works_on(line: CommandLine) -> None:
    line.run("schedule", "forgotten", "--delay", "0s")
    [what] = [what for level, what in notes(line, Exit.NOT_DONE) if level == "error"]
    assert what.startswith("topic forgotten: 1 due, the oldest ")
    assert what.endswith("no live worker has a handler for it")


def test_a_topic_that_somebody_works_on(line: CommandLine) -> None:
    async def examine() -> list[tuple[str, str]]:
        app = Bide(line.url)
        begun = asyncio.Event()

        @app.handler("t", concurrency=1)
        async def slow(task: Task[object]) -> None:
            begun.set()
            await forever()

        async with app.worker() as worker:
            for key in "ab":
                await app.schedule("t", key=key, delay="0s")
            await begun.wait()
            found = await asyncio.to_thread(notes, line)
            await worker.stop(grace=0)
            return found

    found = asyncio.run(examine())
    assert ("ok", "1 live worker, on t") in found
    assert not [what for level, what in found if level == "error"]


def test_dead_tasks(line: CommandLine) -> None:
    async def kill() -> None:
        app = Bide(line.url)
        died = asyncio.Event()

        @app.handler("t")
        async def handle(task: Task[object]) -> None:
            raise Dead("no such order")

        @app.on_dead("t")
        async def report(task: Task[object]) -> None:
            died.set()

        async with app.worker():
            await app.schedule("t", delay="0s")
            await died.wait()

    asyncio.run(kill())
    assert ("warning", "dead tasks: t 1") in notes(line)


def test_a_clock_that_was_set_back(line: CommandLine) -> None:
    async def record() -> None:
        async with Bide(line.url) as app:
            at = app.clock.now() + 3_600_000
            app.recorder.note(Event(at=at, topic="t", key="k", id="i", kind=EventKind.CHANGE))

    asyncio.run(record())
    assert any(level == "warning" and re.search(r"from the future: in (1h|59m)", what) for level, what in notes(line))


def test_a_server_whose_clock_is_an_hour_ahead(
    line: CommandLine, redis_server: StartsRedis, server_clock: ServerClock
) -> None:
    server_clock.shift(3_600)
    server = redis_server(clock=server_clock)
    found = line.json("doctor", "--store", server.url)
    assert any("differs from the store's by 1h" in one["what"] for one in found if one["level"] == "warning"), found


def test_a_store_that_does_not_open(line: CommandLine) -> None:
    path = line.directory / "letter.txt"
    path.write_text("Dear SQLite, " * 400, encoding="utf-8")
    found = line.json("doctor", "--store", f"sqlite:///{path}", code=Exit.NOT_DONE)
    assert found[-1]["level"] == "error"
    assert str(path) in found[-1]["what"]


def test_a_setting_that_is_none(line: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BIDE_LAESE", "5s")
    found = line.json("doctor", code=Exit.NOT_DONE)
    assert "BIDE_LEASE" in found[-1]["what"]
