"""Changes to tasks: one task at once; many after a preview, in the background, with progress that all viewers see."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import NamedTuple
from urllib.parse import unquote

from bide.core.errors import BadInput
from bide.core.instants import LAST_INSTANT, duration, instant_text
from bide.core.names import check_name, check_topic, new_id
from bide.core.records import Ref, Result, State
from bide.insight.bulk import MOST_PACE, BulkRequest, BulkVerb, May, Version, change_one, preview, wake_after
from bide.insight.bulk_run import MOST_NOTED, BulkRunner, BulkState, Progress, untouched_by
from bide.ports.remote import LAST_TOKEN
from bide.service.access import Verb
from bide.service.console.pages import ConsoleContext, Page, PageRequest, filter_fields, local_path, read_filter
from bide.service.console.rendering import address, task_address
from bide.service.requests import Reply


class Action(NamedTuple):
    """A change that the console offers."""

    name: str
    access: Verb
    states: tuple[str, ...]
    """The states of tasks that allow it; `due` is a filter of the task list."""


ACTIONS: Mapping[BulkVerb, Action] = {
    BulkVerb.CANCEL: Action("Cancel", Verb.CANCEL, ("due", State.WAITING, State.LEASED)),
    BulkVerb.MOVE: Action("Move", Verb.RESCHEDULE, ("due", State.WAITING)),
    BulkVerb.SHIFT: Action("Shift", Verb.SHIFT, ("due", State.WAITING)),
    BulkVerb.FIRE: Action("Fire now", Verb.FIRE, (State.WAITING,)),
    BulkVerb.REDRIVE: Action("Redrive", Verb.REDRIVE, (State.DEAD,)),
}
_MOST_CHOSEN = 1_000
"""Tasks that one form may name."""
_ID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
Field = tuple[str, str]


def _version(text: str) -> Version:
    """The task that a form names, and the token that the viewer saw. Raises BadInput."""
    name, at, token = text.rpartition("@")
    topic, slash, key = name.partition("/")
    if not at or not slash or not token.isascii() or not token.isdigit() or len(token) > 19:
        raise BadInput("ref", text, "topic/key@token, percent-encoded, as the console's own forms have it")
    return Version(Ref(check_topic(unquote(topic)), check_name("key", unquote(key))), int(token))


def read_bulk(request: PageRequest) -> BulkRequest:
    """Read a change from a form, and check that the viewer may make it. Raises BadInput, Forbidden."""
    verb = request.choice_field("verb", BulkVerb)
    scope = request.field("scope", "chosen")
    if scope == "chosen":
        texts = request.fields.get("ref", [])
        if len(texts) > _MOST_CHOSEN:
            raise BadInput("ref", f"{len(texts)} tasks", f"at most {_MOST_CHOSEN:,} at once; or all that match")
        seen = tuple(_version(text) for text in dict.fromkeys(texts))
        if not seen:
            raise BadInput("tasks", "none", "at least one: tick some in the list, or choose all that match")
        for needed in (Verb.READ, ACTIONS[verb].access):
            request.caller.check_all(needed, [one.ref.topic for one in seen])
        where = None
    elif scope == "matching":
        seen, where = (), read_filter(request)
        if where.topic is not None:
            request.caller.check(Verb.READ, where.topic)
            request.caller.check(ACTIONS[verb].access, where.topic)
        else:
            request.caller.check_somewhere(ACTIONS[verb].access)
    else:
        raise BadInput("scope", scope, "chosen or matching")
    by = request.field("by").replace("−", "-").removeprefix("+")
    return BulkRequest(
        verb=verb, chosen=seen, where=where, error=request.field("error") or None if where is not None else None,
        at=request.locale.read_time(request.field("to"), "to") if verb is BulkVerb.MOVE else None,
        by=duration(by.strip(), field="by", negative=True) if verb is BulkVerb.SHIFT else None,
        deadlines=verb is BulkVerb.SHIFT and bool(request.field("deadlines")),
        pace=request.number_field("pace", 0, least=1, most=MOST_PACE) or None,
        untouched_since=request.number_field("since", 0, least=1, most=LAST_TOKEN) or None,
    )  # fmt: skip


def possible(request: PageRequest, state: str, topics: Sequence[str]) -> frozenset[str]:
    """The changes that the viewer may make to tasks of this state (empty: any) in any of these topics."""
    return frozenset(
        verb
        for verb, action in ACTIONS.items()
        if (not state or state in action.states) and any(request.caller.may(action.access, topic) for topic in topics)
    )


def may_of(request: PageRequest, verb: BulkVerb) -> May:
    """Return a function that tells whether the viewer may make this change to tasks of a topic."""
    caller, needed = request.caller, ACTIONS[verb].access
    return lambda topic: caller.may(needed, topic) and caller.may(Verb.READ, topic)


def fields_of(request: PageRequest, bulk: BulkRequest) -> Iterator[Field]:
    """The hidden fields that repeat the request, with all times fixed; without the pace."""
    yield "verb", bulk.verb.value
    if bulk.where is None:
        yield "scope", "chosen"
        for text in dict.fromkeys(request.fields["ref"]):
            yield "ref", text
    else:
        yield "scope", "matching"
        yield from _match_fields(bulk).items()
    if bulk.at is not None:
        yield "to", instant_text(bulk.at)
    if bulk.by is not None:
        yield "by", f"{bulk.by}ms"
    if bulk.deadlines:
        yield "deadlines", "yes"
    if bulk.untouched_since is not None:
        yield "since", str(bulk.untouched_since)


def read_id(text: str) -> str:
    """The one-time id of a form; a new one if there is none. Raises BadInput."""
    if not text:
        return new_id()
    if _ID.fullmatch(text) is None:
        raise BadInput("id", text, "the id of the page that asked for a confirmation")
    return text


_STEADY = 100
"""Tasks per second that are proposed for redriving more tasks than this."""
_SHOWN = 100
REASONS = {
    "under_way": "it is being delivered, or its retry is pending: it was left unchanged",
    "stale_token": "it was changed in the meantime: it was left unchanged",
    "finished": "it had already ended",
    "not_found": "there is no such task: it ended and was forgotten, or it never existed",
    "refused": "the new time lies past its deadline",
    "unknown": "the answer was lost: check the task itself",
    "unavailable": "the store was unavailable; nothing was done",
}
"""The reasons why a task was not changed as requested."""


class ActionsPage(Page):
    """The forms that change tasks, and the changes in the background; closing records how far they came."""

    def __init__(self, context: ConsoleContext) -> None:
        self._access = context.access
        self._bulks = BulkRunner(context.app, context.instance)
        self.routes = {
            ("POST", "/changes"): self._request,
            ("GET", "/changes"): self._list,
            ("GET", "/changes/{id}"): partial(self._one, "change.html"),
            ("GET", "/changes/{id}/live"): partial(self._one, "change_live.html"),
            ("POST", "/changes/{id}/stop"): self._stop,
        }
        context.stack.push_async_callback(self._bulks.close)

    # --- request a change

    async def _request(self, request: PageRequest) -> Reply:
        bulk = read_bulk(request)
        if len(bulk.chosen) == 1:
            return await self._change_one(request, bulk)
        if not request.field("confirm"):
            return await self._preview(request, bulk)
        id = read_id(request.field("id"))
        caller, access = request.caller, self._access
        await self._bulks.start(
            id, bulk, may_of(request, bulk.verb), who=caller.name, identity=caller.id,
            still=lambda: access.caller_by_id(caller.id),
            asked_at=request.number_field("asked", LAST_INSTANT, least=1, most=LAST_INSTANT),
        )  # fmt: skip
        return request.redirect(f"/changes/{id}")

    async def _change_one(self, request: PageRequest, bulk: BulkRequest) -> Reply:
        [(ref, token)] = bulk.chosen
        answer = await change_one(request.client, bulk)
        result, record = answer.result, answer.record
        back = local_path(request.field("back"), "")
        said, ago = result.value, ""
        if bulk.verb is BulkVerb.FIRE and answer.ok:
            said = "fired"
        elif record is not None and (answer.past or timedelta(0)) >= timedelta(seconds=1):
            said, ago = "past", request.locale.relative(record.due_at)
        if answer.ok and back:
            return request.redirect(f"{back}{'&' if '?' in back else '?'}said={said}")
        since = []
        if not answer.ok:
            events = await request.client.events(ref.topic, ref.key, limit=20)
            since = [event for event in events if event.at * 1000 + 999 >= token]
        live = answer.ok and record is not None and record.state.live
        paused = live and ref.topic in await request.client.paused()
        again = None
        if result is Result.STALE_TOKEN and record is not None:
            possible = record.state is State.DEAD if bulk.verb is BulkVerb.REDRIVE else record.state.live
            again = [one for one in fields_of(request, bulk) if one[0] != "ref"] if possible else None
        return request.render(
            "change_answer.html", status=200 if answer.ok else 409, verb=ACTIONS[bulk.verb].name, ref=ref,
            answer=answer, record=record, reason=REASONS.get(result.value, ""), seen_at=token // 1000, since=since,
            again=again, back=back, where=task_address(*ref), paused=paused, ago=ago,
        )  # fmt: skip

    async def _preview(self, request: PageRequest, bulk: BulkRequest) -> Reply:
        now, paused = request.locale.now, await request.client.paused()
        seen = await preview(request.client, bulk, may_of(request, bulk.verb))
        pace = bulk.pace
        if pace is None and bulk.verb is BulkVerb.REDRIVE and seen.meant.number > _STEADY:
            pace = _STEADY
        return request.render(
            "change_preview.html", bulk=bulk, verb=ACTIONS[bulk.verb].name, seen=seen, scope=_scope(bulk),
            sample=[(record, wake_after(bulk, record, now)) for record in seen.sample], pace=pace,
            paused=sorted(seen.topics & paused.keys()), id=read_id(""),
            fields=[*fields_of(request, bulk), ("asked", str(now))], back=local_path(request.field("back"), ""),
        )  # fmt: skip

    # --- follow changes

    async def _list(self, request: PageRequest) -> Reply:
        request.caller.check_somewhere(Verb.READ)
        shown = [one for one in await self._bulks.all() if _may_see(request, one)]
        rows = [(one, self._state(one), _scope(one.bulk)) for one in shown[:200]]
        return request.render("changes.html", rows=rows, actions=ACTIONS)

    async def _stop(self, request: PageRequest) -> Reply:
        progress = await self._known(request)
        if progress is None:
            return request.render("change_gone.html", status=404)
        if progress.identity != request.caller.id:
            request.caller.check_all(ACTIONS[progress.bulk.verb].access, _topics(progress))
        if not progress.state.over:
            await self._bulks.stop(progress.id, who=request.caller.name)
        return request.redirect(f"/changes/{progress.id}")

    async def _known(self, request: PageRequest) -> Progress | None:
        """The change that the address names; None: it never began, or was forgotten. Raises Forbidden."""
        progress = await self._bulks.get(read_id(request.path_values[0]))
        if progress is not None and progress.identity != request.caller.id:
            request.caller.check_all(Verb.READ, _topics(progress))
        return progress

    async def _one(self, template: str, request: PageRequest) -> Reply:
        """The page of one change, or its live part, which is polled until the change is over."""
        progress = await self._known(request)
        if progress is None:
            return request.render("change_gone.html", status=404)
        now = request.client.clock.now()
        state = self._state(progress)
        missed = [one for one in await self._bulks.missed(progress.id) if request.caller.may(Verb.READ, one.topic)]
        every = bool(request.field("all"))
        rate, left = _rate(progress, progress.alive_at if state == "lost" else now)
        return request.render(
            template, progress=progress, bulk=progress.bulk, verb=ACTIONS[progress.bulk.verb].name, state=state,
            over=progress.state.over or state == "lost", scope=_scope(progress.bulk), rate=rate, left=left,
            counts=sorted(progress.counts.items(), key=lambda one: -one[1]), reasons=REASONS,
            missed=missed if every else missed[:_SHOWN], more=max(0, len(missed) - _SHOWN) if not every else 0,
            kept=len(missed), again=self._again(request, progress, state), tasks=_tasks_address(progress.bulk),
            noted=MOST_NOTED,
        )  # fmt: skip

    def _state(self, progress: Progress) -> str:
        return "lost" if self._bulks.is_lost(progress) else progress.state.value

    def _again(self, request: PageRequest, progress: Progress, state: str) -> list[tuple[str, str]] | None:
        """The fields that continue with the rest; None if nothing is left, or the rest is unknown."""
        broken_off = state in ("lost", BulkState.STOPPED.value, BulkState.FAILED.value)
        if not broken_off or progress.chosen:
            return None
        bulk = progress.bulk
        fields = list(fields_of(request, bulk))
        since = untouched_by(progress) if bulk.verb is BulkVerb.SHIFT and bulk.untouched_since is None else None
        if since is not None:  # a task with a newer token may have been shifted already
            fields.append(("since", str(since)))
        if bulk.pace is not None:
            fields.append(("pace", str(bulk.pace)))
        return fields


def _topics(progress: Progress) -> Sequence[str | None]:
    """The topics of a change; None: all."""
    where = progress.bulk.where
    return progress.topics or [None if where is None else where.topic]


def _may_see(request: PageRequest, progress: Progress) -> bool:
    caller = request.caller
    return progress.identity == caller.id or all(caller.may(Verb.READ, topic) for topic in _topics(progress))


def _scope(bulk: BulkRequest) -> list[tuple[str, str | int]]:
    """The filter of a change as (name, value); times are instants."""
    where = bulk.where
    if where is None:
        return []
    named: list[tuple[str, str | int | None]] = [
        ("Topic", where.topic), ("Group", where.group), ("State", where.state), ("Error", bulk.error),
        ("Due from", where.wake_from), ("Due before", where.wake_before),
    ]  # fmt: skip
    return [(name, value) for name, value in named if value is not None]


def _match_fields(bulk: BulkRequest) -> dict[str, str]:
    assert bulk.where is not None
    return filter_fields(bulk.where) | ({} if bulk.error is None else {"error": bulk.error})


def _tasks_address(bulk: BulkRequest) -> str | None:
    if bulk.where is None:
        return None
    fields = _match_fields(bulk)
    if bulk.verb is BulkVerb.REDRIVE:
        return address("/dead", topic=fields.get("topic"), error=fields.get("error"))
    return address("/tasks", **fields)


def _rate(progress: Progress, now: int) -> tuple[float | None, int | None]:
    """Tasks per second so far, and the milliseconds left at this rate, if known."""
    if progress.started_at is None or not progress.looked:
        return None, None
    took = max(1, (progress.ended_at or now) - progress.started_at)
    rate = progress.looked * 1000 / took
    left = None
    if progress.total is not None and progress.total_exact and not progress.state.over:
        left = max(0, int((progress.total - progress.looked) * 1000 / rate))
    return rate, left
