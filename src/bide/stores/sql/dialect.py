"""The traits of one kind of server: its connections, and the meaning of its errors.

Each class of error stands for one reaction. A StoreError means that the call is given up, and says why.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

from bide.core.errors import BideError, StoreError, StoreFull, StoreUnavailable
from bide.stores.resending import Lost, NotSent


class Dialect(NamedTuple):
    """The functions that connect to one kind of server and interpret its errors."""

    log: logging.Logger
    address_of: Callable[[str], Any]
    connect: Callable[..., Awaitable[Any]]
    """Opens a connection to an address, `within` seconds."""
    meaning: Callable[..., Exception]
    """Returns the exception to raise, or to act on, for a statement's error."""
    said: Callable[[BaseException], str]
    """The text of an error, or its type if it has none."""
    away: tuple[type[Exception], ...]
    """The driver's errors, whether from the server or from the connection."""
    names: Callable[[str, str], Any]
    """The names of the tables in a schema, with a prefix."""


Code = TypeVar("Code")


class TransactionConflict(Exception):
    """Refused and rolled back because of a concurrent transaction: the same batch is tried again."""


class LockTimeout(TransactionConflict):
    """Rolled back: another transaction kept a row locked longer than we wait. The batch may go on without that row."""


class AlreadyApplied(Exception):
    """Stopped at the gate: this call was done before, or its caller has no row yet."""


class KeyTaken(Exception):
    """Refused and rolled back: a key that should be new exists already."""


class RowsMissing(Exception):
    """Refused and rolled back: not all rows were as the call expects."""


OURS = (BideError, NotSent, Lost, TransactionConflict, AlreadyApplied, KeyTaken, RowsMissing)
"""Errors that need no interpretation."""


class Meanings(Generic[Code]):
    """The meanings of a server's error codes. An unknown code means StoreUnavailable."""

    def __init__(
        self,
        kinds: Mapping[type[Exception], Collection[Code]],
        *,
        full: Collection[Code],
        refusals: Sequence[tuple[type[StoreError], Collection[Code], str]],
    ) -> None:
        """`full`: codes for a lack of space. `refusals`: each error with its codes and advice for the user."""
        self._kinds = {code: (kind, "") for kind, codes in kinds.items() for code in codes}
        self._kinds |= {code: (kind, f"; {advice}") for kind, codes, advice in refusals for code in codes}
        self._full = full

    def meaning(self, code: Code, text: str, *, adding: bool = False) -> Exception:
        """The error to raise, or to act on. `adding`: the call adds tasks, so a lack of space means StoreFull."""
        if code in self._full:
            return (StoreFull if adding else StoreUnavailable)(f"{text}: free some of its disk")
        kind, advice = self._kinds.get(code, (StoreUnavailable, ""))
        return kind(text + advice)


def plain(found: Exception) -> BideError:
    """The bide error to raise for `found` outside of a numbered call, where nothing is sent again."""
    return found if isinstance(found, BideError) else StoreUnavailable(str(found))
