"""Names, errors, answers, outcomes, options, texts and table sources: what they say, and what they refuse."""

from __future__ import annotations

import copy
import inspect
import os
import pickle
import re
import uuid
from datetime import UTC, datetime, timedelta
from enum import Enum, StrEnum
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.engine.test_loops_and_forks import forks, in_a_child, quietly

from bide import BadInput, Sql, TableSource
from bide.core import errors
from bide.core.answers import Answer
from bide.core.errors import BadPayload, BideError, MissingExtra, PartlyFailed, StoreError, StoreUnavailable
from bide.core.instants import At, In, one_due
from bide.core.lifecycle import schedule
from bide.core.names import (
    LONGEST_NAME,
    LONGEST_TEXT,
    RESERVED_TOPIC,
    TRACE,
    check_name,
    check_topic,
    error_parts,
    error_text,
    new_id,
    storable,
    text_of,
)
from bide.core.options import LONGEST_HEADERS, NO_OPTIONS, decode_options, encode_options
from bide.core.outcomes import Dead, Defer, Done, Retry
from bide.core.records import NewTask, Result, State
from bide.core.retry import Fixed, Ladder


@pytest.mark.parametrize(
    "name",
    ["", "x" * (LONGEST_NAME + 1), "é" * (LONGEST_NAME // 2) + "x", "🦀" * 51, "a\x00b", "a\nb", "\t", "\x7f", "a\x85",
     "é\x00", "é\n", "é\x9f", "\u2028", "\u2029", "\ud800", "é\udfff", None, 42, b"key", ["key"], 1.5],
)  # fmt: skip
def test_names_that_are_refused(name: Any) -> None:
    with pytest.raises(BadInput) as caught:
        check_name("key", name)
    assert caught.value.field == "key"
    assert str(LONGEST_NAME) in caught.value.accepted


def test_a_member_of_an_enum_of_texts_is_its_plain_text() -> None:
    class Topic(StrEnum):
        CLOSE = "order.close"

    class Older(str, Enum):  # noqa: UP042 - how it was written before StrEnum
        CLOSE = "order.close"

    for member in (Topic.CLOSE, Older.CLOSE):
        checked = check_topic(member)
        assert type(checked) is str
        assert checked == "order.close"
        assert f"{checked}" == "order.close"


def test_the_topic_of_the_settings_is_not_for_callers() -> None:
    assert check_topic("order.close") == "order.close"
    assert check_name("key", RESERVED_TOPIC) == RESERVED_TOPIC
    with pytest.raises(BadInput, match="a topic of your own"):
        check_topic(RESERVED_TOPIC)


def test_a_fresh_id_is_a_uuid_of_version_7(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bide.core.names.time.time_ns", lambda: 1_800_000_000_123_999_999)
    for _ in range(1000):
        text = new_id()
        read = uuid.UUID(text)
        assert str(read) == text
        assert read.version == 7
        assert read.variant == uuid.RFC_4122
        assert read.int >> 80 == 1_800_000_000_123


def test_fresh_ids_differ_and_are_in_order_of_time() -> None:
    ids = [new_id() for _ in range(20_000)]
    assert len(set(ids)) == len(ids)
    stamps = [text[:13] for text in ids]  # the milliseconds; the rest is noise
    assert stamps == sorted(stamps)


@forks
@quietly
def test_a_forked_process_gives_out_ids_of_its_own() -> None:
    new_id()
    out, into = os.pipe()
    assert in_a_child(lambda: os.write(into, new_id().encode()) == 36)
    theirs = os.read(out, 36).decode()
    assert theirs[19:] != new_id()[19:]
    os.close(into)
    os.close(out)


ALL: list[type[BideError]] = [
    each for _, each in inspect.getmembers(errors, inspect.isclass) if issubclass(each, BideError)
]


def test_the_docstring_draws_the_tree() -> None:
    assert errors.__doc__ is not None
    drawn: dict[str, str | None] = {}
    above: list[str] = []
    for line in errors.__doc__.splitlines():
        found = re.match(r"(    [│├└─ ]*)([A-Z]\w+)", line)
        if found:
            depth = (len(found[1]) - 4) // 4
            above = [*above[:depth], found[2]]
            drawn[found[2]] = above[depth - 1] if depth else None
    actual = {each.__name__: None if each is BideError else each.__bases__[0].__name__ for each in ALL}
    assert drawn == actual


def test_errors_say_what_would_be_accepted() -> None:
    error = BadInput("delay", "soon", "a duration")
    assert str(error) == "delay: 'soon' is not accepted; give a duration"
    assert (error.field, error.value, error.accepted) == ("delay", "soon", "a duration")
    assert isinstance(error, ValueError)
    assert "pip install 'bide[redis]'" in str(MissingExtra("redis", "a redis:// store"))


def test_long_values_are_shortened() -> None:
    assert len(str(BadInput("key", "x" * 10_000, "less"))) < 200
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    assert "a list is not accepted" in str(BadInput("payload", deep, "less"))


AWAY = StoreUnavailable("away")


def examples() -> list[BideError]:
    special: dict[type[BideError], BideError] = {
        BadInput: BadInput("delay", "soon", "a duration"),
        BadPayload: BadPayload("payload", b"\xff", "JSON"),
        MissingExtra: MissingExtra("redis", "a redis:// store"),
        PartlyFailed: PartlyFailed(["done", AWAY]),
    }
    return [special[each] if each in special else each("it is away") for each in ALL]


@pytest.mark.parametrize("error", examples(), ids=lambda error: type(error).__name__)
def test_errors_travel_between_processes(error: BideError) -> None:
    for other in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(other) is type(error)
        assert str(other) == str(error)
        assert repr(vars(other)) == repr(vars(error))


def test_every_error_is_ours_and_says_what_it_means() -> None:
    assert all(each.__doc__ for each in ALL)
    assert issubclass(StoreUnavailable, StoreError)
    raised = [value for _, value in inspect.getmembers(errors, inspect.isclass) if issubclass(value, BaseException)]
    assert raised == ALL


AS_ASKED = {"created", "replaced", "kept", "moved", "cancelled", "cancelled_while_leased", "redriven"}


@pytest.mark.parametrize("result", Result)
def test_ok_says_whether_what_was_asked_for_holds_and_an_answer_is_neither_true_nor_false(result: Result) -> None:
    assert Answer(result).ok is (result.value in AS_ASKED)
    with pytest.raises(TypeError, match=f"{result.value}.*answer.ok"):
        bool(Answer(result))


def test_an_answer_carries_the_task() -> None:
    assert Answer(Result.NOT_FOUND).task is None
    new = NewTask("order.close", "42", "life-1", In(900_000), b'{"number":42}', group="user-7")
    task = schedule(new, None, 1_000, 1).task
    assert task is not None
    assert (task.topic, task.key, task.id, task.group) == ("order.close", "42", "life-1", "user-7")
    assert task.state is State.WAITING
    assert task.payload == {"number": 42}
    assert task.wake_at == task.due_at
    assert (task.due_at.timestamp(), task.created_at.timestamp()) == (901.0, 1.0)
    assert task.deadline is None
    assert task.finished_at is None
    assert dict(task.headers) == {}


NOON = datetime(2030, 1, 31, 12, tzinfo=UTC)
NOON_MILLIS = 1_896_091_200_000


def test_outcomes_say_when_and_why() -> None:
    assert Done().again is None
    assert Done(again_at=NOON).again == At(NOON_MILLIS)
    assert Done(again_in="4h").again == In(14_400_000)
    assert Retry().due is None
    assert Retry("busy").why == "busy"
    assert Retry(delay="5s").due == In(5_000)
    assert Retry("busy", at=NOON).due == At(NOON_MILLIS)
    assert Defer("5s").due == Defer(timedelta(seconds=5)).due == In(5_000)
    assert Defer(at=NOON).due == At(NOON_MILLIS)
    assert Dead("the account is closed").why == str(Dead("the account is closed")) == "the account is closed"
    with pytest.raises(BadInput, match="to say when"):
        Defer()


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda: Done(again_at=NOON, again_in="4h"), "again_at, again_in"),
        (lambda: Done(again_in="-4h"), "again_in"),
        (lambda: Done(again_at=datetime(2030, 1, 31)), "again_at"),
        (lambda: Retry(delay="5s", at=NOON), "at, delay"),
        (lambda: Retry(delay="soon"), "delay"),
        (lambda: Defer("5s", at=NOON), "at, delay"),
        (lambda: one_due(None, None), "at, delay"),
    ],
)
def test_what_is_refused_names_its_field(make: Any, field: str) -> None:
    with pytest.raises(BadInput) as caught:
        make()
    assert caught.value.field == field


