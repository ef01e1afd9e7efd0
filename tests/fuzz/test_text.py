"""Text that people write or give a program: durations, instants, names, settings, arguments, table sources."""

from __future__ import annotations

import re
import unicodedata
from datetime import UTC, datetime, timedelta, timezone
from decimal import ROUND_CEILING, Decimal, localcontext
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import msgspec
import pytest
from click.testing import CliRunner
from hypothesis import example
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn
from tests.fuzz.cases import NOISE, NUMBERS, ODD_VALUES, Hung, changed, damaged, fuzz, mostly, near, refusals, within

from bide.app import Bide
from bide.cli import main
from bide.cli.exits import Exit
from bide.core.errors import BadInput, MissingExtra, SetupError
from bide.core.instants import (
    LAST_INSTANT,
    LONGEST,
    LONGEST_TEXT,
    as_datetime,
    duration,
    duration_text,
    instant,
    instant_text,
)
from bide.core.names import LONGEST_NAME, check_name, check_topic
from bide.core.options import known_options, with_recurrence
from bide.core.recurrence.plan import Recurrence
from bide.core.recurrence.rules import At, Cron, Every, rule_of
from bide.core.table_source import DueIs, Sql, TableSource
from bide.service.serving import ServiceInstance, read_config
from bide.settings import Settings, describe
from bide.stores.naive_times import cutoff, instant_of

