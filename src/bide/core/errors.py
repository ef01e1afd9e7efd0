"""All errors that bide raises, grouped by what a caller wants to catch.

    BideError
    ├── BadInput (ValueError)          an argument is not acceptable; nothing was done
    │   └── BadPayload                 a payload cannot be encoded, is too large, or is not of the declared type
    ├── SetupError                     the program is set up incorrectly: fix the code
    │   ├── DuplicateHandler           a topic has two handlers
    │   ├── MissingExtra               an optional package is not installed
    │   └── NotOpen                    the app is not open: wrap the call in `async with app:`
    ├── StoreError
    │   ├── StoreUnavailable           not done: the store is locked, closed or unreachable; try again
    │   ├── StoreFull                  not done: no room for new tasks; existing tasks still drain
    │   ├── StoreCorrupt               the data is damaged
    │   ├── StoreMismatch              not a bide store, another version, or opened with other settings
    │   ├── OutcomeUnknown             done once or not at all; which one cannot be known in time
    │   └── PartlyFailed               part of a batch failed; `answers` says which part
    └── LeaseLost                      another worker has leased the task, or it was cancelled

A lost race is an *answer* (`under_way`, `stale_token`, ...), never one of these.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def pickled(error: Exception) -> tuple[Any, ...]:
    """A `__reduce__` that unpickles it without a call of `__init__`, which may take other arguments than `args`."""
    return Exception.__new__, (type(error), *error.args), error.__dict__


class BideError(Exception):
    """The base class of all errors that bide raises on purpose."""

    __reduce__ = pickled


class BadInput(BideError, ValueError):
    """An argument cannot be accepted; the message names the field, the value, and the accepted values."""

    def __init__(self, field: str, value: object, accepted: str) -> None:
        self.field = field
        self.value = value
        self.accepted = accepted
        given = "nothing was given" if value is None else f"{_shorten(value)} is not accepted"
        super().__init__(f"{field}: {given}; give {accepted}")


class BadPayload(BadInput):
    """A payload cannot be encoded, is over the limit, or is not of the handler's declared type."""


class SetupError(BideError):
    """The program is set up incorrectly; running it again will not help."""


HAS_TO_BE_AWAITED = (
    "app.sync works only with synchronous connections, and this one has to be awaited: use "
    "`await app.using(connection)...` in a coroutine"
)


class DuplicateHandler(SetupError):
    """Two handlers claim one topic."""


class MissingExtra(SetupError):
    """A required optional package is not installed; the message says how to install it."""

    def __init__(self, extra: str, needed_for: str) -> None:
        self.extra = extra
        self.needed_for = needed_for
        super().__init__(f"{needed_for} needs an optional package: pip install 'bide[{extra}]'")


class NotOpen(SetupError):
    """The app is not open here. Nothing was done, and trying again will not help."""


class StoreError(BideError):
    """The store could not carry out the request."""


class StoreUnavailable(StoreError):
    """Nothing was done: the store is locked, closed, or cannot be reached. Trying again is safe."""


class StoreFull(StoreError):
    """Nothing was done: there is no room for new tasks. Lease, settle and cancel still work."""


class StoreCorrupt(StoreError):
    """The store's data is damaged; the message says where and what to do."""


class StoreMismatch(StoreError):
    """This is not a bide store, has another version, or is open here with other settings."""


class OutcomeUnknown(StoreError):
    """The answer to a call was lost: it was done once or not at all, and which one cannot be known in time."""


class PartlyFailed(StoreError):
    """Part of a batch failed, for example because one server of several is unavailable.

    `answers` has the length and order of the batch: an answer for each item that was done, a StoreError for each that
    was not or may not have been. For a group verb: the answers so far, and the error that ended it.
    """

    def __init__(self, answers: Sequence[object]) -> None:
        self.answers = answers
        failed = [one for one in answers if isinstance(one, StoreError)]
        first = f"; the first: {failed[0]}" if failed else ""
        super().__init__(f"{len(failed)} of {len(answers)} failed, the others were done{first}")


class LeaseLost(BideError):
    """The lease ended: another worker holds the task now, or it was cancelled, replaced or finished."""


def _shorten(value: object) -> str:
    try:
        text = repr(value)
    except Exception:  # noqa: BLE001 - a value whose repr fails (too deep, or a defect) is refused too
        text = f"a {type(value).__name__}"
    return text if len(text) <= 80 else f"{text[:79]}…"
