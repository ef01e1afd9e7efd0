"""What each of the store calls does: reads what was asked, looks at all of it and at who asks, and says how to do it.

Nothing that comes in is trusted: every field is checked, every topic by what the caller may do, and the clock is that
of the service's own store. Who may what:

add SCHEDULE; a move RESCHEDULE, or FIRE where it is due at once and keeps its deadline; a cancel CANCEL, a redrive
REDRIVE; get and find READ (find without a topic over all topics); tally shows the topics that one may READ; minutes
READ over all topics; lease, extend, settle, announce, listen and record WORK (changes are noted here, as they are
made); events EVENTS; pause and resume ADMIN (see `store_pauses`). Purge forgets only what has passed its time; a
caller without WORK on all topics is told that there was nothing to forget.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from functools import partial
from itertools import groupby
from operator import attrgetter
from typing import Any

from msgspec import Raw
from msgspec.structs import replace

from bide.core.answers import Answer
from bide.core.errors import BadInput
from bide.core.events import EventKind
from bide.core.instants import LAST_INSTANT, Millis
from bide.core.names import check_name
from bide.core.records import (
    Cancel,
    Change,
    Filter,
    Found,
    In,
    Lease,
    Move,
    NewTask,
    Page,
    Record,
    Settlement,
    Tally,
)
from bide.engine.client import Client
from bide.engine.history import rows_between
from bide.engine.pauses import HeldBack
from bide.engine.session import Session, verb_of
from bide.ports import KeepsEvents, Shares, wire
from bide.service import store_checks as checks
from bide.service.audit import Rates
from bide.service.callers import Caller, Verb
from bide.service.store_items import Reply, each, merged, seen, sifted
from bide.service.store_pauses import StorePauses, held_by, in_the_name_of

_PRESENCE: Millis = 60_000
"""How long a worker is taken to live after it last said so, at most."""
_MOST_HOLDERS = 10_000
_PAGE_BYTES = 8 << 20
"""Of payloads and errors, in one page: a page that would have more is read again with a lower limit."""

Act = Callable[[Millis], Coroutine[Any, Any, Reply]]
"""Does what was asked, which has been found to be in order; told what time it is."""
Prepare = Callable[[Raw, Caller, Millis], Act]
"""Raises BadInput, AccessRefused, and what msgspec raises."""


class Operations:
    """All of them, on the store of an open client."""

    def __init__(self, client: Client, *, trusting: bool, held_back: HeldBack | None = None) -> None:
        self._client = client
        self._trusting = trusting
        self._pauses = StorePauses(client, held_back)
        self._session = Session(client.store, client.clock, None)
        """Folds the single calls of many clients into batches, and notes who changed what."""
        self._holders: dict[str, Millis] = {}
        """Who announced here, and until when they are taken to live."""
        self._rates = Rates()
        self.all: Mapping[str, Prepare] = {
            "add": self._add,
            "change": self._change,
            "settle": self._settle,
            "extend": self._extend,
            "lease": self._lease,
            "purge": self._purge,
            "record": self._record,
            "get": self._get,
            "find": self._find,
            "tally": self._tally,
            "announce": self._announce,
            "events": self._events,
            "time": self._time,
            "pause": partial(self._pausing, self._pauses.pause),
            "resume": partial(self._pausing, self._pauses.resume),
            "paused": self._paused,
            "minutes": self._minutes,
        }

    async def close(self) -> None:
        """What was noted is written."""
        await self._session.recorder.close()

    # --- clients

    def _add(self, asked: Raw, caller: Caller, now: Millis) -> Act:
        tasks = wire.read_tasks(asked)
        limit, options = self._client.terms.payload_limit, not self._trusting

        def check(tasks: Sequence[NewTask]) -> None:
            checks.check_tasks(tasks, limit, options=options)
            caller.check_all(Verb.SCHEDULE, {task.topic for task in tasks})

        good, wrong = sifted(tasks, check)

        async def act(now: Millis) -> Reply:
            self._client.history.scheduled(len(good))
            if len(good) == 1 and not self._trusting:
                return merged(seen(caller, ([await self._session.add(good[0])], {})), wrong)
            added = await each(self._client.store.add(good, now=now), self._note_adds)
            return merged(seen(caller, added), wrong)

        return act

    def _change(self, asked: Raw, caller: Caller, now: Millis) -> Act:
        changes = wire.read_changes(asked)

        def check(changes: Sequence[Change]) -> None:
            checks.check_changes(changes)
            for verb, topic in {(_needed(change), change.topic) for change in changes}:
                caller.check(verb, topic)

        good, wrong = sifted(changes, check)

        async def act(now: Millis) -> Reply:
            if len(good) == 1 and not self._trusting:
                return merged(seen(caller, ([await self._session.change(good[0])], {})), wrong)
            changing = self._client.store.change(good, now=now)
            changed = await each(changing, lambda answers: self._note_changes(good, answers))
            return merged(seen(caller, changed), wrong)

        return act

    def _note_adds(self, answers: Sequence[object]) -> None:
        self._session.note("schedule", [one for one in answers if isinstance(one, Answer)], bulk=True)

    def _note_changes(self, changes: Sequence[Change], answers: Sequence[object]) -> None:
        """By verb, as they were asked for."""
        by_verb: dict[str, list[Answer]] = {}
        for change, answer in zip(changes, answers, strict=True):
            if isinstance(answer, Answer):
                by_verb.setdefault(verb_of(change), []).append(answer)
        for verb, its in by_verb.items():
            self._session.note(verb, its)

    def _get(self, asked: Raw, caller: Caller, now: Millis) -> Act:
        refs = wire.read_refs(asked)
        checks.check_refs(refs)
        caller.check_all(Verb.READ, {ref.topic for ref in refs})

        async def act(now: Millis) -> Reply:
            """As many from the first on as fit into one answer; the client asks for the others."""
            found = await self._client.store.get(refs[: wire.LONGEST_PAGE])
            records = [one if one is not None and caller.visible([one]) else None for one in found]
            return records[: _that_fit(records)], {}

        return act

    def _find(self, asked: Raw, caller: Caller, now: Millis) -> Act:
        ask = wire.read_find(asked)
        where, page = ask.where, ask.page
        checks.check_filter(where)
        if page.limit < 0 or (page.cursor is not None and len(page.cursor) > 4096):
            raise BadInput("page", page.limit, "a limit of at least 0, and the cursor of the page before")
        caller.check(Verb.READ, where.topic)

        async def act(now: Millis) -> Reply:
            found = await self._page(where, Page(limit=min(page.limit, wire.LONGEST_PAGE), cursor=page.cursor))
            return Found(caller.visible(found.tasks), found.cursor), {}

        return act

    async def _page(self, where: Filter, page: Page) -> Found:
        """A page that fits into one answer; it may have fewer tasks than its limit."""
        while True:
            found = await self._client.store.find(where, page)
            fit = _that_fit(found.tasks)
            if fit == len(found.tasks):
                return found
            page = Page(limit=fit, cursor=page.cursor)

    def _tally(self, asked: Raw, caller: Caller, now: Millis) -> Act:
        ask = wire.read_tally_ask(asked)
        edges, topics = ask.edges, ask.topics
        if edges is not None:
            checks.check_count("edges", edges)
            for edge in edges:
                checks.check_edge("edges", edge)
        if topics is not None:
            checks.check_count("topics", topics)
            checks.check_topics(topics)
        if Verb.READ not in caller.verbs:
            caller.check(Verb.READ, None)

        async def act(now: Millis) -> Reply:
            found = await self._client.store.tally(edges, topics=topics)
            may = {topic: caller.may(Verb.READ, topic) for topic in {*found.forecast, *(of for of, _ in found.counts)}}
            counts = {of: count for of, count in found.counts.items() if may[of[0]]}
            forecast = {topic: its for topic, its in found.forecast.items() if may[topic]}
            return wire.flat(Tally(counts, forecast)), {}

        return act

    # --- workers

    def _lease(self, asked: Raw, caller: Caller, now: Millis) -> Act:
        ask = wire.read_lease(asked)
        checks.check_wants(ask.wants)
        lasts = ask.lasts if self._trusting else checks.lease_length(ask.lasts)
        holder = check_name("holder", ask.holder) if self._trusting else held_by(caller, ask.holder)
        caller.check_all(Verb.WORK, ask.wants)

        async def act(now: Millis) -> Reply:
            until = _until(now, lasts)
            leased = await self._pauses.lease(ask.wants, now=now, until=until, holder=holder)
            for topic, tasks in groupby(leased.tasks, attrgetter("topic")):
                self._client.history.began(topic, [task.planned_at for task in tasks], leased.now)
            return leased, {}

        return act

    def _extend(self, asked: Raw, caller: Caller, now: Millis) -> Act:
        ask = wire.read_extend(asked)
        lasts = ask.lasts if self._trusting else checks.lease_length(ask.lasts)

        def check(leases: Sequence[Lease]) -> None:
            checks.check_leases(leases)
            caller.check_all(Verb.WORK, {lease.topic for lease in leases})

        good, wrong = sifted(ask.leases, check)

        async def act(now: Millis) -> Reply:
            return merged(await each(self._client.store.extend(good, now=now, until=_until(now, lasts))), wrong)

        return act

    def _settle(self, asked: Raw, caller: Caller, now: Millis) -> Act:
        outcomes = wire.read_settlements(asked)

        def check(outcomes: Sequence[Settlement]) -> None:
            checks.check_settlements(outcomes)
            caller.check_all(Verb.WORK, {one.topic for one in outcomes})

        good, wrong = sifted(outcomes, check)

        async def act(now: Millis) -> Reply:
            accepted, failed = await each(self._client.store.settle(good, now=now))
            for one, ok in zip(good, accepted, strict=True):
                if ok is True:
                    self._client.history.ended(one.topic, one.verdict)
            return merged((accepted, failed), wrong)

        return act

    def _purge(self, asked: Raw, caller: Caller, now: Millis) -> Act:
        limit = min(max(wire.read_number(asked), 0), wire.MOST)
        may = caller.may(Verb.WORK, None)

        async def act(now: Millis) -> Reply:
            return await self._client.store.purge(now=now, limit=limit) if may else 0, {}

        return act

    def _announce(self, asked: Raw, caller: Caller, now: Millis) -> Act:
        ask = wire.read_announce(asked)
        holder = check_name("holder", ask.holder) if self._trusting else held_by(caller, ask.holder)
        checks.check_count("topics", ask.topics)
        checks.check_topics(ask.topics)
        checks.check_lasts(ask.lasts)
        caller.check_all(Verb.WORK, ask.topics)
        if not ask.topics and Verb.WORK not in caller.verbs:
            caller.check(Verb.WORK, None)

        async def act(now: Millis) -> Reply:
            store = self._client.store
            if not isinstance(store, Shares):
                return {}, {}
            until = _until(now, ask.lasts if self._trusting else min(ask.lasts, _PRESENCE))
            if ask.topics and holder not in self._holders and len(self._holders) >= _MOST_HOLDERS:
                raise BadInput("holder", ask.holder, f"one of at most {_MOST_HOLDERS} workers at once")
            live = await store.announce(holder, ask.topics, until, now=now)
            if ask.topics:
                self._holders[holder] = until
            else:
                self._holders.pop(holder, None)
            for gone in [holder for holder, ends in self._holders.items() if ends <= now]:
                del self._holders[gone]  # it died: a store that takes it for one of this process lets go of its share
                live = await store.announce(gone, [], now, now=now)
            seen = {holder: [topic for topic in its if caller.may(Verb.WORK, topic)] for holder, its in live.items()}
            return {holder: its for holder, its in seen.items() if its}, {}

        return act

    # --- what is paused

    def _pausing(
        self, do: Callable[[wire.PauseAsk, Caller], Awaitable[bool]], asked: Raw, caller: Caller, now: Millis
    ) -> Act:
        ask = wire.read_pause_ask(asked)
        self._pauses.check(ask, caller)

        async def act(now: Millis) -> Reply:
            return await do(ask, caller), {}

        return act

    def _paused(self, asked: Raw, caller: Caller, now: Millis) -> Act:
        async def act(now: Millis) -> Reply:
            return await self._pauses.paused(caller), {}

        return act

    # --- the history, the log, and the time

    def _minutes(self, asked: Raw, caller: Caller, now: Millis) -> Act:
        first, last = checks.check_minutes(*wire.read_minutes(asked))
        caller.check(Verb.READ, None)  # what was scheduled is counted over all topics

        async def act(now: Millis) -> Reply:
            return await rows_between(self._client.store, self._client.clock, first, last), {}

        return act

    def _record(self, asked: Raw, caller: Caller, now: Millis) -> Act:
        events = wire.read_events(asked)
        checks.check_events(events)
        caller.check_all(Verb.WORK, {event.topic for event in events})
        if not self._trusting:  # changes are noted here as they are made, and by nobody else
            fresh = [event for event in events if event.kind is not EventKind.CHANGE]
            who, most = partial(in_the_name_of, caller), self._rates.take(caller.id, len(fresh))
            events = [replace(one, who=who(one.who), at=now) for one in fresh[:most]]

        async def act(now: Millis) -> Reply:
            store = self._client.store
            if isinstance(store, KeepsEvents) and events:
                await store.record(events)
            return None, {}

        return act

    def _events(self, asked: Raw, caller: Caller, now: Millis) -> Act:
        ask = wire.read_events_ask(asked)
        if ask.ref is not None:
            checks.check_refs([ask.ref])
        caller.check(Verb.EVENTS, None if ask.ref is None else ask.ref.topic)

        async def act(now: Millis) -> Reply:
            store = self._client.store
            if not isinstance(store, KeepsEvents):
                return [], {}
            await self._client.recorder.flush()
            await self._session.recorder.flush()
            found = await store.events(ask.ref, limit=min(max(ask.limit, 0), wire.MOST))
            return [event for event in found if caller.may(Verb.EVENTS, event.topic)], {}

        return act

    def _time(self, asked: Raw, caller: Caller, now: Millis) -> Act:
        async def act(now: Millis) -> Reply:
            return None, {}

        return act


def _until(now: Millis, lasts: Millis) -> Millis:
    return min(now + lasts, LAST_INSTANT)


def _needed(change: Change) -> Verb:
    """What one must be allowed to do for this change. To move to another time is not to fire, whatever it says."""
    if isinstance(change, Cancel):
        return Verb.CANCEL
    if isinstance(change, Move):
        fires = change.verb == "fire_now" and change.due == In(0) and change.deadline is None
        return Verb.FIRE if fires else Verb.RESCHEDULE
    return Verb.REDRIVE


def _that_fit(records: Iterable[Record | None]) -> int:
    """How many of them, from the first on, one answer holds: at least one."""
    room, count = _PAGE_BYTES, 0
    for record in records:
        if record is not None:
            room -= len(record.payload) + len(record.error or "")
            if room < 0 and count:
                break
        count += 1
    return count