UNITS = {"ms": 1, "s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000, "w": 604_800_000}
SPACES = " \t\n\r\f\v"
EPOCH = datetime(1970, 1, 1)
LENGTHS = st.one_of(
    st.from_regex(r"[-+ ]?([0-9]{1,4}(\.[0-9]{1,4})? ?(ms|[smhdw]) ?){1,4}", fullmatch=True),
    st.from_regex(r"-?P([0-9]{1,2}W)?([0-9]{1,2}D)?(T([0-9]{1,2}H)?([0-9]{1,2}M)?([0-9]{1,2}S)?)?", fullmatch=True),
    st.builds("{}{}".format, NUMBERS, st.sampled_from(list(UNITS))),
)
"""Durations as people write them."""


def read_length(text: str) -> int | None:
    """Read a duration a second time, cut at its units and summed up in decimals; None where it is none."""
    if len(text) > LONGEST_TEXT:
        return None
    text = text.strip()
    sign, body = (-1, text[1:]) if text.startswith("-") else (1, text.removeprefix("+"))
    cuts = [(body, "ms|[smhdw]")]
    if iso := body.startswith("P"):
        date, t, time = body[1:].partition("T")
        cuts = [(date, "[WD]"), (time, "[HMS]")]
        if t and not time:
            return None
    total, seen = Decimal(0), list[str]()
    with localcontext() as exact:
        exact.prec = 400
        for piece, units in cuts:
            *parts, rest = re.split(f"({units})", piece)
            if rest if iso else rest.strip(SPACES) or body[:1] in SPACES:
                return None
            for number, unit in zip(parts[::2], parts[1::2], strict=True):
                number = number if iso else number.strip(SPACES)
                if unit in seen or not re.fullmatch(r"[0-9]+(\.[0-9]+)?", number):
                    return None
                seen.append(unit)
                total += Decimal(number) * UNITS[unit.lower() if iso else unit]
        ordered = not iso or seen == [unit for unit in "WDHMS" if unit in seen]
        return int((sign * total).to_integral_value(ROUND_CEILING)) if seen and ordered else None


@example(value="0ms0s", negative=False)
@fuzz(400, value=mostly(near(LENGTHS), st.timedeltas() | ODD_VALUES), negative=st.booleans())
def test_durations(value: Any, negative: bool) -> None:
    meant: int | None = None
    if isinstance(value, timedelta):
        meant = -((-value) // timedelta(milliseconds=1))
    elif isinstance(value, str):
        meant = read_length(value)
    if meant is not None and ((meant < 0 and not negative) or abs(meant) > LONGEST):
        meant = None
    got = None
    with refusals():
        got = duration(value, negative=negative)
        assert duration(duration_text(got), negative=True) == got
    assert got == meant


@st.composite
def instant_texts(draw: DrawFn) -> tuple[str, int | None]:
    """ISO 8601 with an offset, and the instant that it says; None where that lies outside of 1970 to 9999."""
    moment = draw(st.datetimes() | st.datetimes(EPOCH, EPOCH + timedelta(days=2)))
    minutes, compact = draw(st.integers(-14 * 60 - 59, 14 * 60 + 59)), draw(st.booleans())
    point = draw(st.sampled_from((".", ",", "")))
    if not point:
        moment = moment.replace(microsecond=0)
    if compact:
        text = f"{moment.year:04}{moment:%m%dT%H%M%S}"
    else:
        text = f"{moment.year:04}-{moment:%m-%d}{draw(st.sampled_from('T '))}{moment:%H:%M:%S}"
    text += f"{point}{moment.microsecond:06}" if point else ""
    hours, rest = divmod(abs(minutes), 60)
    offset = f"{'-' if minutes < 0 else '+'}{hours:02}{'' if compact else ':'}{rest:02}"
    text += offset if minutes else draw(st.sampled_from(("Z", "-00:00", offset)))
    micros = (moment - EPOCH - timedelta(minutes=minutes)) // timedelta(microseconds=1)
    millis = -(-micros // 1000)
    return text, millis if 0 <= millis <= LAST_INSTANT else None


LAST = datetime(9999, 12, 31, 23, 59, 59, 999_999)
ODD_MOMENTS = st.builds(
    lambda moment, zone: moment.replace(tzinfo=zone),
    st.sampled_from([datetime(1, 1, 1), EPOCH, datetime(2030, 1, 1), LAST]),
    st.none() | st.integers(-86_399, 86_399).map(lambda seconds: timezone(timedelta(seconds=seconds))),
)


@fuzz(400, said=instant_texts())
def test_instants_are_read_as_what_they_say(said: tuple[str, int | None]) -> None:
    text, meant = said
    got = None
    with refusals():
        got = instant(text)
    assert got == meant


@fuzz(400, value=mostly(changed(instant_texts().map(lambda said: said[0])), ODD_MOMENTS | ODD_VALUES | st.text()))
def test_instants_are_read_back_or_refused(value: Any) -> None:
    with refusals():
        got = instant(value)
        assert 0 <= got <= LAST_INSTANT
        assert instant(instant_text(got)) == instant(as_datetime(got)) == got


RULES = st.one_of(
    st.from_regex(
        r"(\*|[0-9]{1,2})(/[0-9]{1,2})?( (\*|[0-9L]{1,2}|[1-9]-[0-9]{1,2}|mon#2|friL|sat-sun)){4,5}", fullmatch=True
    ),
    st.from_regex(r"@(hourly|daily|weekly|monthly|yearly)|every [0-9]{1,4}(s|m|h|d)", fullmatch=True),
    st.lists(
        st.sampled_from([
            "FREQ=DAILY", "FREQ=MONTHLY", "FREQ=YEARLY", "FREQ=HOURLY", "INTERVAL=3", "COUNT=5", "BYDAY=-1FR,MO",
            "BYMONTHDAY=31,-1", "BYMONTH=2", "BYHOUR=2", "BYSETPOS=-1", "BYWEEKNO=53", "UNTIL=20300101T000000Z",
        ]), max_size=5,
    ).map(";".join),
)  # fmt: skip
"""Recurring rules as people write them."""


@fuzz(300, text=mostly(near(RULES), ODD_VALUES | NOISE), at=st.integers(0, LAST_INSTANT))
def test_rules_are_refused_or_step_forward_and_are_read_back(text: Any, at: int) -> None:
    with refusals():
        rule = rule_of(text, zone="Europe/Rome", start="2026-01-01T02:30+01:00")
        assert isinstance(rule.words, str)
        back = msgspec.msgpack.decode(msgspec.msgpack.encode(Recurrence(rule=rule)), type=Recurrence).rule
        for _ in range(3):
            following = rule.after(at)
            assert back.after(at) == following
            if following is None:
                break
            assert following > at
            at = following


@fuzz(300, damage=st.data(), at=st.integers(0, LAST_INSTANT))
def test_a_damaged_rule_of_a_stored_task_is_refused(damage: Any, at: int) -> None:
    rule = damage.draw(
        st.sampled_from([Cron("30 2 * * mon-fri", zone="Europe/Rome"), Every("90s"), At("2030-01-01T00:00Z")])
    )
    options = with_recurrence(b"", Recurrence(rule=rule))
    found = known_options(damage.draw(damaged(options))).recurrence
    if found is not None:
        with refusals():
            assert (found.rule.after(at) or at + 1) > at


ZONES = (
    "UTC", "Europe/Berlin", "America/New_York", "Australia/Lord_Howe", "Asia/Kathmandu", "Africa/Casablanca",
    "America/St_Johns", "Pacific/Apia", "Asia/Tehran", "Antarctica/Troll",
)  # fmt: skip


@example(shown=datetime(2027, 10, 31, 2, 30), name="Europe/Berlin", edge=0)
@example(shown=datetime(2027, 3, 28, 2, 30), name="Europe/Berlin", edge=0)
@example(shown=datetime(2027, 4, 4, 1, 45), name="Australia/Lord_Howe", edge=0)
@fuzz(
    400,
    shown=st.datetimes(datetime(1971, 1, 1), datetime(2036, 12, 31)),
    name=st.sampled_from(ZONES),
    edge=st.integers(0, LAST_INSTANT),
)
def test_a_naive_time_comes_once_and_for_good(shown: datetime, name: str, edge: int) -> None:
    """It comes when the zone's clock shows it or a later time, for good: as read every quarter of an hour."""
    zone = ZoneInfo(name)
    at = instant_of(shown, zone)
    assert 0 <= at <= LAST_INSTANT
    for quarter in range(13):
        assert as_datetime(at + quarter * 900_000).astimezone(zone).replace(tzinfo=None) >= shown
    if at:
        assert cutoff(at - 1, zone) < shown <= cutoff(at, zone)
    assert cutoff(edge, zone) <= LAST


NAMES = st.sampled_from(
    (
        "order.close",
        "user-7",
        "a/b",
        "键",
        "é" * 100,
        "x" * LONGEST_NAME,
        "x" * (LONGEST_NAME + 1),
        "bide:settings",
        "\x7f",
    )
)


@fuzz(400, value=mostly(near(NAMES), ODD_VALUES))
def test_names(value: Any) -> None:
    fine = (
        isinstance(value, str)
        and not any(unicodedata.category(one) in ("Cc", "Cs", "Zl", "Zp") for one in value)
        and 1 <= len(value.encode("utf-8", "surrogatepass")) <= LONGEST_NAME
    )
    for is_topic in (False, True):
        read = None
        with refusals():
            read = check_topic(value) if is_topic else check_name("key", value)
        assert read == (value if fine and not (is_topic and value in ("bide:settings", "bide:shown")) else None)


SECRET = "s3cr3tword"
KNOWN = {one.variable: one for one in describe()}


@st.composite
def environments(draw: DrawFn) -> dict[str, str]:
    environ = {"PATH": "/bin", "HOME": "/"}
    for _ in range(draw(st.integers(1, 3))):
        one = KNOWN[draw(st.sampled_from(list(KNOWN)))]
        values = st.sampled_from(["15s", "1h30m", "100", "on", "off", "normal", "full", one.default_text])
        values |= LENGTHS | NUMBERS.map(str)
        if one.name == "store":
            values = st.sampled_from(["memory:", "sqlite:///x.db", f"redis://:{SECRET}@host/0"])
        elif one.kind.secret:
            values = st.just(SECRET)
        environ[draw(mostly(st.just(one.variable), changed(one.variable)))] = draw(near(values))
    if draw(st.integers(0, 9)) == 9:
        environ["BIDE_TOKEN_FILE"] = draw(st.sampled_from(["/nowhere/at/all", "/", "\0", "/proc/self/mem", ""]))
    return environ


@fuzz(100, environ=environments())
def test_settings(environ: dict[str, str]) -> None:
    """Each is read as what it says, or refused by its name, and no secret is shown."""
    made = None
    with refusals() as refused:
        made = Settings.from_env(environ)
    assert SECRET not in repr(made) + "".join(map(str, refused))
    if made is None:
        return
    for variable, one in KNOWN.items():
        value = getattr(made, one.name)
        if variable in environ:
            assert one.kind.read(one.kind.text(value), one.name) == value
        else:
            assert "BIDE_TOKEN_FILE" in environ or value == one.default


EXPRESSIONS = st.sampled_from(
    [
        "times + 1",
        ":now",
        "coalesce(x, ':now')",
        "now() + interval '1 day'",
        "a::text",
        "a; b",
        "a -- b",
        "a /* b",
        "(a",
    ]
)
CONDITIONS = st.sampled_from(
    ["status = 2", "a = 1 AND (b = 'it''s' OR c IS NULL)", '"odd name" > 3', "x in (1, 2)", "note = ':now'"]
)


@fuzz(400, text=near(EXPRESSIONS))
def test_expressions_in_sql(text: str) -> None:
    with refusals():
        change = Sql(text)
        one_expression(text)
        left = re.sub(r"'(?:[^']|'')*'|\"(?:[^\"]|\"\")*\"|`[^`]*`|[:\w]:now|:now\w", "", change.written(lambda: "$1"))
        assert ":now" not in left


def one_expression(text: str) -> None:
    """Read by its signs: within its brackets it is one expression and ends where the text ends."""
    assert not set(text) & set("\\\0")
    outside = re.sub(r"'(?:[^']|'')*'|\"(?:[^\"]|\"\")*\"|`[^`]*`", " ", text)
    assert not set(outside) & set(";?$'\"`"), f"{outside!r}: an open quote, or an end"
    assert "--" not in outside
    assert "/*" not in outside
    depth = 0
    for letter in outside:
        depth += (letter == "(") - (letter == ")")
        assert depth >= 0, "a bracket closes what is around it"
    assert not depth, "an open bracket"


SOURCES: dict[str, st.SearchStrategy[Any]] = {
    "table": near(st.sampled_from(["posts", "blog.posts", "Ünïcode"])),
    "due": near("publish_at"),
    "where": mostly(near(CONDITIONS), ODD_VALUES),
    "changes": st.dictionaries(near("status"), st.sampled_from([3, "sent", None, 1.5]) | st.just(Sql("times + 1")))
    | st.sampled_from([None, [], "x"]),
    "id": near("id"),
    "columns": st.sampled_from([(), ("title",), "title", None, (1,)]) | st.lists(near("title"), max_size=1),
    "due_is": near(st.sampled_from([str(one) for one in DueIs])),
    "zone": st.sampled_from([UTC, ZoneInfo("Europe/Berlin"), "UTC", None, timedelta(0)]),
    "page": st.sampled_from([1, 100, 10_000, "1", None, True, 1.0]) | NUMBERS,
    "look_every": mostly(near(st.sampled_from(["1s", "1h", "250ms"])), ODD_VALUES),
    "database": st.sampled_from([None, "sqlite:///x.db", 5, b""]),
    "channel": st.sampled_from([None, "posts", "", 'a"b', 7, "x" * 64]),
}
SOUND: dict[str, Any] = {"table": "posts", "due": "at", "where": "status = 2", "changes": {"status": 3}}


@fuzz(
    400,
    given=st.sampled_from(list(SOURCES)).flatmap(lambda name: st.fixed_dictionaries({name: SOURCES[name]}))
    | st.fixed_dictionaries({}, optional=SOURCES),
)
def test_table_sources(given: dict[str, Any]) -> None:
    """What is taken can be put into a statement: brackets and quotes that match, nothing behind them."""
    with refusals():
        source = TableSource(**(SOUND | given))
        one_expression(source.where)
        for name in (*source.table.split("."), *source.named):
            assert 0 < len(name) <= 63
            assert not set(name) & set('"`[]\\.\0\n')
        assert 0 < source.look_every_ms <= 3_600_000


LINES = (
    "schedule t {} --key k --delay 15m", "schedule t --at 2030-01-01T00:00:00Z --group g", "ls --topic t --limit 3",
    "ls --state dead --json", "show t k --json", "move t k --delay 1h", "fire t k", "cancel t k", "shift g --by -2h",
    "redrive t k", "tally --json", "pause t", "resume t", "cancel --group g", "redrive --all-dead",
    "ls --group g --before 1h", "move t k --at 2030-01-01T00:00:00Z", "--version", "--help", "nothing", "migrate",
    "tally --ahead 24h --step 1h", "token ls",
)  # fmt: skip
ENDLESS = ("serve", "work", "top", "bench", "lab", "demo")
PUT_IN = st.sampled_from(["--json", "--limit", "--key", "--delay", "--", "-x"]) | LENGTHS | NOISE


@st.composite
def command_lines(draw: DrawFn) -> list[str]:
    words = draw(st.sampled_from(LINES)).split()
    for _ in range(draw(st.integers(0, 2))):
        place = draw(st.integers(0, len(words)))
        if draw(st.booleans()):
            words.insert(place, draw(PUT_IN))
        else:
            words[place : place + 1] = [draw(changed(word)) for word in words[place : place + 1] if draw(st.booleans())]
    return [word.replace("\0", "") for word in words if word not in ENDLESS]  # no system hands over a NUL


@fuzz(150, words=command_lines())
def test_the_command_line(words: list[str]) -> None:
    """Each ends with a code of the table that is no defect, and without a traceback."""
    done = CliRunner(env={"BIDE_STORE": "memory:", "COLUMNS": "80"}).invoke(main, words, input="")
    assert done.exit_code in set(Exit) - {Exit.DEFECT}, f"it ended with {done.exit_code}: {done.exception!r}"
    assert "Traceback" not in done.output
    assert done.exit_code == 0 or done.output.strip()


TOML = """\
keep_most = 100
[webhooks]
allow = ["10.1.0.0/16", "receiver.internal:8080"]
per_host = 5
plain_http = true
[topics."order.close"]
webhook = "https://hooks.example.com/x"
retry = ["15s", "1m"]
concurrency = 20
losses = 3
keep_done = "1h"
timeout = "10s"
headers = {a = "b"}
[topics.t]
webhook = "per-task"
retry = {policy = "exponential", first = "1s", tries = 3}
"""


@fuzz(
    150,
    text=(changed(TOML, 1) | near(TOML)).map(lambda text: text.encode("utf-8", "surrogatepass"))
    | damaged(TOML.encode(), 2),
)
def test_the_settings_file_of_a_service(text: bytes, tmp_path: Path) -> None:
    path = tmp_path / "service.toml"
    path.write_bytes(text)
    with refusals(BadInput, SetupError, MissingExtra):
        ServiceInstance(Bide("memory:"), read_config(str(path)), host="127.0.0.1")


def test_a_case_that_does_not_end_is_found() -> None:
    @within(0.2)
    def case() -> None:
        while True:
            pass

    with pytest.raises(Hung, match=r"0\.2 s"):
        case()


def test_a_refusal_has_to_be_clear() -> None:
    with refusals() as refused:
        raise BadInput("field", 1, "something else")
    assert len(refused) == 1
    for unclear in (BadInput("", 1, "something else"), BadInput("field", 1, "")):
        with pytest.raises(AssertionError), refusals():
            raise unclear
    with pytest.raises(ValueError, match="plain"), refusals():
        raise ValueError("plain")
