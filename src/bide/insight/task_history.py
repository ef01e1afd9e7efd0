"""The known history of one task: its deliveries, its changes, and the other deliveries of its topic at that time.

It combines three sources: the task's current record, the event log, and the history by minute. The log is capped, and
contains neither successful nor deferred deliveries. So a history may have gaps, and it lists the missing deliveries.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from enum import StrEnum
from itertools import pairwise, takewhile

from msgspec import Struct
from msgspec.structs import replace

from bide.core.events import Event, EventKind
from bide.core.instants import Millis
from bide.core.names import error_parts
from bide.core.records import Record, Ref, State, Topic
from bide.engine.client import Client
from bide.engine.delivery.settlement import UNDELIVERED
from bide.engine.history import MINUTE, DeliveryCounts, rows_between
from bide.ports import Clock, Store

_MOST_EVENTS = 500
_MOST_MINUTES = 60
_SLACK: Millis = 1_000
"""The log computes the time of the next delivery when it records an outcome, slightly after the store has. So a
delivery that seems to begin early by up to this much began on time.
"""
_MOVES = frozenset({"reschedule", "fire_now", "shift"})


class Ended(StrEnum):
    """The end of a delivery, or that it has not ended."""

    RUNNING = "running"
    DONE = "done"
    RETRY = "retry"
    DEAD = "dead"
    LOST = "lost"
    """The lease expired unsettled: its worker died or hung."""
    CANCELLED = "cancelled"


class Attempt(Struct, frozen=True, kw_only=True):
    """One delivery. A field is None if the log does not have it."""

    number: int
    how: Ended
    planned: Millis | None = None
    """The time at which it was planned to begin."""
    began: Millis | None = None
    ended: Millis | None = None
    who: str | None = None
    """The worker."""
    error: str = ""
    again_at: Millis | None = None
    """The planned time of the next delivery."""

    @property
    def late(self) -> Millis | None:
        """How long after its planned time it began."""
        if self.how is Ended.DEAD and self.error.startswith(UNDELIVERED):  # on leasing it: no handler was called
            return None
        return None if self.planned is None or self.began is None else max(0, self.began - self.planned)

    @property
    def took(self) -> Millis | None:
        return None if self.ended is None or self.began is None else max(0, self.ended - self.began)


class Cohort(Struct, frozen=True, kw_only=True):
    """The other deliveries of the topic at that time, from the history by minute."""

    planned_at: Millis
    """The minute for which the task was planned, and the one in which it began."""
    began_at: Millis
    planned: int
    """Deliveries that were planned for the first minute and have begun, including this one."""
    begun: int
    """Deliveries that began in the second."""
    half: Millis | None
    """The lateness that half of these did not exceed, and the one that 99 of 100 did not exceed."""
    most: Millis | None
    idle: tuple[Millis, Millis] | None
    """A period of two minutes or more between the two minutes in which no delivery of the topic began."""


class TaskHistory(Struct, frozen=True, kw_only=True):
    record: Record
    attempts: Sequence[Attempt]
    """The deliveries of this life, oldest first."""
    missing: Sequence[int]
    """The numbers of the unknown deliveries of this life."""
    changes: Sequence[Event]
    """The changes of all lives in the log, by a person or an API caller, newest first."""
    earlier: Sequence[Attempt]
    """The failed deliveries of earlier lives."""
    cohort: Cohort | None = None

    @property
    def last(self) -> Attempt | None:
        """The running delivery, or the last one."""
        return self.attempts[-1] if self.attempts else None

    @property
    def first_due(self) -> Millis:
        """The first planned time of delivery, before any move."""
        moved = [one.was for one in self.changes if one.id == self.record.id and _is_move(one) and one.was is not None]
        return moved[-1] if moved else max(self.record.due_at, self.record.created_at)

    @property
    def moved(self) -> int:
        """The number of moves in this life that the log has."""
        return sum(one.id == self.record.id and _is_move(one) for one in self.changes)


def _is_move(change: Event) -> bool:
    return change.what.partition(": ")[0] in _MOVES


async def task_history(client: Client, topic: str, key: str) -> TaskHistory | None:
    """The history of a task; None: it never existed, or ended and was deleted. At most three store calls.

    Raises StoreError, BadInput.
    """
    [found], events = await asyncio.gather(
        client.get_many([Ref(topic, key)]), client.events(topic, key, limit=_MOST_EVENTS)
    )
    if found is None:
        return None
    history = history_of(found.record, events)
    last = history.last
    if last is None or last.planned is None or last.began is None or client.store.features.remote is not None:
        return history  # the store is a service that refuses the history by minute
    return replace(history, cohort=await cohort_of(client.store, client.clock, topic, last.planned, last.began))


def history_of(record: Record, events: Sequence[Event]) -> TaskHistory:
    """The history from a record and its events (newest first). Pure function; O(events)."""
    ours = [event for event in reversed(events) if event.id == record.id]
    attempts = _deliveries(ours, _first_plan(record, ours))
    last = _last_of(record, attempts)
    if last is not None:
        attempts = [one for one in attempts if one.number != last.number] + [last]
    known = {one.number for one in attempts}
    return TaskHistory(
        record=record,
        attempts=attempts,
        missing=[number for number in range(1, record.attempt + 1) if number not in known],
        changes=[event for event in events if event.kind is EventKind.CHANGE],
        earlier=_deliveries([event for event in reversed(events) if event.id != record.id], None),
    )


def _first_plan(record: Record, events: Sequence[Event]) -> Millis | None:
    """The planned time of the first delivery, if only moves came before it; `events` are of this life."""
    moves = [event for event in events if event.kind is EventKind.CHANGE and _is_move(event)]
    if not moves:
        return max(record.due_at, record.created_at)
    before = takewhile(lambda event: event.kind is EventKind.CHANGE, events)
    return moves[0].was if moves[0] in before else None


def _deliveries(events: Iterable[Event], plan: Millis | None) -> list[Attempt]:
    """The deliveries in the log, oldest first; the first is planned for `plan`."""
    found: list[Attempt] = []
    for event in events:
        if event.kind in (EventKind.CHANGE, EventKind.DROPPED):  # neither is a delivery
            plan = event.wake_at if event.wake_at is not None else plan
        elif event.kind is EventKind.LOSS:
            # the holder of the next lease records it, with the attempt of that lease
            found.append(Attempt(number=max(1, event.attempt - 1), how=Ended.LOST, planned=plan, ended=event.at))
        else:
            how = Ended.RETRY if event.kind is EventKind.RETRY else Ended.DEAD
            found.append(
                Attempt(
                    number=event.attempt, how=how, planned=_planned(plan, event.was), began=event.was,
                    ended=event.at, who=event.who, error=event.what, again_at=event.wake_at,
                )
            )  # fmt: skip
            plan = event.wake_at
    return found


def _planned(plan: Millis | None, began: Millis | None) -> Millis | None:
    """The planned time of a delivery that began at `began`, if known."""
    if plan is None or began is None or plan > began + _SLACK:
        return None
    return min(plan, began)


def _last_of(record: Record, attempts: Sequence[Attempt]) -> Attempt | None:
    """The delivery that the record itself describes; None: it is not and was not leased."""
    if record.holder is None or record.state is State.WAITING:
        return None
    how = Ended.RUNNING if record.state is State.LEASED else Ended(record.state.value)
    logged = next((one for one in attempts if one.number == record.attempt), None)
    return Attempt(
        number=record.attempt, how=how, planned=record.planned_at or None, began=record.started_at,
        ended=record.finished_at, who=record.holder if logged is None or logged.who is None else logged.who,
        error=error_parts(record.error)[0] if how is Ended.DEAD else "",
    )  # fmt: skip


async def cohort_of(store: Store, clock: Clock, topic: Topic, planned: Millis, began: Millis) -> Cohort | None:
    """The cohort from `planned` to `began`, from the history by minute; None: it has no such deliveries.

    If the period is longer than an hour, only its first hour and last minute are read. Raises StoreError.
    """
    first, last = planned // MINUTE, began // MINUTE
    upto = min(last, first + _MOST_MINUTES)
    rows = await rows_between(store, clock, first, upto)
    if upto < last:
        rows |= await rows_between(store, clock, last, last)
    counts = rows[last].topics.get(topic) if last in rows else None
    if counts is None:
        return None
    of_topic = {minute: row.topics.get(topic) or DeliveryCounts() for minute, row in rows.items()}
    return Cohort(
        planned_at=first * MINUTE,
        began_at=last * MINUTE,
        planned=sum(one.planned.get(first, 0) for one in of_topic.values()),
        begun=counts.begun,
        half=counts.lateness(0.5),
        most=counts.lateness(0.99),
        idle=_idle([minute for minute, one in of_topic.items() if one.begun and minute <= upto], first, upto),
    )


def _idle(begun: Iterable[int], first: int, last: int) -> tuple[Millis, Millis] | None:
    """The longest period without a delivery, in whole minutes, between `first` and `last`; at least two minutes."""
    edges = sorted({first, last, *begun})
    gaps = [(after - before - 1, before + 1, after) for before, after in pairwise(edges)]
    length, start, end = max(gaps, default=(0, 0, 0))
    return (start * MINUTE, end * MINUTE) if length >= 2 else None
