"""The answer of a verb: one word, and the current task."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from msgspec import Struct

from bide.core.instants import Millis
from bide.core.records import Record, Result
from bide.core.tasks import Task

_DONE_AS_ASKED = frozenset(
    {Result.CREATED, Result.REPLACED, Result.KEPT, Result.MOVED, Result.CANCELLED, Result.CANCELLED_WHILE_LEASED,
     Result.REDRIVEN}
)  # fmt: skip
_TIMED = frozenset({Result.CREATED, Result.REPLACED, Result.MOVED})


class Answer(Struct, frozen=True, gc=False):
    """The answer for one task.

    A lost race is an answer too: check `result` (a `Result`, equal to its text) or `ok`. It has no truth value.
    `was` is the previous `wake_at` of a moved or replaced task, in milliseconds since the epoch.
    """

    result: Result
    record: Record | None = None
    was: Millis | None = None

    @property
    def task(self) -> Task[Any] | None:
        """The current task; None if there is none (`not_found`)."""
        return None if self.record is None else Task(self.record)

    @property
    def past(self) -> timedelta | None:
        """How far the requested time was in the past, so that the task is due now; None: it was not in the past."""
        record = self.record
        if record is None or self.result not in _TIMED or record.due_at >= record.wake_at:
            return None
        return timedelta(milliseconds=record.wake_at - record.due_at)

    @property
    def ok(self) -> bool:
        """True if the request took effect, or already held: the task is scheduled, moved, cancelled or sent again."""
        return self.result in _DONE_AS_ASKED

    def __repr__(self) -> str:
        record = self.record
        if record is None:
            return f"<Answer {self.result.value}>"
        return f"<Answer {self.result.value} {record.topic}/{record.key} {record.state.value}>"

    def __bool__(self) -> bool:
        raise TypeError(
            f"an answer is neither true nor false: this one is {self.result.value!r}; "
            "look at answer.ok, or compare answer.result with the word you expect"
        )
