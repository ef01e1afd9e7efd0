"""The settlement of a recurring task when one of its occurrences is leased or ends.

`core.recurrence.plan` decides; here its decisions become settlements. A recurring task that would end begins its next
life instead, with the same payload and options, at the next instant of its rule. So it needs no operation of the store
that other tasks do not need, and a crash between two steps repeats a step and loses none.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from msgspec.structs import replace

from bide.core.errors import BadInput
from bide.core.instants import At, Millis, instant_text
from bide.core.names import new_id
from bide.core.options import recurrence_of, with_recurrence
from bide.core.records import NewTask, OutcomeKind, Record, Settlement, State, Token
from bide.core.recurrence.plan import Overlap, Step
from bide.engine.config import Retention

REMEMBERED: Millis = 86_400_000
"""How long an occurrence that is a task of its own is kept at least, so that a repeated start finds it."""
NO_TOKEN: Token = 0
"""A token that no task has: with it a task is added only if its key is free."""
_DONE = OutcomeKind.DONE
"""Bound once, because an enum member's lookup takes as long as making a settlement."""


def next_life(record: Record, keep: Retention, now: Millis, died: Settlement | None = None) -> Settlement | None:
    """The settlement of an occurrence that ended, or `died`: the next one is due. None: there is none.

    There is none if the task does not recur, its rule has ended, or it is to end with the first death. If the rule has
    ended while occurrences were dropped, the task ends here, and the settlement counts them.
    """
    topic, key, token = record.topic, record.key, record.token
    if died is None and (again := next_for_all(record.options, record.due_at, now)) is not None:
        return Settlement(topic, key, token, _DONE, again, next_id=new_id())
    recurrence = recurrence_of(record.options)
    if recurrence is None or (died is not None and recurrence.end_when_dead):
        return None
    missed = 0 if record.failures else token // 1000  # a retry was waited for, which overlaps
    step = recurrence.on_end(record.due_at, key, missed, now, lost=record.losses > 0)
    if step.due_at is None and not step.dropped:
        return None
    if died is not None and step.due_at is None:
        return replace(died, dropped=step.dropped, dropped_why=step.said)
    life = _settlement(record, step, keep, now)
    return life if died is None else replace(life, error=died.error, counts_as=OutcomeKind.DEAD)


def _settlement(record: Record, step: Step, keep: Retention, now: Millis) -> Settlement:
    """The next life at the time of `step`, or the end of the task with its rule."""
    next_at, until = None if step.due_at is None else At(step.due_at), 0
    if next_at is None:
        until = keep.keep_until(State.DONE, now)
    return Settlement(
        record.topic, record.key, record.token, _DONE, next_at, until, step.said, "" if next_at is None else new_id(),
        dropped=step.dropped, dropped_why=step.said,
    )  # fmt: skip


@lru_cache(maxsize=1024)
def next_for_all(options: bytes, due_at: Millis, now: Millis) -> At | None:
    """When every task with these options and due time is due next, if it ends now; None: `Recurrence.on_end` decides.

    Cached, as `is_delivered`.
    """
    recurrence = recurrence_of(options)
    if recurrence is None or recurrence.paused or recurrence.rule.jitter:
        return None
    later = recurrence.rule.after(due_at)
    return None if later is None or later <= now else At(later)


@lru_cache(maxsize=1024)
def is_delivered(options: bytes, due_at: Millis, now: Millis) -> bool:
    """True if a task with these options that is due then is delivered now, whatever its key and attempt.

    False: `passed_over` and `deadline_of` decide. Cached, since the tasks of a burst share all three arguments.
    """
    recurrence = recurrence_of(options)
    if recurrence is None:
        return True
    late = recurrence.deadline is not None and now > due_at + recurrence.deadline
    try:
        shared = not late and not recurrence.rule.jitter and recurrence.overlap is not Overlap.ALLOW
        return shared and recurrence.is_punctual(due_at, "", now)
    except BadInput:  # a damaged rule, or a zone that this machine does not know
        return False


