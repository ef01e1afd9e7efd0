"""Names and ids: what may be a topic, a key and a group, and fresh keys that are in order."""

from __future__ import annotations

import os
import uuid
from enum import Enum, StrEnum
from typing import Any

import pytest

from bide.core.errors import BadInput
from bide.core.names import LONGEST_NAME, RESERVED_TOPIC, check_name, check_topic, new_id


@pytest.mark.parametrize(
    "name",
    [
        "a",
        " ",
        "order.close",
        "a/b:c%d?e#f",
        "'; DROP TABLE tasks; --",
        '"quoted"',
        "{tag}",
        "x" * LONGEST_NAME,
        "é" * (LONGEST_NAME // 2),
        "訂單",
        "🦀" * (LONGEST_NAME // 4),
        "שלום\u200f",  # direction marks are part of ordinary text in some languages
        "a\u0301",
    ],
)
def test_names_that_are_accepted(name: str) -> None:
    assert check_name("key", name) == name


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


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
def test_a_forked_process_gives_out_ids_of_its_own() -> None:
    new_id()
    out, into = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(into, new_id().encode())
        os._exit(0)
    os.close(into)
    with os.fdopen(out) as told:
        theirs = told.read()
    os.waitpid(child, 0)
    mine = new_id()
    assert len(theirs) == 36
    assert theirs[19:] != mine[19:]
