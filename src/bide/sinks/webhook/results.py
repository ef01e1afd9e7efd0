"""What is told of each delivery, for metrics and for the console."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from msgspec import Struct


class WebhookResult(Struct, frozen=True, kw_only=True, gc=False):
    """How one delivery ended. Not told of one that was broken off, since it has no outcome."""

    topic: str
    key: str
    id: str
    attempt: int
    host: str | None
    """With its port; None where there was no URL that could be called."""
    status: int | None
    """Of the answer; None where there was none."""
    seconds: float
    """From the first byte of work on it to its outcome."""
    outcome: str
    """`done`, `retry`, `dead`, or `defer` where the host had no place free: nothing was sent then."""
    excerpt: str
    """The first 500 bytes of the answer, without control characters."""
    why: str | None
    """What the outcome says: None where it is done."""


Observe: TypeAlias = Callable[[WebhookResult], None]
