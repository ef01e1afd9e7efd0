"""`bide pause` and `resume`, and how the other commands say that something is held back."""

from __future__ import annotations

import asyncio
import re
import sys
from asyncio.subprocess import PIPE
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bide import Bide, StoreUnavailable
from bide.cli.context import person
from bide.cli.exits import Exit

if TYPE_CHECKING:
    import pytest
    from tests.cli.conftest import CommandLine


def test_pause_and_resume(line: CommandLine) -> None:
    first, second = line.json("pause", "order.close", "mail")
    assert first == {"topic": "order.close", "since": first["since"], "who": person(), "paused": True, "changed": True}
    assert (second["topic"], second["changed"]) == ("mail", True)
    assert line.one("pause", "order.close") == {**first, "changed": False}
    assert line.json("pause") == [
        {"topic": one["topic"], "since": one["since"], "who": person()} for one in (second, first)
    ]
    over = {"topic": "mail", "since": None, "who": None, "paused": False, "changed": True}
    assert line.one("resume", "mail") == over
    assert line.one("resume", "mail") == {**over, "changed": False}
    assert [one["topic"] for one in line.json("pause")] == ["order.close"]


def test_in_words(line: CommandLine) -> None:
    assert line.run("pause").stdout == f"no topic is paused in {line.url}\n"
    assert line.run("pause", "t").stdout == "t: paused\n"
    assert line.run("pause", "t").stdout.startswith("t: already paused: paused ")
    listed = line.run("pause").stdout
    assert listed.startswith("t: paused ")
    assert listed.endswith(f" by {person()}\n")
    assert line.run("resume", "t").stdout == "t: resumed\n"
    assert line.run("resume", "t").stdout == "t: was not paused\n"


def test_bad_input_pauses_nothing(line: CommandLine) -> None:
    assert "TOPIC: 'bide:settings' is not accepted" in line.error("pause", "good", "bide:settings")
    assert line.json("pause") == []
    assert "Missing argument" in line.error("resume")


def test_answers_say_that_it_waits(line: CommandLine) -> None:
    args = ("t", "--key", "k", "--group", "g")
    assert "paused" not in line.one("schedule", *args, "--delay", "1h")
    line.run("pause", "t")
    assert line.one("schedule", *args, "--delay", "1h")["paused"] is True
    assert line.one("move", "t", "k", "--delay", "2h")["paused"] is True
    assert line.one("fire", "t", "k")["paused"] is True
    assert line.one("shift", "--group", "g", "--by", "1h")["paused"] is True
    said = line.run("move", "t", "k", "--delay", "3h").stdout
    assert said.endswith("; the topic is paused: it waits for bide resume t\n")
    assert "paused" not in line.one("schedule", "other", "--key", "k", "--delay", "1h")
    assert "paused" not in line.one("cancel", "t", "k")
    assert "paused" not in line.one("move", "t", "none", "--delay", "1h", code=Exit.NOT_DONE)


def test_tally_shows_it(line: CommandLine) -> None:
    line.run("pause", "t", "empty")
    line.run("schedule", "t", "--delay", "1h")
    line.run("schedule", "other", "--delay", "1h")
    shape = line.one("tally")
    assert [one["topic"] for one in shape["paused"]] == ["empty", "t"]
    assert [one["topic"] for one in line.one("tally", "--topic", "t")["paused"]] == ["t"]
    said = line.run("tally").stdout
    assert "t is paused " in said
    assert "resume it with: bide resume t" in said
    assert "other is paused" not in said


def test_doctor_explains_what_waits(line: CommandLine) -> None:
    line.run("schedule", "t", "--delay", "0s")
    assert any("no live worker" in note["what"] for note in line.json("doctor", code=Exit.NOT_DONE))
    line.run("pause", "t")
    [note] = [note for note in line.json("doctor") if note["what"].startswith("topic t: 1 due")]
    assert note["level"] == "warning"
    assert ", held back: it is paused " in note["what"]
    assert note["advice"] == "resume it with: bide resume t"


def test_what_cannot_be_told_fails_nothing(line: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    async def away(app: Any) -> Any:
        raise StoreUnavailable("away")

    monkeypatch.setattr(Bide, "paused", away)
    done = line.run("schedule", "t", "--key", "k", "--delay", "1h")
    assert re.match(r"t/k: created, due in (1h|59m \d+s) \(", done.stdout)
    assert done.stderr == "bide: note: the pauses cannot be read: away\n"


def test_work_says_when_it_holds_back(line: CommandLine, tmp_path: Path) -> None:
    """A process of its own: paused before it starts, resumed while it runs."""
    (tmp_path / "shop.py").write_text(
        "from bide import Bide\n"
        "app = Bide()\n"
        "@app.handler('t')\n"
        "async def handle(task):\n"
        "    print('handled', task.key, flush=True)\n"
    )

    line.run("pause", "t")
    line.run("schedule", "t", "--key", "k", "--delay", "0s")

    async def story() -> None:
        command = (sys.executable, "-m", "bide", "work", "shop:app")
        work = await asyncio.create_subprocess_exec(*command, cwd=tmp_path, stdout=PIPE, stderr=PIPE)
        assert work.stderr is not None
        assert work.stdout is not None
        try:
            async with asyncio.timeout(60):
                while b"t is held back: paused since" not in (await work.stderr.readline()):
                    assert not work.stderr.at_eof()
                async with Bide(line.url) as app:
                    await app.resume("t")
                assert await work.stdout.readline() == b"handled k\n"
        finally:
            work.terminate()
            await work.communicate()
        assert work.returncode == 0

    asyncio.run(story())