printable = st.text(st.characters(exclude_categories=("C", "Z")), max_size=20)


def test_nothing_is_no_bytes_at_all() -> None:
    assert encode_options(None, None) == b""
    assert encode_options(None, {}) == b""
    assert decode_options(b"") is NO_OPTIONS


@given(
    st.one_of(st.none(), st.just(Ladder("1s", "5m")), st.just(Fixed("1s", tries=3))),
    st.dictionaries(printable.filter(bool), printable, max_size=10),
)
def test_options_survive_their_bytes(retry: Any, headers: dict[str, str]) -> None:
    options = decode_options(encode_options(retry, headers))
    assert options.retry == retry
    assert options.headers == headers


@pytest.mark.parametrize(
    "headers", [{"": "x"}, {"a": "b\nc"}, {"a\r": "b"}, {"a": 5}, {5: "a"}, {"a": None}, {"a": "\ud800"}, ["a"], "a=b"]
)
def test_headers_that_are_not_short_text_are_refused(headers: Any) -> None:
    with pytest.raises(BadInput) as caught:
        encode_options(None, headers)
    assert caught.value.field == "headers"


def test_headers_and_a_policy_have_a_limit() -> None:
    assert encode_options(None, {"a": "x" * (LONGEST_HEADERS - 50)})
    with pytest.raises(BadInput, match=f"at most {LONGEST_HEADERS} bytes"):
        encode_options(None, {"a": "x" * LONGEST_HEADERS})
    with pytest.raises(BadInput, match=f"retry: .* at most {LONGEST_HEADERS} bytes"):
        encode_options(Ladder(*["1s"] * LONGEST_HEADERS), None)


