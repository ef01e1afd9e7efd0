"""Changes as callers ask for them, checked. All raise BadInput."""

from __future__ import annotations

from bide.core.instants import LAST_INSTANT, Length, Millis, When, duration
from bide.core.names import check_name, check_topic, new_id
from bide.core.records import At, Cancel, In, Move, Record, Redrive, State, Token, uncut
from bide.engine.arguments import deadline_of, one_due_of
from bide.engine.terms import Terms
from bide.ports import Clock


def new_move(
    topic: str,
    key: str,
    *,
    delay: Length | None,
    at: When | None,
    deadline: When | Length | None,
    if_token: Token | None,
    clock: Clock,
) -> Move:
    """Another time for a waiting task."""
    due = one_due_of(at, delay, clock.grain)
    return Move(check_topic(topic), check_name("key", key), due, if_token, deadline_of(deadline, due, clock))


def new_fire(topic: str, key: str, *, if_token: Token | None) -> Move:
    """Now."""
    return Move(check_topic(topic), check_name("key", key), In(0), if_token, verb="fire_now")


def new_cancel(topic: str, key: str, *, if_token: Token | None, terms: Terms, clock: Clock) -> Cancel:
    """Never; remembered for as long as the terms say."""
    topic, key = check_topic(topic), check_name("key", key)  # before its retention is asked, which may count
    keep_until = terms.retention_of(topic).keep_until(State.CANCELLED, clock.now())
    return Cancel(topic, key, keep_until, if_token)


def new_shift(record: Record, by: Millis, *, deadlines: bool, if_token: Token) -> Move:
    """A waiting task by a length from when it was asked for; with `deadlines` its deadline moves along."""
    deadline = None
    if deadlines and record.deadline is not None:
        deadline = shifted(record.deadline, by)
    return Move(record.topic, record.key, At(shifted(record.due_at, by)), if_token, deadline, "shift")


def shifted(at: Millis, by: Millis) -> Millis:
    """An instant, moved by a length, and kept within what an instant can be."""
    return min(max(0, at + by), LAST_INSTANT)


def new_redrive(topic: str, key: str, *, delay: Length, if_token: Token | None, clock: Clock) -> Redrive:
    """A dead task again, as a new life."""
    due = uncut(In(duration(delay, field="delay")), clock.grain)
    return Redrive(check_topic(topic), check_name("key", key), new_id(), due, if_token)
