"""Putting in, changing, pausing and tokens: what is answered, in words and JSON, and where no output can be had."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import re
import subprocess
import sys
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from tests.cli.conftest import CommandLine, Write, dies, worked

from bide import Bide, OutcomeUnknown, StoreUnavailable
from bide.cli.context import person
from bide.cli.exits import Exit
from bide.core.errors import PartlyFailed, StoreError
from bide.core.instants import LAST_INSTANT
from bide.service.access import DEFAULT_VERBS, Access, Unauthorized, Verb, parse

INSTANT = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z")
TASK_FIELDS = {
    "topic", "key", "id", "group", "state", "due_at", "wake_at", "attempt", "token", "payload", "error", "created_at",
    "finished_at",
}  # fmt: skip


def test_schedule_answers_with_the_task(line: CommandLine) -> None:
    words = ("schedule", "order.close", '{"number": 42}', "--key", "42", "--group", "user-7", "--delay", "15m")
    assert line.run(*words).stdout.startswith("order.close/42: created, due in 15m (")
    shape = line.one(*words)
    assert shape["answer"] == "replaced"
    task = shape["task"]
    assert set(task) == TASK_FIELDS
    assert (task["topic"], task["key"], task["group"], task["state"]) == ("order.close", "42", "user-7", "waiting")
    assert task["payload"] == {"number": 42}
    assert INSTANT.fullmatch(task["due_at"])
    assert INSTANT.fullmatch(task["created_at"])
    assert task["finished_at"] is None


def test_a_time_in_the_past_is_said(line: CommandLine) -> None:
    said = line.run("schedule", "t", "--key", "k", "--at", "2020-01-01T00:00:00Z").stdout
    assert re.fullmatch(r"t/k: created, due [^(]+ ago \(20.*\), so now\n", said)
    assert ", so now" in line.run("move", "t", "k", "--at", "2020-01-01T00:00:00Z").stdout


def test_a_recurring_task_is_added_with_each_option_and_shown_as_one(
    line: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    line.run(
        "recurring", "add", "rent", "0 8 1 * *", "--start", "2099-01-01T00:00Z", "--times", "3", "--except-on",
        "2099-02-01", "--except-on", "2099-03-01", "--on-gap", "skip", "--on-repeat", "both", "--retry", "patient",
        "--end-when-dead",
    )  # fmt: skip
    with monkeypatch.context() as patch:
        patch.setattr("bide.cli.recurring.current_millis", lambda: LAST_INSTANT)  # the store's clock is right
        shape = line.one("recurring", "ls", "rent", "-n", "9")
    assert [at[:10] for at in shape["next"]] == ["2099-01-01", "2099-04-01", "2099-05-01"]
    assert (shape["rule"]["on_gap"], shape["rule"]["on_repeat"]) == ("skip", "both")
    assert (shape["retry"]["policy"], shape["end_when_dead"]) == ("exponential", True)
    assert "recurs      at 08:00 on day 1 of the month, UTC" in line.run("show", "rent", "rent").stdout
    with monkeypatch.context() as patch:
        patch.setattr("bide.cli.recurring.planned", lambda *_: [])  # as where the zone is not known
        assert "UTC   in 2" in line.run("recurring", "ls").stdout
    line.run("recurring", "pause", "rent")
    assert "rent/rent: refused, paused\n" in line.run("recurring", "skip-next", "rent", code=1).stdout
    assert "of the month, UTC; paused" in line.run("show", "rent", "rent").stdout
    assert "waiting   never" in line.run("ls").stdout
    details = line.one("show", "rent", "rent")["details"]
    assert (details["recurs"], details["paused"]) == ("at 08:00 on day 1 of the month, UTC", True)
    assert "rent/rent: moved, due in " in line.run("move", "rent", "rent", "--delay", "1h").stdout
    assert re.search("9999|due at never", line.run("show", "rent", "rent").stdout) is None
    assert line.run("recurring", "ls", "rant").stdout.startswith("no such recurring tasks in ")
    line.run("recurring", "run-now", "rent")
    words = [json.loads(event)["what"] for event in line.run("events", "--json").stdout.splitlines()]
    assert words == ["schedule: created", "reschedule: moved", "pause: replaced", "recur: created"]
    line.run("schedule", "t", "--key", "k", "--delay", "1h")
    assert "recurs" not in line.run("show", "t", "k").stdout
    assert line.run("recurring", "pause", "t", "k", code=1).stdout == "t/k: there is no such recurring task\n"
    day = ("--since", "2099-01-01T00:00Z", "--until", "2099-01-02T00:00Z")
    assert line.run("recurring", "backfill", "t", "k", *day, code=1).stdout == "there is no such recurring task\n"


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


def test_schedule_over_what_was_seen(line: CommandLine) -> None:
    args = ("schedule", "t", "--key", "k", "--delay", "2h", "--if-token")
    token = line.one(*args, "1")["task"]["token"]
    assert line.one(*args, "1", code=1)["answer"] == "stale_token"
    lines = "".join(f'{{"key": "{key}", "delay": "3h", "if_token": {token}}}\n' for key in "kkj")
    assert line.run("schedule", "t", "--many", "-", given=lines, code=1).stdout.startswith("3 tasks: ")
    assert line.one(*args, str(token), code=1)["answer"] == "stale_token"


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
    assert "--from: 1002 is not accepted" in line.error("schedule", "t", "--many", "-", "--from", "1002", given=given)
    assert line.run("schedule", "t", "--many", "-", given="\n").stdout == "no tasks: the file is empty\n"
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
    worked(line.url, dies, *map(str, range(600)))
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
    assert not {"rich", "bide_bench", "bide.cli.tables", "bide.cli.demo", "uvloop"} & loaded


@pytest.mark.parametrize("words", ["show t k", "top --once", "ls", "tally", "events", "doctor"])
def test_looking_needs_no_extra(line: CommandLine, words: str) -> None:
    line.run("schedule", "t", "--key", "k", "--delay", "1h")
    absent = ("uvicorn", "httptools", "jinja2", "markupsafe", "prometheus_client", "aiohttp")
    code = f"import sys; sys.modules |= dict.fromkeys({absent}); from bide.cli import main; main({words.split()})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (Exit.DONE, "")


def test_settings_name_the_person(line: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BIDE_ACTOR", "nightly cleaner")
    line.run("schedule", "t", "--key", "k", "--delay", "1h")
    assert line.one("events", "t", "k")["who"] == "nightly cleaner"


def test_the_shared_options_may_stand_anywhere(line: CommandLine) -> None:
    other = f"sqlite:///{line.directory}/other.db"
    line.run("--store", other, "schedule", "t", "--key", "k", "--delay", "1h")
    assert line.json("ls") == []
    assert [task["key"] for task in line.json("ls", "--store", other)] == ["k"]


def test_memory_is_said_to_be_forgotten(line: CommandLine) -> None:
    result = line.run("schedule", "t", "--delay", "1h", "--store", "memory:")
    assert "memory: keeps nothing after" in result.stderr


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
    assert "t: paused " in said
    assert "resume it with: bide resume t" in said
    assert "other: paused" not in said


def test_doctor_explains_what_waits(line: CommandLine) -> None:
    line.run("schedule", "t", "--delay", "0s")
    assert any("no live worker" in note["what"] for note in line.json("doctor", code=Exit.NOT_DONE))
    line.run("pause", "t")
    [note] = [note for note in line.json("doctor") if note["what"].startswith("topic t: 1 due")]
    assert note["level"] == "warning"
    assert ", held back: paused " in note["what"]
    assert note["advice"] == "resume it with: bide resume t"


def test_what_cannot_be_told_fails_nothing(line: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    async def away(app: Any) -> Any:
        raise StoreUnavailable("away")

    monkeypatch.setattr(Bide, "paused", away)
    done = line.run("schedule", "t", "--key", "k", "--delay", "1h")
    assert re.match(r"t/k: created, due in (1h|59m \d+s) \(", done.stdout)
    assert done.stderr == "bide: note: the pauses cannot be read: away\n"


def run(script: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run a line of bash in which `bide` is the command; ends with the exit code of the first of a pipe."""
    return subprocess.run(
        ["bash", "-c", f'bide() {{ "{sys.executable}" -m bide "$@"; }}; {script}; exit ${{PIPESTATUS[0]}}'],
        env=os.environ | environ, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip


@pytest.fixture
def many(write: Write) -> None:
    write("many", "".join(f'{{"key": "{number}", "delay": "1h"}}\n' for number in range(2_500)))


def test_a_reader_that_is_gone_ends_no_command_that_changes(line: CommandLine, many: None) -> None:
    done = run("bide schedule t --many many --json | head -n 1")
    assert (done.returncode, done.stdout.count("\n"), done.stderr) == (Exit.DONE, 1, "")
    assert line.one("tally")["counts"][0]["number"] == 2_500
    assert run("bide move t nobody --delay 1h --json | true").returncode == Exit.NOT_DONE
    assert run("bide ls --all --json | head -n 1").returncode == Exit.DONE
    for command in ("ls --all", "show t 0", "tally", "events"):
        done = run(f"bide {command} | true")
        assert (done.returncode, done.stderr) == (Exit.DONE, ""), command
    assert run("bide ls --help | true").returncode == Exit.DONE


def test_no_output_at_all(line: CommandLine) -> None:
    done = run("bide schedule t --key a --delay 1h >&-")
    assert (done.returncode, done.stderr) == (Exit.DONE, "")
    assert run("bide cancel t nobody <&- >&- 2>&-").returncode == Exit.NOT_DONE
    assert line.one("show", "t", "a")["task"]["state"] == "waiting"


def test_a_full_output_is_said(line: CommandLine) -> None:
    done = run("bide schedule t --key a --delay 1h > /dev/full")
    assert done.returncode == Exit.DONE
    assert "the output cannot be written and is dropped: [Errno 28]" in done.stderr
    for command in ("ls", "ls --json", "show t a", "tally", "ls --help"):
        done = run(f"bide {command} > /dev/full")
        assert done.returncode == Exit.DONE, command
        assert done.stderr.count("[Errno 28]") == done.stderr.count("\n") == 1, command


@pytest.mark.parametrize(
    "environ",
    [{"PYTHONIOENCODING": "latin-1"}, {"LC_ALL": "POSIX", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}],
    ids=["latin-1", "POSIX"],
)
def test_a_name_beyond_the_encoding_of_the_terminal(line: CommandLine, environ: dict[str, str]) -> None:
    key = "caf\u00e9 \U0001f680"
    line.run("schedule", "t", json.dumps(key), "--key", key, "--delay", "1h")
    done = run("bide ls > shown", **environ)
    assert (done.returncode, done.stderr) == (Exit.DONE, "")
    done = run("bide ls --json", **environ)
    assert json.loads(done.stdout)["key"] == json.loads(done.stdout)["payload"] == key
    assert "###" in run("bide tally --ahead 2h --step 1h", **environ).stdout


def caller(line: CommandLine, text: str) -> tuple[str, set[Verb], tuple[str, ...]]:
    """Whom a service takes the holder of this token for."""

    async def ask() -> tuple[str, set[Verb], tuple[str, ...]]:
        async with Bide(line.url) as app:
            found = await Access(app).caller_of(f"Bearer {text}")
            return found.name, set(found.verbs), found.topics

    return asyncio.run(ask())


def test_the_token_alone_is_on_stdout_and_is_not_repeated_in_the_place_of_its_id(line: CommandLine) -> None:
    made = line.run("token", "add", "ann")
    text = made.stdout.strip()
    assert parse(text) is not None
    assert "it is not shown again" in made.stderr
    assert text[-43:] not in made.stderr + line.error("token", "revoke", text)
    assert caller(line, text) == ("ann", set(DEFAULT_VERBS), ("*",))


def test_scopes_and_expiry(line: CommandLine) -> None:
    made = line.one(
        "token", "add", "ci", "--verb", "read", "--verb", "schedule", "--topic", "order.*", "--topic", "mail",
        "--expires", "90d",
    )  # fmt: skip
    assert caller(line, made["token"]) == ("ci", {Verb.READ, Verb.SCHEDULE}, ("order.*", "mail"))
    [listed] = line.json("token", "ls")
    assert listed == {name: value for name, value in made.items() if name != "token"}
    assert listed["verbs"] == ["schedule", "read"]
    ends, begins = (datetime.fromisoformat(listed[name]) for name in ("expires_at", "created_at"))
    assert ends - begins == timedelta(days=90)
    assert listed["created_by"]


def test_ls_never_shows_a_secret(line: CommandLine) -> None:
    assert "no tokens in sqlite:///" in line.run("token", "ls").stdout
    texts = [line.run("token", "add", "ann", "--verb", verb).stdout.strip() for verb in ("all", "read", "admin")]
    for shown in (line.run("token", "ls").stdout, line.run("token", "ls", "--json").stdout):
        for text in texts:
            id, secret = parse(text) or ("", "")
            assert id in shown
            assert secret not in shown
            assert "hash" not in shown
    assert "do all" in line.run("token", "ls").stdout


def test_revoke(line: CommandLine) -> None:
    text = line.run("token", "add", "ann").stdout.strip()
    other = line.run("token", "add", "ann").stdout.strip()
    id = text[5:13]
    done = line.run("token", "revoke", id)
    assert done.stdout == f"token {id}: revoked\n"
    assert done.stderr == ""
    with pytest.raises(Unauthorized):
        caller(line, text)
    assert (caller(line, other))[0] == "ann"
    assert line.run("token", "revoke", id, code=1).stdout == f"token {id}: not found\n"
    assert line.one("token", "revoke", id, code=1) == {"id": id, "revoked": False}
    last = line.run("token", "revoke", other[5:13])
    assert "accepts anybody again" in last.stderr


@pytest.mark.parametrize(
    ("args", "field", "accepted"),
    [
        (("add",), "NAME", "Missing argument"),
        (("add", ""), "name: ''", "1 to 200 bytes"),
        (("add", "anonymous"), "name: 'anonymous'", "another"),
        (("add", "a", "--verb", "reed"), "verb: 'reed'", "all, or one of schedule"),
        (("add", "a", "--topic", ""), "topic: ''", '"order.*"'),
        (("add", "a", "--topic", "bide:settings"), "topic: 'bide:settings'", "reserved for bide"),
        (("add", "a", "--expires", "0s"), "--expires: '0s'", "above zero"),
        (("add", "a", "--expires", "soon"), "--expires: 'soon'", "units"),
        (("revoke",), "ID", "Missing argument"),
        (("revoke", "short"), "ID: 'short'", "8 letters and digits"),
        (("lst",), "token: 'lst'", "did you mean 'ls'"),
        (("zzz",), "token: 'zzz'", "one of add, ls, revoke"),
        ((), "Missing command", "bide token --help"),
    ],
)
def test_bad_input(line: CommandLine, args: tuple[str, ...], field: str, accepted: str) -> None:
    message = line.error("token", *args)
    assert field in message
    assert accepted in message


def test_wall_clock_times(line: CommandLine, tmp_path: Path) -> None:
    rome = ZoneInfo("Europe/Rome")

    def due(*args: str) -> datetime:
        return datetime.fromisoformat(line.one(*args)["task"]["due_at"]).astimezone(rome)

    today = datetime.now(rome).date()
    found = due("schedule", "t", "--key", "k", "--at", "tomorrow 20:00", "--zone", "Europe/Rome")
    assert found.replace(tzinfo=None) - datetime.combine(today, datetime.min.time()) in (
        timedelta(days=1, hours=20),
        timedelta(days=2, hours=20),  # midnight came between the two
    )
    assert due("move", "t", "k", "--at", "2099-01-31 08:00", "--zone", "Europe/Rome").isoformat() == (
        "2099-01-31T08:00:00+01:00"
    )
    (tmp_path / "lines").write_text('{"topic": "t", "key": "m", "at": "2099-01-31 08:00", "zone": "Asia/Shanghai"}\n')
    line.run("schedule", "--many", "lines")
    assert line.one("show", "t", "m")["task"]["due_at"] == "2099-01-31T00:00:00.000Z"
    [shape] = line.json("ls", "--topic", "t", "--before", "2099-01-31 08:01 Asia/Shanghai")
    assert shape["key"] == "m"
    assert "without a zone" in line.error("schedule", "t", "--at", "tomorrow 20:00")
    assert "not UTC and Europe/Rome" in line.error("schedule", "t", "--at", "20:00 UTC", "--zone", "Europe/Rome")
    assert line.error("move", "t", "k", "--delay", "1h", "--zone", "Rome").startswith("bide: zone: 'Rome'")
    assert "each line has its own" in line.error("schedule", "--many", "lines", "--zone", "UTC")
