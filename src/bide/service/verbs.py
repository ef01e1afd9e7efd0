"""The calls of the contract, from the request to the engine and back."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Container, Iterable, Sequence
from functools import partialmethod
from typing import Any, TypeVar

import msgspec
from msgspec import UNSET

from bide.core.answers import Answer
from bide.core.errors import BadInput, PartlyFailed
from bide.core.events import Event
from bide.core.instants import Millis, as_datetime, due_later, duration, instant_text
from bide.core.names import check_name, check_topic
from bide.core.outcomes import Dead, Defer, Done, Outcome, Retry
from bide.core.records import (
    Cancel,
    Change,
    Count,
    Lease,
    NewTask,
    OutcomeKind,
    Page,
    Record,
    Redrive,
    Result,
    State,
    Topic,
)
from bide.core.recurrence.rules import Bounds, rule_of
from bide.engine.client import Client
from bide.engine.delivery.long_poll import LongPoll
from bide.engine.verbs import CONFLICTS, filter_of, new_cancel, new_fire, new_move, new_redrive, one_of
from bide.ports.remote import LONGEST_LEASE, SHORTEST_LEASE
from bide.service import schemas
from bide.service.access import Caller, Verb, audit_pause
from bide.service.contract import CALLS
from bide.service.requests import Reply, Request, StreamingReply, encode, etag, problem_of, reply, reply_to, shape_for
from bide.service.streaming import EventFeed

Made = TypeVar("Made")
_NONE = Count(0)
_EVENT_STREAM = "text/event-stream; charset=utf-8"


async def set_paused(client: Client, topic: Topic, who: str, *, paused: bool) -> bool:
    """Pause or resume a topic, and return True if that changed anything. Raises BadInput, StoreError."""
    if paused:
        changed = await client.pause(topic, who=who)
        audit_pause(who, "pause", topic, "paused" if changed else "already paused")
    else:
        changed = await client.resume(topic, who=who)
        audit_pause(who, "resume", topic, "resumed" if changed else "not paused")
    return changed


_BY_NAME = {call.name: call for call in CALLS}
_DECODERS: dict[str, msgspec.json.Decoder[Any]] = {
    call.name: msgspec.json.Decoder(call.ask) for call in CALLS if call.ask is not None
}
_TAG = re.compile(r'\s*(?:W/)?("?)([0-9]{1,19})\1\s*', re.ASCII)
_NO_TOKEN = 0
"""A token that no task ever has."""


def asked(request: Request, call: str) -> Any:
    """The body, decoded as the type that this call takes. Raises Problem."""
    return request.decoded(_DECODERS[call])


class Verbs:
    """Each method is a call of the contract. Raises Problem, AccessRefused, and the errors of the engine."""

    def __init__(self, client: Client, long_poll: LongPoll, feed: EventFeed, *, instance: str) -> None:
        self._client = client
        self._long_poll = long_poll
        self._feed = feed
        self._instance = instance

    # --- whole topics

    async def topics(self, request: Request) -> Reply:
        """The counts and the pause of every topic that has tasks or is paused, or of one topic. O(topics)."""
        client, caller = self._client, request.caller
        only = request.query(("topic",)).get("topic")
        if only is None:
            caller.check_somewhere(Verb.READ)
        else:
            caller.check(Verb.READ, only)
            check_topic(only)
        edges = [as_datetime(0), as_datetime(client.clock.now() + 1)]
        tally = await client.tally(edges, topics=None if only is None else [only])
        pauses = await client.paused()
        paused = pauses.keys() if only is None else pauses.keys() & {only}
        found: list[schemas.TopicShape] = []
        for topic in sorted({topic for topic, _ in tally.counts} | tally.forecast.keys() | paused):
            if caller.may(Verb.READ, topic):
                counts = {state.value: schemas.CountShape(*tally.counts.get((topic, state), _NONE)) for state in State}
                due = schemas.CountShape(*tally.forecast.get(topic, [_NONE])[0])
                pause = schemas.paused_shape(pauses[topic]) if topic in paused else None
                found.append(schemas.TopicShape(topic=topic, **counts, due=due, paused=pause))
        return reply(schemas.TopicsShape(found))

    async def _set_paused(self, request: Request, *, paused: bool) -> Reply:
        """Pause or resume a topic. This affects every user of the topic, so it needs the verb `admin`."""
        [topic] = request.segments
        request.caller.check(Verb.ADMIN, topic)
        _refuse_body(request)
        check_topic(topic)
        changed = await set_paused(self._client, topic, request.caller.name, paused=paused)
        pause = (await self._client.paused()).get(topic)
        since, who = (None, None) if pause is None else (instant_text(pause.since), pause.who)
        return reply(schemas.PauseShape(topic, pause is not None, changed, since, who))

    pause, resume = partialmethod(_set_paused, paused=True), partialmethod(_set_paused, paused=False)

    # --- one task, named by the path

    async def schedule(self, request: Request) -> Reply:
        topic, key = request.ref(Verb.SCHEDULE)
        ask: schemas.Schedule = asked(request, "schedule")
        condition: Container[Result] = ()
        if request.header(b"if-match") is not None:
            raise BadInput("if-match", request.header(b"if-match"), "none: PATCH and DELETE take it")
        only_new = request.header(b"if-none-match")
        if only_new is not None:
            if only_new.strip() != "*":
                raise BadInput("if-none-match", only_new, "* alone: only if there is no such task")
            one_of(CONFLICTS, ask.on_conflict, "on_conflict")  # checked, although the header decides
            ask = msgspec.structs.replace(ask, on_conflict="refuse")
            condition = (Result.REFUSED,)
        answer = await self._client.schedule_new(self._new(topic, key, ask))
        return reply_to(answer, request.caller, condition=condition, paused=self._client.known_pauses)

    async def get(self, request: Request) -> Reply:
        topic, key = request.ref(Verb.READ)
        task = await self._client.get(topic, key)
        if task is None:
            return reply_to(Answer(Result.NOT_FOUND), request.caller)
        headers = etag(Answer(Result.KEPT, task.record))
        if _seen(request.header(b"if-none-match"), headers["etag"]):
            return Reply(304, b"", headers=headers)
        return Reply(200, encode(schemas.task_shape(task.record, alone=True)), headers=headers)

    async def reschedule(self, request: Request) -> Reply:
        topic, key = request.ref(Verb.RESCHEDULE)
        ask: schemas.Move = asked(request, "reschedule")
        token, condition = await self._condition(request, (topic, key), ask.if_token)
        answer = await self._client.reschedule(
            topic, key, delay=ask.delay, at=ask.at, deadline=ask.deadline, if_token=token, zone=ask.zone,
        )  # fmt: skip
        return reply_to(answer, request.caller, condition=condition, paused=self._client.known_pauses)

    async def cancel(self, request: Request) -> Reply:
        topic, key = request.ref(Verb.CANCEL)
        _refuse_body(request)
        token, condition = await self._condition(request, (topic, key), None)
        answer = await self._client.cancel(topic, key, if_token=token)
        return reply_to(answer, request.caller, condition=condition)

    # --- many

    async def schedule_many(self, request: Request) -> Reply:
        tasks = _each(
            request, asked(request, "schedule_many"), Verb.SCHEDULE, lambda ask: self._new(ask.topic, ask.key, ask)
        )
        return await self._answered(request, self._client.schedule_many(tasks), paused=self._client.known_pauses)

    async def reschedule_many(self, request: Request) -> Reply:
        return await self._changed(
            request, "reschedule_many", Verb.RESCHEDULE,
            lambda ask: new_move(
                ask.topic, ask.key, delay=ask.delay, at=ask.at, deadline=ask.deadline, if_token=ask.if_token,
                zone=ask.zone, clock=self._client.clock,
            ),
        )  # fmt: skip

    async def fire_many(self, request: Request) -> Reply:
        return await self._changed(
            request, "fire_many", Verb.FIRE, lambda ask: new_fire(ask.topic, ask.key, if_token=ask.if_token)
        )

    async def cancel_many(self, request: Request) -> Reply:
        ask: list[schemas.Ref] | schemas.CancelGroup = asked(request, "cancel_many")
        if isinstance(ask, schemas.CancelGroup):
            request.caller.check(Verb.CANCEL, ask.topic)
            return await self._answered(request, self._client.cancel_group(ask.group, topic=ask.topic))
        config, clock = self._client.config, self._client.clock

        def cancel(one: schemas.Ref) -> Cancel:
            return new_cancel(one.topic, one.key, if_token=one.if_token, config=config, clock=clock)

        return await self._answered(request, self._client.change_many(_each(request, ask, Verb.CANCEL, cancel)))

    async def redrive_many(self, request: Request) -> Reply:
        def redrive(ask: schemas.RedriveItem) -> Redrive:
            delay = "0s" if ask.delay is None else ask.delay
            return new_redrive(ask.topic, ask.key, delay=delay, if_token=ask.if_token, clock=self._client.clock)

        return await self._changed(request, "redrive_many", Verb.REDRIVE, redrive)

    async def shift(self, request: Request) -> Reply:
        ask: schemas.Shift = asked(request, "shift")
        request.caller.check(Verb.SHIFT, ask.topic)
        shifted = self._client.shift(ask.group, ask.by, topic=ask.topic, deadlines=ask.deadlines)
        return await self._answered(request, shifted, paused=self._client.known_pauses)

    async def find(self, request: Request) -> Reply:
        given = request.query(tuple(_BY_NAME["find"].query))
        request.caller.check(Verb.READ, given.get("topic"))
        limit = _whole(given.get("limit", "100"), "limit", 1, 1_000)
        fields = (given.get(name) for name in ("topic", "state", "group", "wake_from", "wake_before"))
        where = filter_of(*fields, now=self._client.clock.now)
        found = await self._client.find_page(where, Page(limit=limit, cursor=given.get("cursor")))
        return reply(schemas.FoundShape(_visible(request, found.tasks), found.cursor))

    # --- recurring tasks

    async def recur(self, request: Request) -> Reply:
        topic, key = request.ref(Verb.SCHEDULE)
        ask: schemas.Recur = asked(request, "recur")
        bounds: Any = {name: getattr(ask, name) for name in Bounds.__annotations__}
        try:
            rule = rule_of(ask.rule, zone=ask.zone, **bounds)
        except BadInput as error:
            if error.field in schemas.Recur.__struct_fields__:
                raise
            raise BadInput("rule", error.value, f"{error.field}: {error.accepted}") from None
        answer = await self._client.recurring.add(
            topic, rule, schemas.payload_of(ask), key=key, group=ask.group, retry=schemas.retries(ask.retry),
            headers=ask.headers, catch_up=ask.catch_up, window=ask.window, most=ask.most, overlap=ask.overlap,
            deadline=ask.deadline, end_when_dead=ask.end_when_dead,
        )  # fmt: skip
        return reply_to(answer, request.caller, paused=self._client.known_pauses)

    async def recurring(self, request: Request) -> Reply:
        topic, key = request.ref(Verb.READ)
        most = _whole(request.query(("n",)).get("n", "5"), "n", 0, 100)
        task = await self._client.get(topic, key)
        shape = None if task is None else schemas.recurring_shape(task.record, self._client.clock.now(), most)
        return reply_to(Answer(Result.NOT_FOUND), request.caller) if shape is None else reply(shape)

    async def steer(self, request: Request) -> Reply:
        """Change what a recurring task does next. What starts occurrences needs the verb `schedule`."""
        ask: schemas.Steer = asked(request, "steer")
        topic, key = request.ref(Verb.SCHEDULE if ask.do in ("run_now", "backfill") else Verb.RESCHEDULE)
        if ask.do not in schemas.STEPS:
            raise BadInput("do", ask.do, f"one of {', '.join(schemas.STEPS)}")
        span = {name: at for name, at in (("since", ask.since), ("until", ask.until)) if at is not None}
        if len(span) != (2 if ask.do == "backfill" else 0):
            raise BadInput("since, until", (ask.since, ask.until), "both with backfill, and neither with other steps")
        answering = getattr(self._client.recurring, ask.do)(topic, key, **span)
        return await self._answered(request, answering, paused=self._client.known_pauses, sent=False)

    async def remove(self, request: Request) -> Reply:
        topic, key = request.ref(Verb.CANCEL)
        _refuse_body(request)
        return reply_to(await self._client.recurring.remove(topic, key), request.caller)

    async def find_recurring(self, request: Request) -> Reply:
        given = request.query(tuple(_BY_NAME["find_recurring"].query))
        request.caller.check(Verb.READ, given.get("topic"))
        most = _whole(given.get("n", "5"), "n", 0, 100)
        where = filter_of(given.get("topic"), None, given.get("group"), None, None)
        found = await self._client.find_page(where, Page(limit=1_000, cursor=given.get("cursor")))
        now = self._client.clock.now()
        live = [record for record in request.caller.visible(found.tasks) if record.options and record.state.live]
        shapes = [shape for record in live if (shape := schemas.recurring_shape(record, now, most)) is not None]
        return reply(schemas.RecurringFoundShape(shapes, found.cursor))

    # --- consumers in any language

    async def lease(self, request: Request) -> Reply:
        """Lease tasks, waiting in the long poll until the client disconnects or the caller loses access."""
        ask: schemas.LeaseRequest = asked(request, "lease")
        room = {check_topic(topic, "topics"): count for topic, count in ask.topics.items()}
        request.caller.check_all(Verb.WORK, room)
        wait = _bounded(ask.wait, "wait", 0, 1_000 * schemas.LONGEST_WAIT) / 1_000
        lease_for = self._length(ask.lease_for)
        holder = f"{request.caller.name}@{self._instance}"
        leasing = self._long_poll.lease(room, holder=holder, lease_for=lease_for, wait=wait)
        tasks = await request.while_connected(leasing, undo=self._long_poll.release)
        paused = [topic for topic in room if topic in self._long_poll.pause_gate.topics]
        return reply(schemas.LeasedShape(_visible(request, tasks, Verb.WORK), paused or UNSET))

    async def settle(self, request: Request) -> Reply:
        ended = _each(request, asked(request, "settle"), Verb.WORK, lambda ask: (_lease(ask), _outcome(ask)))
        return reply(schemas.SettledShape(await self._long_poll.settle(ended, who=request.caller.name)))

    async def extend(self, request: Request) -> Reply:
        ask: schemas.Extend = asked(request, "extend")
        request.caller.check_all(Verb.WORK, [one.topic for one in ask.leases])
        leases = [_lease(one) for one in ask.leases]
        return reply(schemas.ExtendedShape(await self._long_poll.extend(leases, self._length(ask.lease_for))))

    def _length(self, given: str | None) -> Millis:
        if given is None:
            return self._client.config.lease
        return _bounded(given, "lease_for", SHORTEST_LEASE, LONGEST_LEASE)

    async def events(self, request: Request) -> Reply | StreamingReply:
        topic = request.query(("topic",)).get("topic")
        caller = request.caller
        caller.check(Verb.EVENTS, topic)
        if topic is not None:
            check_topic(topic)
        last = request.header(b"last-event-id")
        if request.method == "HEAD":
            return Reply(200, b"", _EVENT_STREAM)

        def admits(event: Event) -> bool:
            return topic in (None, event.topic) and caller.may(Verb.EVENTS, event.topic)

        return StreamingReply(await self._feed.stream(last, admits), _EVENT_STREAM)

    # --- helpers

    def _new(self, topic: str, key: str | None, ask: schemas.Schedule) -> NewTask:
        """The task that a request describes. Raises BadInput."""
        return self._client.new(
            topic, schemas.payload_of(ask), key=key, group=ask.group, delay=ask.delay, at=ask.at,
            on_conflict=ask.on_conflict, retry=schemas.retries(ask.retry), deadline=ask.deadline,
            headers=ask.headers, if_token=ask.if_token, zone=ask.zone,
        )  # fmt: skip

    async def _changed(self, request: Request, call: str, verb: Verb, make: Callable[[Any], Change]) -> Reply:
        """Make a batch of changes from the request, and answer it."""
        changes = _each(request, asked(request, call), verb, make)
        return await self._answered(request, self._client.change_many(changes), paused=self._client.known_pauses)

    async def _condition(
        self, request: Request, ref: tuple[str, str], if_token: int | None
    ) -> tuple[int | None, Container[Result]]:
        """Return the token that the task must have, and the results that mean a failed condition of the headers.

        As in RFC 9110, 13.1.1, except that a weak tag counts as the strong one, since compressing proxies make tags
        weak. A tag of another form matches nothing.
        """
        given = request.header(b"if-match")
        if given is None:
            return if_token, ()
        if given.strip() == "*":
            return if_token, (Result.NOT_FOUND,)
        tokens = {int(found[2]) for one in given.split(",") if (found := _TAG.fullmatch(one))}
        if if_token is not None:
            tokens &= {if_token}  # both conditions have to hold
        if len(tokens) > 1:
            task = await self._client.get(*ref)
            tokens = {token for token in tokens if task is not None and token == task.token}
        return min(tokens, default=_NO_TOKEN), (Result.STALE_TOKEN, Result.NOT_FOUND)

    async def _answered(
        self, request: Request, answering: Awaitable[Answer | Sequence[Answer]], *, paused: Container[Topic] = (),
        sent: bool = True,
    ) -> Reply:  # fmt: skip
        """Answer a batch; the items whose part of the store was unavailable carry a problem."""
        try:
            answered = await answering
            answers: Sequence[object] = [answered] if isinstance(answered, Answer) else answered
        except PartlyFailed as partly:
            answers = partly.answers
        return reply([_item(request.caller, answer, paused, sent=sent) for answer in answers])


def _visible(request: Request, records: Iterable[Record], verb: Verb = Verb.READ) -> list[schemas.TaskShape]:
    return [schemas.task_shape(record) for record in request.caller.visible(records, verb)]


def _whole(text: str, field: str, least: int, most: int) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 4 and least <= int(text) <= most):
        raise BadInput(field, text, f"a whole number from {least} to {most}")
    return int(text)


def _refuse_body(request: Request) -> None:
    if request.body:
        raise BadInput("body", f"{len(request.body)} bytes", "no body")


def _seen(given: str | None, tag: str) -> bool:
    """Return True if `If-None-Match` names this tag; a weak one counts too (RFC 9110, 13.1.2)."""
    if given is None:
        return False
    return given.strip() == "*" or tag in [one.strip().removeprefix("W/") for one in given.split(",")]


def _item(
    caller: Caller, answer: object, paused: Container[Topic], *, sent: bool = True
) -> schemas.AnswerShape | schemas.ItemShape:
    if type(answer) is Answer:
        return shape_for(caller, answer, paused, sent=sent)
    assert isinstance(answer, Exception)
    return schemas.ItemShape(problem=problem_of(answer).shape)


def _each(request: Request, batch: Sequence[Any], verb: Verb, make: Callable[[Any], Made]) -> list[Made]:
    """Make each item, if the caller has access to the topics of all items. An error names the index of its item, and
    nothing is done. Raises Forbidden, BadInput."""
    request.caller.check_all(verb, [ask.topic for ask in batch])
    place = 0
    made: list[Made] = []
    try:
        for place, ask in enumerate(batch):  # noqa: B007 - the error uses the place
            made.append(make(ask))
    except BadInput as error:
        raise BadInput(f"[{place}].{error.field}", error.value, error.accepted) from None
    return made


def _bounded(given: str, field: str, least: Millis, most: Millis) -> Millis:
    millis = duration(given, field=field)
    if not least <= millis <= most:
        raise BadInput(field, given, f"from {least // 1_000} to {most // 1_000} seconds")
    return millis


def _lease(ask: schemas.LeaseRef) -> Lease:
    return Lease(check_topic(ask.topic), check_name("key", ask.key), ask.token)


def _outcome(ask: schemas.Settle) -> Outcome:
    """The outcome of a request to settle. Raises BadInput."""
    at, delay = ask.at, ask.delay
    if at is not None or delay is not None:
        due_later(at, delay)  # an error names the fields of this call
    if ask.outcome == "done":
        return Done(again_at=at, again_in=delay)
    if ask.outcome == "retry":
        return Retry(ask.error or None, at=at, delay=delay)
    if ask.outcome == "defer":
        return Defer(delay, at=at)
    if ask.outcome == "dead":
        if at is not None or delay is not None:
            raise BadInput("at, delay", (at, delay), "neither of them with dead")
        return Dead(ask.error or "the consumer reported it dead")
    raise BadInput("outcome", ask.outcome, f"one of {', '.join(OutcomeKind)}")