def test_fields_of_a_newer_version_are_passed_over() -> None:
    newer = msgspec.msgpack.encode({"headers": {"a": "b"}, "colour": "blue"})
    assert decode_options(newer).headers == {"a": "b"}


def policy_of(**terms: Any) -> bytes:
    return msgspec.msgpack.encode({"retry": terms})


GROWING = {"policy": "exponential", "first": 1, "factor": 2.0, "longest": 5, "tries": 3, "jitter": 0.2}


@pytest.mark.parametrize(
    "damaged",
    [
        b"\xc1", b"\x81", b"hello", b"\x92\x01\x02", b"\x81\xa5retry\x05",
        b"\x81\xa7headers\x81\xa1a\xa1\xff",  # a header that is no UTF-8
        b"\x81\xa1x" + b"\x91" * 5_000 + b"\x01",
        *(policy_of(**(GROWING | {name: value})) for name, value in (
            ("jitter", float("inf")), ("jitter", -1.0), ("factor", float("nan")), ("factor", 1e300), ("first", -1),
            ("longest", 2**62), ("tries", 0),
        )),
        policy_of(policy="fixed", pause=-5, tries=3),
        policy_of(policy="ladder", rungs=[]),
        policy_of(policy="ladder", rungs=[1, 2**60]),
    ],
)  # fmt: skip
def test_damaged_options_are_one_known_error(damaged: bytes) -> None:
    with pytest.raises(msgspec.DecodeError):
        decode_options(damaged)


class Mute:
    def __str__(self) -> str:
        raise ValueError("no words")

    def __repr__(self) -> str:
        return "<Mute>"


class Silent(Mute):
    def __repr__(self) -> str:
        raise LookupError("none here either")


class Number(Exception):
    def __str__(self) -> str:
        return 404  # type: ignore[return-value]


class Shouting(str):
    def __str__(self) -> str:
        raise ValueError("a str that cannot be written")


@pytest.mark.parametrize(
    ("anything", "text"),
    [
        ("plain", "plain"), (404, "404"), (None, "None"), (Mute(), "<Mute>"), (Silent(), "Silent"),
        (b"caf\xe9".decode("utf-8", "surrogateescape"), "caf\\udce9"), ("a\0b", "a\\x00b"), (Number(), "Number()"),
        (Shouting("x"), "'x'"),
    ],
)  # fmt: skip
def test_anything_becomes_text(anything: object, text: str) -> None:
    assert text_of(anything) == text


