"""`bide migrate`: what is missing is said, printed or made; and `bide doctor` names it where it is missing."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Any

import asyncpg
import pytest
from tests.servers.fixtures import not_installed
from tests.servers.pooler import PostgresPooler

from bide.cli.exits import Exit
from bide_proofs.servers.process import ServerMissing

if TYPE_CHECKING:
    from tests.cli.conftest import CommandLine


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
    url = either
    said = line.run("migrate", "--check", "--store", url, code=Exit.NOT_DONE).stdout
    assert "there is no schema" in said
    assert "run `bide migrate`" in said
    assert "the schema was made" in line.run("migrate", "--store", url).stdout
    assert "up to date" in line.run("migrate", "--store", url).stdout
    assert "up to date" in line.run("migrate", "--check", "--store", url).stdout
    line.run("schedule", "t", "--delay", "1h", "--store", url)


def test_the_same_in_json(line: CommandLine, either: str) -> None:
    url = either
    found = line.one("migrate", "--check", "--store", url, code=Exit.NOT_DONE)
    assert set(found) == {"store", "before", "found", "wanted", "up_to_date"}
    assert (found["before"], found["found"], found["up_to_date"]) == (0, 0, False)
    made = line.one("migrate", "--store", url)
    assert (made["before"], made["found"], made["up_to_date"]) == (0, made["wanted"], True)
    assert line.one("migrate", "--check", "--store", url)["before"] == made["wanted"]


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
    assert "nothing to do" in line.run(*words).stdout
    assert line.one(*words)["up_to_date"] is True
    assert not (line.directory / "new.db").exists(), "it was only asked"


def test_what_cannot_be_is_refused(line: CommandLine, url: str, postgres_url: str) -> None:
    assert "--print" in line.error("migrate", "--check", "--print", "--store", url, code=Exit.BAD_INPUT)
    away = "postgresql://bide@127.0.0.1:1/postgres"
    assert "cannot be reached" in line.error("migrate", "--store", away, code=Exit.UNAVAILABLE)


def test_doctor_names_the_command_where_the_schema_is_missing(line: CommandLine, either: str) -> None:
    found = line.json("doctor", "--store", either, code=Exit.NOT_DONE)
    assert found[-1]["level"] == "error"
    assert "no bide schema there" in found[-1]["what"]
    assert "bide migrate" in found[-1]["what"]


def test_doctor_says_what_the_database_is_like(line: CommandLine, url: str) -> None:
    line.run("migrate", "--store", url)
    found = {note["what"]: note["level"] for note in line.json("doctor", "--store", url, code=Exit.NOT_DONE)}
    for part in ("PostgreSQL 1", "schema version 1", "LISTEN works", "dead ones", "transaction", "clock is"):
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
