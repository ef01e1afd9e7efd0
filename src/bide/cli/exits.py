"""How a command ends, as a number that scripts can use: one table, shown by `--help` and in docs/cli.md."""

from __future__ import annotations

from enum import IntEnum
from typing import assert_never

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
    """The exit codes. A number once given keeps its meaning."""

    DONE = 0
    NOT_DONE = 1
    BAD_INPUT = 2
    UNAVAILABLE = 3
    DAMAGED = 4
    SETUP = 5
    UNKNOWN = 6
    PARTLY = 7
    DEFECT = 70
    INTERRUPTED = 130

    @property
    def meaning(self) -> str:
        """The conclusion that a script may draw."""
        match self:
            case Exit.DONE:
                return "done as asked"
            case Exit.NOT_DONE:
                return "not done, and the answer says why: not found, finished, under way, refused, stale token"
            case Exit.BAD_INPUT:
                return "wrong usage or bad input; nothing was done"
            case Exit.UNAVAILABLE:
                return "the store is locked, away or full; nothing was done, and trying again is safe"
            case Exit.DAMAGED:
                return "the store is damaged, is not a bide store, or is of another version"
            case Exit.SETUP:
                return "the program is put together wrongly: a missing package, an app that cannot be loaded"
            case Exit.UNKNOWN:
                return "the answer was lost: it was done once or not at all; look before you try again"
            case Exit.PARTLY:
                return "a part is done, or may be, and the message says which; the rest is not"
            case Exit.DEFECT:
                return "a defect in bide or in the loaded app; --debug shows where"
            case Exit.INTERRUPTED:
                return "interrupted (Ctrl-C) before the end"
            case _:
                assert_never(self)


class PartlyDone(BideError):
    """A command ended in the middle; the message says how far it came."""


def exit_of(error: BideError) -> Exit:
    """The code of a command that ends with `error`."""
    if isinstance(error, BadInput):
        return Exit.BAD_INPUT
    if isinstance(error, StoreCorrupt | StoreMismatch):
        return Exit.DAMAGED
    if isinstance(error, PartlyDone | PartlyFailed):
        return Exit.PARTLY
    if isinstance(error, OutcomeUnknown):
        return Exit.UNKNOWN
    if isinstance(error, StoreError):
        return Exit.UNAVAILABLE
    if isinstance(error, SetupError):
        return Exit.SETUP
    return Exit.NOT_DONE if isinstance(error, LeaseLost) else Exit.DEFECT
