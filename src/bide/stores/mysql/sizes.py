"""How much goes into one packet: the server takes no more than its `max_allowed_packet`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from bide.core.errors import StoreError, StoreUnavailable
from bide.core.records import NewTask

AT_ONCE = 1_000
"""Tasks in one statement: beyond that it is no quicker, and others wait longer."""
_BYTES_AT_ONCE = 4 * 1024 * 1024
_AROUND = 2_500
"""Bytes of a statement for a task whose names are the longest, without payload and options."""
_REST = 4_096
"""Bytes of what else is in a packet."""

One = TypeVar("One")


def size_of(new: NewTask) -> int:
    """The bytes that this will be within a statement, at most. Quotes and backslashes are doubled there."""
    size = _AROUND
    for data in (new.payload, new.options):
        size += len(data) + data.count(b"'") + data.count(b"\\")
    return size


def too_large(new: NewTask, largest: int) -> StoreError | None:
    """Why the server would not take this task, if so."""
    if len(new.payload) + len(new.options) < _BYTES_AT_ONCE // 4 and largest >= _BYTES_AT_ONCE:
        return None
    size = size_of(new) + _REST
    if size <= largest:
        return None
    return StoreUnavailable(
        f"not done: task {new.topic!r} {new.key!r} makes a packet of up to {size} bytes, and the server's "
        f"max_allowed_packet is {largest}: raise that, or keep large data elsewhere"
    )


def slices(asked: Sequence[One], largest: int | None = None) -> list[Sequence[One]]:
    """Parts for one packet each; with `largest`, of new tasks, also by their bytes."""
    if largest is None:
        return [asked[first : first + AT_ONCE] for first in range(0, len(asked), AT_ONCE)]
    room = max(min(_BYTES_AT_ONCE, largest - _REST), 0)
    parts: list[Sequence[One]] = []
    first, size = 0, 0
    new: Any
    for place, new in enumerate(asked):
        more = size_of(new)
        if place > first and (place - first >= AT_ONCE or size + more > room):
            parts.append(asked[first:place])
            first, size = place, 0
        size += more
    if first < len(asked):
        parts.append(asked[first:])
    return parts
