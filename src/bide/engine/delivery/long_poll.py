"""Leasing for consumers in other processes: each waits until a task is due for it, and settles the task.

One loop, the same as a worker's (`lease_loop`), serves all waiting consumers. It leases for them together and hands out
the tasks, first to the consumer that has waited longest. So a thousand waiting consumers cost as much as one worker. A
task leased for a consumer that has disconnected is released unstarted, which does not count as a delivery.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence

from msgspec import Struct, field

from bide.core.errors import StoreError
from bide.core.events import EventKind
from bide.core.instants import Millis
from bide.core.outcomes import Done, Outcome
from bide.core.records import Lease, OutcomeKind, Record, Ref, Settlement, State, Topic
from bide.engine.background import Background
from bide.engine.client import Client
from bide.engine.delivery.lease_loop import LeaseLoop
from bide.engine.delivery.occurrences import Refusal
from bide.engine.delivery.settlement import release, settlement_for
from bide.engine.registry import RouteSettings
from bide.ports import Listening, Policy, all_answers

_log = logging.getLogger("bide.long_poll")
_MOST = 10_000
"""The most tasks that one lease requests."""
_MOST_BARE = 100_000
_FORGET_AFTER = 60.0
"""Seconds for which the subscription to a topic outlives the last request for it."""


class _Request(Struct, eq=False):
    """One consumer's request, and its tasks so far."""

    room: dict[Topic, int]
    future: asyncio.Future[list[Record]]
    patient: bool
    """True: it waits until a task is due; else one lease answers it."""
    taken: list[Record] = []


