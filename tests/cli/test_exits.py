"""What ends with an error: bad input, no store, an old schema, and what bide doctor finds."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import asyncpg
import pytest
from click.testing import CliRunner
from tests.cli.conftest import CommandLine, dies, worked
from tests.servers.fixtures import StartsRedis, not_installed
from tests.servers.pooler import PostgresPooler
from tests.waiting import forever

from bide import Bide, Event, EventKind, Task
from bide.cli import main
from bide.cli.exits import Exit, exit_of
from bide.core import errors
from bide.stores.http.calls import NotAllowed
from bide_proofs.servers.process import ServerMissing
from bide_proofs.servers.server import ServerClock

ONE_HOUR = ("--delay", "1h")


@pytest.mark.parametrize(
    ("args", "field", "value", "accepted"),
    [
        (("schedule", "t"), "delay", "nothing was given", "one of the two"),
        (("schedule", "t", *ONE_HOUR, "--at", "2099-01-01T00:00:00Z"), "at, delay", "1h", "only one"),
        (("schedule", "t", "--delay", "5 parsecs"), "delay", "'5 parsecs'", "units: ms s m h d w"),
        (("schedule", "t", "--delay", "-5m"), "delay", "'-5m'", "not negative"),
        (("schedule", "t", "--at", "tomorrow"), "at", "'tomorrow'", "2030-01-31T08:00:00+01:00"),
        (("schedule", "t", *ONE_HOUR, "--deadline", "1m"), "deadline", "'1m'", "not before the task is due"),
        (("schedule", "t", *ONE_HOUR, "--group", "a\nb"), "group", r"'a\nb'", "without control characters"),
        (("schedule", "bide:settings", *ONE_HOUR), "topic", "'bide:settings'", "of your own"),
        (("schedule", "t", "{nope", *ONE_HOUR), "payload", "'{nope'", "JSON such as"),
        (("schedule", "t", "@missing.json", *ONE_HOUR), "payload", "'@missing.json'", "readable file"),
        (("schedule", "t", "--bytes", "x" * 300_000, *ONE_HOUR), "payload", "300000 bytes", "at most 262144 bytes"),
        (("schedule", *ONE_HOUR), "TOPIC", "nothing was given", "order.close"),
        (("schedule", "t", *ONE_HOUR, "--on-conflict", "wait"), "--on-conflict", "'wait'", "'earliest'"),
        (("schedule", "t", *ONE_HOUR, "--retry", "often"), "--retry", "'often'", "'patient'"),
        (("schedule", "t", "--many", "none.jsonl"), "--many", "'none.jsonl'", "readable file"),
        (("schedule", "t", "--many", "-", *ONE_HOUR), "--delay", "'1h'", "no such option with --many"),
        (("ls", "--limit", "lots"), "--limit", "'lots'", "a whole number from 1"),
        (("ls", "--limit", "0"), "--limit", "'0'", "a whole number from 1"),
        (("ls", "--state", "ready"), "--state", "'ready'", "'waiting'"),
        (("ls", "--before", "soon"), "--before", "'soon'", "a duration from now"),
        (("ls", "--before", "1h", "--state", "dead"), "--before", "'1h'", "--state live"),
        (("ls", "--topic", ""), "topic", "''", "1 to 200 bytes"),
        (("show", "t"), "KEY", "", "Missing argument"),
        (("events", "t"), "KEY", "nothing was given", "or neither"),
        (("move", "t", "k"), "delay", "nothing was given", "one of the two"),
        (("move", "t", "k", *ONE_HOUR, "--if-token", "new"), "--if-token", "'new'", "a whole number"),
        (("schedule", "t", *ONE_HOUR, "--if-token", "1"), "--if-token", "1", "together with --key"),
        (("cancel",), "TOPIC, KEY", "nothing was given", "--group GROUP"),
        (("cancel", "t"), "KEY", "nothing was given", "--group GROUP"),
        (("cancel", "t", "k", "--group", "g"), "TOPIC", "'t'", "only --topic together with --group"),
        (("cancel", "t", "k", "--topic", "u"), "--topic", "'u'", "together with --group"),
        (("shift", "--group", "g", "--by", "sideways"), "by", "'sideways'", "units"),
        (("shift", "--by", "1h"), "--group", "", "Missing option"),
        (("redrive",), "TOPIC, KEY", "nothing was given", "--all-dead"),
        (("redrive", "t", "k", "--all-dead"), "TOPIC", "'t'", "together with --all-dead"),
        (("tally", "--step", "1h"), "--step", "'1h'", "together with --ahead"),
        (("tally", "--ahead", "1d", "--step", "1s"), "--step", "'1s'", "at most 200 times"),
        (("tally", "--ahead", "0s"), "--ahead", "'0s'", "above zero"),
        (("ls", "--store", "somewhere"), "store", "", "sqlite:///bide.db"),
        (("ls", "--store", "sqlite://"), "store", "sqlite", "sqlite:///"),
        (("ls", "--store", "redis://[::1"), "store", "a URL that cannot be read", "sqlite:///relative.db"),
        (("demo", "--port", "soon"), "--port", "'soon'", "a whole number from 0 to 65,535"),
        (("lss",), "command", "'lss'", "did you mean 'ls'"),
        (("ls", "--stat", "dead"), "--stat", "", "--state"),
        (("serve", "--store", "http://127.0.0.1:9"), "store", "'http://127.0.0.1:9'", "of the store itself"),
        (("work", "shop"), "MODULE:APP", "'shop'", "such as shop:app"),
        (("work", "nowhere:app"), "MODULE:APP", "'nowhere:app'", "can be imported"),
        (("work", "json:app"), "MODULE:APP", "'json:app'", "the name of a Bide object"),
        (("work", "json:dumps"), "MODULE:APP", "'json:dumps'", "not of a function"),
        (("work", "shop:app", "--processes", "0"), "--processes", "'0'", "a whole number from 1"),
    ],
    ids=lambda one: " ".join(one)[:40] if isinstance(one, tuple) else None,
)
def test_it_names_field_value_and_accepted(
    line: CommandLine, args: tuple[str, ...], field: str, value: str, accepted: str
) -> None:
    complaint = line.error(*args)
    assert field in complaint
    assert value in complaint
    assert accepted in complaint


def test_a_typing_error_in_the_environment(line: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BIDE_STROE", "sqlite:///a.db")
    assert "BIDE_STORE" in line.error("ls")
    assert "BIDE_STORE" in line.json("doctor", code=Exit.NOT_DONE)[-1]["what"]


def test_nothing_was_done(line: CommandLine) -> None:
    line.error("schedule", "t", "--delay", "5")
    line.error("schedule", "t", "--key", "", "--delay", "5m")
    assert line.json("ls") == []


def test_the_documentation_has_the_table(root: Path) -> None:
    rows = re.findall(r"^\| (\d+) \| (.+) \|$", (root / "docs" / "cli.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert rows == [(str(code.value), code.meaning) for code in Exit]


def test_help_has_the_table(line: CommandLine) -> None:
    text = line.run("--help").stdout
    assert line.run().stdout == text, "the same without any argument"
    words = " ".join(text.split())
    for code in Exit:
        assert f"{code.value} {code.meaning}" in words


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.BadInput("field", 1, "two"), Exit.BAD_INPUT),
        (errors.BadPayload("payload", 1, "two"), Exit.BAD_INPUT),
        (errors.DuplicateHandler("twice"), Exit.SETUP),
        (errors.MissingExtra("redis", "redis:"), Exit.SETUP),
        (NotAllowed("no verb"), Exit.SETUP),
        (errors.StoreUnavailable("locked"), Exit.UNAVAILABLE),
        (errors.StoreFull("full"), Exit.UNAVAILABLE),
        (errors.StoreCorrupt("damaged"), Exit.DAMAGED),
        (errors.StoreMismatch("another"), Exit.DAMAGED),
        (errors.OutcomeUnknown("lost"), Exit.UNKNOWN),
        (errors.LeaseLost("gone"), Exit.NOT_DONE),
        (errors.BideError("else"), Exit.DEFECT),
    ],
    ids=lambda one: type(one).__name__ if isinstance(one, Exception) else None,
)
def test_every_error_has_a_code(error: errors.BideError, code: Exit) -> None:
    assert exit_of(error) is code


def test_what_is_no_bide_database_is_damaged(line: CommandLine) -> None:
    path = line.directory / "letter.txt"
    path.write_text("Dear SQLite, " * 400, encoding="utf-8")
    assert str(path) in line.error("ls", "--store", f"sqlite:///{path}", code=Exit.DAMAGED)
    note = line.json("doctor", "--store", f"sqlite:///{path}", code=Exit.NOT_DONE)[-1]
    assert note["level"] == "error"
    assert str(path) in note["what"]


def test_a_folder_that_is_not_there_is_unavailable(line: CommandLine) -> None:
    line.error("ls", "--store", f"sqlite:///{line.directory}/nowhere/tasks.db", code=Exit.UNAVAILABLE)


def test_a_service_that_is_not_there_is_unavailable(line: CommandLine) -> None:
    assert "127.0.0.1:9" in line.error("ls", "--store", "http://127.0.0.1:9", code=Exit.UNAVAILABLE)


def test_a_defect_is_one_line_and_debug_shows_where(line: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError("by nothing")

    monkeypatch.setattr("bide.cli.context.Context.open", broken)
    assert "ZeroDivisionError" in line.error("ls", code=Exit.DEFECT)
    assert "Traceback" in CliRunner().invoke(main, ["ls", "--debug"]).stderr


def test_control_c_ends_cleanly(line: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("bide.cli.context.Context.open", interrupted)
    assert line.run("ls", code=Exit.INTERRUPTED).stderr.strip() == "bide: interrupted"


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
    worked(line.url, dies, "k")
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


@pytest.fixture
def url(postgres_url: str, postgres_schema: str) -> str:
    """A place of the test's own, without tables."""
    return f"{postgres_url}?schema={postgres_schema}"


