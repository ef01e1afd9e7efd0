"""Sentences about one task: its state, and the reasons why it was late.

They answer "why did my order close late?", on a page and on the command line. They state only what is known; a reason
that is merely likely is given as the figures that make it so.
"""

from __future__ import annotations

from collections.abc import Iterator

from bide.core.instants import LAST_INSTANT, Millis
from bide.core.records import Pause, State
from bide.insight.task_history import Cohort, Ended, TaskHistory
from bide.service.console.i18n import Locale, isolated

ON_TIME: Millis = 100
"""Lateness up to which a delivery is on time and needs no reason."""
_MUCH: Millis = 1_000
_FEW = 4
"""Deliveries up to which nothing follows from how they fared."""


def meaning(locale: Locale, history: TaskHistory, pause: Pause | None) -> str:
    """Explain the state of the task in a sentence."""
    record, t, now = history.record, locale.t, locale.now
    if record.state is State.WAITING:
        if record.wake_at <= now:
            length = locale.length(now - record.wake_at)
            if pause is not None:
                return t("It has been due for {length} and is held back because its topic is paused.", length=length)
            return t("It has been due for {length} and waits for a worker.", length=length)
        after = locale.relative(record.wake_at)
        if record.failures:
            failures = locale.number(record.failures)
            return t("It waits for its retry, {after}; failed so far: {count}.", after=after, count=failures)
        return t("It waits until it is due, {after}.", after=after)
    last = history.last
    if record.state is State.LEASED:
        holder = isolated(record.holder or "")
        if record.wake_at <= now:
            length = locale.length(now - record.wake_at)
            return t("Its holder {holder} is lost: the lease expired {length} ago, and the next free worker gets it.",
                     holder=holder, length=length)  # fmt: skip
        began = locale.relative(record.started_at or now)
        return t("{holder} started to deliver it {began}.", holder=holder, began=began)
    if record.state is State.DONE and last is not None and last.late is not None:
        late, took = locale.length(last.late), locale.length(last.took)
        return t("It is done: the delivery began {late} after it was due and took {took}.", late=late, took=took)
    ended = locale.relative(record.finished_at or now)
    if record.state is State.DONE:
        return t("It is done, {ended}.", ended=ended)
    if record.state is State.CANCELLED:
        if record.holder is not None:
            return t("It was cancelled while it was being delivered, {ended}.", ended=ended)
        return t("It was cancelled, {ended}.", ended=ended)
    return t("It is dead, {ended}: nothing more happens unless it is redriven.", ended=ended)


def reasons(locale: Locale, history: TaskHistory, pause: Pause | None) -> Iterator[str]:
    """The reasons why it was not delivered when it was first due; none if it was on time, or is not due yet."""
    record, t = history.record, locale.t
    if history.moved and history.first_due != LAST_INSTANT:  # it was not paused
        first = locale.moment(history.first_due, millis=True)
        if history.moved == 1:
            yield t("It was moved; before that it was due at {first}.", first=first)
        else:
            yield t("It was moved {count} times; before that it was due at {first}.", count=history.moved, first=first)
    if record.created_at > record.due_at + ON_TIME and not history.moved:
        length = locale.length(record.created_at - record.due_at)
        yield t("It was scheduled {length} after its requested time, so it was due at once.", length=length)
    yield from _of_attempts(locale, history)
    last = history.last
    if last is not None and last.late is not None and last.late > ON_TIME:
        yield t("Delivery {number} began {late} late.", number=last.number,
                late=locale.length(last.late))  # fmt: skip
        if history.cohort is not None:
            yield from _of_cohort(locale, history.cohort)
    if record.state is State.WAITING and record.wake_at <= locale.now and pause is None:
        length = locale.length(locale.now - record.wake_at)
        if locale.now - record.wake_at > _MUCH:
            yield t("It has been due for {length}: no worker had room for it, or no worker handles this topic.",
                    length=length)  # fmt: skip
    if pause is not None and record.state.live:
        since = locale.moment(pause.since)
        if pause.who is None:
            yield t("The topic was paused at {since}: its tasks are not delivered until it is resumed.", since=since)
        else:
            yield t("{who} paused the topic at {since}: its tasks are not delivered until it is resumed.",
                    since=since, who=isolated(pause.who))  # fmt: skip


def _of_attempts(locale: Locale, history: TaskHistory) -> Iterator[str]:
    """Explain the deliveries before the last one."""
    t = locale.t
    lost = [one for one in history.attempts if one.how is Ended.LOST]
    failed = [one for one in history.attempts if one.how is Ended.RETRY]
    for one in lost:
        ended = locale.moment(one.ended, millis=True) if one.ended is not None else ""
        yield t("Delivery {number} was lost: its worker died or hung. When the lease had expired, the task "
                "was leased again, at {ended}.", number=one.number, ended=ended)  # fmt: skip
    if not failed:
        return
    first = failed[0]
    if first.number == 1 and first.late is not None and first.late <= ON_TIME:
        yield t("Its first delivery was on time, {late} after it was due, and failed.", late=locale.length(first.late))
    pauses = [max(0, one.again_at - one.ended) for one in failed if one.again_at is not None and one.ended is not None]
    length = locale.length(sum(pauses))
    if len(failed) == 1:
        yield t("Delivery {number} failed; the pause before the retry was {length}.", number=failed[0].number,
                length=length)  # fmt: skip
    else:
        yield t("{count} deliveries failed; the pauses before the retries come to {length}.",
                count=locale.number(len(failed)), length=length)  # fmt: skip


def _of_cohort(locale: Locale, cohort: Cohort) -> Iterator[str]:
    """Compare with the other deliveries of the topic at that time."""
    t, number = locale.t, locale.number
    if cohort.idle is not None:
        begin, end = (locale.clock(at, 60_000) for at in cohort.idle)
        yield t("From {begin} to {end} no delivery of this topic began: it was paused, or no worker handled it.",
                begin=begin, end=end)  # fmt: skip
    if cohort.half is None or cohort.most is None:
        return
    if cohort.planned == 2:
        yield t("One other task of this topic was planned for the same minute, {minute}.",
                minute=locale.clock(cohort.planned_at, 60_000))  # fmt: skip
    elif cohort.planned > 2:
        yield t("{count} other tasks of this topic were planned for the same minute, {minute}.",
                count=number(cohort.planned - 1), minute=locale.clock(cohort.planned_at, 60_000))  # fmt: skip
    if cohort.begun > 1:
        yield t("Of the {count} deliveries of this topic that began at {minute}, half were at most {half} late, and "
                "99 of 100 at most {most}.", count=number(cohort.begun), minute=locale.clock(cohort.began_at, 60_000),
                half=locale.length(cohort.half), most=locale.length(cohort.most))  # fmt: skip
        if cohort.begun <= _FEW:
            return
        if cohort.half > ON_TIME and cohort.idle is None:
            yield t("So most of the topic was late then: more tasks were due at once than its workers had room for.")
        elif cohort.half <= ON_TIME:
            yield t("So most others were on time: the cause lies with this task, or with its worker.")
