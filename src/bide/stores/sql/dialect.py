"""The traits of one kind of server: its connections, and the meaning of its errors.

Errors are told apart by what is to be done about them; a StoreError means that it will not be done, and says why.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from bide.core.errors import BideError, StoreError, StoreFull, StoreUnavailable


class Connection(Protocol):
    """A connection to the server, as those parts use it that are the same for all kinds."""

    driver: Any
    """The driver's own connection."""
    name: str
    """Of its row among the callers, while handlers' transactions are on it."""
    number: int
    """The handlers' transactions on it so far."""

    @property
    def usable(self) -> bool:
        """True while it is open, as far as the driver knows."""
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
        """Close it at once: the server undoes what is open."""

    async def end(self, *, within: float) -> None:
        """Close it in order, as far as that is possible."""


class Dialect(NamedTuple):
    """The way to a kind of server, and the meaning of its errors."""

    log: logging.Logger
    address_of: Callable[[str], Any]
    connect: Callable[..., Awaitable[Any]]
    """Makes a Connection to an address, `within` seconds."""
    meaning: Callable[..., Exception]
    """Give the exception to raise, or to act on, for an error of a statement."""
    said: Callable[[BaseException], str]
    """The text of an error, or its type if it has none."""
    away: tuple[type[Exception], ...]
    """The driver's errors, of the server as of the way to it."""
    names: Callable[[str, str], Any]
    """The names of the tables in a schema, with a prefix."""


Code = TypeVar("Code")


class NotSent(Exception):
    """No connection, or none to a server that may be written to: the call is safe to send again."""


class Lost(Exception):
    """The call was sent and no answer came: only the caller's row tells whether it was done."""


class TransactionConflict(Exception):
    """Refused and undone, for what others did meanwhile: the same batch is tried again."""


class LockTimeout(TransactionConflict):
    """Refused and undone: others kept a row locked for longer than we wait. The batch may go on without that row."""


class AlreadyApplied(Exception):
    """The gate is shut: this call was done before, or its caller has no row yet."""


class KeyTaken(Exception):
    """Refused and undone: a key that was to be new is there."""


class RowsMissing(Exception):
    """Refused and undone: not all rows were as the call expects them."""


OURS = (BideError, NotSent, Lost, TransactionConflict, AlreadyApplied, KeyTaken, RowsMissing)
"""Errors that mean what they are."""


class Meanings(Generic[Code]):
    """The meanings of a server's error codes. A code that is not known is a StoreUnavailable."""

    def __init__(
        self,
        kinds: Mapping[type[Exception], Collection[Code]],
        *,
        full: Collection[Code],
        refusals: Sequence[tuple[type[StoreError], Collection[Code], str]],
    ) -> None:
        """`full`: no space is left. `refusals`: for each error its codes, and what to do about it."""
        self._kinds: dict[Code, type[Exception]] = {code: kind for kind, codes in kinds.items() for code in codes}
        self._full = full
        self._refusals: dict[Code, tuple[type[StoreError], str]] = {
            code: (kind, advice) for kind, codes, advice in refusals for code in codes
        }

    def meaning(self, code: Code, text: str, *, adding: bool = False) -> Exception:
        """The error to raise, or to act on. `adding`: new tasks need space, and are refused for the want of it."""
        if code in self._kinds:
            return self._kinds[code](text)
        if code in self._full:
            return (StoreFull if adding else StoreUnavailable)(f"{text}: free some of its disk")
        if code in self._refusals:
            kind, advice = self._refusals[code]
            return kind(f"{text}; {advice}")
        return StoreUnavailable(text)


def plain(found: Exception) -> BideError:
    """The error for a caller outside of a call, which is not sent again: one of bide's own."""
    return found if isinstance(found, BideError) else StoreUnavailable(str(found))
