"""The outcomes of a delivery; a handler returns one, or raises it from any depth."""

from __future__ import annotations

from typing import TypeAlias

from bide.core.errors import pickled
from bide.core.instants import Due, Length, When, due_later
from bide.core.names import error_text, text_of


class Outcome(Exception):
    """The base class of the four outcomes. It is an exception so that a handler can raise it from any depth. A
    wall-clock time without a date, such as "08:00 Asia/Tokyo", is read as of the settlement, by the worker's clock."""

    __reduce__ = pickled


class Done(Outcome):
    """The delivery succeeded. With `again_at` or `again_in` the task starts its next life then, under the same key.

    This is the low-level way to repeat a task: `again_in` counts from the end of the run, so it drifts by the time that
    each run takes, and the first death ends it. What recurs at known times has a rule: see `Bide.recurs`.
    """

    def __init__(self, *, again_at: When | None = None, again_in: Length | None = None) -> None:
        self.again: Due | str | None = None
        if again_at is not None or again_in is not None:
            self.again = due_later(again_at, again_in, at_field="again_at", delay_field="again_in")
        super().__init__("done")


class Retry(Outcome):
    """The delivery failed: retry by the policy, or at the time given here, as often as the policy allows.

    `why` is kept as text, with its type if it is an error.
    """

    def __init__(self, why: object = None, *, delay: Length | None = None, at: When | None = None) -> None:
        self.due: Due | str | None = None if delay is None and at is None else due_later(at, delay)
        self.why = None if why is None else _reason(why)
        super().__init__(self.why or "retry")


class Defer(Outcome):
    """The task must wait longer; this counts as neither a delivery nor a failure."""

    def __init__(self, delay: Length | None = None, *, at: When | None = None) -> None:
        self.due: Due | str = due_later(at, delay)
        super().__init__("defer")


class Dead(Outcome):
    """The task can never succeed: stop trying, and keep it as dead, with `why` as the text of its error."""

    def __init__(self, why: object) -> None:
        self.why = _reason(why)
        super().__init__(self.why)


def outcome_in(error: BaseException) -> BaseException:
    """The outcome that alone is in an exception group, as of an `asyncio.TaskGroup`; else `error` itself.

    An error whose own code fails, as a proxy may, becomes one with its text.
    """
    inner = error
    try:
        while isinstance(inner, BaseExceptionGroup) and len(inner.exceptions) == 1:
            inner = inner.exceptions[0]
        return inner if isinstance(inner, Outcome) else error
    except Exception:  # noqa: BLE001 - it may be of any kind
        return RuntimeError(error_text(error))


End: TypeAlias = Outcome | BaseException | None
"""How a handler ended: None for Done, another outcome, or its exception."""


def _reason(why: object) -> str:
    return error_text(why) if isinstance(why, BaseException) else text_of(why)