class Refusal(NamedTuple):
    """The settlement of a leased task that is not delivered."""

    settlement: Settlement
    own: NewTask | None = None
    """An occurrence that runs as a task of its own: to be added before the settlement is sent."""


def passed_over(record: Record, keep: Retention, now: Millis) -> Refusal | None:
    """The end of a leased occurrence that is too old to run, or runs as a task of its own; None: deliver it.

    An occurrence whose delivery failed or was lost is delivered again at any age, unless the next one is to cancel what
    failed. A deferred one counts as not begun.
    """
    recurrence = recurrence_of(record.options)
    if recurrence is None:
        return None
    key, due_at = record.key, record.due_at
    step = recurrence.on_lease(due_at, key, record.created_at, now) if record.attempt == 1 else None
    own = None
    if step is None:
        if record.failures and (replaced := replaced_by_next(record, now)) is not None:
            return Refusal(replaced)
        if recurrence.overlap is not Overlap.ALLOW:
            return None
        own = own_task(record, recurrence.rule.nominal(due_at, key), due_at, since=due_at)
        step = recurrence.on_end(due_at, key, now, now)
    return Refusal(replace(_settlement(record, step, keep, now), counts_as=OutcomeKind.DEFER), own)


def keeps_lease(record: Record, lease_ends: Millis) -> bool:
    """True if a worker that stops while the occurrence runs keeps its lease.

    It is lost with the lease, as after a crash, and then delivered again at any age, under the same id. Given back, it
    could be dropped as too late, or replaced by a change. That is right only if the next one comes before the lease
    ends, and must not wait for it.
    """
    recurrence = recurrence_of(record.options)
    if recurrence is None or record.attempt != 1:
        return False
    coming = recurrence.first(record.due_at, record.key)
    return coming is None or coming > lease_ends


def replaced_at(record: Record) -> Millis | None:
    """When an occurrence cancels this one; None: never. Those that it came too late for wait until it has ended."""
    recurrence = recurrence_of(record.options)
    if recurrence is None or recurrence.paused or recurrence.overlap is not Overlap.CANCEL_RUNNING:
        return None
    began = record.token // 1000 if record.attempt == 1 else 0  # a retry is cancelled by the one that is due
    coming = recurrence.rule.coming(max(record.due_at, began), record.key)
    return None if coming is None else recurrence.rule.fires_at(coming, record.key)


def replaced_by_next(record: Record, now: Millis) -> Settlement | None:
    """The settlement of an occurrence that runs while the next one is due, and is cancelled by it; None: it goes on."""
    at, recurrence = replaced_at(record), recurrence_of(record.options)
    if at is None or at > now or recurrence is None:
        return None
    why, later = "overlap: the occurrence was cancelled by the next one", recurrence.first(record.due_at, record.key)
    return Settlement(
        record.topic, record.key, record.token, OutcomeKind.DONE, At(later or at), next_id=new_id(),
        counts_as=OutcomeKind.DEFER, error=why, dropped=1, dropped_why=why,
    )  # fmt: skip


def own_task(record: Record, nominal: Millis, due_at: Millis, *, since: Millis) -> NewTask:
    """The occurrence of `nominal` as a task of its own. It is added once, however often this is repeated.

    One that was cancelled or is dead stays so.
    """
    recurrence = recurrence_of(record.options)
    limit = None if recurrence is None else recurrence.deadline
    return NewTask(
        record.topic, f"{record.key}@{instant_text(nominal)}", new_id(), At(due_at), record.payload, record.group,
        with_recurrence(record.options, None, nominal), None if limit is None else since + limit,
        if_token=NO_TOKEN,
    )  # fmt: skip


def deadline_of(record: Record) -> Millis | None:
    """The deadline of the task, or of this occurrence."""
    recurrence = recurrence_of(record.options) if record.deadline is None else None
    length = None if recurrence is None else recurrence.deadline
    return record.deadline if length is None else record.due_at + length
