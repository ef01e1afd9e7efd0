"""Times, lengths and numbers as people write and read them; and in which language they are spoken to."""

from __future__ import annotations

import ast
import inspect
import re
import tomllib
from collections import Counter
from datetime import UTC
from importlib.resources import files
from pathlib import Path
from zoneinfo import ZoneInfo

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from tests.service.calling import Running
from tests.service.console.conftest import Visit

from bide import Cron
from bide.core.errors import BadInput
from bide.core.instants import LAST_INSTANT, as_datetime, duration_text, instant, instant_text
from bide.core.records import Count
from bide.service import health
from bide.service.console.i18n import Locale, language_of, translations, zone_of

NOW = instant("2026-06-01T12:00:00Z")
ZONES = ("UTC", "Europe/Berlin", "America/New_York", "Asia/Shanghai", "Asia/Kolkata", "Australia/Lord_Howe")
ORDINARY = st.integers(0, instant("2300-01-01T00:00:00Z"))


def locale(zone: str = "UTC", language: str = "en", now: int = NOW) -> Locale:
    return Locale(language, *zone_of(zone), now)


# --- reading


@given(ORDINARY, st.sampled_from(ZONES))
def test_a_time_that_is_shown_is_read_again(at: int, zone: str) -> None:
    at -= at % 1000
    found = locale(zone)
    local = as_datetime(at).astimezone(ZoneInfo(zone))
    # of an hour that comes twice the first is meant
    twice = local.replace(fold=1).utcoffset() != local.replace(fold=0).utcoffset()
    again = found.read_time(found.moment(at), "at")
    assert again == at or (twice and again < at)
    assert found.read_time(instant_text(at), "at") == at


@given(st.integers(0, 10**11))
def test_a_length_is_from_now(length: int) -> None:
    found = locale()
    text = duration_text(length)
    assert found.read_time(text, "at") == NOW + length
    assert found.read_time(f"+{text}", "at") == found.read_time(f"+ {text}", "at") == NOW + length
    if length <= NOW:
        assert found.read_time(f"-{text}", "at") == NOW - length


@pytest.mark.parametrize(
    ("zone", "text", "meant"),
    [
        ("Europe/Berlin", "2026-06-02 08:00", "2026-06-02T06:00:00Z"),
        ("Europe/Berlin", "2026-06-02T08:00:00.250", "2026-06-02T06:00:00.250Z"),
        ("Europe/Berlin", "2026-06-02", "2026-06-01T22:00:00Z"),
        ("Europe/Berlin", "2026-06-02T08:00:00Z", "2026-06-02T08:00:00Z"),
        ("Europe/Berlin", "2026-06-02T08:00:00-05:00", "2026-06-02T13:00:00Z"),
        ("Europe/Berlin", " 2026-06-02 08:00 ", "2026-06-02T06:00:00Z"),
        # the clock goes from 02:00 to 03:00: the first instant after the gap
        ("Europe/Berlin", "2026-03-29 02:30", "2026-03-29T01:00:00Z"),
        ("America/New_York", "2026-03-08 02:15", "2026-03-08T07:00:00Z"),
        ("Australia/Lord_Howe", "2026-10-04 02:10", "2026-10-03T15:30:00Z"),
        # and from 03:00 back to 02:00: the first of the two, as everywhere in bide
        ("Europe/Berlin", "2026-10-25 02:30", "2026-10-25T00:30:00Z"),
        ("America/New_York", "2026-11-01 01:15", "2026-11-01T05:15:00Z"),
        ("Europe/Berlin", "2026-10-25 03:00", "2026-10-25T02:00:00Z"),
    ],
)
def test_times_of_a_zone(zone: str, text: str, meant: str) -> None:
    assert locale(zone).read_time(text, "at") == instant(meant)


