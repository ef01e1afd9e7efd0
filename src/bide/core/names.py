"""Names of topics, keys and groups, their checks, and new ids.

Also readable text of any value: errors, reasons, headers. Making it never raises, and every store can keep it.
"""

from __future__ import annotations

import functools
import os
import re
import time
from collections.abc import Iterable

from bide.core.errors import BadInput

LONGEST_NAME = 200
"""The most bytes of UTF-8 in a topic, key or group."""

_FORBIDDEN = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")
_ACCEPTED = f"1 to {LONGEST_NAME} bytes of text without control characters"
RESERVED_TOPIC = "bide:settings"
"""The topic of the hidden tasks that hold settings; no verb of a caller reaches or shows it."""
SHOWN_TOPIC = "bide:shown"
"""The topic of hidden tasks kept for some days and shown to people: history, announced routes, bulk changes."""
PAUSED_TOPIC = "bide:paused"
"""The topic of the hidden tasks that hold pauses, which every worker reads every two seconds."""
RESERVED_TOPICS = frozenset({RESERVED_TOPIC, SHOWN_TOPIC, PAUSED_TOPIC})


def check_name(field: str, value: object) -> str:
    """Return `value` if it can be a topic, key or group. O(length). Raises BadInput."""
    if type(value) is not str:
        if not isinstance(value, str):
            raise BadInput(field, value, _ACCEPTED)
        value = str.__str__(value)  # a StrEnum member may name a topic; its plain text is kept
    if not 0 < len(value) <= LONGEST_NAME:
        raise BadInput(field, value, _ACCEPTED)
    if value.isascii():
        if not value.isprintable():
            raise BadInput(field, value, _ACCEPTED)
    elif _FORBIDDEN.search(value) or len(value.encode()) > LONGEST_NAME:
        raise BadInput(field, value, _ACCEPTED)
    return value


def check_topic(value: object, field: str = "topic") -> str:
    """Return `value` if it can be a caller's topic. Raises BadInput."""
    return _checked_topic(value, field) if type(value) is str else _checked_topic(check_name(field, value), field)


def check_topics(value: Iterable[str]) -> list[str]:
    """The topics of a caller. A text is not accepted, although it is a collection of letters. Raises BadInput."""
    if isinstance(value, str):
        raise BadInput("topics", value, "a list of topics")
    return [check_topic(topic, "topics") for topic in value]


@functools.lru_cache(maxsize=1024)
def _checked_topic(value: str, field: str) -> str:
    """Check a topic. Cached, since programs have few topics."""
    topic = check_name(field, value)
    if topic in RESERVED_TOPICS:
        raise BadInput(field, value, "a topic of your own: this one holds what is bide's own")
    return topic


_POOL = 256
_endings: list[str] = []
"""The random parts of future ids, made many at once at a fifth of the cost."""
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_endings.clear)  # otherwise parent and child would use the same ids
_beginning = (0, "")
"""A millisecond, and the beginning of its ids."""
_FORM = b"7xxx-yxxx-xxxxxxxxxxxx\n"
"""The end of an id: its version, random digits (x), and the variant with two random bits (y)."""
_DRAWN = [place for place, digit in enumerate(_FORM) if digit in b"xy"]
_VARIANT = bytes.maketrans(b"0123456789abcdef", b"89ab" * 4)


def new_id() -> str:
    """A fresh UUIDv7 (RFC 9562 section 5.7) in canonical text: 48 bits of Unix milliseconds, then 74 random bits.

    Ids are ordered by time, so that new keys are adjacent in an index. Any thread may call it.
    """
    global _beginning
    millis = time.time_ns() // 1_000_000
    known, beginning = _beginning
    if known != millis:
        digits = f"{millis:012x}"
        beginning = f"{digits[:8]}-{digits[8:]}-"
        _beginning = millis, beginning
    try:
        return beginning + _endings.pop()
    except IndexError:
        ending, *more = _new_endings()
        _endings.extend(more)
        return beginning + ending


def _new_endings() -> list[str]:
    """The ends of many ids, drawn digit by digit: the first digit of all, then the second of all."""
    digits = os.urandom(len(_DRAWN) * _POOL // 2).hex().encode()
    text, width = bytearray(_FORM * _POOL), len(_FORM)
    for number, place in enumerate(_DRAWN):
        column = digits[number * _POOL : (number + 1) * _POOL]
        text[place::width] = column.translate(_VARIANT) if _FORM[place] == ord("y") else column
    return text.decode().split()


LONGEST_TEXT = 2_000
"""The number of characters kept of an error or a reason."""
TRACE = "\n\x1f"
"""Separates the text of an error from its traceback where a store keeps both as one; no text has it by chance."""


def text_of(anything: object, longest: int = LONGEST_TEXT) -> str:
    """Its `str`, else `repr`, else the name of its type; at most `longest` characters, without NUL and surrogates."""
    for write in (str, repr):
        try:
            return storable(str.__str__(write(anything))[:longest])[:longest]
        except Exception:  # noqa: BLE001 - the object's own code failed: try the next conversion
            continue
    return storable(type(anything).__name__)[:longest]


def error_text(error: BaseException) -> str:
    """The type and message of an error, as `text_of` writes them."""
    name, said = type(error).__name__, text_of(error)
    return storable(f"{name}: {said}" if said else name)[:LONGEST_TEXT]


def error_parts(kept: str | None) -> tuple[str, str]:
    """Split the error that a store keeps into its text and its traceback; empty if there is none."""
    text, _, trace = (kept or "").partition(TRACE)
    return text, trace


def storable(text: str) -> str:
    """`text` made encodable in UTF-8, without NUL: other characters become escapes (`\\udce9`, `\\x00`)."""
    if text.isascii() and "\0" not in text:
        return text
    return text.replace("\0", "\\x00").encode("utf-8", "backslashreplace").decode("utf-8")


def printable(text: str) -> str:
    """`text` with unprintable characters escaped: line breaks, controls, lone surrogates."""
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode("ascii") for one in text)