@pytest.fixture(params=["postgres", "mysql"])
def either(request: pytest.FixtureRequest) -> str:
    """The same, on each database that has a schema."""
    where, name = (request.getfixturevalue(f"{request.param}_{what}") for what in ("url", "schema"))
    return f"{where}?schema={name}"


def test_what_is_missing_is_said_made_and_then_there(line: CommandLine, either: str) -> None:
    store = ("--store", either)
    found = line.json("doctor", *store, code=Exit.NOT_DONE)[-1]
    assert found["level"] == "error"
    assert "no bide schema there" in found["what"]
    assert "bide migrate" in found["what"]
    said = line.run("migrate", "--check", *store, code=Exit.NOT_DONE).stdout
    assert "there is no schema" in said
    assert "run `bide migrate`" in said
    assert "the schema was made" in line.run("migrate", *store).stdout
    assert "up to date" in line.run("migrate", *store).stdout
    assert "up to date" in line.run("migrate", "--check", *store).stdout
    line.run("schedule", "t", "--delay", "1h", *store)


def test_the_same_in_json(line: CommandLine, either: str) -> None:
    store = ("--store", either)
    found = line.one("migrate", "--check", *store, code=Exit.NOT_DONE)
    assert set(found) == {"store", "before", "found", "wanted", "up_to_date"}
    assert (found["before"], found["found"], found["up_to_date"]) == (0, 0, False)
    made = line.one("migrate", *store)
    assert (made["before"], made["found"], made["up_to_date"]) == (0, made["wanted"], True)
    assert line.one("migrate", "--check", *store)["before"] == made["wanted"]