def test_an_error_says_its_type() -> None:
    assert error_text(ValueError("no such order")) == "ValueError: no such order"
    assert error_text(ValueError()) == "ValueError"
    assert error_text(Number()) == "Number: Number()"
    assert error_text(ValueError("\ud800")) == "ValueError: \\ud800"


@pytest.mark.parametrize(
    ("kept", "parts"),
    [
        (None, ("", "")),
        ("E: x\nTraceback (most recent call last):\n", ("E: x\nTraceback (most recent call last):\n", "")),
        (f"E: x{TRACE}File{TRACE}", ("E: x", f"File{TRACE}")),
    ],
)
def test_the_trace_is_told_from_the_text_of_the_error(kept: str | None, parts: tuple[str, str]) -> None:
    assert error_parts(kept) == parts


@given(st.text(st.characters(exclude_categories=[])), st.integers(1, 50))
def test_what_is_kept_can_be_encoded_and_has_a_bound(text: str, longest: int) -> None:
    kept = text_of(text, longest)
    assert len(kept) <= longest
    assert "\0" not in kept
    assert kept.encode().decode() == kept
    assert storable(kept) == kept
    assert len(error_text(ValueError(text * LONGEST_TEXT))) <= LONGEST_TEXT


GIVEN: dict[str, Any] = {"table": "posts", "due": "due", "where": "status = 2", "changes": {"status": 3}}


def test_what_is_left_out() -> None:
    source = TableSource(**GIVEN, columns=["title", "id", "title"])
    assert (source.id, source.page, source.look_every_ms, source.database) == ("id", 100, 1_000, None)
    assert source.loaded == ("id", "title")
    assert source.named == {"id": "id", "due": "due", "status": "changes", "title": "columns"}


def test_what_was_given_can_be_changed_no_more() -> None:
    changes = {"status": 3}
    source = TableSource(**{**GIVEN, "changes": changes})
    changes["status"] = 4
    assert source.changes == {"status": 3}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("table", ""), ("table", "a.b.c"), ("table", 'po"sts'), ("table", 7), ("table", "x" * 64), ("id", "a b\0"),
        ("due", ""), ("due", "a.b"), ("where", ""), ("where", "  "), ("where", None), ("where", "status = 2;"),
        ("where", "status = 2 -- so"), ("where", "status = 2 /* so */"), ("where", "(status = 2"),
        ("where", "status = 2) OR (1 = 1"), ("where", "title = 'open"), ("where", "status = ?"),
        ("where", "status = $1"), ("where", "status = :status"), ("where", "due < :now"), ("where", "a = 'b\\'"),
        ("changes", {}), ("changes", None), ("changes", {"a.b": 1}), ("changes", {"id": 1}),
        ("columns", "title"), ("columns", ["ti'tle", "x\n"]), ("due_is", "hours"), ("zone", "Europe/Nowhere"),
        ("page", 0), ("page", 100_000), ("page", True), ("look_every", "0s"), ("look_every", "2h"), ("look_every", 1),
        ("database", 1), ("channel", ""),
    ],
)  # fmt: skip
def test_what_is_refused_names_the_field(field: str, value: object) -> None:
    with pytest.raises(BadInput) as raised:
        TableSource(**{**GIVEN, field: value})
    assert raised.value.field == field


@pytest.mark.parametrize(
    "where",
    [
        "status = 2", "(status = 2 OR status = 5) AND NOT deleted", "title = 'a; b -- c ('", "title = 'it''s'",
        '"Status" = 2', "`status` = 2", "meta::jsonb @> '{\"a\": 1}'", "tags[1:2] IS NULL",
        "id IN (SELECT post FROM picks)",
    ],
)  # fmt: skip
def test_conditions_that_are_taken(where: str) -> None:
    assert TableSource(**{**GIVEN, "where": where}).where == where


def test_the_moment_in_an_expression() -> None:
    assert Sql("coalesce(at, :now)").written(lambda: "NOW()") == "coalesce(at, NOW())"
    assert Sql("':now' || x::now || :now").written(lambda: "T") == "':now' || x::now || T"
    for text in ("", "1; DROP TABLE posts", ":later", "(1"):
        with pytest.raises(BadInput):
            Sql(text)
