"""Arguments of the verbs, checked and converted to what stores take: names, times, filters, changes.

All raise BadInput, naming the field.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from typing import TypedDict

from bide.core.errors import BadInput
from bide.core.instants import (
    LAST_INSTANT,
    LONGEST,
    LONGEST_TEXT,
    Length,
    Millis,
    When,
    check_instant,
    duration,
    duration_text,
    instant,
    instant_text,
)
from bide.core.names import check_name, check_topic, new_id
from bide.core.outcomes import one_due
from bide.core.records import (
    At,
    Cancel,
    Due,
    Filter,
    In,
    Move,
    OnConflict,
    Record,
    Redrive,
    Ref,
    State,
    Token,
    with_grain,
)
from bide.core.retry import RetryPolicy
from bide.engine.config import EngineConfig
from bide.ports import Clock


class TaskOptions(TypedDict, total=False):
    """The options of a task; `ClientVerbs.schedule` explains each."""

    key: str | None
    group: str | None
    delay: Length | None
    at: When | None
    on_conflict: str
    retry: RetryPolicy | str | None
    deadline: When | Length | None
    headers: Mapping[str, str] | None


class RouteOptions(TypedDict, total=False):
    """The options of how a topic is worked on; `Bide.handler` explains each."""

    retry: RetryPolicy | str | None
    timeout: Length | None
    losses: int | None
    keep_done: Length | None
    keep_cancelled: Length | None
    keep_dead: Length | None


CONFLICTS = {choice.value: choice for choice in OnConflict}
STATES = {state.value: state for state in State}


def refuse_unknown(options: Iterable[str], known: Sequence[str], of: str) -> None:
    """Raises BadInput for the first of `options`, with the closest that is known; `of`: "an option of app.handler"."""
    from difflib import get_close_matches  # here, since it is needed only for what is wrong

    for name in options:
        closest = get_close_matches(name, known, n=1, cutoff=0.0)
        raise BadInput(of.rpartition(" ")[2], name, f"{of}; the closest name is {closest[0]}")


def conflict_of(choice: str) -> OnConflict:
    found = CONFLICTS.get(choice)
    if found is None:
        raise BadInput("on_conflict", choice, f"one of {', '.join(CONFLICTS)}")
    return found


def pair_of(ref: Ref | tuple[str, str]) -> tuple[str, str]:
    """A (topic, key) pair, its names not checked yet."""
    try:
        topic, key = ref
    except (TypeError, ValueError):
        raise BadInput("refs", ref, "pairs of (topic, key)") from None
    return topic, key


def ref_of(ref: Ref | tuple[str, str]) -> Ref:
    """A (topic, key) pair."""
    topic, key = pair_of(ref)
    return Ref(check_topic(topic), check_name("key", key))


def one_due_of(at: When | None, delay: Length | None, grain: Millis) -> Due:
    """The due time by `at` or `delay`, whichever was given. For `grain` see `with_grain`."""
    if at is None and type(delay) is str and len(delay) <= LONGEST_TEXT:
        return _due_after(delay, grain)
    return with_grain(one_due(at, delay), grain)


@functools.lru_cache(maxsize=512)
def _due_after(delay: str, grain: Millis) -> Due:
    """Cached, since programs use the same few lengths over and over."""
    return with_grain(one_due(None, delay), grain)


def due_of(when: When | Length, field: str = "when", *, grain: Millis = 0) -> Due:
    """An instant (a datetime, ISO text) or a length from now (a timedelta, "15m"). For `grain` see `with_grain`."""
    if isinstance(when, str):
        try:
            return with_grain(In(duration(when, field=field)), grain)
        except BadInput:
            return At(instant(when, field=field))
    if isinstance(when, timedelta):
        return with_grain(In(duration(when, field=field)), grain)
    return At(instant(when, field=field))


def check_past(due: Due, most: Millis, clock: Clock) -> Due:
    """Return `due`. Raises BadInput for an instant that lies further in the past than `most`."""
    if most != LONGEST and type(due) is At and due.millis < clock.now() - most:
        raise BadInput("at", instant_text(due.millis), f"a time that is at most {duration_text(most)} ago (max_past)")
    return due


def deadline_of(deadline: When | Length | None, due: Due, clock: Clock) -> Millis | None:
    """The instant of a deadline. Raises BadInput where it is before the task is due."""
    if deadline is None:
        return None
    now = clock.now()
    not_after = due_of(deadline, "deadline", grain=clock.grain).resolve(now)
    check_instant(not_after, field="deadline", value=deadline)
    if not_after < due.resolve(now):
        raise BadInput("deadline", deadline, "an instant that is not before the task is due")
    return not_after


def filter_of(
    topic: str | None, state: str | None, group: str | None, wake_from: When | None, wake_before: When | None
) -> Filter:
    """The filter of `find`."""
    if state is not None and state not in STATES:
        raise BadInput("state", state, f"one of {', '.join(STATES)}")
    return Filter(
        topic=None if topic is None else check_topic(topic),
        state=None if state is None else STATES[state],
        group=None if group is None else check_name("group", group),
        wake_from=None if wake_from is None else instant(wake_from, field="wake_from"),
        wake_before=None if wake_before is None else instant(wake_before, field="wake_before"),
    )


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
    """Make a waiting task due at another time."""
    due = one_due_of(at, delay, clock.grain)
    return Move(check_topic(topic), check_name("key", key), due, if_token, deadline_of(deadline, due, clock))


def new_fire(topic: str, key: str, *, if_token: Token | None) -> Move:
    """Make a waiting task due now."""
    return Move(check_topic(topic), check_name("key", key), In(0), if_token, verb="fire_now")


def new_cancel(topic: str, key: str, *, if_token: Token | None, config: EngineConfig, clock: Clock) -> Cancel:
    """Cancel a live task, and remember it for as long as the retention of its topic says."""
    topic, key = check_topic(topic), check_name("key", key)  # before its retention, which may count
    keep_until = config.retention_of(topic).keep_until(State.CANCELLED, clock.now())
    return Cancel(topic, key, keep_until, if_token)


def new_shift(record: Record, by: Millis, *, deadlines: bool, if_token: Token) -> Move:
    """Move a waiting task by a length from its due time; with `deadlines` its deadline moves along."""
    deadline = None
    if deadlines and record.deadline is not None:
        deadline = shifted(record.deadline, by)
    return Move(record.topic, record.key, At(shifted(record.due_at, by)), if_token, deadline, "shift")


def shifted(at: Millis, by: Millis) -> Millis:
    """An instant, moved by a length, within the bounds of instants."""
    return min(max(0, at + by), LAST_INSTANT)


def new_redrive(topic: str, key: str, *, delay: Length, if_token: Token | None, clock: Clock) -> Redrive:
    """Send a dead task again, as a new life."""
    due = with_grain(In(duration(delay, field="delay")), clock.grain)
    return Redrive(check_topic(topic), check_name("key", key), new_id(), due, if_token)
