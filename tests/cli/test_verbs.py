"""Putting in and changing: what is answered, in words, in JSON, and as an exit code."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import re
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from bide import Bide, Dead, OutcomeUnknown, StoreUnavailable, Task
from bide.cli.exits import Exit
from bide.core.errors import PartlyFailed, StoreError

if TYPE_CHECKING:
    from tests.cli.conftest import CommandLine, Write

INSTANT = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z")
TASK_FIELDS = {
    "topic", "key", "id", "group", "state", "due_at", "wake_at", "attempt", "token", "payload", "error", "created_at",
    "finished_at",
}  # fmt: skip


def test_schedule_answers_with_the_task(line: CommandLine) -> None:
    shape = line.one("schedule", "order.close", '{"number": 42}', "--key", "42", "--group", "user-7", "--delay", "15m")
    assert shape["answer"] == "created"
    task = shape["task"]
    assert set(task) == TASK_FIELDS
    assert (task["topic"], task["key"], task["group"], task["state"]) == ("order.close", "42", "user-7", "waiting")
    assert task["payload"] == {"number": 42}
    assert INSTANT.fullmatch(task["due_at"])
    assert INSTANT.fullmatch(task["created_at"])
    assert task["finished_at"] is None


def test_schedule_in_words(line: CommandLine) -> None:
    said = line.run("schedule", "order.close", "--key", "42", "--delay", "15m").stdout
    assert said.startswith("order.close/42: created, due in 15m (")


def test_a_time_in_the_past_is_said(line: CommandLine) -> None:
    said = line.run("schedule", "t", "--key", "k", "--at", "2020-01-01T00:00:00Z").stdout
    assert re.fullmatch(r"t/k: created, due [^(]+ ago \(20.*\), so now\n", said)
    assert ", so now" in line.run("move", "t", "k", "--at", "2020-01-01T00:00:00Z").stdout


def test_on_conflict(line: CommandLine) -> None:
    args = ("schedule", "t", "--key", "k", "--delay")
    line.run(*args, "1h")
    assert line.one(*args, "2h", "--on-conflict", "keep")["answer"] == "kept"
    assert line.one(*args, "2h", "--on-conflict", "refuse", code=1)["answer"] == "refused"
    assert line.one(*args, "2h")["answer"] == "replaced"


def test_payloads_from_everywhere(line: CommandLine, write: Write) -> None:
    write("order.json", '{\n  "number": 9007199254740993\n}\n')

    def payload(*args: str, given: str | None = None) -> object:
        return line.one("schedule", "t", *args, "--delay", "1h", given=given)["task"]["payload"]

    assert payload() is None
    assert payload("-", given="[1, 2]") == [1, 2]
    assert payload("@order.json") == {"number": 9007199254740993}
    assert payload('"\\n"') == "\n"
    raw = line.one("schedule", "t", "-", "--bytes", "--delay", "1h", given="no JSON")["task"]
    assert "payload" not in raw
    assert raw["payload_base64"] == "bm8gSlNPTg=="


def test_many_lines(line: CommandLine, write: Write) -> None:
    tasks = [{"key": str(number), "delay": "1h", "payload": number} for number in range(2_500)]
    write("tasks.jsonl", "\n".join(json.dumps(task) for task in tasks) + "\n\n")
    assert line.run("schedule", "t", "--many", "tasks.jsonl").stdout == "2,500 tasks: 2,500 created\n"
    assert line.run("schedule", "t", "--many", "tasks.jsonl").stdout == "2,500 tasks: 2,500 replaced\n"
    own = '{"topic": "other", "key": "a", "at": "2099-01-01T00:00:00Z", "payload_base64": "AAE=", "retry": "quick"}'
    [shape] = line.json("schedule", "--many", "-", given=own)
    assert (shape["task"]["topic"], shape["task"]["payload_base64"]) == ("other", "AAE=")
    assert line.one("tally", "--topic", "t")["counts"] == [
        {"topic": "t", "state": "waiting", "number": 2_500, "exact": True}
    ]
    assert line.json("events") == []


def test_many_stops_at_a_bad_line_and_says_what_is_done(line: CommandLine) -> None:
    good = "\n".join(json.dumps({"key": str(number), "delay": "1h"}) for number in range(1_000))
    given = f'{good}\n{{"delay": "5 parsecs"}}\n'
    complaint = line.error("schedule", "t", "--many", "-", given=given, code=Exit.PARTLY)
    assert "line 1001, delay: '5 parsecs' is not accepted" in complaint
    assert "1,000 tasks of earlier lines are scheduled, and none from line 1001 on" in complaint
    given = given.replace("5 parsecs", "5s")
    assert line.run("schedule", "t", "--many", "-", "--from", "1001", given=given).stdout == "1 tasks: 1 created\n"
    for bad in ("[1]", '{"delay": "1h", "prioriti": 3}', '{"delay": '):
        assert "line 1: " in line.error("schedule", "t", "--many", "-", given=bad)
    assert "line 1, topic" in line.error("schedule", "--many", "-", given='{"delay": "1h"}')


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (StoreUnavailable("away"), "scheduled, and none from line 1001 on: go on with --from 1001"),
        (OutcomeUnknown("lost"), "scheduled; those of lines 1001 to 2000 may be; with keys, --from 1001 repeats them"),
        (PartlyFailed([StoreUnavailable("away")]), "scheduled, and 0 of lines 1001 to 2000; with keys, --from 1001"),
    ],
)
def test_many_says_how_far_it_came_when_the_store_fails(
    line: CommandLine, monkeypatch: pytest.MonkeyPatch, error: StoreError, said: str
) -> None:
    fail_at(2, "schedule_many", error, monkeypatch)
    given = '{"delay": "1h"}\n' * 2_500
    complaint = line.error("schedule", "t", "--many", "-", given=given, code=Exit.PARTLY)
    assert f"1,000 tasks of earlier lines are {said}" in complaint


def test_a_first_page_that_fails_is_done_or_not_as_its_error_says(
    line: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    for error, code in ((StoreUnavailable("away"), Exit.UNAVAILABLE), (OutcomeUnknown("lost"), Exit.PARTLY)):
        fail_at(1, "schedule_many", error, monkeypatch)
        line.error("schedule", "t", "--many", "-", given='{"delay": "1h"}\n', code=code)


def test_redrive_and_groups_say_how_far_they_came(line: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    async def die() -> None:
        async with Bide(line.url) as app:
            app.handler("t", retry="never")(dies)
            await app.schedule_many([app.new("t", None, delay="0s", group="g") for _ in range(600)])
            async with app.worker() as worker:
                await worker.until_empty()

    async def dies(task: Task[None]) -> None:
        raise Dead("as it was told")

    asyncio.run(die())
    with monkeypatch.context() as patched:
        fail_at(2, "redrive_many", StoreUnavailable("away"), patched)
        complaint = line.error("redrive", "--all-dead", "--yes", code=Exit.PARTLY)
    assert "500 tasks were redriven; run it again for the rest" in complaint
    assert line.run("redrive", "--all-dead", "--yes").stdout == "100 redriven\n"

    async def cancel_group(app: Bide, *_: object, **__: object) -> None:
        one = await anext(app.find(topic="t", state="waiting"))
        raise PartlyFailed([await app.cancel("t", one.key), StoreUnavailable("away")])

    monkeypatch.setattr(Bide, "cancel_group", cancel_group)
    ended = line.run("cancel", "--group", "g", code=Exit.PARTLY)
    assert "group g: cancelled 1" in ended.stdout
    assert "1 of 2 failed" in ended.stderr


def fail_at(call: int, verb: str, error: StoreError, monkeypatch: pytest.MonkeyPatch) -> None:
    """The call of this number fails."""
    real, calls = getattr(Bide, verb), itertools.count(1)

    async def called(app: Bide, *args: object, **kwargs: object) -> object:
        if next(calls) == call:
            raise error
        return await real(app, *args, **kwargs)

    monkeypatch.setattr(Bide, verb, called)


def test_move_fire_cancel(line: CommandLine) -> None:
    token = line.one("schedule", "t", "--key", "k", "--delay", "1h")["task"]["token"]
    assert line.one("move", "t", "k", "--delay", "2h", "--if-token", str(token))["answer"] == "moved"
    assert line.one("move", "t", "k", "--delay", "3h", "--if-token", str(token), code=1)["answer"] == "stale_token"
    assert re.search(r"before: in (2h|1h 59m) \(", line.run("fire", "t", "k").stdout)
    assert line.one("cancel", "t", "k")["answer"] == "cancelled"
    for args in (("move", "t", "k", "--delay", "1h"), ("fire", "t", "k"), ("cancel", "t", "k"), ("redrive", "t", "k")):
        assert line.one(*args, code=1)["answer"] == "finished"
    for args in (("move", "t", "j", "--delay", "1h"), ("fire", "t", "j"), ("cancel", "t", "j"), ("redrive", "t", "j")):
        assert line.one(*args, code=1) == {"answer": "not_found", "task": None}
        assert "t/j: not found" in line.run(*args, code=1).stdout


def test_a_move_past_the_deadline_is_refused(line: CommandLine) -> None:
    line.run("schedule", "t", "--key", "k", "--delay", "1h", "--deadline", "2h")
    refused = line.run("move", "t", "k", "--delay", "3h", code=1).stdout
    assert re.search(r"refused, its deadline is in (2h|1h 59m)", refused)


def test_groups(line: CommandLine) -> None:
    for topic in ("meal", "egg"):
        for key in "ab":
            line.run("schedule", topic, "--key", key, "--group", "mia", "--delay", "4h")
    said = line.run("shift", "--group", "mia", "--topic", "meal", "--by", "-2h").stdout
    assert len(re.findall(r"due in (?:2h|1h 59m) ", said)) == 2
    assert said.endswith("group mia: moved 2\n")
    assert {shape["answer"] for shape in line.json("shift", "--group", "mia", "--by", "-5h")} == {"moved"}
    assert line.one("tally", "--topic", "egg")["due"] == [{"topic": "egg", "number": 2, "exact": True}]
    assert len(line.json("cancel", "--group", "mia", "--topic", "egg")) == 2
    assert len(line.json("cancel", "--group", "mia")) == 2
    assert "no live task" in line.run("cancel", "--group", "mia", code=1).stdout
    assert "no live task" in line.run("shift", "--group", "mia", "--by", "1h", code=1).stdout


def test_what_a_person_changes_is_noted(line: CommandLine) -> None:
    line.run("schedule", "t", "--key", "k", "--delay", "1h")
    line.run("move", "t", "k", "--delay", "2h")
    moved, created = line.json("events", "t", "k")
    assert (created["kind"], created["what"]) == ("change", "schedule: created")
    assert "@" in created["who"]
    assert moved["was"] == created["wake_at"]
    assert INSTANT.fullmatch(moved["wake_at"])


def test_scheduling_loads_neither_rich_nor_the_bench(line: CommandLine) -> None:
    code = (
        "import sys\n"
        "from bide.cli import main\n"
        "try: main(['schedule', 't', '--delay', '1h'])\n"
        "finally: print(*sys.modules, sep='\\n')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    assert "bide.cli.schedule" in loaded
    assert not {"rich", "bide.cli.bench", "bide.cli.tables", "bide.cli.demo", "uvloop"} & loaded


def test_settings_name_the_person(line: CommandLine) -> None:
    os.environ["BIDE_ACTOR"] = "nightly cleaner"
    try:
        line.run("schedule", "t", "--key", "k", "--delay", "1h")
    finally:
        del os.environ["BIDE_ACTOR"]
    assert line.one("events", "t", "k")["who"] == "nightly cleaner"


def test_the_shared_options_may_stand_anywhere(line: CommandLine) -> None:
    other = f"sqlite:///{line.directory}/other.db"
    line.run("--store", other, "schedule", "t", "--key", "k", "--delay", "1h")
    assert line.json("ls") == []
    assert [task["key"] for task in line.json("ls", "--store", other)] == ["k"]


def test_memory_is_said_to_be_forgotten(line: CommandLine) -> None:
    result = line.run("schedule", "t", "--delay", "1h", "--store", "memory:")
    assert "memory: keeps nothing after" in result.stderr
