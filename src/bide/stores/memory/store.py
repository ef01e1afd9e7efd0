"""The memory store: the pure functions of the lifecycle over dictionaries, and nothing else.

It makes no decisions of its own, so it defines correct behaviour: a Hypothesis state machine compares every other store
with it. Its tasks last as long as the process. Several apps may share one store on one event loop, not across threads.

**The cost**, in microseconds of one core per task, in batches of 100 (CPython 3.11, 100,000 tasks):

                                add   lease  extend  settle   move   cancel
    all due at one instant      1.2    1.4     1.4     1.8     2.7     4.0
    due at random times         1.5    3.4     1.8     2.7     2.6     4.7
    the same, on a wheel        1.5    3.6     2.5     1.9     2.6     2.2
    with 10^6 more waiting      1.8    2.6     1.6     3.0     3.1     2.3

The lifecycle's functions take more than half of that, to make records. Every verb is O(1) or O(log n) per task, with
any number of waiting tasks, including those of topics without a worker. Only the first listing sorts (see `lines`).
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from heapq import heapify, heappop, heappush
from itertools import chain, islice

from bide.core import lifecycle
from bide.core.answers import Answer
from bide.core.errors import StoreUnavailable
from bide.core.events import Event
from bide.core.instants import Millis
from bide.core.records import (
    Change,
    Count,
    Filter,
    Found,
    Lease,
    Leased,
    NewTask,
    Page,
    Record,
    Ref,
    Settlement,
    State,
    Tally,
    Token,
    Topic,
)
from bide.ports import COUNTED, Features, OnTaken, OnWake
from bide.stores.batches import drained
from bide.stores.listeners import Listener, Listeners
from bide.stores.memory.lines import Listings, MakeTimer, MemoryReads, TopicTasks
from bide.stores.sql.reading import read_page

_log = logging.getLogger("bide.memory")
_WAITING, _LEASED = State.WAITING, State.LEASED
_SLACK = 64
"""The number of outdated retention entries that are not worth clearing."""


class MemoryStore:
    """A `Store` in memory.

    `timer` takes the current time and makes the timer on which the tasks of one topic wait, for example
    `lambda now: HierarchicalWheel(start=now)`; without it they wait in a `Line`. Scheduled tasks survive `close` and
    another `open` of the same object. `longest_log` caps the events.
    """

    def __init__(self, *, timer: MakeTimer | None = None, longest_log: int = 10_000) -> None:
        self._make_timer = timer
        self._is_open = False
        self._topics: dict[Topic, TopicTasks] = {}
        self._vacant: set[Topic] = set()
        self._token: Token = 0
        self._ended: list[tuple[Millis, Token, Topic, str]] = []
        self._ended_live = 0
        self._groups = Listings(self._everything)
        self._listeners = Listeners(_log)
        self._events: deque[Event] = deque(maxlen=longest_log)
        self._workers: dict[str, tuple[Millis, list[Topic]]] = {}

    @property
    def features(self) -> Features:
        return Features(wakes=self, workers=self, events=self)

    async def open(self) -> None:
        self._is_open = True

    async def close(self) -> None:
        self._is_open = False
        self._listeners = Listeners(_log)

    # verbs for clients

    async def add(self, tasks: Sequence[NewTask], *, now: Millis) -> list[Answer]:
        self._check_open()
        answers: list[Answer] = []
        waiting: list[Record] = []
        last, topic = None, None
        for new in tasks:
            if topic is None or new.topic != last:
                last, topic = new.topic, self._topic(new.topic, now)
            old = topic.records.get(new.key)
            token = lifecycle.next_token(self._token, now)
            answer = lifecycle.schedule(new, old, now, token)
            answers.append(answer)
            record = answer.record
            if record is None or record is old:
                continue
            self._token = token
            if old is None:
                topic.records[new.key] = record
                topic.place(record, now)
                topic.note(None, record)
            else:
                self._revive(old)
                topic.replace(old, record, now)
                topic.clear_away()
            waiting.append(record)
        if self._listeners:
            self._tell(waiting)
        return answers

    async def change(self, changes: Sequence[Change], *, now: Millis) -> list[Answer]:
        self._check_open()
        answers: list[Answer] = []
        waiting: list[Record] = []
        for asked in changes:
            topic = self._topics.get(asked.topic)
            old = None if topic is None else topic.records.get(asked.key)
            token = lifecycle.next_token(self._token, now)
            answer = lifecycle.change(asked, old, now, token)
            answers.append(answer)
            record = answer.record
            if topic is None or old is None or record is None or record is old:
                continue
            self._token = token
            self._revive(old)
            self._put(topic, old, record, now, waiting)
            topic.clear_away()
        if self._listeners:
            self._tell(waiting)
        return answers

    async def get(self, refs: Sequence[Ref]) -> list[Record | None]:
        self._check_open()
        return [self._record(topic, key) for topic, key in refs]

    async def find(self, where: Filter, page: Page) -> Found:
        self._check_open()
        return await read_page(where, page, lambda read: read(MemoryReads(self._groups, self._topics)))

    async def tally(
        self, edges: Sequence[Millis] | None = None, *, upto: int = COUNTED, topics: Collection[Topic] | None = None
    ) -> Tally:
        """Exact counts. O(topics); with edges, also one rank in the listing of waiting tasks per topic and edge."""
        self._check_open()
        counts: dict[tuple[Topic, State], Count] = {}
        forecast: dict[Topic, list[Count]] = {}
        asked = self._topics
        if topics is not None:
            asked = {name: self._topics[name] for name in topics if name in self._topics}
        for name, topic in asked.items():
            for state in State:
                number: int = getattr(topic, state.value)
                if number:
                    counts[name, state] = Count(number)
            if edges is not None and topic.waiting:
                forecast[name] = [Count(number) for number in topic.listings.forecast(name, edges)]
        return Tally(counts, forecast)

    # verbs for workers

    async def lease(self, wants: Mapping[Topic, int], *, now: Millis, until: Millis, holder: str) -> Leased:
        self._check_open()
        taken: list[Record] = []
        heads: dict[Topic, Millis] = {}
        for name, want in wants.items():
            topic = self._topics.get(name)
            if topic is None:
                continue
            topic.ripen(now)
            got = self._take(topic, want, now, until, holder) if want > 0 else []
            taken += got
            if len(got) < want or want <= 0:
                wake = topic.next_wake()
                if wake is not None:
                    heads[name] = wake
        leased = Leased(taken, heads, now)
        if taken and self._listeners:
            self._listeners.notify_taken(drained(wants, leased), holder)
        return leased

    def _take(self, topic: TopicTasks, want: int, now: Millis, until: Millis, holder: str) -> list[Record]:
        taken: list[Record] = []
        records, waits = topic.records, topic.waits
        # the task whose lease ended first: it stays the first while only waiting tasks are taken
        lost = topic.held.front()
        while len(taken) < want:
            line, old = waits, waits.front()
            if lost is not None and (old is None or lost.wake_at < old.wake_at):
                line, old = topic.held, lost
            if old is None or not lifecycle.may_lease(old, now):
                break
            line.pop(old)
            self._token = token = lifecycle.next_token(self._token, now)
            record = lifecycle.lease(old, now, until, holder, token)
            records[record.key] = record
            if old is lost:
                lost = topic.held.front()
            else:
                topic.leased += 1
            taken.append(record)
            topic.note(old, record)
        # placed only now, otherwise a task whose new lease ends at once would be taken twice
        for record in taken:
            topic.place(record, now)
        return taken

    async def extend(self, leases: Sequence[Lease], *, now: Millis, until: Millis) -> list[bool]:
        self._check_open()
        return [self._extend(lease, now, until) for lease in leases]

    def _extend(self, lease: Lease, now: Millis, until: Millis) -> bool:
        topic = self._topics.get(lease.topic)
        old = None if topic is None else topic.records.get(lease.key)
        if topic is None or old is None or not lifecycle.holds(old, lease.token):
            return False
        record = lifecycle.extend(old, until)
        topic.replace(old, record, now)
        topic.clear_away()
        return True

    async def settle(self, outcomes: Sequence[Settlement], *, now: Millis) -> list[bool]:
        self._check_open()
        accepted: list[bool] = []
        waiting: list[Record] = []
        last, topic = None, None
        for asked in outcomes:
            if topic is None or asked.topic != last:
                if topic is not None:
                    topic.clear_away()
                last, topic = asked.topic, self._topics.get(asked.topic)
            old = None if topic is None else topic.records.get(asked.key)
            if topic is None or old is None or not lifecycle.holds(old, asked.token):
                accepted.append(False)
                continue
            accepted.append(True)
            self._token = lifecycle.next_token(self._token, now)
            record = lifecycle.settle(asked, old, now, self._token)
            self._put(topic, old, record, now, waiting)
        if topic is not None:
            topic.clear_away()
        if waiting and self._listeners:
            self._tell(waiting)
        return accepted

    async def purge(self, *, now: Millis, limit: int) -> int:
        """Forget expired ended tasks, O(log n) each, and topics that have become empty."""
        self._check_open()
        forgotten = 0
        while forgotten < limit and self._ended and self._ended[0][0] <= now:
            _, token, name, key = heappop(self._ended)
            record = self._record(name, key)
            if record is None or record.token != token:
                continue
            self._ended_live -= 1
            self._forget(self._topics[name], record)
            forgotten += 1
        for name in self._vacant:
            if name in self._topics and not self._topics[name].records:
                del self._topics[name]
        self._vacant.clear()
        return forgotten

    # features

    async def listen(self, topics: Collection[Topic], on_wake: OnWake, on_taken: OnTaken | None = None) -> Listener:
        self._check_open()
        return self._listeners.listen(topics, on_wake, on_taken)

    async def announce(
        self, holder: str, topics: Collection[Topic], until: Millis, *, now: Millis
    ) -> dict[str, list[Topic]]:
        self._check_open()
        if topics:
            self._workers[holder] = (until, list(topics))
        else:
            self._workers.pop(holder, None)
        self._workers = {name: known for name, known in self._workers.items() if known[0] > now}
        return {name: list(known) for name, (_, known) in self._workers.items()}

    async def record(self, events: Sequence[Event]) -> None:
        self._check_open()
        self._events.extend(events)

    async def events(self, ref: Ref | None = None, *, limit: int = 100) -> list[Event]:
        """The latest events. Those of one task are found by a scan of all events: 1 ms for 10,000."""
        self._check_open()
        found = (event for event in reversed(self._events) if ref is None or ref == (event.topic, event.key))
        return list(islice(found, limit))

    # within

    def _check_open(self) -> None:
        if not self._is_open:
            raise StoreUnavailable("the store is not open: nothing was done")

    def _tell(self, waiting: Iterable[Record]) -> None:
        """Notify the listeners of these newly waiting tasks: once per topic, with the earliest wake.

        Done in the loop's next iteration, so that the caller does not wait for the listeners.
        """
        earliest: dict[Topic, Millis] = {}
        for record in waiting:
            if record.wake_at < earliest.get(record.topic, record.wake_at + 1):
                earliest[record.topic] = record.wake_at
        for topic, wake_at in earliest.items():
            asyncio.get_running_loop().call_soon(self._listeners.notify, topic, wake_at)

    def _topic(self, name: Topic, now: Millis) -> TopicTasks:
        topic = self._topics.get(name)
        if topic is None:
            make = self._make_timer
            topic = self._topics[name] = TopicTasks(None if make is None else make(now), self._groups)
        return topic

    def _record(self, topic: Topic, key: str) -> Record | None:
        tasks = self._topics.get(topic)
        return None if tasks is None else tasks.records.get(key)

    def _everything(self) -> Iterator[Record]:
        return chain.from_iterable(topic.records.values() for topic in self._topics.values())

    def _put(self, topic: TopicTasks, old: Record, record: Record, now: Millis, waiting: list[Record]) -> None:
        if record.state is _WAITING:
            topic.replace(old, record, now)
            waiting.append(record)
        else:
            self._end(topic, old, record, now)

    def _end(self, topic: TopicTasks, old: Record, ended: Record, now: Millis) -> None:
        """Keep `ended` until its retention has passed, or forget it at once."""
        if ended.keep_until is None or ended.keep_until <= now:
            self._forget(topic, old)
            return
        topic.replace(old, ended, now)
        heappush(self._ended, (ended.keep_until, ended.token, ended.topic, ended.key))
        self._ended_live += 1

    def _revive(self, old: Record) -> None:
        """Note that an ended task lives again, so its retention entry is outdated; clear such entries if many."""
        if old.keep_until is None:
            return
        self._ended_live -= 1
        if len(self._ended) > 2 * self._ended_live + _SLACK:
            self._ended = [entry for entry in self._ended if self._is_current(entry) and entry[1] != old.token]
            heapify(self._ended)

    def _is_current(self, entry: tuple[Millis, Token, Topic, str]) -> bool:
        record = self._record(entry[2], entry[3])
        return record is not None and record.token == entry[1]

    def _forget(self, topic: TopicTasks, old: Record) -> None:
        topic.forget(old)
        if not topic.records:
            self._vacant.add(old.topic)
