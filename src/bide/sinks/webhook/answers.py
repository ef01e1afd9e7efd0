"""From the answer of a receiver to the outcome of the task, and the record of it for observers."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from http import HTTPStatus
from typing import TypeAlias

from msgspec import Struct

from bide.core.outcomes import Dead, Outcome, Retry
from bide.core.texts import printable

EXCERPT = 500
"""Bytes of an answer that are kept for people to read."""
LONGEST_WAIT = timedelta(days=1)
"""A receiver may ask for a later retry, and not that a task be as good as forgotten."""
_ABSURD = 366 * 86_400
"""Seconds. Who asks for more means something else, such as a time since 1970."""
_SECONDS = re.compile(r"[0-9]{1,10}", re.ASCII)
_BUSY = (429, 503)
_GONE = 410


class WebhookResult(Struct, frozen=True, kw_only=True, gc=False):
    """How one delivery ended, for metrics and the console. One that was broken off has no outcome, and so no result."""

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
    """The reason of the outcome; None where it is done."""


Observe: TypeAlias = Callable[[WebhookResult], None]


def outcome_of(
    status: int, retry_after: str | None, location: str | None, excerpt: str, now: float, date: str | None = None
) -> Outcome | None:
    """None: done. A status is judged alone; an excerpt only explains it."""
    if 200 <= status < 300:
        return None
    why = _named(status)
    if 300 <= status < 400:
        why += f": redirects are not followed (to {inert(location[:200])})" if location else ": a redirect"
    if excerpt:
        why = f"{why}: {excerpt}"
    if status == _GONE:
        return Dead(why)
    wait = pause_asked_for(retry_after, now, date) if status in _BUSY else None
    return Retry(why) if wait is None else Retry(f"{why} (asked to wait {wait.total_seconds():.0f} s)", delay=wait)


def pause_asked_for(retry_after: str | None, now: float, date: str | None = None) -> timedelta | None:
    """The wait that a Retry-After header asks for: whole seconds, or a date. None: nothing that makes sense.

    A date is meant by the receiver's clock, which its `date` tells, else by ours: `now`, seconds since 1970. At most a
    day. Zero and a date that has passed ask for nothing: the retry policy decides.
    """
    if retry_after is None:
        return None
    text = retry_after.strip()
    if _SECONDS.fullmatch(text):
        seconds = float(text)
    else:
        moment = _moment(text)
        if moment is None:
            return None
        there = _moment(date) or datetime.fromtimestamp(now, UTC)
        seconds = (moment - there).total_seconds()
    if not 0 < seconds <= _ABSURD:
        return None
    return min(timedelta(seconds=seconds), LONGEST_WAIT)


def _moment(text: str | None) -> datetime | None:
    try:
        moment = parsedate_to_datetime(text or "")
    except (ValueError, IndexError, TypeError, OverflowError):
        return None
    return moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)


def inert(answered: bytes | str) -> str:
    """The first bytes of an answer as text that does nothing where it is shown: no line ends, no control characters.

    That includes those that turn the direction of writing. It is not escaped for HTML: who shows it there does that.
    """
    if isinstance(answered, str):  # a header, whose bytes that are no UTF-8 are lone surrogates
        answered = answered.encode(errors="surrogateescape")
    return printable(answered[:EXCERPT].decode("utf-8", "replace"))


def _named(status: int) -> str:
    try:
        return f"{status} {HTTPStatus(status).phrase}"
    except ValueError:
        return str(status)