class _RequestGroup(Struct, eq=False):
    """The requests for leases of one length by one holder: one store call serves them all."""

    holder: str
    lease_for: Millis
    queues: dict[Topic, dict[_Request, None]] = {}
    """By topic, the longest waiting first. A request that ends is removed at once: if no task comes due for days,
    the requests of consumers that poll repeatedly would pile up."""
    wanted: Counter[Topic] = field(default_factory=Counter)
    impatient: list[_Request] = []

    def add(self, request: _Request) -> None:
        for topic, count in request.room.items():
            self.queues.setdefault(topic, {})[request] = None
            self.wanted[topic] += count
        if not request.patient:
            self.impatient.append(request)

    def remove(self, request: _Request) -> None:
        """Remove a request that is answered, or whose caller has disconnected."""
        for topic in list(request.room):
            self._leave_queue(request, topic)

    def requests(self) -> set[_Request]:
        return {request for queue in self.queues.values() for request in queue}

    def give(self, record: Record) -> _Request | None:
        """Give the task to the request that has waited longest for one more of its topic; None: there is none."""
        topic = record.topic
        for request in self.queues.get(topic, ()):
            if not request.future.done():
                request.taken.append(record)
                request.room[topic] -= 1
                self.wanted[topic] -= 1
                if not request.room[topic]:
                    self._leave_queue(request, topic)
                return request
        return None

    def _leave_queue(self, request: _Request, topic: Topic) -> None:
        queue = self.queues[topic]
        del queue[request]
        self.wanted[topic] -= request.room.pop(topic)
        if not queue:
            del self.queues[topic], self.wanted[topic]

    def wants(self) -> dict[Topic, int]:
        """The number of tasks to lease by topic: some of every topic, so that none waits for another."""
        share = max(1, _MOST // max(1, len(self.wanted)))
        return {topic: min(count, share) for topic, count in self.wanted.items()}


class LongPoll(LeaseLoop):
    """Leases due tasks to consumers, extends their leases, and settles them by the policy of their topic.

    Make it in the running loop, `start` it, and `close` it before the client. It calls `started` for each lease handed
    out, and `settled` for each accepted outcome. `may_note` returns True if this caller may write one more line to the
    shared event log.
    """

    _log = _log

    def __init__(
        self,
        client: Client,
        *,
        policy_of: Callable[[Topic], Policy],
        started: Callable[[Record, Millis], None] = lambda record, now: None,
        settled: Callable[[Topic, OutcomeKind], None] = lambda topic, outcome: None,
        may_note: Callable[[str], object] = lambda who: True,
    ) -> None:
        super().__init__(client)
        self._policy_of = policy_of
        self._started = started
        self._settled = settled
        self._may_note = may_note
        self._loop = asyncio.get_running_loop()
        self._groups: dict[tuple[str, Millis], _RequestGroup] = {}
        self._bare: OrderedDict[Lease, bool] = OrderedDict()
        """Leases handed out here of tasks without options, so that their plain Done needs no reading."""
        self._listening: dict[Topic, asyncio.Task[Listening]] = {}
        self._unasked: dict[Topic, float] = {}
        """When the last request for each subscribed topic ended, by the loop's time."""
        self._unsubscribes_at = float("-inf")
        self._background = Background()
        self.waiting = 0

    async def start(self, routes: Sequence[RouteSettings] = ()) -> None:
        """Begin to lease, and announce `routes`, the settings of the topics that consumers work on."""
        self._start_leasing()
        self._announce(routes)

    async def close(self) -> None:
        """Stop leasing; every waiting request is answered with no tasks."""
        await self._stop_leasing()
        for group in self._groups.values():
            for request in group.requests():
                self._answer(group, request)
        await self._background.ended()
        await self._unsubscribe(list(self._listening))

    async def lease(self, room: Mapping[Topic, int], *, holder: str, lease_for: Millis, wait: float) -> list[Record]:
        """Wait at most `wait` seconds for due tasks; lease at most the number of each topic in `room`.

        With `wait` 0 the store is queried once. If the caller is cancelled, nothing stays leased for it. Raises
        StoreError if the store is unavailable.
        """
        if self._stopping:
            return []
        await self._subscribe(room)
        group = self._groups.setdefault((holder, lease_for), _RequestGroup(holder, lease_for))
        request = _Request(dict(room), self._loop.create_future(), patient=wait > 0)
        group.add(request)
        self.waiting += 1
        self._waker.kick()
        timer = self._loop.call_later(wait, self._answer, group, request) if wait > 0 else None
        try:
            return await request.future
        except asyncio.CancelledError:
            self.release(request.taken)
            raise
        finally:
            self.waiting -= 1
            if timer is not None:
                timer.cancel()
            group.remove(request)
            if not group.wanted and self._groups.get((holder, lease_for)) is group:
                del self._groups[holder, lease_for]

    def release(self, records: Sequence[Record]) -> None:
        """Return leases that were not begun. Their tasks are due again at once, and no delivery is counted."""
        if records:
            self._background.begin(self._settle([release(record) for record in records], "released"), "long poll")

    async def extend(self, leases: Sequence[Lease], length: Millis) -> list[bool]:
        """Extend leases to `length` milliseconds from now; False for each lost lease. Raises StoreError."""
        now = self.clock.now()
        return await self.store.extend(leases, now=now, until=now + self.clock.span(length))

    async def settle(self, ended: Sequence[tuple[Lease, Outcome]], *, who: str) -> list[bool]:
        """Record the outcomes of leases; False for each lost lease, whose task is unchanged. Raises StoreError.

        A plain Done of a task that was leased here without options does not depend on the task. All others do: the
        policy decides when to retry or whether it is too late, and a rule when it recurs. So their tasks are read
        first, all in one call.
        """
        plain = [
            isinstance(outcome, Done) and outcome.again is None and self._bare.pop(lease, False)
            for lease, outcome in ended
        ]
        read = [place for place, bare in enumerate(plain) if not bare]
        refs = [Ref(ended[place][0].topic, ended[place][0].key) for place in read]
        found = dict(zip(read, await self.store.get(refs), strict=True)) if refs else {}
        sent: list[tuple[int, Settlement, Record | None]] = []
        for place, (lease, outcome) in enumerate(ended):
            record, retention = found.get(place), self.config.retentions.of(lease.topic)
            if plain[place]:
                keep = retention.keep_until(State.DONE, self.clock.now())
                sent.append((place, Settlement(*lease, OutcomeKind.DONE, None, keep), None))
            elif record is not None and record.token == lease.token and record.state is State.LEASED:
                decided = settlement_for(record, outcome, self._policy_of(lease.topic), retention, self.clock)
                sent.append((place, decided, record))
        settled = [False] * len(ended)
        if not sent:
            return settled
        accepted = await all_answers(
            await self.store.settle([settlement for _, settlement, _ in sent], now=self.clock.now())
        )
        for (place, settlement, record), ok in zip(sent, accepted, strict=True):
            settled[place] = ok
            if ok:
                self._settled(settlement.topic, settlement.kind)
                self._history.ended(settlement.topic, settlement.kind)
                if record is not None:
                    self._note_dropped(record, settlement, who)
                    if settlement.kind in (OutcomeKind.RETRY, OutcomeKind.DEAD):
                        self._note_failure(record, settlement, who)
        return settled

    def _note_failure(self, record: Record, settlement: Settlement, who: str) -> None:
        if self._may_note(who):
            self._note(EventKind(settlement.kind.value), record, settlement.why, who, settlement.next_at)
        else:
            self._recorder.dropped += 1

    # --- the loop

    def _wants_turn(self) -> bool:
        """True if any request waits. From time to time, this also ends unused subscriptions."""
        if self._loop.time() >= self._unsubscribes_at:
            self._unsubscribes_at = self._loop.time() + _FORGET_AFTER / 4
            self._background.begin(self._unsubscribe_unasked(), "long poll")
        return bool(self._groups)

    async def _turn(self) -> Millis | None:
        """Lease for every waiting request and hand out the tasks. Returns the next wake time of their topics."""
        if not self.pause_gate.known:
            await self.pause_gate.first()
        wakes: list[Millis] = []
        for group in list(self._groups.values()):
            asked = {topic: count for topic, count in group.wants().items() if topic not in self.pause_gate.topics}
            answered_now, group.impatient = group.impatient, []
            if asked:  # else no request is left, or all requested topics are paused
                leased = await self._lease(asked, group.lease_for, group.holder)
                got = Counter(record.topic for record in leased.tasks)
                if any(got[topic] == count < group.wanted[topic] for topic, count in asked.items()):
                    self._waker.kick()  # the lease was full, and more is wanted
                self._hand_out(group, leased.tasks, leased.now)
                if leased.wake is not None:
                    wakes.append(leased.wake)
            for request in answered_now:
                self._answer(group, request)
        return min(wakes, default=None)

    def _hand_out(self, group: _RequestGroup, tasks: Sequence[Record], now: Millis) -> None:
        got: dict[_Request, None] = {}
        refusals: list[Refusal] = []
        left: list[Record] = []
        for record in tasks:
            refusal = self._refusal(record, self._policy_of(record.topic), now, group.holder)
            if refusal is not None:
                refusals.append(refusal)
                if refusal.settlement.kind is OutcomeKind.DEAD:
                    self._note(EventKind.DEAD, record, refusal.settlement.why, group.holder)
                self._note_dropped(record, refusal.settlement, group.holder)
                continue
            request = group.give(record)
            if request is None:
                left.append(record)
                continue
            got[request] = None
            if not record.options:
                self._bare[Lease(record.topic, record.key, record.token)] = True
                if len(self._bare) > _MOST_BARE:
                    self._bare.popitem(last=False)
            self._started(record, now)
            self._history.began(record.topic, (record.planned_at,), now)
        for request in got:
            self._answer(group, request)
        self.release(left)
        if refusals:
            self._background.begin(self._start_and_settle(refusals), "long poll")
            self._waker.kick()  # the refused tasks left room, and more may be due

    def _answer(self, group: _RequestGroup, request: _Request) -> None:
        if not request.future.done():
            group.remove(request)
            request.future.set_result(request.taken)

    async def _turn_failed(self, error: Exception) -> None:
        for group in list(self._groups.values()):
            for request in group.requests():
                if not request.future.done():
                    group.remove(request)
                    request.future.set_exception(error)
            group.impatient.clear()
        await super()._turn_failed(error)

    async def _start_and_settle(self, refusals: Sequence[Refusal]) -> None:
        started = [one.own is None or await self._start_own(one.own) for one in refusals]
        await self._settle([one.settlement for one, ok in zip(refusals, started, strict=True) if ok], "settled")

    async def _settle(self, settlements: Sequence[Settlement], what: str) -> None:
        try:
            await all_answers(await self.store.settle(settlements, now=self.clock.now()))
        except StoreError as error:
            _log.warning("%d leases could not be %s, and run out by themselves: %s", len(settlements), what, error)

    # --- wake-ups

    async def _subscribe(self, topics: Mapping[Topic, int]) -> None:
        """Subscribe before the first lease of a topic, so that no wake-up falls in between."""
        if (wakes := self.store.features.wakes) is None:
            return
        for topic in topics:
            self._unasked.pop(topic, None)
            listening = self._listening.get(topic)
            if listening is None or (listening.done() and listening.exception() is not None):
                listening = self._loop.create_task(wakes.listen([topic], self._on_wake))
                self._listening[topic] = listening
            elif listening.done():
                continue
            try:
                await asyncio.shield(listening)
            except StoreError:
                if self._listening.get(topic) is listening:
                    del self._listening[topic]
                raise

    async def _unsubscribe_unasked(self) -> None:
        """End the subscriptions that no request has used for a while."""
        now = self._loop.time()
        asked = {topic for group in self._groups.values() for topic in group.wanted}
        for topic in self._listening.keys() - asked:
            self._unasked.setdefault(topic, now)
        over = [topic for topic, since in self._unasked.items() if now - since >= _FORGET_AFTER]
        for topic in over:
            del self._unasked[topic]
        await self._unsubscribe([topic for topic in over if topic not in asked])

    async def _unsubscribe(self, topics: Sequence[Topic]) -> None:
        """End the subscriptions concurrently, since each may be a call to the store."""
        ending = [self._listening.pop(topic) for topic in topics if topic in self._listening]
        if ending:
            await asyncio.wait(ending)
        open_ones = [one.result() for one in ending if not one.cancelled() and one.exception() is None]
        await asyncio.gather(*(one.close() for one in open_ones), return_exceptions=True)
