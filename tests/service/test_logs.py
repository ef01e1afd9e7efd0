"""Lines of log that a machine can read and no text from outside can forge, and the audit log among them."""

from __future__ import annotations

import io
import json
import logging
import re
import subprocess
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.sdk.trace import TracerProvider

from bide import Bide
from bide.engine.session import acting_as
from bide.service import logs
from bide.service.access import AccessRefused, Forbidden, Refusals, Unauthorized, Verb, audit, audit_unknown, network_of

TIME = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z"
NASTY = [
    "a\nb", "a\r\nb", "a\x1b[31mred", "a\x00b", "a\u2028b\u2029c\x85d", "\ud800", "‮evil", '"},{"level":"error', "🐘\t|",
]  # fmt: skip


@pytest.fixture
def kept() -> Iterator[None]:
    """The logging of the tests as it was, afterwards."""
    root, audit = logging.getLogger(), logging.getLogger(logs.AUDIT)
    before, level, audit_level = root.handlers[:], root.level, audit.level
    root.handlers = []
    yield
    root.handlers = before
    root.setLevel(level)
    audit.setLevel(audit_level)
    logging.captureWarnings(False)


def line(formatter: logging.Formatter, message: Any, *arguments: Any, exc_info: Any = None, **extra: Any) -> str:
    logger = logging.Logger("bide.test")
    record = logger.makeRecord("bide.test", logging.INFO, "x.py", 1, message, arguments, exc_info, extra=extra)
    return formatter.format(record)


def read(*arguments: Any, **extra: Any) -> dict[str, Any]:
    text = line(logs.JsonLines(), *arguments, **extra)
    assert text.isascii()
    assert text.isprintable()
    found: dict[str, Any] = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    return found


def test_a_line_is_an_object_with_the_extra_fields() -> None:
    found = read("cancel %s", "42", who="shop", topic="order.close", key="42", was=None, wake_at=1, answer="cancelled")
    assert re.fullmatch(TIME, found.pop("time"))
    assert found == {
        "level": "info", "logger": "bide.test", "message": "cancel 42", "who": "shop", "topic": "order.close",
        "key": "42", "was": None, "wake_at": 1, "answer": "cancelled",
    }  # fmt: skip


