"""What one kind of server has of its own, where all that connects to it needs it."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple, Protocol


class Connection(Protocol):
    """A connection to the server, as those parts use it that are the same for all kinds."""

    driver: Any
    """The driver's own connection."""

    @property
    def usable(self) -> bool:
        """Whether it is open, as far as the driver knows."""
        ...

    async def ask(self, statement: str, /) -> Any:
        """Carry out a statement without arguments."""
        ...

    async def rollback(self) -> None:
        """Undo what is not committed, if anything is."""
        ...

    async def reset(self) -> None:
        """Take back what a handler has set, locked or made in its session. One round trip."""
        ...

    def drop(self) -> None:
        """Close it at once, without a word: the server undoes what is open."""

    async def end(self, *, within: float) -> None:
        """Close it in order, as far as that is possible."""


class Dialect(NamedTuple):
    """How to reach a kind of server, and what it means by its errors."""

    log: logging.Logger
    address_of: Callable[[str], Any]
    connect: Callable[..., Awaitable[Any]]
    """Makes a Connection to an address, `within` seconds."""
    meaning: Callable[..., Exception]
    """What to raise, or to act on, for an error of a statement."""
    said: Callable[[BaseException], str]
    """What an error says, or what it is if it says nothing."""
    away: tuple[type[Exception], ...]
    """The driver's errors, of the server as of the way to it."""
    names: Callable[[str, str], Any]
    """What the tables are called in a schema, with a prefix."""
