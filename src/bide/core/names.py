"""Names of topics, keys and groups, and their checks; and the source of fresh ids.

Text of anything, for people to read: errors, reasons, headers. It cannot raise, and every store can keep it.
"""

from __future__ import annotations

import functools
import os
import re
import time
from collections.abc import Iterator

from bide.core.errors import BadInput

LONGEST_NAME = 200
"""Bytes of UTF-8 that a topic, key or group may have."""

_FORBIDDEN = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")
_ACCEPTED = f"1 to {LONGEST_NAME} bytes of text without control characters"
RESERVED_TOPIC = "bide:settings"
"""The topic of hidden tasks that hold settings; no verb of a caller's reaches or shows it."""
SHOWN_TOPIC = "bide:shown"
"""The same for what is shown to people and kept for some days: history, announced routes, progress of bulk changes."""
RESERVED_TOPICS = frozenset({RESERVED_TOPIC, SHOWN_TOPIC})


def check_name(field: str, value: object) -> str:
    """`value`, if it can be a topic, key or group. O(length). Raises BadInput."""
    if type(value) is not str:
        if not isinstance(value, str):
            raise BadInput(field, value, _ACCEPTED)
        value = str.__str__(value)  # a member of a StrEnum names a topic well; what is kept is its plain text
    if not 0 < len(value) <= LONGEST_NAME:
        raise BadInput(field, value, _ACCEPTED)
    if value.isascii():
        if not value.isprintable():
            raise BadInput(field, value, _ACCEPTED)
    elif _FORBIDDEN.search(value) or len(value.encode()) > LONGEST_NAME:
        raise BadInput(field, value, _ACCEPTED)
    return value


def check_topic(value: object, field: str = "topic") -> str:
    """`value`, if it can be a topic of a caller's. Raises BadInput."""
    return _checked_topic(value, field) if type(value) is str else _checked_topic(check_name(field, value), field)


@functools.lru_cache(maxsize=1024)
def _checked_topic(value: str, field: str) -> str:
    """Cached, since programs have few topics."""
    topic = check_name(field, value)
    if topic in RESERVED_TOPICS:
        raise BadInput(field, value, "a topic of your own: this one holds what is bide's own")
    return topic


_POOL = 256
_endings: list[str] = []
"""The random part of ids to come, written out: many at once, at a fifth of the cost."""
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_endings.clear)  # else parent and child would give out the same ids
_beginning = (0, "")
"""A millisecond, and how an id of it begins."""
_RANDOM = int.from_bytes(_POOL * bytes.fromhex("0fff3fff"))
_FIXED = int.from_bytes(_POOL * bytes.fromhex("70008000"))
"""Of the two middle groups of many ids: which bits are random, and the version and the variant among them."""


def new_id() -> str:
    """A fresh UUIDv7 (RFC 9562 section 5.7) in canonical text: 48 bits of Unix milliseconds, then 74 random bits.

    Time-ordered, so that fresh keys land side by side in an index. Any thread may call it.
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


def _new_endings() -> Iterator[str]:
    """Two groups of two bytes, with version and variant in them, and one of six; joined, and in hexadecimal."""
    noise, size = os.urandom(10 * _POOL), 4 * _POOL
    middle = (int.from_bytes(noise[:size]) & _RANDOM | _FIXED).to_bytes(size).hex("-", 2).split("-")
    last = noise[size:].hex("-", 6).split("-")
    return map("-".join, zip(middle[::2], middle[1::2], last, strict=True))


LONGEST_TEXT = 2_000
"""Characters of an error or a reason that are kept."""
TRACE = "\n\x1f"
"""Between the text of an error and its trace, where a store keeps both as one: no text has it by chance."""


def text_of(anything: object, longest: int = LONGEST_TEXT) -> str:
    """`str` of it, else `repr`, else the name of its type; at most `longest` characters, without NUL and surrogates."""
    for write in (str, repr):
        try:
            return storable(str.__str__(write(anything))[:longest])[:longest]
        except Exception:  # noqa: BLE001 - its own code failed: the next way of writing it is tried
            continue
    return storable(type(anything).__name__)[:longest]


def error_text(error: BaseException) -> str:
    """The type of an error and what it says, as `text_of` writes it."""
    name, said = type(error).__name__, text_of(error)
    return storable(f"{name}: {said}" if said else name)[:LONGEST_TEXT]


def error_parts(kept: str | None) -> tuple[str, str]:
    """The text of an error as a store keeps it, and the trace that follows; empty where there is none."""
    text, _, trace = (kept or "").partition(TRACE)
    return text, trace


def storable(text: str) -> str:
    """`text` in UTF-8 without NUL: what no encoder takes is written as an escape (`\\udce9`, `\\x00`)."""
    if text.isascii() and "\0" not in text:
        return text
    return text.replace("\0", "\\x00").encode("utf-8", "backslashreplace").decode("utf-8")


def printable(text: str) -> str:
    """`text` with every character that does not print as its escape: line breaks, controls, lone surrogates."""
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode("ascii") for one in text)
