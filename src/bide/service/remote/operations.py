"""The operations of a remote store, on the store of an open client. One method for each row of `ports.remote`.

Each gets a request that was checked, its caller, who has the access that it needs, and the time. An item of a batch
that failed is answered by its error.
"""

from __future__ import annotations

from collections.abc import Awaitable, Iterable, Mapping, Sequence
from itertools import groupby
from operator import attrgetter
from typing import TypeVar

from msgspec.structs import replace

from bide.core.answers import Answer
from bide.core.errors import BadInput, PartlyFailed
from bide.core.events import Event, EventKind
from bide.core.instants import LAST_INSTANT, Millis
from bide.core.names import LONGEST_NAME
from bide.core.records import Change, Found, Lease, Leased, NewTask, Page, Pause, Record, Ref, Settlement, Tally, Topic
from bide.engine.client import Client
from bide.engine.history import MinuteRow, rows_between
from bide.engine.pauses import PauseGate
from bide.engine.session import Session, verb_of
from bide.ports import Pending, all_answers, remote
from bide.ports.remote import SHORTEST_LEASE, Batch, FlatTally
from bide.service.audit import EventQuota
from bide.service.authz import Caller, Verb
from bide.service.verbs import set_paused

Got = TypeVar("Got")
_PRESENCE: Millis = 60_000
"""How long a worker is taken to live after it last announced itself, at most."""
_MOST_HOLDERS = 10_000
_PAGE_BYTES = 8 << 20
"""Of payloads and errors, in one page: a page that would have more is read again with a lower limit."""
_LOOK_AGAIN: Millis = 2_000
"""After how long a client looks again that has nothing to wait for but paused topics."""


