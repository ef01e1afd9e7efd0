"""The operations of a remote store, carried out on the store of an open client: one method for each row of
`ports.remote`.

Each gets a checked request, a caller with the needed access, and the time. The answer to a failed item of a batch is
its error.
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
from bide.core.payloads import fitting
from bide.core.records import Change, Found, Lease, Leased, NewTask, Page, Pause, Record, Ref, Settlement, Tally, Topic
from bide.engine.client import Client
from bide.engine.delivery.settlement import release
from bide.engine.history import MinuteRow, rows_between
from bide.engine.pauses import PauseGate
from bide.engine.session import Session, verb_of
from bide.ports import Pending, all_answers, remote
from bide.ports.remote import SHORTEST_LEASE, Batch, FlatTally
from bide.service.access import Caller, EventQuota, Verb
from bide.service.metrics import Metrics
from bide.service.verbs import set_paused

Got = TypeVar("Got")
_PRESENCE: Millis = 60_000
"""The most milliseconds for which a worker counts as alive after its announcement."""
_MOST_HOLDERS = 10_000
_PAGE_BYTES = 8 << 20
"""The most bytes of payloads and errors in one page: a larger page is read again with a lower limit."""
_LEASE_AGAIN: Millis = 2_000
"""Milliseconds after which a client leases again if only paused topics have tasks."""


class StoreOperations:
    """`pause_gate`: knows the paused topics. `metrics`: count the deliveries and outcomes of the remote workers.
    `trusting` is only for tests of the messages."""

    def __init__(
        self, client: Client, *, trusting: bool, pause_gate: PauseGate | None, metrics: Metrics | None = None
    ) -> None:
        self._client = client
        self._store = client.store
        self._trusting = trusting
        self._pause_gate = pause_gate
        self._metrics = metrics
        self._session = Session(client.store, client.clock, None)
        """Combines single calls of many clients into batches, and records changes with their callers."""
        self._holders: dict[str, Millis] = {}
        """The workers that announced themselves here, and the times until which they count as alive."""
        self._rates = EventQuota()

    async def close(self) -> None:
        """Write the recorded events."""
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
        """The first tasks, as many as fit into one answer; the client requests the others again."""
        found = await self._store.get(refs[: remote.LONGEST_PAGE])
        records = [one if one is not None and caller.visible([one]) else None for one in found]
        return records[: _that_fit(records)]

    async def find(self, request: remote.FindRequest, caller: Caller, now: Millis) -> Found:
        """A page that fits into one answer, possibly with fewer tasks than its limit."""
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
        """Lease from topics that are not paused. If only paused ones have tasks, the client must lease again soon."""
        wants: Mapping[Topic, int] = request.wants
        until, holder = self._until(now, request.lasts), self._holder(caller, request.holder)
        held: dict[Topic, int] = {}
        if self._pause_gate is not None:
            await self._pause_gate.first()
            held = {topic: 0 for topic in wants if topic in self._pause_gate.topics}
            wants = {topic: want for topic, want in wants.items() if topic not in held}
        leased = Leased([], {}, now)
        if wants or not held:
            leased = await self._store.lease(wants, now=now, until=until, holder=holder)
        if held and not leased.heads:
            waits = await self._store.lease(held, now=now, until=until, holder=holder)
            if waits.heads:  # without the heads, the client would lease continuously
                heads = {topic: max(head, waits.now + _LEASE_AGAIN) for topic, head in waits.heads.items()}
                leased = replace(leased, heads=heads)
        if self._pause_gate is not None:
            topics = self._pause_gate.topics
            paused = [release(task) for task in leased.tasks if task.topic in topics]
            if paused:  # since the lease was sent
                await _each(self._store.settle(paused, now=now))
                leased = replace(leased, tasks=[task for task in leased.tasks if task.topic not in topics])
        for topic, tasks in groupby(leased.tasks, attrgetter("topic")):
            its = list(tasks)
            self._client.history.began(topic, [task.planned_at for task in its], leased.now)
            if self._metrics is not None:
                for task in its:
                    self._metrics.started(task, leased.now)
        return leased

    async def extend(self, batch: Batch[Lease], caller: Caller, now: Millis) -> Sequence[object]:
        return await _each(self._store.extend(batch.items, now=now, until=self._until(now, batch.lasts)))

    async def settle(self, batch: Batch[Settlement], caller: Caller, now: Millis) -> Sequence[object]:
        accepted = await _each(self._store.settle(batch.items, now=now))
        for one, ok in zip(batch.items, accepted, strict=True):
            if ok is True:
                self._client.history.ended(one.topic, one.kind)
                if self._metrics is not None:
                    self._metrics.settled(one.topic, one.kind)
        return accepted

    async def purge(self, limit: int, caller: Caller, now: Millis) -> int:
        """Purge expired tasks; do nothing for a caller who may not work on all topics."""
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
            del self._holders[gone]  # it died: the store, which counts it as a worker of this process, drops it
            live = await workers.announce(gone, [], now, now=now)
        seen = {holder: [topic for topic in its if caller.may(Verb.WORK, topic)] for holder, its in live.items()}
        return {holder: its for holder, its in seen.items() if its}

    def _until(self, now: Millis, lasts: Millis) -> Millis:
        """The end of a lease. Its length is at least a second, as in the calls for other languages."""
        return min(now + (lasts if self._trusting else max(lasts, SHORTEST_LEASE)), LAST_INSTANT)

    def _holder(self, caller: Caller, holder: str) -> str:
        """A worker's name prefixed with the caller's, so that it cannot pose as another caller's worker."""
        if self._trusting:
            return holder
        return f"{caller.name[:64]}@{holder}".encode()[:LONGEST_NAME].decode(errors="ignore")

    # --- pauses, the history, the log, and the time

    async def pause(self, request: remote.PauseRequest, caller: Caller, now: Millis) -> bool:
        return await set_paused(self._client, request.topic, _on_behalf(caller, request.who), paused=True)

    async def resume(self, request: remote.PauseRequest, caller: Caller, now: Millis) -> bool:
        return await set_paused(self._client, request.topic, _on_behalf(caller, request.who), paused=False)

    async def paused(self, request: None, caller: Caller, now: Millis) -> list[Pause]:
        """The pauses of the topics to which the caller has any access."""
        found = await self._client.paused()
        return [one for one in found.values() if any(caller.may(verb, one.topic) for verb in caller.verbs)]

    async def minutes(self, minutes: tuple[int, int], caller: Caller, now: Millis) -> dict[int, MinuteRow]:
        return await rows_between(self._store, self._client.clock, *minutes)

    async def record(self, events: list[Event], caller: Caller, now: Millis) -> None:
        """Record events within a quota, except changes, which the service records itself."""
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
        """Answer nothing: every answer carries the time."""


async def _each(verb: Awaitable[Sequence[Got | Pending[Got]]]) -> Sequence[object]:
    """The answers of a batch; if it partly failed, the errors in their places."""
    try:
        return await all_answers(await verb)
    except PartlyFailed as partly:
        return partly.answers


def _on_behalf(caller: Caller, who: str | None) -> str:
    """The name to record: the caller, and the name given by the caller."""
    return caller.name if who is None else f"{caller.name}/{who}".encode()[:LONGEST_NAME].decode(errors="ignore")


def _that_fit(records: Iterable[Record | None]) -> int:
    """The number of first records that fit into one answer; at least one."""
    sizes = [0 if one is None else len(one.payload) + len(one.error or "") for one in records]
    return fitting(sizes, _PAGE_BYTES)
