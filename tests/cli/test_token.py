"""`bide token`: made and shown once, listed without the secret, revoked."""

from __future__ import annotations

import asyncio
from datetime import datetime, timedelta
from typing import TYPE_CHECKING

import pytest

from bide import Bide
from bide.service.access import Access
from bide.service.authz import DEFAULT_VERBS, Unauthorized, Verb, parse

if TYPE_CHECKING:
    from tests.cli.conftest import CommandLine


def caller(line: CommandLine, text: str) -> tuple[str, set[Verb], tuple[str, ...]]:
    """Whom a service takes the holder of this token for."""

    async def ask() -> tuple[str, set[Verb], tuple[str, ...]]:
        async with Bide(line.url) as app:
            found = await Access(app).caller_of(f"Bearer {text}")
            return found.name, set(found.verbs), found.topics

    return asyncio.run(ask())


def test_the_token_alone_is_on_stdout(line: CommandLine) -> None:
    made = line.run("token", "add", "ann")
    text = made.stdout.strip()
    assert parse(text) is not None
    assert "it is not shown again" in made.stderr
    assert text[-43:] not in made.stderr
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


def test_tokens_are_no_tasks(line: CommandLine) -> None:
    line.run("token", "add", "ann")
    assert line.json("ls", "--state", "all") == []
    assert line.one("tally")["counts"] == []
    assert line.json("events") == []
    for args in (("show",), ("cancel",), ("fire",), ("redrive",), ("move", "--delay", "1h")):
        command, *options = args
        assert "bide:settings" in line.error(command, "bide:settings", "token:abcdefgh", *options)
    assert "bide:settings" in line.error("ls", "--topic", "bide:settings")
    assert len(line.json("token", "ls")) == 1


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


def test_a_whole_token_in_the_place_of_an_id_is_not_repeated(line: CommandLine) -> None:
    text = line.run("token", "add", "ann").stdout.strip()
    assert text[-43:] not in line.error("token", "revoke", text)


def test_on_a_server_too(line: CommandLine, redis_url: str, redis_namespace: str) -> None:
    store = ("--store", f"{redis_url}?namespace={redis_namespace}")
    text = line.run("token", "add", "ann", *store).stdout.strip()
    assert [one["id"] for one in line.json("token", "ls", *store)] == [text[5:13]]
    assert line.one("token", "revoke", text[5:13], *store)["revoked"] is True
    assert line.json("token", "ls", *store) == []