def test_what_is_printed_can_be_run_by_hand(line: CommandLine, url: str, postgres_url: str) -> None:
    script = line.run("migrate", "--print", "--store", url).stdout
    assert line.one("migrate", "--print", "--store", url)["statements"][0].startswith("CREATE SCHEMA")
    line.run("migrate", "--check", "--store", url, code=Exit.NOT_DONE)

    async def run() -> None:
        connection: Any = await asyncpg.connect(postgres_url)
        try:
            await connection.execute(script)
        finally:
            await connection.close()

    asyncio.run(run())
    line.run("migrate", "--check", "--store", url)
    assert line.run("migrate", "--print", "--store", url).stdout == "-- up to date: nothing to run\n"
    assert line.one("migrate", "--print", "--store", url) == {"statements": []}


@pytest.mark.parametrize("store", ["sqlite", "memory", "redis"])
@pytest.mark.parametrize("option", ["--check", "--print", None])
def test_others_look_after_themselves(
    line: CommandLine, store: str, option: str | None, request: pytest.FixtureRequest
) -> None:
    urls = {"sqlite": f"sqlite:///{line.directory}/new.db", "memory": "memory:"}
    url = urls.get(store) or str(request.getfixturevalue("redis_url"))
    words = ("migrate", *([option] if option else []), "--store", url)
    assert ("nothing to do" if option else "opened; done") in line.run(*words).stdout
    assert line.one(*words)["up_to_date"] is True
    assert (line.directory / "new.db").exists() is (store == "sqlite" and option is None)


def test_what_cannot_be_is_refused(line: CommandLine, url: str, postgres_url: str) -> None:
    assert "--print" in line.error("migrate", "--check", "--print", "--store", url, code=Exit.BAD_INPUT)
    away = "postgresql://bide@127.0.0.1:1/postgres"
    assert "cannot be reached" in line.error("migrate", "--store", away, code=Exit.UNAVAILABLE)


def test_doctor_says_what_the_database_is_like(line: CommandLine, url: str) -> None:
    line.run("migrate", "--store", url)
    found = {note["what"]: note["level"] for note in line.json("doctor", "--store", url, code=Exit.NOT_DONE)}
    for part in ("PostgreSQL 1", "schema version 1", "LISTEN works", "dead ones", "transaction", "clock and the"):
        assert any(part in what for what in found), part
    # the tests' server does not wait for the disk
    assert found["fsync is off: a power cut may destroy the database"] == "error"


@pytest.mark.parametrize("said", [True, False], ids=["said", "not said"])
def test_doctor_says_that_a_proxy_stands_between(line: CommandLine, url: str, tmp_path: Path, said: bool) -> None:
    line.run("migrate", "--store", url)
    try:
        with PostgresPooler(tmp_path / "pooler", url) as pooler:
            behind = f"{pooler.url}?{url.partition('?')[2]}{'&pooler=transaction' if said else ''}"
            found = line.json("doctor", "--store", behind, code=Exit.NOT_DONE)
    except ServerMissing as error:
        not_installed(error)
    [note] = [note for note in found if "proxy" in f"{note['what']}{note['advice']}"]
    if said:
        assert note["level"] == "warning"
        assert "five times a second" in note["what"]
    else:
        assert "pooler=transaction" in f"{note['what']}{note['advice']}"
