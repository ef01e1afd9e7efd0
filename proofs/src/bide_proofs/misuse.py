"""Values that no handler should return or raise, but some handlers will: for simulation, torture and tests."""

from __future__ import annotations

from typing import Any

from bide.core.outcomes import Dead, Retry


class Panic(BaseException):
    """Not an Exception, and not asyncio's: like a panic in an extension or a time-out of a green thread."""


class Mute(Exception):
    """An error whose text cannot be formatted."""

    def __str__(self) -> str:
        raise LookupError("no words")


WAYS = 10


def misbehave(way: int) -> Any:
    """Return or raise the misuse with number `way`, from 0 up to `WAYS`: wrong types, or not an Exception."""
    why: Any = ConnectionError("where text is meant")
    status: Any = 404
    returned = (42, Retry, Retry(why), Dead(why), Dead(status))
    if way < len(returned):
        return returned[way]
    of_no_encoding = b"caf\xe9".decode("utf-8", "surrogateescape")
    raised = (Mute(), Panic("overflow"), GeneratorExit(), SystemExit(3), ValueError(f"no such file: {of_no_encoding}"))
    raise raised[way - len(returned)]
