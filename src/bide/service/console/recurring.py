"""Recurring tasks: the list, and each one's page with its instants, its calendar, and what can be done with it."""

from __future__ import annotations

import asyncio
from calendar import Calendar
from contextlib import suppress
from datetime import date, datetime, time, timedelta
from functools import partial
from typing import Any, TypeAlias

from bide.core.answers import Answer
from bide.core.errors import BadInput
from bide.core.instants import Millis, as_datetime, instant, instant_text
from bide.core.names import check_topic
from bide.core.options import recurrence_of
from bide.core.records import Count, Ref, Result, State
from bide.core.recurrence.rules import Rule
from bide.core.recurrence.zones import zone_info
from bide.engine.recurring import planned
from bide.insight.cached_query import CachedQuery
from bide.insight.recurring import MOST, Miss, misses_of, past_of, recurring_tasks
from bide.ports.remote import LAST_TOKEN
from bide.service.access import Verb
from bide.service.console.i18n import Locale, inert_line
from bide.service.console.pages import ConsoleContext, Page, PageRequest
from bide.service.console.rendering import address, recurring_address
from bide.service.console.task import ref_of
from bide.service.requests import Reply

_SHOWN, _EVENTS, _INSTANTS, _OF_DAY = 500, 1_000, 10, 100
_PATIENCE = 1.2
"""Seconds to wait for the end of an occurrence that runs."""

_ACTS = {
    "pause": Verb.RESCHEDULE, "resume": Verb.RESCHEDULE, "skip_next": Verb.RESCHEDULE, "run_now": Verb.SCHEDULE,
    "remove": Verb.CANCEL,
}  # fmt: skip
"""The actions on a recurring task, and the access that each needs."""

Day: TypeAlias = tuple[int, Count, bool]
"""A day of the calendar: its number, how often the rule names an instant on it, and whether it is today."""


def month_of(rule: Rule, now: Millis) -> list[list[Day | None]]:
    """The weeks of the current month in the rule's zone."""
    zone = zone_info(rule.zone)
    today = as_datetime(now).astimezone(zone).date()

    def seen(day: date) -> Day:
        first, end = (instant(datetime.combine(one, time(), zone)) for one in (day, day + timedelta(1)))
        found = len(rule.upto(first, end - 1, _OF_DAY))
        return day.day, Count(found, found < _OF_DAY), day == today

    weeks = Calendar().monthdatescalendar(today.year, today.month)
    return [[seen(day) if day.month == today.month else None for day in week] for week in weeks]


class RecurringPage(Page):
    """The list, one task's page, and the form that acts on it."""

    def __init__(self, context: ConsoleContext) -> None:
        self._all = CachedQuery(partial(recurring_tasks, context.app), every=2.0, share=0.05)
        self._events = CachedQuery(partial(context.app.events, limit=_EVENTS), every=2.0, share=0.05)
        self.routes = {
            ("GET", "/recurring"): self._list,
            ("GET", "/recurring/{topic}/{key}"): self._one,
            ("POST", "/recurring"): self._act,
        }
        context.stack.push_async_callback(self._all.close)
        context.stack.push_async_callback(self._events.close)

    async def _list(self, request: PageRequest) -> Reply:
        if request.raw_field("key"):  # a name that no path can have
            return await self._one(request)
        topic, said = request.raw_field("topic"), request.field("said")
        if topic:
            request.caller.check(Verb.READ, check_topic(topic))
            found, whole = await recurring_tasks(request.client, (await request.client.tally(topics=[topic])).counts)
        else:
            request.caller.check_somewhere(Verb.READ)
            found, whole = await (self._all.fresh() if said else self._all.get())
        misses: dict[Ref, list[Miss]] = {}
        for miss in misses_of(await self._events.get()):
            misses.setdefault(Ref(miss.event.topic, miss.event.key), []).append(miss)
        seen = request.caller.visible(found)
        rows = [
            (one, recurrence_of(one.options), planned(one, request.locale.now, 1), misses.get(one.ref, ()))
            for one in seen[:_SHOWN]
        ]
        return request.render(
            "recurring.html", topic=topic, rows=rows, more=len(seen) - _SHOWN, whole=whole, most=MOST, said=said
        )

    async def _one(self, request: PageRequest) -> Reply:
        """The page of a task; if a form asks for its removal, with the question."""
        ref, now = ref_of(request), request.locale.now
        task = await request.client.get(*ref)
        recurrence = None if task is None else task.recurrence
        if task is None or recurrence is None:
            return request.render("recurring_one.html", status=404, ref=ref, record=None)
        record, rule = task.record, recurrence.rule
        misses = misses_of(await request.client.events(*ref, limit=_EVENTS))
        computed: dict[str, Any] = {"trouble": "", "past": [], "ahead": [], "weeks": [], "there": request.locale}
        try:
            computed["there"] = Locale(request.locale.language, rule.zone, zone_info(rule.zone), now)
            computed["past"] = past_of(rule, ref.key, now, misses, _INSTANTS)
            computed["ahead"] = planned(record, now, _INSTANTS)
            computed["weeks"] = month_of(rule, now)
        except BadInput as error:
            computed["trouble"] = inert_line(str(error))
        acts = {act for act, needed in _ACTS.items() if record.state.live and request.caller.may(needed, ref.topic)}
        acts -= {"pause", "skip_next"} if recurrence.paused else {"resume"}
        bound = {"if_token": record.token, "once_at": instant_text(now)} | _bound(request, *_ACTS)
        return request.render(
            "recurring_one.html", ref=ref, record=record, recurrence=recurrence, rule=rule, misses=misses, **computed,
            acts=acts, said=request.field("said"), bound=bound, removing=not request.is_read,
        )  # fmt: skip

    async def _act(self, request: PageRequest) -> Reply:
        act, ref = request.field("do"), ref_of(request)
        if act not in _ACTS:
            raise BadInput("do", act, f"one of {', '.join(_ACTS)}")
        request.caller.check(_ACTS[act], ref.topic)
        if act == "remove" and not request.field("confirm"):
            return await self._one(request)
        task, answer = await request.client.get(*ref), Answer(Result.UNDER_WAY)
        bound = _bound(request, act) if task is not None and task.state.live else {}
        with suppress(TimeoutError):
            async with asyncio.timeout(_PATIENCE if task is not None and task.state is State.LEASED else None):
                answer = await getattr(request.client.recurring, act)(*ref, **bound)
        back = "/recurring" if act == "remove" and answer.ok else recurring_address(*ref)
        again = bound if answer.result in (Result.MOVED, Result.CREATED) else {}
        return request.redirect(address(back, said=f"{act}-{answer.result.value}", **again))


def _bound(request: PageRequest, *acts: str) -> dict[str, Any]:
    """The arguments that bind a form to what its viewer saw, so that a second click does nothing.

    The page after a success carries them too, since the second click of a double click may land there.
    """
    found: dict[str, Any] = {}
    if "run_now" in acts and (at := request.field("once_at")):
        found["once_at"] = at
    if "skip_next" in acts and (token := request.number_field("if_token", 0, least=1, most=LAST_TOKEN)):
        found["if_token"] = token
    return found