@pytest.mark.parametrize("text", NASTY, ids=ascii)
def test_nothing_forges_a_line(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.time", lambda: 1_790_000_000.002)
    found = read(text, topic=text, error=ValueError(text))
    expected = text if text != "\ud800" else "\\ud800"
    assert (found["message"], found["topic"], found["error"]) == (expected, expected, expected)
    shown = line(logs.Lines(), text, topic=text)
    assert shown.isprintable()
    assert shown.startswith(found["time"])


@given(st.text(), st.binary(), st.dictionaries(st.text(), st.floats()), st.lists(st.integers()))
def test_whatever_is_logged_is_one_line(text: str, data: bytes, mapping: dict[str, float], numbers: list[int]) -> None:
    read("%s", text, text=text, data=data, mapping=mapping, numbers=numbers, where={"deep": [[[[[numbers]]]]]})
    assert line(logs.Lines(), "%s", text, text=text, data=data, mapping=mapping, numbers=numbers).isprintable()


class Unshowable:
    def __str__(self) -> str:
        raise RuntimeError("no")

    __repr__ = __str__


def test_what_cannot_be_shown_is_said_to_be_so() -> None:
    found = read("%d things", "no number", what=Unshowable())
    assert found["message"] == "%d things (its arguments do not fit: TypeError)"
    assert found["what"] == "a Unshowable that cannot be shown (RuntimeError)"
    assert read(Unshowable())["message"] == (
        "a Unshowable that cannot be shown (RuntimeError) (its arguments do not fit: RuntimeError)"
    )


def test_own_fields_are_never_replaced() -> None:
    found = read("real", time="forged", level="error", logger="root", exception="none", trace_id="1")
    assert (found["message"], found["level"], found["logger"]) == ("real", "info", "bide.test")
    assert re.fullmatch(TIME, found["time"])
    assert found["extra_time"] == "forged"
    assert found["extra_level"] == "error"
    assert found["extra_trace_id"] == "1"
    assert "exception" not in found


def test_numbers_that_json_has_not_are_text() -> None:
    found = read("x", a=float("nan"), b=float("-inf"), c=2**60, d=1.5, e=True, f=(1, "a"), g={1: b"\xff"})
    assert [found[name] for name in "abcdefg"] == [
        "nan", "-inf", str(2**60), 1.5, True, [1, "a"], {"1": "\\xff"},
    ]  # fmt: skip


def test_much_text_is_cut() -> None:
    found = read("m" * 100_000, payload="p" * 9_000, many=list(range(1_000)))
    assert found["message"].endswith("… (91808 more characters)")
    assert len(found["payload"]) < 8_300
    assert len(found["many"]) == 100


def raised() -> Any:
    try:
        raise ValueError("first\nsecond \x1b[2J")
    except ValueError:
        return sys.exc_info()


def test_an_exception_is_one_field_or_indented_lines() -> None:
    found = read("failed", exc_info=raised())
    assert found["exception"].startswith("Traceback (most recent call last)")
    assert found["exception"].endswith("ValueError: first\nsecond \x1b[2J")
    first, *others = line(logs.Lines(), "failed", exc_info=raised()).split("\n")
    assert first.endswith("INFO    bide.test failed")
    assert all(one.startswith("    ") and one.isprintable() for one in others)
    assert others[-1] == "    second \\x1b[2J"


def test_the_line_for_people_quotes_what_is_not_one_word() -> None:
    shown = line(logs.Lines(), "cancel", who="shop", key='4 "2"\n', empty="", none=None, count=3, tags=["a", "b"])
    assert re.sub(TIME, "TIME", shown) == (
        'TIME INFO    bide.test cancel who=shop key="4 \\"2\\"\\n" empty="" none=null count=3 tags="[\\"a\\", \\"b\\"]"'
    )


def test_a_line_inside_a_span_names_it() -> None:
    with TracerProvider().get_tracer("test").start_as_current_span("outer") as span:
        found = read("inside")
    context = span.get_span_context()
    assert context is not None
    assert found["trace_id"] == f"{context.trace_id:032x}"
    assert found["span_id"] == f"{context.span_id:016x}"
    assert "trace_id" not in read("outside")


@pytest.mark.usefixtures("kept")
def test_setup_replaces_what_was_there_and_always_writes_the_audit() -> None:
    before, now = io.StringIO(), io.StringIO()
    logs.setup("info", stream=before)
    logs.setup("error", json=True, stream=now)
    logging.getLogger("bide.worker").warning("not asked for")
    logging.getLogger("bide.worker").error("asked for")
    logging.getLogger(logs.AUDIT).info("cancel", extra={"who": "shop"})
    assert before.getvalue() == ""
    found = [json.loads(one) for one in now.getvalue().splitlines()]
    assert [(one["logger"], one["message"]) for one in found] == [
        ("bide.worker", "asked for"),
        ("bide.audit", "cancel"),
    ]
    assert found[1]["who"] == "shop"


@pytest.mark.usefixtures("kept")
def test_warnings_of_python_are_lines_too() -> None:
    stream = io.StringIO()
    logs.setup(json=True, stream=stream)
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        logging.captureWarnings(True)
        warnings.warn("old way", stacklevel=1)
        logging.captureWarnings(False)
    [found] = [json.loads(one) for one in stream.getvalue().splitlines()]
    assert found["logger"] == "py.warnings"
    assert "old way" in found["message"]


def test_it_goes_to_stderr_and_needs_no_opentelemetry() -> None:
    code = (
        "import sys, logging; from bide.service import logs; logs.setup(json=True);"
        "logging.getLogger('bide.x').info('a\\nb'); assert 'opentelemetry' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == ""
    assert json.loads(done.stderr)["message"] == "a\nb"


PARTS = ("who", "verb", "topic", "key", "id", "was", "wake_at", "answer")


def lines(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    return [record for record in caplog.records if record.name == "bide.audit"]


def parts(record: logging.LogRecord, *names: str) -> tuple[Any, ...]:
    return tuple(getattr(record, name) for name in names)


async def test_a_change_is_a_line_that_says_who_what_from_and_to(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "bide.audit")
    async with Bide("memory:") as app:
        with acting_as("ann", audit):
            await app.schedule("order.close", 1, key="k", group="g", at="2040-01-01T00:00Z")
            await app.reschedule("order.close", "k", at="2041-01-01T00:00Z")
            task = await app.get("order.close", "k")
            assert task is not None
            await app.reschedule("order.close", "gone", delay="1h")
            await app.cancel("order.close", "k", if_token=1)
            await app.schedule("order.close", 1, key="k", group="g", on_conflict="keep", delay="1h")
            await app.schedule("order.close", 1, key="k", group="g", at="2042-01-01T00:00Z")
            await app.shift("g", "1h")
            await app.cancel("order.close", "k")
    found = lines(caplog)
    assert [parts(record, "who", "verb", "topic", "key", "answer", "was", "wake_at") for record in found] == [
        ("ann", verb, "order.close", "k", answer, was, wake_at)
        for verb, answer, was, wake_at in (
            ("schedule", "created", None, "2040-01-01T00:00:00.000Z"),
            ("reschedule", "moved", "2040-01-01T00:00:00.000Z", "2041-01-01T00:00:00.000Z"),
            ("schedule", "replaced", "2041-01-01T00:00:00.000Z", "2042-01-01T00:00:00.000Z"),
            ("shift", "moved", "2042-01-01T00:00:00.000Z", "2042-01-01T01:00:00.000Z"),
            ("cancel", "cancelled", None, None),
        )
    ], "what changed nothing has no line"
    assert found[0].id == found[1].id == task.record.id  # type: ignore[attr-defined]
    assert all(set(PARTS) <= set(vars(record)) for record in found)
    assert found[1].getMessage() == "ann: reschedule order.close/k: moved"


async def test_new_tasks_are_one_line_in_all(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "bide.audit")
    async with Bide("memory:") as app:
        await app.schedule("a", key="there", delay="1h")
        with acting_as("ann", audit):
            await app.schedule_many(
                [app.new(topic, key=key, delay="1h") for topic in "ab" for key in ("there", "new", "too")]
            )
    replaced, created = lines(caplog)
    assert parts(replaced, "topic", "key", "answer") == ("a", "there", "replaced")
    assert parts(created, "who", "verb", "count", "topics", "answer") == (
        "ann", "schedule", 5, {"a": 2, "b": 3}, "created",
    )  # fmt: skip
    assert created.getMessage() == "ann: schedule 5 tasks of a, b: created"


async def test_nothing_is_made_where_nobody_listens(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "bide.audit")
    async with Bide("memory:") as app:
        with acting_as("ann", audit):
            await app.schedule("a", key="there", delay="1h")
    assert lines(caplog) == []


def test_a_change_whose_answer_was_lost_is_a_line_too(caplog: pytest.LogCaptureFixture) -> None:
    audit_unknown("ann", "cancel", "order.close", "k")
    audit_unknown("ann", "cancel")
    one, many = lines(caplog)
    assert parts(one, "who", "verb", "topic", "key", "answer") == ("ann", "cancel", "order.close", "k", "unknown")
    assert one.getMessage() == "ann: cancel order.close/k: the outcome is unknown"
    assert many.getMessage() == "ann: cancel many: the outcome is unknown"


def test_refusals_cannot_fill_a_disk(caplog: pytest.LogCaptureFixture) -> None:
    now = 0.0
    refusals = Refusals(lambda: now)
    for _ in range(5_000):
        refusals.note(Unauthorized("no"), "203.0.113.7")
    assert len(lines(caplog)) == 10, "one peer"
    now = 10.0
    refusals.note(Unauthorized("no"), "203.0.113.7")
    refusals.note(Unauthorized("no"), "203.0.113.7")
    assert len(lines(caplog)) == 11, "and one more every ten seconds"
    assert parts(lines(caplog)[-1], "left_out", "peer", "answer") == (4_990, "203.0.113.7", "unauthorized")

    caplog.clear()
    for number in range(20_000):
        now += 0.01
        refusals.note(Unauthorized("no"), f"2001:db8:{number >> 16:x}:{number & 0xFFFF:x}::1")
    assert 280 <= len(lines(caplog)) <= 310, "200 s from 20,000 networks: a hundred, and one a second"
    assert len(refusals._peers) <= Refusals.MOST_PEERS, "what is remembered of them is bounded"


def test_one_who_is_refused_often_does_not_hide_another(caplog: pytest.LogCaptureFixture) -> None:
    refusals = Refusals(lambda: 0.0)
    for _ in range(100):
        refusals.note(Forbidden(Verb.CANCEL, "pay", "ann"), "203.0.113.7")
    refusals.note(Forbidden(Verb.CANCEL, "pay", "bob"), "203.0.113.7")
    refusals.note(Unauthorized("no"), "203.0.113.8")
    assert [parts(record, "who", "peer") for record in lines(caplog)[10:]] == [
        ("bob", "203.0.113.7"),
        (None, "203.0.113.8"),
    ]
    assert parts(lines(caplog)[0], "verb", "topic", "answer") == ("cancel", "pay", "forbidden")


@pytest.mark.parametrize(
    "error", [Forbidden(Verb.READ, "a\nbide: forged line\r\n" + "x" * 10_000, "ann"), Unauthorized("no")]
)
def test_a_line_stays_a_short_line(error: AccessRefused, caplog: pytest.LogCaptureFixture) -> None:
    Refusals().note(error, "::1")
    [line] = lines(caplog)
    assert len(line.getMessage().splitlines()) == 1
    assert len(line.getMessage()) < 500


@pytest.mark.parametrize(
    ("peer", "network"),
    [
        ("203.0.113.7", "203.0.113.7"),
        ("::ffff:203.0.113.7", "203.0.113.7"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("local", "local"),
    ],
)
def test_what_one_party_has_of_addresses(peer: str, network: str) -> None:
    assert network_of(peer) == network
