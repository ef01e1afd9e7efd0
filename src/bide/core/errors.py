"""Every error that bide raises, shaped by what a caller wants to catch.

    BideError
    ├── BadInput (ValueError)          an argument is not acceptable; nothing was done
    │   └── BadPayload                 it cannot be encoded, is too large, or is not of the declared type
    ├── SetupError                     the program is put together wrongly: fix the code
    │   ├── DuplicateHandler           a topic has two handlers
    │   ├── MissingExtra               an optional package is not installed
    │   └── NotOpen                    the app is not open: `async with app:` around it
    ├── StoreError
    │   ├── StoreUnavailable           not done: locked, closed or away; try again
    │   ├── StoreFull                  not done: no room for new work; what is there still drains
    │   ├── StoreCorrupt               the data is damaged
    │   ├── StoreMismatch              it is not a bide store, is of another version, or is opened with other settings
    │   ├── OutcomeUnknown             it may or may not have been done, and cannot be known in time
    │   └── PartlyFailed               of a batch: some were answered, some failed; `answers` says which
    └── LeaseLost                      the task is no longer ours: another worker has it, or it was cancelled

A lost race is an *answer* (`under_way`, `stale_token`, ...), never one of these.
"""

from __future__ import annotations

from collections.abc import Sequence


class BideError(Exception):
    """The root of everything that bide raises on purpose."""


class BadInput(BideError, ValueError):
    """An argument that cannot be accepted: names the field, the value, and what would be."""

    def __init__(self, field: str, value: object, accepted: str) -> None:
        self.field = field
        self.value = value
        self.accepted = accepted
        given = "nothing was given" if value is None else f"{_shorten(value)} is not accepted"
        super().__init__(f"{field}: {given}; give {accepted}")

    def __reduce__(self) -> tuple[type[BadInput], tuple[str, object, str]]:
        return type(self), (self.field, self.value, self.accepted)


class BadPayload(BadInput):
    """A payload that cannot be encoded, is over the limit, or is not of the handler's declared type."""


class SetupError(BideError):
    """The program is put together wrongly; running it again will not help."""


HAS_TO_BE_AWAITED = (
    "app.sync works on synchronous connections only, and this one has to be awaited: use "
    "`await app.using(connection)...` in a coroutine"
)
"""Of a SetupError."""


class DuplicateHandler(SetupError):
    """Two handlers claim one topic."""


class MissingExtra(SetupError):
    """An optional package is needed and not installed; the message says how to install it."""

    def __init__(self, extra: str, needed_for: str) -> None:
        self.extra = extra
        self.needed_for = needed_for
        super().__init__(f"{needed_for} needs an optional package: pip install 'bide[{extra}]'")

    def __reduce__(self) -> tuple[type[MissingExtra], tuple[str, str]]:
        return type(self), (self.extra, self.needed_for)


class NotOpen(SetupError):
    """The app is not open here. Nothing was done, and trying again will not help."""


class StoreError(BideError):
    """The store could not do what was asked."""


class StoreUnavailable(StoreError):
    """Nothing was done: the store is locked, closed, or cannot be reached. Trying again is safe."""


class StoreFull(StoreError):
    """Nothing was done: there is no room for new work. Lease, settle and cancel still work."""


class StoreCorrupt(StoreError):
    """The store's data is damaged; the message says where and what to do."""


class StoreMismatch(StoreError):
    """Not a bide store, one of another version, or one that is open here with other settings."""


class OutcomeUnknown(StoreError):
    """The call was sent and its answer lost: it was done once or not at all, and which cannot be known in time."""


class PartlyFailed(StoreError):
    """Of one batch some were answered and some failed, as when one server of several is away.

    `answers` has the length and order of the batch: an answer for each that was done, a StoreError for each that was
    not, or may not have been. Of a group verb: the answers so far, and the error that ended it.
    """

    def __init__(self, answers: Sequence[object]) -> None:
        self.answers = answers
        failed = [one for one in answers if isinstance(one, StoreError)]
        first = f"; the first: {failed[0]}" if failed else ""
        super().__init__(f"{len(failed)} of {len(answers)} failed, the others were done{first}")

    def __reduce__(self) -> tuple[type[PartlyFailed], tuple[Sequence[object]]]:
        return type(self), (self.answers,)


class LeaseLost(BideError):
    """The lease ended: another worker holds the task now, or it was cancelled, replaced or finished."""


def _shorten(value: object, limit: int = 80) -> str:
    try:
        text = repr(value)
    except Exception:  # noqa: BLE001 - what is too deep to show, or cannot show itself, is still not accepted
        text = f"a {type(value).__name__}"
    return text if len(text) <= limit else f"{text[: limit - 1]}…"