@pytest.mark.parametrize(
    "text",
    [
        "", "tomorrow", "15", "15x", "08:00", "2026-13-01", "2026-06-02 25:00", "2026-06-02 08:00 CET", "2026-02-30",
        "2026-06-02\x0008:00", "-100000d", "4000000d", "0001-01-01", "1969-12-31 00:00", "9999-12-31T23:59:59-14:00",
        "１５m", "2026-06-02T08:00:00+99:00", "P", "--1h", "9" * 400, "9999999999999d", "2026-",
    ],
)  # fmt: skip
@pytest.mark.parametrize("zone", ["UTC", "Asia/Shanghai", "America/New_York"])
def test_what_is_no_time_is_refused(zone: str, text: str) -> None:
    with pytest.raises(BadInput) as caught:
        locale(zone).read_time(text, "wake_from")
    assert caught.value.field == "wake_from"


# --- showing


@given(st.integers(0, LAST_INSTANT), st.sampled_from(ZONES))
def test_every_instant_can_be_shown(at: int, zone: str) -> None:
    found = locale(zone)
    for shown in (found.moment(at), found.moment(at, millis=True), found.clock(at), instant_text(at),
                  found.relative(at)):  # fmt: skip
        assert shown


def test_the_last_instant_is_shown_in_a_zone_ahead_of_utc() -> None:
    assert locale("Asia/Shanghai").moment(LAST_INSTANT - 1) == "9999-12-31 23:59:59"


@pytest.mark.parametrize(
    ("length", "english", "chinese"),
    [
        (None, "", ""), (0, "0 ms", "0 毫秒"), (12, "12 ms", "12 毫秒"), (999, "999 ms", "999 毫秒"),
        (4_200, "4.2s", "4.2秒"), (-4_200, "−4.2s", "−4.2秒"), (14 * 60_000 + 3_000, "14m 3s", "14分3秒"),
        (59_700, "1m", "1分"), (2 * 86_400_000 + 4 * 3_600_000, "2d 4h", "2天4小时"), (86_400_000, "1d", "1天"),
    ],
)  # fmt: skip
def test_lengths(length: int | None, english: str, chinese: str) -> None:
    assert locale().length(length) == english
    assert locale(language="zh").length(length) == chinese


def test_from_now() -> None:
    found = locale()
    assert [found.relative(NOW + off) for off in (0, 5_000, -90_000)] == ["now", "in 5s", "1m 30s ago"]
    assert locale(language="zh").relative(NOW + 5_000) == "5秒后"


def test_numbers() -> None:
    found = locale()
    assert found.number(None) == ""
    assert [found.number(one) for one in (0, 1_234_567, Count(10_000, False), Count(3))] == [
        "0", "1,234,567", "10,000+", "3",
    ]  # fmt: skip
    assert [found.size(one) for one in (10, 2_048, 3 * 1024 * 1024)] == ["10 B", "2.0 KiB", "3.0 MiB"]


# --- languages and zones


@pytest.mark.parametrize(
    ("accepted", "language"),
    [
        (None, "en"), ("", "en"), ("zh-CN,zh;q=0.9,en;q=0.8", "zh"), ("en-US,en;q=0.9,zh;q=0.8", "en"),
        ("de, zh;q=0.5, en;q=0.4", "zh"), ("de", "en"), ("ZH-hans-cn", "zh"), ("en;q=0, zh;q=0.001", "zh"),
        ("zh;q=0", "en"), ("zh;q=0, en;q=0", "en"), ("zh-TW;q=0, zh;q=0.5", "zh"), ("en;q=0.5,zh;Q=0.8", "zh"),
        ("zh;q=2, en", "en"), ("zh;q=1.5, en;q=0.1", "en"), ("zh ; q=0.9 , en;q=0.8", "zh"), ("zh;q=", "en"),
        ("*", "en"), ("zh;q=0.5555, en;q=0.1", "en"), ("," * 1_000 + "zh", "en"), ("zh\x00", "en"), ("en,zh", "en"),
        ("zh,en", "zh"), ("zh;q=1.000,en", "zh"),
    ],
)  # fmt: skip
def test_the_language_that_a_browser_asks_for(accepted: str | None, language: str) -> None:
    assert language_of(accepted) == language


