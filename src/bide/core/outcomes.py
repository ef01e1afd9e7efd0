"""The outcomes of a delivery, which a handler returns, or raises from any depth below it."""

from __future__ import annotations

from bide.core.errors import BadInput
from bide.core.instants import Length, When, duration, instant
from bide.core.names import error_text, text_of
from bide.core.records import At, Due, In


class Outcome(Exception):
    """The root of the four outcomes. An exception, so that a handler can raise one from any depth."""


class Done(Outcome):
    """It has happened. With `again_at` or `again_in` the task starts its next life then, under the same key."""

    def __init__(self, *, again_at: When | None = None, again_in: Length | None = None) -> None:
        self.again: Due | None = None
        if again_at is not None or again_in is not None:
            self.again = one_due(again_at, again_in, at_field="again_at", delay_field="again_in")
        super().__init__("done")


class Retry(Outcome):
    """It failed: try again when the policy says, or at the time given here; as often as the policy allows.

    `why` is kept as text, with its type if it is an error.
    """

    def __init__(self, why: object = None, *, delay: Length | None = None, at: When | None = None) -> None:
        self.due: Due | None = None if delay is None and at is None else one_due(at, delay)
        self.why = None if why is None else _reason(why)
        super().__init__(self.why or "retry")


class Defer(Outcome):
    """Not yet: wait again, counting nothing."""

    def __init__(self, delay: Length | None = None, *, at: When | None = None) -> None:
        if delay is None and at is None:
            raise BadInput("delay", None, 'Defer("1m") or Defer(at=...): when shall it be looked at again?')
        self.due: Due = one_due(at, delay)
        super().__init__("defer")


class Dead(Outcome):
    """It will never work: stop trying, and keep the task as dead, with `why` as the text of its error."""

    def __init__(self, why: object) -> None:
        self.why = _reason(why)
        super().__init__(self.why)


def _reason(why: object) -> str:
    return error_text(why) if isinstance(why, BaseException) else text_of(why)


def one_due(at: When | None, delay: Length | None, *, at_field: str = "at", delay_field: str = "delay") -> Due:
    """The due time by `at` or `delay`. Raises BadInput for both or neither, and for one that is no instant or
    length.
    """
    if at is not None:
        if delay is not None:
            raise BadInput(f"{at_field}, {delay_field}", (at, delay), "only one of the two")
        return At(instant(at, field=at_field))
    if delay is None:
        raise BadInput(f"{at_field}, {delay_field}", None, "one of the two: when shall it happen?")
    return In(duration(delay, field=delay_field))
