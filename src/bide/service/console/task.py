"""One task: its state in a sentence, its times, its deliveries, the reasons why it was late, and the possible changes.

Finished tasks are shown while they are remembered. A key that a browser cannot have in a path (`.` and `..`) has the
address `/task?topic=..&key=..`.

The sentences answer "why did my order close late?". They state only what is known; a reason that is merely likely is
given as the figures that make it so.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

from msgspec import DecodeError, to_builtins

from bide.core.instants import Millis
from bide.core.names import check_name, check_topic
from bide.core.options import NO_OPTIONS, Options, decode_options, recurrence_of
from bide.core.records import Pause, Record, Ref, Result, State
from bide.engine.history import MINUTE
from bide.insight.cached_query import CachedQuery
from bide.insight.task_history import Cohort, Ended, TaskHistory, task_history
from bide.service.authz import Verb
from bide.service.console.actions import possible
from bide.service.console.i18n import Locale
from bide.service.console.pages import Answer, ConsoleContext, PageRequest, Route
from bide.service.console.rendering import address, isolated, payload_view, task_address
from bide.service.requests import Reply

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


def reasons(locale: Locale, history: TaskHistory, pause: Pause | None) -> list[str]:
    """The reasons why it was not delivered when it was first due; empty if it was on time, or is not due yet."""
    return list(_reasons(locale, history, pause))


def _reasons(locale: Locale, history: TaskHistory, pause: Pause | None) -> Iterator[str]:
    record, t = history.record, locale.t
    if history.moved:
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
        yield t("Delivery {number} was lost: its worker died or hung, and when the lease had ended, it was given out "
                "again, at {ended}.", number=one.number, ended=ended)  # fmt: skip
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


_SAID: Mapping[str, str] = {
    Result.MOVED: "It was moved.",
    "past": "It was moved to a time that has passed ({ago}), so it is due now.",
    "fired": "It is due now; the next free worker gets it.",
    Result.CANCELLED: "It was cancelled: no delivery will start.",
    Result.CANCELLED_WHILE_LEASED: "It was cancelled while it was being delivered: no further delivery follows.",
    Result.REDRIVEN: "It begins a new life.",
    Result.UNDER_WAY: "Nothing was changed: it is already being delivered.",
    Result.REFUSED: "Nothing was changed: that would be after its deadline.",
    Result.FINISHED: "Nothing was changed: it has finished.",
    Result.STALE_TOKEN: "Nothing was changed: the task is no longer as you saw it. Below is how it is now.",
    Result.NOT_FOUND: "Nothing was changed: there is no such task any more.",
}  # fmt: skip
_SANDBOX = "default-src 'none'; sandbox"


class TaskPage:
    """The page of a task, with its live part and its payload. `paused`: the paused topics, as of a moment ago."""

    def __init__(self, context: ConsoleContext, paused: CachedQuery[Mapping[str, Pause]]) -> None:
        self._app = context.app
        self._paused = paused
        parts = (("", self._page), ("/live", self._live), ("/payload", self._payload))
        self.routes: Mapping[Route, Answer] = {
            ("GET", path + part): answer for path in ("/tasks/{topic}/{key}", "/task") for part, answer in parts
        }

    async def _page(self, request: PageRequest) -> Reply:
        ref = ref_of(request)
        values = await self._shared_values(request, ref)
        if values is None:
            return self._gone(request, ref)
        record: Record = values["record"]
        options: Options | None = None
        with suppress(DecodeError):  # they are damaged
            options = decode_options(record.options) if record.options else NO_OPTIONS
        policy = None if options is None else options.retry
        said = request.field("said")
        return request.render(
            "task.html",
            **values,
            said=request.t(_SAID[said], ago=request.locale.relative(record.due_at)) if said in _SAID else "",
            well=said
            in ("fired", "past", Result.MOVED, Result.CANCELLED, Result.CANCELLED_WHILE_LEASED, Result.REDRIVEN),
            payload=payload_view(record.payload),
            headers=None if options is None else options.headers,
            policy=None if policy is None else to_builtins(policy),
            verbs=possible(request, record.state, [record.topic]),
        )

    async def _live(self, request: PageRequest) -> Reply:
        """The part that an open page polls."""
        ref = ref_of(request)
        values = await self._shared_values(request, ref)
        if values is None:
            return request.render("task_over.html", ref=ref)
        return request.render("task_live.html", **values)

    async def _payload(self, request: PageRequest) -> Reply:
        """The whole payload, as a download that no browser displays."""
        ref = ref_of(request)
        [task] = await self._app.get_many([ref])
        if task is None:
            return self._gone(request, ref)
        headers = {
            "content-disposition": f'attachment; filename="payload-{task.id}.txt"',
            "content-security-policy": _SANDBOX,
        }
        return Reply(200, task.payload_bytes, "text/plain; charset=utf-8", headers)

    async def _shared_values(self, request: PageRequest, ref: Ref) -> Mapping[str, Any] | None:
        """The values that the page and its live part share; None if there is no such task."""
        history, paused = await asyncio.gather(task_history(self._app, *ref), self._paused.get())
        if history is None:
            return None
        record, pause = history.record, paused.get(ref.topic)
        seen_token = request.field("token")  # with which an open page was loaded
        live = task_address(record.topic, record.key, "live")
        return {
            "ref": record.ref,
            "record": record,
            "story": history,
            "due": record.state.live and record.wake_at <= request.locale.now,
            "pause": pause,
            "recurrence": recurrence_of(record.options),
            "meaning": meaning(request.locale, history, pause),
            "reasons": reasons(request.locale, history, pause),
            "timeline": _timeline(history),
            "over": not record.state.live,
            "changed": bool(seen_token) and seen_token != str(record.token) and record.state.live,
            "live": f"{live}{'&' if '?' in live else '?'}token={record.token}",
            "whole": task_address(record.topic, record.key, "payload"),
        }

    def _gone(self, request: PageRequest, ref: Ref) -> Reply:
        keep = self._app.config.retentions.of(ref.topic)
        return request.render("task_gone.html", status=404, ref=ref, keep=keep)


def _timeline(history: TaskHistory) -> str:
    """The address of the timeline around the last delivery; empty if the history does not have it."""
    last = history.last
    if history.cohort is None or last is None or last.planned is None or last.began is None:
        return ""
    around = {"from": last.planned - 5 * MINUTE, "until": last.began + 5 * MINUTE}
    return address("/timeline", topic=history.record.topic, **around)


def ref_of(request: PageRequest) -> Ref:
    """The task that the address names. Raises BadInput, Forbidden."""
    topic, key = request.path_values if request.path_values else (request.raw_field("topic"), request.raw_field("key"))
    ref = Ref(check_topic(topic), check_name("key", key))
    request.caller.check(Verb.READ, ref.topic)
    return ref
