"""What may be a topic, a key and a group; and where fresh ids come from."""

from __future__ import annotations

import os
import re
import time

from bide.core.errors import BadInput

LONGEST_NAME = 200
"""Bytes of UTF-8 that a topic, key or group may have."""

_FORBIDDEN = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")
_ACCEPTED = f"1 to {LONGEST_NAME} bytes of text without control characters"
RESERVED_TOPIC = "bide:settings"
"""Settings that must survive live here as hidden tasks; no verb of a caller's reaches or shows it."""
SHOWN_TOPIC = "bide:shown"
"""So does, for a day, what is there to be shown: what happened when, who works how, what is being changed."""
RESERVED_TOPICS = frozenset({RESERVED_TOPIC, SHOWN_TOPIC})


def check_name(field: str, value: object) -> str:
    """`value`, if it can be a topic, key or group. O(length). Raises BadInput."""
    if isinstance(value, str) and type(value) is not str:
        value = str.__str__(value)  # a member of a StrEnum names a topic well; what is kept is its plain text
    if type(value) is not str or not value or len(value) > LONGEST_NAME:
        raise BadInput(field, value, _ACCEPTED)
    if value.isascii():
        if not value.isprintable():
            raise BadInput(field, value, _ACCEPTED)
    elif _FORBIDDEN.search(value) or len(value.encode()) > LONGEST_NAME:
        raise BadInput(field, value, _ACCEPTED)
    return value


def check_topic(value: object, field: str = "topic") -> str:
    """`value`, if it can be a topic of a caller's. Raises BadInput."""
    topic = check_name(field, value)
    if topic in RESERVED_TOPICS:
        raise BadInput(field, value, "a topic of your own: this one holds what is bide's own")
    return topic


_POOL = 256
_endings: list[str] = []
"""The random part of ids to come, written out: one call of the system for many ids, at a fifth of the cost."""
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_endings.clear)  # else parent and child would give out the same ids
_beginning = (0, "")
"""A millisecond, and how an id of it begins."""


def new_id() -> str:
    """A fresh UUIDv7 (RFC 9562 section 5.7) in canonical text: 48 bits of Unix milliseconds, then 74 random bits.

    Time-ordered, so that fresh keys land side by side in an index. Any thread may call it.
    """
    global _beginning
    millis = time.time_ns() // 1_000_000
    known, beginning = _beginning
    if known != millis:
        digits = f"{millis:012x}"
        beginning = f"{digits[:8]}-{digits[8:]}-7"
        _beginning = millis, beginning
    try:
        return beginning + _endings.pop()
    except IndexError:
        noise = os.urandom(10 * _POOL).hex()
        ending, *more = (_ending(noise[place : place + 20]) for place in range(0, 20 * _POOL, 20))
        _endings.extend(more)
        return beginning + ending


def _ending(noise: str) -> str:
    """What follows the version: 12 random bits, the variant, 62 more."""
    return f"{noise[:3]}-{'89ab'[int(noise[3], 16) & 3]}{noise[4:7]}-{noise[7:19]}"
