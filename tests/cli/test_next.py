"""`bide next`: the coming instants of a rule, as words and as JSON."""

from __future__ import annotations

from tests.cli.conftest import CommandLine


def test_shifted_instants_are_marked(line: CommandLine) -> None:
    words = ("next", "30 2 * * *", "--zone", "Europe/Rome", "-n", "2", "--after", "2024-03-30T12:00Z")
    assert line.run(*words).stdout.splitlines() == [
        "at 02:30, Europe/Rome",
        "Sun 2024-03-31 03:00:00 +0200  2024-03-31T01:00:00.000Z  shifted: the clocks are set forward over its time",
        "Mon 2024-04-01 02:30:00 +0200  2024-04-01T00:30:00.000Z",
    ]
    assert line.json(*words) == [
        {
            "at": "2024-03-31T01:00:00.000Z",
            "local": "2024-03-31T03:00:00+02:00",
            "zone": "Europe/Rome",
            "shifted": True,
        },
        {
            "at": "2024-04-01T00:30:00.000Z",
            "local": "2024-04-01T02:30:00+02:00",
            "zone": "Europe/Rome",
            "shifted": False,
        },
    ]


def test_an_interval_says_that_a_gap_has_no_runs(line: CommandLine) -> None:
    said = line.run("next", "*/30 * * * *", "--zone", "Europe/Rome", "-n", "1", "--after", "2024-03-31T00:30Z").stdout
    assert "03:00:00 +0200" in said
    assert "do not exist" in said
    assert "note" not in line.run("next", "every 15m").stdout
    assert len(line.json("next", "@daily")) == 5


def test_a_rule_that_ends_says_so(line: CommandLine) -> None:
    words = ("next", "FREQ=DAILY;COUNT=2", "--start", "2024-01-01T08:00Z", "--after")
    said = line.run(*words, "2024-01-01T08:00Z")
    assert said.stdout.count("2024-01-02T08:00:00.000Z") == 1
    assert "ends here" in said.stderr
    assert line.run(*words, "2024-01-02T08:00Z", code=1).stdout.splitlines() == ['rrule "FREQ=DAILY;COUNT=2" in UTC']


def test_the_zone_of_the_rule_is_that_of_after(line: CommandLine) -> None:
    words = ("next", "0 20 * * *", "--zone", "Asia/Tokyo", "-n", "1", "--after")
    assert line.one(*words, "2030-01-31 20:00")["at"] == "2030-02-01T11:00:00.000Z"
    assert line.one(*words, "2030-01-31 20:00 UTC")["at"] == "2030-02-01T11:00:00.000Z"
    assert line.one(*words, "tomorrow 20:00")["zone"] == "Asia/Tokyo"
    assert line.error("next", "@daily", "--after", "2030-01-31 20:00").startswith("bide: --after: ")


def test_refusals_name_the_field(line: CommandLine) -> None:
    assert line.error("next", "61 * * * *").startswith("bide: minute: ")
    assert line.error("next", "@daily", "--zone", "Mars").startswith("bide: zone: ")
    assert line.error("next", "@daily", "--after", "noon").startswith("bide: --after: ")
    assert line.error("next", "@daily", "-n", "0").startswith("bide: -n: ")
