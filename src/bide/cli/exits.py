"""The exit codes of commands, for scripts: one table, shown by `--help` and in docs/cli.md."""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from typing import Self

from bide.core.errors import (
    BadInput,
    BideError,
    LeaseLost,
    OutcomeUnknown,
    PartlyFailed,
    SetupError,
    StoreCorrupt,
    StoreError,
    StoreMismatch,
)


class Exit(IntEnum):
    """The exit codes, each with the conclusion that a script may draw. A number once given keeps its meaning."""

    meaning: str

    def __new__(cls, code: int, meaning: str = "") -> Self:
        one = int.__new__(cls, code)
        one._value_ = code
        one.meaning = meaning
        return one

    DONE = 0, "done as asked"
    NOT_DONE = 1, "not done, and the answer says why: not found, finished, under way, refused, stale token"
    BAD_INPUT = 2, "wrong usage or bad input; nothing was done"
    UNAVAILABLE = 3, "the store is locked, away or full; nothing was done, and trying again is safe"
    DAMAGED = 4, "the store is damaged, is not a bide store, or is of another version"
    SETUP = 5, "the program is put together wrongly: a missing package, an app that cannot be loaded"
    UNKNOWN = 6, "the answer was lost: it was done once or not at all; look before you try again"
    PARTLY = 7, "a part is done, or may be, and the message says which; the rest is not"
    DEFECT = 70, "a defect in bide or in the loaded app; --debug shows where"
    INTERRUPTED = 130, "interrupted (Ctrl-C) before the end"


class PartlyDone(BideError):
    """A command ended in the middle; the message says how far it came."""


_EXITS: Mapping[type[BideError], Exit] = {
    BadInput: Exit.BAD_INPUT,
    StoreCorrupt: Exit.DAMAGED,
    StoreMismatch: Exit.DAMAGED,
    PartlyDone: Exit.PARTLY,
    PartlyFailed: Exit.PARTLY,
    OutcomeUnknown: Exit.UNKNOWN,
    StoreError: Exit.UNAVAILABLE,
    SetupError: Exit.SETUP,
    LeaseLost: Exit.NOT_DONE,
}
"""By the kind of error, each before those that it is a special case of."""


def exit_of(error: BideError) -> Exit:
    """The code of a command that ends with `error`."""
    return next((code for kind, code in _EXITS.items() if isinstance(error, kind)), Exit.DEFECT)
