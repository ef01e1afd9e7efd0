"""The group of processes that all proofs rest on: who is asked, killed, replaced, ended, and what is called wrong."""

from __future__ import annotations

import json
import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.faults.child import Spec
from tests.waiting import until

from bide.testing.history.events import Died
from bide.testing.history.recording import Journal, Log, read
from bide_proofs.harness import processes
from bide_proofs.harness.command import ChildFailed, tell
from bide_proofs.harness.processes import Child, ChildSpec, ProcessGroup

ROOT = Path(__file__).resolve().parents[2]
PATHS = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))


@asynccontextmanager
async def group_of(folder: Path, does: str, **options: Any) -> AsyncIterator[ProcessGroup]:
    def spec_of(kind: str, slot: int, name: str) -> ChildSpec:
        environment = {"PYTHONPATH": PATHS}
        return ChildSpec(
            module="tests.faults.child", spec=Spec(does), environment=environment, finishes=does == "finishes"
        )

    group = ProcessGroup(folder, spec_of, **options)
    try:
        await group.start("child", 2)
        yield group
    finally:
        await group.abandon()


def names(group: ProcessGroup) -> list[str]:
    return [child.name for child in group.of("child")]


async def test_children_answer_and_end_when_they_are_told(tmp_path: Path) -> None:
    said: list[tuple[str, dict[str, Any]]] = []
    async with group_of(tmp_path, "answers", heard=lambda child, words: said.append((child.name, words))) as group:
        assert [await child.ask("look") for child in group.of("child")] == ["answers"] * 2
        await group.end("child")
        assert group.children == []
        assert group.wrong == []
    assert sorted(said, key=str) == sorted(
        [(name, {word: value}) for name in ("child-0.1", "child-1.1") for word, value in
         (("ready", True), ("look", "answers"))], key=str,
    )  # fmt: skip
    assert group.errors() == ["child-0.1: it answers", "child-1.1: it answers"]


async def test_one_that_is_killed_is_replaced_and_its_death_is_written_down(tmp_path: Path) -> None:
    log = Log(tmp_path / "frame.jsonl")
    journal = Journal(log.say, time_ns=time.monotonic_ns, clock=lambda: 0)
    async with group_of(tmp_path, "answers", journal=journal) as group:
        assert await group.kill(group.of("child")[0])
        assert names(group) == ["child-0.2", "child-1.1"]
        assert group.wrong == []
        assert group.started == 3
    log.close()
    assert next(one.who for one in read(tmp_path / "frame.jsonl") if isinstance(one, Died)) == "child-0.1"


async def test_one_that_ends_by_itself_is_blamed_and_replaced(tmp_path: Path) -> None:
    async with group_of(tmp_path, "fails") as group:
        with pytest.raises(ChildFailed, match="ended with 3"):
            await group.of("child")[0].ask("look")
        await until(lambda: names(group) == ["child-0.2", "child-1.1"], "another to take its place")
        assert group.wrong == ["child-0.1 ended with 3"]


async def test_one_that_may_finish_is_neither(tmp_path: Path) -> None:
    async with group_of(tmp_path, "finishes") as group:
        child = group.of("child")[0]
        child.send("go")
        await child.over
        assert not await group.kill(child)
        assert names(group) == ["child-1.1"]
        assert group.wrong == []


async def test_one_that_does_not_end_is_blamed_and_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with group_of(tmp_path, "stays") as group:
        monkeypatch.setattr(processes, "PATIENCE", 0.1)
        await group.end("child")
        assert group.children == []
        assert group.wrong[0] == "child-0.1 was told to end, and did not within 0.1 s"


async def test_a_line_that_a_kill_cut_off_was_not_said(tmp_path: Path) -> None:
    async with group_of(tmp_path, "answers") as group:
        first: Child = group.of("child")[0]
        assert first._process.stdout is not None
        first._process.stdout.feed_data(b'{"look": "hal')
        await group.kill(first)
        assert "look" not in first.said
        assert group.wrong == []


def test_the_exit_code_and_the_results_say_whether_anything_was_wrong(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results = tmp_path / "deeper" / "results.jsonl"
    assert tell({"store": "one"}, {"P2": []}, results) == 0
    assert tell({"store": "two"}, {"P1": [], "P2": ["it is lost"]}, results) == 1
    assert capsys.readouterr().err == "P2: it is lost\n"
    assert [json.loads(line) for line in results.read_text().splitlines()] == [
        {"store": "one", "wrong": {"P2": 0}}, {"store": "two", "wrong": {"P1": 0, "P2": 1}}
    ]  # fmt: skip