class StoreOperations:
    """`held_back` is what is known to be paused; `trusting` is for tests of the messages alone."""

    def __init__(self, client: Client, *, trusting: bool, pause_gate: PauseGate | None) -> None:
        self._client = client
        self._store = client.store
        self._trusting = trusting
        self._pause_gate = pause_gate
        self._session = Session(client.store, client.clock, None)
        """Folds the single calls of many clients into batches, and notes who changed what."""
        self._holders: dict[str, Millis] = {}
        """The workers that announced themselves here, and until when they are taken to live."""
        self._rates = EventQuota()

    async def close(self) -> None:
        """Write the events that were noted."""
        await self._session.recorder.close()

    # --- clients

    async def add(self, batch: Batch[NewTask], caller: Caller, now: Millis) -> Sequence[object]:
        self._client.history.scheduled(len(batch.items))
        if len(batch.items) == 1 and not self._trusting:
            return [await self._session.add(batch.items[0])]
        answers = await _each(self._store.add(batch.items, now=now))
        self._session.note("schedule", [one for one in answers if isinstance(one, Answer)], bulk=True)
        return answers

    async def change(self, batch: Batch[Change], caller: Caller, now: Millis) -> Sequence[object]:
        if len(batch.items) == 1 and not self._trusting:
            return [await self._session.change(batch.items[0])]
        answers = await _each(self._store.change(batch.items, now=now))
        by_verb: dict[str, list[Answer]] = {}
        for change, answer in zip(batch.items, answers, strict=True):
            if isinstance(answer, Answer):
                by_verb.setdefault(verb_of(change), []).append(answer)
        for verb, its in by_verb.items():
            self._session.note(verb, its)
        return answers

    async def get(self, refs: list[Ref], caller: Caller, now: Millis) -> list[Record | None]:
        """As many from the first on as fit into one answer; the client asks for the others."""
        found = await self._store.get(refs[: remote.LONGEST_PAGE])
        records = [one if one is not None and caller.visible([one]) else None for one in found]
        return records[: _that_fit(records)]

    async def find(self, request: remote.FindRequest, caller: Caller, now: Millis) -> Found:
        """A page that fits into one answer; it may have fewer tasks than its limit."""
        page = replace(request.page, limit=min(request.page.limit, remote.LONGEST_PAGE))
        while True:
            found = await self._store.find(request.where, page)
            fit = _that_fit(found.tasks)
            if fit == len(found.tasks):
                return Found(caller.visible(found.tasks), found.cursor)
            page = Page(limit=fit, cursor=page.cursor)

    async def tally(self, request: remote.TallyRequest, caller: Caller, now: Millis) -> FlatTally:
        found = await self._store.tally(request.edges, topics=request.topics)
        may = {topic: caller.may(Verb.READ, topic) for topic in {*found.forecast, *(of for of, _ in found.counts)}}
        counts = {of: count for of, count in found.counts.items() if may[of[0]]}
        return FlatTally.of(Tally(counts, {topic: its for topic, its in found.forecast.items() if may[topic]}))

    # --- workers

    async def lease(self, request: remote.LeaseRequest, caller: Caller, now: Millis) -> Leased:
        """Without what is paused; where nothing else waits, the client is told to look again."""
        wants: Mapping[Topic, int] = request.wants
        until, holder = self._until(now, request.lasts), self._holder(caller, request.holder)
        held: dict[Topic, int] = {}
        if self._pause_gate is not None:
            await self._pause_gate.first()
            held = {topic: 0 for topic in wants if topic in self._pause_gate.topics}
            wants = {topic: want for topic, want in wants.items() if topic not in held}
        leased = Leased([], None, now)
        if wants or not held:
            leased = await self._store.lease(wants, now=now, until=until, holder=holder)
        if held and leased.next_wake is None:
            waits = await self._store.lease(held, now=now, until=until, holder=holder)
            if waits.next_wake is not None:  # so it is not empty, and it would be asked again and again if told more
                leased = replace(leased, next_wake=max(waits.next_wake, waits.now + _LOOK_AGAIN))
        for topic, tasks in groupby(leased.tasks, attrgetter("topic")):
            self._client.history.began(topic, [task.planned_at for task in tasks], leased.now)
        return leased

    async def extend(self, batch: Batch[Lease], caller: Caller, now: Millis) -> Sequence[object]:
        return await _each(self._store.extend(batch.items, now=now, until=self._until(now, batch.lasts)))

    async def settle(self, batch: Batch[Settlement], caller: Caller, now: Millis) -> Sequence[object]:
        accepted = await _each(self._store.settle(batch.items, now=now))
        for one, ok in zip(batch.items, accepted, strict=True):
            if ok is True:
                self._client.history.ended(one.topic, one.outcome)
        return accepted

    async def purge(self, limit: int, caller: Caller, now: Millis) -> int:
        """Forgets only what has passed its time; a caller who may not work on all topics is told that there is none."""
        if not caller.may(Verb.WORK, None):
            return 0
        return await self._store.purge(now=now, limit=min(max(limit, 0), remote.MOST))

    async def announce(self, request: remote.AnnounceRequest, caller: Caller, now: Millis) -> dict[str, list[Topic]]:
        if (workers := self._store.features.workers) is None:
            return {}
        holder = self._holder(caller, request.holder)
        until = min(now + (request.lasts if self._trusting else min(request.lasts, _PRESENCE)), LAST_INSTANT)
        if request.topics and holder not in self._holders and len(self._holders) >= _MOST_HOLDERS:
            raise BadInput("holder", request.holder, f"one of at most {_MOST_HOLDERS} workers at once")
        live = await workers.announce(holder, request.topics, until, now=now)
        if request.topics:
            self._holders[holder] = until
        else:
            self._holders.pop(holder, None)
        for gone in [holder for holder, ends in self._holders.items() if ends <= now]:
            del self._holders[gone]  # it died: a store that takes it for one of this process lets go of its share
            live = await workers.announce(gone, [], now, now=now)
        seen = {holder: [topic for topic in its if caller.may(Verb.WORK, topic)] for holder, its in live.items()}
        return {holder: its for holder, its in seen.items() if its}

    def _until(self, now: Millis, lasts: Millis) -> Millis:
        """The end of a lease: as over the calls for other languages, it lasts at least a second."""
        return min(now + (lasts if self._trusting else max(lasts, SHORTEST_LEASE)), LAST_INSTANT)

    def _holder(self, caller: Caller, holder: str) -> str:
        """The name of a worker, behind the caller's, so that nobody is taken for a worker of another's."""
        if self._trusting:
            return holder
        return f"{caller.name[:64]}@{holder}".encode()[:LONGEST_NAME].decode(errors="ignore")

    # --- pauses, the history, the log, and the time

    async def pause(self, request: remote.PauseRequest, caller: Caller, now: Millis) -> bool:
        return await set_paused(self._client, request.topic, _on_behalf(caller, request.who), paused=True)

    async def resume(self, request: remote.PauseRequest, caller: Caller, now: Millis) -> bool:
        return await set_paused(self._client, request.topic, _on_behalf(caller, request.who), paused=False)

    async def paused(self, request: None, caller: Caller, now: Millis) -> list[Pause]:
        """Of the topics with which the caller may do anything at all."""
        found = await self._client.paused()
        return [one for one in found.values() if any(caller.may(verb, one.topic) for verb in caller.verbs)]

    async def minutes(self, minutes: tuple[int, int], caller: Caller, now: Millis) -> dict[int, MinuteRow]:
        return await rows_between(self._store, self._client.clock, *minutes)

    async def record(self, events: list[Event], caller: Caller, now: Millis) -> None:
        """Changes are noted here as they are made, and by nobody else; others only so many."""
        if not self._trusting:
            fresh = [event for event in events if event.kind is not EventKind.CHANGE]
            most = self._rates.take(caller.id, len(fresh))
            events = [replace(one, who=_on_behalf(caller, one.who), at=now) for one in fresh[:most]]
        if (log := self._store.features.events) is not None and events:
            await log.record(events)

    async def events(self, request: remote.EventsRequest, caller: Caller, now: Millis) -> list[Event]:
        if (log := self._store.features.events) is None:
            return []
        await self._client.recorder.flush()
        await self._session.recorder.flush()
        found = await log.events(request.ref, limit=min(max(request.limit, 0), remote.MOST))
        return [event for event in found if caller.may(Verb.EVENTS, event.topic)]

    async def time(self, request: None, caller: Caller, now: Millis) -> None:
        """Every answer has the time in it."""


async def _each(verb: Awaitable[Sequence[Got | Pending[Got]]]) -> Sequence[object]:
    """The answers of a batch, with the errors of one that partly failed in their places."""
    try:
        return await all_answers(await verb)
    except PartlyFailed as partly:
        return partly.answers


def _on_behalf(caller: Caller, who: str | None) -> str:
    """The name that is recorded: the caller, and the name that they give."""
    return caller.name if who is None else f"{caller.name}/{who}"


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
