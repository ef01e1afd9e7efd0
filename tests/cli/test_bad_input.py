"""Every refusal is one line that names the field, the value, and what would be accepted."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.cli.conftest import CommandLine

ONE_HOUR = ("--delay", "1h")


@pytest.mark.parametrize(
    ("args", "field", "value", "accepted"),
    [
        (("schedule", "t"), "delay", "nothing was given", "one of the two"),
        (("schedule", "t", *ONE_HOUR, "--at", "2099-01-01T00:00:00Z"), "at, delay", "1h", "only one"),
        (("schedule", "t", "--delay", "5"), "delay", "'5'", "15m"),
        (("schedule", "t", "--delay", "5 parsecs"), "delay", "'5 parsecs'", "units: ms s m h d w"),
        (("schedule", "t", "--delay", "-5m"), "delay", "'-5m'", "not negative"),
        (("schedule", "t", "--delay", "99999999d"), "delay", "'99999999d'", "year 10000"),
        (("schedule", "t", "--at", "2030-01-31T08:00:00"), "at", "'2030-01-31T08:00:00'", "offset"),
        (("schedule", "t", "--at", "tomorrow"), "at", "'tomorrow'", "2030-01-31T08:00:00+01:00"),
        (("schedule", "t", *ONE_HOUR, "--deadline", "1m"), "deadline", "'1m'", "not before the task is due"),
        (("schedule", "", *ONE_HOUR), "topic", "''", "1 to 200 bytes"),
        (("schedule", "t", *ONE_HOUR, "--key", "k" * 201), "key", "kkk", "1 to 200 bytes"),
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
        (("demo", "--port", "soon"), "--port", "'soon'", "a whole number from 0 to 65,535"),
        (("lss",), "command", "'lss'", "did you mean 'ls'"),
        (("ls", "--stat", "dead"), "--stat", "", "--state"),
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


def test_nothing_was_done(line: CommandLine) -> None:
    line.error("schedule", "t", "--delay", "5")
    line.error("schedule", "t", "--key", "", "--delay", "5m")
    assert line.json("ls") == []
