"""The command line in a temporary directory, with a store of its own."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from tests.waiting import pause

from bide import Bide, Dead, Task
from bide.cli import main


class CommandLine:
    """`run("ls", "--json")` runs `bide ls --json`, in this process."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.url = f"sqlite:///{directory}/tasks.db"

    def run(self, *args: str, code: int | None = 0, given: str | bytes | None = None) -> Result:
        """Run it; `code` is the exit code that is expected."""
        result = CliRunner().invoke(main, list(args), input=given, catch_exceptions=False)
        if code is not None:
            assert result.exit_code == code, f"{args}: {result.exit_code}\n{result.stdout}\n{result.stderr}"
        assert "Traceback" not in result.stderr
        return result

    def json(self, *args: str, code: int = 0, given: str | None = None) -> list[Any]:
        """The objects that `--json` prints."""
        return [json.loads(line) for line in self.run(*args, "--json", code=code, given=given).stdout.splitlines()]

    def one(self, *args: str, code: int = 0, given: str | None = None) -> Any:
        [shape] = self.json(*args, code=code, given=given)
        return shape

    def error(self, *args: str, code: int = 2, given: str | None = None) -> str:
        """The one line on stderr."""
        result = self.run(*args, code=code, given=given)
        assert result.stderr.count("\n") == 1, result.stderr
        assert result.stderr.startswith("bide: ")
        return result.stderr.strip()


def worked(url: str, handle: Callable[[Task[Any]], Any], *keys: str, wait: float = 0.0) -> None:
    """Tasks of topic t and group g with these keys, each delivered once, after `wait` seconds."""

    async def work() -> None:
        async with Bide(url) as app:
            app.handler("t", retry="never")(handle)
            await app.schedule_many([app.new("t", None, key=key, group="g", delay="0s") for key in keys])
            await pause(wait, why="it is to be late")
            async with app.worker() as worker:
                await worker.until_empty()

    asyncio.run(work())


def dies(task: Task[Any]) -> None:
    raise Dead("no such order\nand more")


@pytest.fixture
def line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CommandLine:
    for name in [name for name in os.environ if name.startswith("BIDE_")]:
        monkeypatch.delenv(name)
    found = CommandLine(tmp_path)
    (tmp_path / "tasks.db").touch()  # as an empty store: who only looks makes none
    monkeypatch.setenv("BIDE_STORE", found.url)
    monkeypatch.chdir(tmp_path)
    return found


Write = Callable[[str, str], Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Write a file of this name and text into the temporary directory."""

    def written(name: str, text: str) -> Path:
        path = tmp_path / name
        path.write_text(text, encoding="utf-8")
        return path

    return written
