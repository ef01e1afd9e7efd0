"""How much goes into one packet: the server takes no more than its `max_allowed_packet`."""

from __future__ import annotations

from collections.abc import Sequence

from bide.core.errors import StoreError, StoreUnavailable
from bide.core.records import NewTask
from bide.stores.batches import slices

AT_ONCE = 1_000
"""Tasks in one statement: beyond that it is no quicker, and others wait longer."""
WITH_ERRORS = 500
"""The same of tasks that may have errors, which can be some 6 KB each: together less than a packet of 4 MB."""
_BYTES_AT_ONCE = 4 * 1024 * 1024
_AROUND = 2_500
"""Bytes of a statement for a task whose names are the longest, without payload and options."""
_REST = 4_096
"""Bytes of what else is in a packet."""


def size_of(new: NewTask) -> int:
    """The bytes that this will be within a statement, at most. Quotes and backslashes are doubled there."""
    size = _AROUND
    for data in (new.payload, new.options):
        size += len(data) + data.count(b"'") + data.count(b"\\")
    return size


def too_large(tasks: Sequence[NewTask], largest: int) -> dict[int, StoreError]:
    """The places of those that the server would not take, and why."""
    if not tasks or 2 * max(len(new.payload) + len(new.options) for new in tasks) + _AROUND + _REST <= largest:
        return {}
    problems: dict[int, StoreError] = {}
    for place, new in enumerate(tasks):
        size = size_of(new) + _REST
        if size > largest:
            problems[place] = StoreUnavailable(
                f"not done: task {new.topic!r} {new.key!r} makes a packet of up to {size} bytes, and the server's "
                f"max_allowed_packet is {largest}: raise that, or keep large data elsewhere"
            )
    return problems


def slices_of_new(tasks: Sequence[NewTask], largest: int) -> list[Sequence[NewTask]]:
    """Parts for one packet each, also by their bytes."""
    room = min(_BYTES_AT_ONCE, largest - _REST)
    parts: list[Sequence[NewTask]] = []
    for part in slices(tasks, AT_ONCE):
        if 2 * sum([len(new.payload) + len(new.options) for new in part]) + _AROUND * len(part) <= room:
            parts.append(part)
            continue
        first, size = 0, 0
        for place, new in enumerate(part):
            more = size_of(new)
            if place > first and size + more > room:
                parts.append(part[first:place])
                first, size = place, 0
            size += more
        parts.append(part[first:])
    return parts
