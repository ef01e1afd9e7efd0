"""Values that a handler should not return or raise, and some handler will: for simulation, torture and tests."""

from __future__ import annotations

from typing import Any

from bide.core.outcomes import Dead, Retry


class Panic(BaseException):
    """Neither an Exception nor asyncio's own: a panic of an extension, a time-out of a green thread."""


class Mute(Exception):
    """An error that cannot say what it is."""

    def __str__(self) -> str:
        raise LookupError("no words")


WAYS = 10


def misbehave(way: int) -> Any:
    """Return or raise the one of `WAYS` with this number, from 0: of other types, or other than an Exception."""
    why: Any = ConnectionError("where text is meant")
    status: Any = 404
    returned = (42, Retry, Retry(why), Dead(why), Dead(status))
    if way < len(returned):
        return returned[way]
    of_no_encoding = b"caf\xe9".decode("utf-8", "surrogateescape")
    raised = (Mute(), Panic("overflow"), GeneratorExit(), SystemExit(3), ValueError(f"no such file: {of_no_encoding}"))
    raise raised[way - len(returned)]