@given(st.lists(st.tuples(st.sampled_from(["en", "zh", "de", "fr"]), st.integers(0, 1000)), max_size=6))
def test_the_highest_weight_wins(wanted: list[tuple[str, int]]) -> None:
    header = ", ".join(f"{name};q={weight / 1000:.3f}" for name, weight in wanted)
    ours = [(weight, name) for name, weight in wanted if name in ("en", "zh") and weight]
    found = language_of(header)
    assert found in {name for weight, name in ours if weight == max(ours)[0]} if ours else found == "en"


@given(st.text(max_size=80))
def test_any_header_has_a_language(text: str) -> None:
    assert language_of(text) in ("en", "zh")
    assert language_of(text, "zh") == "zh"
    assert language_of("zh", text) == (text if text in ("en", "zh") else "zh")


def test_zones() -> None:
    for name in (*ZONES, "America/Argentina/Buenos_Aires", "Etc/GMT+8"):
        assert zone_of(name)[0] == name
    nowhere = ("", "Nowhere/Land", "../../etc/passwd", "/etc/localtime", "Europe", "America/", "UTC\n", "a" * 80)
    for unknown in (None, "Etc/+99", *nowhere):
        assert zone_of(unknown) == ("UTC", UTC), unknown


# --- sentences


def test_every_sentence_has_the_same_values_in_chinese() -> None:
    for english, chinese in translations("zh").items():
        assert Counter(re.findall(r"\{(\w+)\}", english)) == Counter(re.findall(r"\{(\w+)\}", chinese)), english


def said_in(template: str) -> set[str]:
    """The sentences of a template."""
    found = re.finditer(r"\bt\(\s*(\"(?:[^\"\\]|\\.)*\"|'(?:[^'\\]|\\.)*')", template)
    return {ast.literal_eval(match[1]) for match in found}


CONSOLE = Path(str(files("bide.service.console")))


@pytest.mark.parametrize("name", sorted(one.name for one in (CONSOLE / "templates").iterdir()))
def test_every_sentence_of_a_template_is_translated(name: str) -> None:
    template = (CONSOLE / "templates" / name).read_text(encoding="utf-8")
    assert said_in(template) - translations("zh").keys() == set()


@pytest.mark.parametrize("name", sorted(one.name for one in CONSOLE.glob("*.py")))
def test_every_sentence_of_a_module_is_translated(name: str) -> None:
    said = {
        node.args[0].value for node in ast.walk(ast.parse((CONSOLE / name).read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant)
        and "t" in (getattr(node.func, "attr", ""), getattr(node.func, "id", ""))
    }  # fmt: skip
    assert said - translations("zh").keys() == set()


def test_every_sentence_of_a_check_is_translated() -> None:
    said: list[ast.expr] = []
    for node in ast.walk(ast.parse(inspect.getsource(health))):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "Check":
            said += node.args[2:3]
        elif isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "sentence":
            said.append(node.value)
    sentences = {node.value for node in said if isinstance(node, ast.Constant)}
    assert len(sentences) == 12
    assert sentences - translations("zh").keys() == set()


def test_in_chinese_no_sentence_is_left(one: Running, visit: Visit) -> None:
    browser = visit(one, language="zh-CN,zh;q=0.9")
    browser.api.dead("a", "1")
    browser.api.put("a", "2", delay="0s")
    one.run(one.app.history.flush())
    one.run(one.app.recurring.add("a", Cron("0 8 * * mon-fri"), key="3", overlap="queue"))
    recurring = ("/recurring", "/recurring/a/3", "/tasks/a/3")
    for path in ("/", "/timeline", "/tasks", "/tasks/a/2", "/dead", "/topics", "/topics/a", "/changes", *recurring):
        text = browser.get(path).text
        assert re.findall(r"[A-Za-z]{2,} [A-Za-z]+ [A-Za-z]{2,}", text) == [], path
        assert "主题" in text, path


def test_one_sentence_has_one_translation() -> None:
    tables = [tomllib.loads(path.read_text(encoding="utf-8")) for path in (CONSOLE / "words" / "zh").iterdir()]
    found = Counter(english for table in tables for english in table)
    assert [english for english, number in found.items() if number > 1] == []


@given(st.text(max_size=40))
def test_a_value_is_no_template(text: str) -> None:
    assume("{count}" not in text)
    assert locale().t("{count} tasks", count=text) == f"{text} tasks"
