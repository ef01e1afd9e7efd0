"""What callers, the receiver and the killer note. Times are nanoseconds of this process's monotonic clock."""

from __future__ import annotations

from typing import TypeAlias

import msgspec


class Answered(msgspec.Struct, frozen=True, gc=False):
    """A call has its answer: one word, and the task as it was then, if there was one. An error is `failed`."""

    verb: str
    key: str
    asked_at: int
    at: int
    result: str
    unanswered: int = 0
    """How often it was sent before without learning whether it was done."""
    id: str = ""
    token: int = 0
    wake_at: int = 0
    """Milliseconds since the epoch."""
    waiting: bool = False
    error: str = ""
    asked_for: int = 0
    """Milliseconds since the epoch: a move can have moved the task to no earlier time, also one without an answer."""


class Arrived(msgspec.Struct, frozen=True, gc=False):
    """A delivery, and what the receiver did with it."""

    key: str
    id: str
    token: int
    attempt: int
    instance: int
    at: int
    wall: int
    """Nanoseconds since the epoch: the store's clock is that of the same machine."""
    effect: str = "applied"
    """Or `repeated`, `stale`: refused with 200; or `none`, since the receiver failed before it looked."""
    acknowledged: bool = True
    """Whether it was answered with 200, and the connection left whole."""


class Killed(msgspec.Struct, frozen=True, gc=False):
    """This instance is about to be killed."""

    instance: int
    at: int


class Wrong(msgspec.Struct, frozen=True, gc=False):
    """What whoever notes it knows to be wrong without comparing."""

    kind: str
    what: str


Line: TypeAlias = Answered | Arrived | Killed | Wrong
