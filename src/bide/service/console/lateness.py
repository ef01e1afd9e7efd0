"""The meaning of a task's state and the reasons why it was late, in sentences: "why did my order close late?"

Only what is known is said; a reason that is merely likely is told as the figures that make it so.
"""

from __future__ import annotations

from collections.abc import Iterator

from bide.core.instants import Millis
from bide.core.records import Pause, State
from bide.insight.story import Attempt, Crowd, Ended, Story
from bide.service.console.i18n import Phrases
from bide.service.console.sanitize import isolated

ON_TIME: Millis = 100
"""Up to so late is on time: nobody needs a reason."""
_MUCH: Millis = 1_000
_FEW = 4
"""Of so few others nothing follows."""


def meaning(phrases: Phrases, told: Story, pause: Pause | None) -> str:
    """Explain its state in a sentence."""
    record, say, now = told.record, phrases.say, phrases.now
    if record.state is State.WAITING:
        if record.wake_at <= now:
            length = phrases.length(now - record.wake_at)
            if pause is not None:
                return say("It has been due for {length} and is held back: its topic is paused.", length=length)
            return say("It has been due for {length} and waits for a worker.", length=length)
        after = phrases.relative(record.wake_at)
        if record.failures:
            failures = phrases.number(record.failures)
            return say("It waits for its retry, {after}; failed so far: {count}.", after=after, count=failures)
        return say("It waits until it is due, {after}.", after=after)
    last = told.last
    if record.state is State.LEASED:
        holder = isolated(record.holder or "")
        if record.wake_at <= now:
            length = phrases.length(now - record.wake_at)
            return say("{holder} had it and is lost: its lease ended {length} ago, and the next worker gets it.",
                       holder=holder, length=length)  # fmt: skip
        began = phrases.relative(record.started_at or now)
        return say("It is being delivered by {holder}, since {began}.", holder=holder, began=began)
    if record.state is State.DONE and last is not None and last.late is not None:
        late, took = phrases.length(last.late), phrases.length(last.took)
        return say("It is done: delivered {late} after it was due, which took {took}.", late=late, took=took)
    ended = phrases.relative(record.finished_at or now)
    if record.state is State.DONE:
        return say("It is done, {ended}.", ended=ended)
    if record.state is State.CANCELLED:
        if record.holder is not None:
            return say("It was cancelled while it was being delivered, {ended}.", ended=ended)
        return say("It was cancelled, {ended}: it was never to happen any more.", ended=ended)
    return say("It is dead, {ended}: nothing more happens to it unless somebody redrives it.", ended=ended)


def reasons(phrases: Phrases, told: Story, pause: Pause | None) -> list[str]:
    """Why it is, or was, not delivered when it was first due; empty where it was on time, or is yet to come."""
    return list(_reasons(phrases, told, pause))


def _reasons(phrases: Phrases, told: Story, pause: Pause | None) -> Iterator[str]:
    record, say = told.record, phrases.say
    if told.moved:
        first = phrases.moment(told.first_due, millis=True)
        if told.moved == 1:
            yield say("It was moved; before that it was due at {first}.", first=first)
        else:
            yield say("It was moved {count} times; before that it was due at {first}.", count=told.moved, first=first)
    if record.created_at > record.due_at + ON_TIME and not told.moved:
        length = phrases.length(record.created_at - record.due_at)
        yield say("It was scheduled {length} after the time that was asked for, and so was due at once.", length=length)
    yield from _of_attempts(phrases, told)
    last = told.last
    if last is not None and last.late is not None and last.late > ON_TIME:
        yield say("Delivery {number} began {late} after it was planned.", number=last.number,
                  late=phrases.length(last.late))  # fmt: skip
        if told.crowd is not None:
            yield from _of_crowd(phrases, told.crowd)
    if record.state is State.WAITING and record.wake_at <= phrases.now and pause is None:
        length = phrases.length(phrases.now - record.wake_at)
        if phrases.now - record.wake_at > _MUCH:
            yield say("It has been due for {length}: no worker has had room for it, or none works on this topic.",
                      length=length)  # fmt: skip
    if pause is not None and record.state.live:
        since = phrases.moment(pause.since)
        if pause.who is None:
            yield say("The topic is paused since {since}: nothing of it is given out until it is resumed.", since=since)
        else:
            yield say("The topic is paused since {since}, by {who}: nothing of it is given out until it is resumed.",
                      since=since, who=isolated(pause.who))  # fmt: skip


def _of_attempts(phrases: Phrases, told: Story) -> Iterator[str]:
    """Explain the deliveries before the last one."""
    say = phrases.say
    lost = [one for one in told.attempts if one.how is Ended.LOST]
    failed = [one for one in told.attempts if one.how is Ended.RETRY]
    for one in lost:
        ended = phrases.moment(one.ended, millis=True) if one.ended is not None else ""
        yield say("Delivery {number} was lost: its worker died or hung, and when the lease had ended, it was given out "
                  "again, at {ended}.", number=one.number, ended=ended)  # fmt: skip
    if not failed:
        return
    first = failed[0]
    if first.number == 1 and first.late is not None and first.late <= ON_TIME:
        yield say(
            "Its first delivery was on time, {late} after it was due, and failed.", late=phrases.length(first.late)
        )
    length = phrases.length(_put_off(failed))
    if len(failed) == 1:
        yield say("Delivery {number} failed; the pause before the retry was {length}.", number=failed[0].number,
                  length=length)  # fmt: skip
    else:
        yield say("{count} deliveries failed; the pauses before the retries come to {length}.",
                  count=phrases.number(len(failed)), length=length)  # fmt: skip


def _put_off(failed: list[Attempt]) -> Millis:
    return sum(max(0, one.again_at - one.ended) for one in failed if one.again_at is not None and one.ended is not None)


def _of_crowd(phrases: Phrases, crowd: Crowd) -> Iterator[str]:
    """How the others of the topic fared."""
    say, number = phrases.say, phrases.number
    if crowd.idle is not None:
        begin, end = (phrases.clock(at, 60_000) for at in crowd.idle)
        yield say("From {begin} to {end} nothing of this topic began: it was paused, or no worker was at work on it.",
                  begin=begin, end=end)  # fmt: skip
    if crowd.half is None or crowd.most is None:
        return
    if crowd.planned == 2:
        yield say("One other of this topic was planned for the same minute, {minute}.",
                  minute=phrases.clock(crowd.planned_at, 60_000))  # fmt: skip
    elif crowd.planned > 2:
        yield say("{count} others of this topic were planned for the same minute, {minute}.",
                  count=number(crowd.planned - 1), minute=phrases.clock(crowd.planned_at, 60_000))  # fmt: skip
    if crowd.begun > 1:
        yield say("Of the {count} deliveries of this topic that began at {minute}, half were at most {half} late, and "
                  "99 of 100 at most {most}.", count=number(crowd.begun), minute=phrases.clock(crowd.began_at, 60_000),
                  half=phrases.length(crowd.half), most=phrases.length(crowd.most))  # fmt: skip
        if crowd.begun <= _FEW:
            return
        if crowd.half > ON_TIME and crowd.idle is None:
            yield say("So most of the topic was late then: more was due at once than its workers had room for.")
        elif crowd.half <= ON_TIME:
            yield say("So most others were on time: the reason lies with this task, or with the worker that had it.")
