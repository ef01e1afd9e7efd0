"""The desk for consumers that are not of this process: each waits until something is due for it, and settles it.

However many wait, there is one loop, the same as a worker's (`leasing`): it asks the store for all of them together,
and hands out what it gets to those who have waited longest. So a thousand that wait cost what one worker costs. What
nobody can take any more, since its consumer has gone, is given back unstarted, which counts nothing.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, OrderedDict
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

from bide.core.errors import StoreError
from bide.core.events import EventKind
from bide.core.instants import Millis
from bide.core.outcomes import Done, Outcome
from bide.core.records import Lease, OutcomeKind, Record, Ref, Settlement, State, Topic
from bide.engine.background import begin
from bide.engine.client import Client
from bide.engine.delivery.lease_loop import LeaseLoop
from bide.engine.delivery.settlement import release, settlement
from bide.engine.registry import RouteSettings
from bide.ports import Listening, Policy, all_answers

_log = logging.getLogger("bide.long_poll")
_MOST = 10_000
"""Tasks that one lease asks for at most."""
_FORGET_AFTER = 60.0
"""Seconds that a topic nobody asks for any more is still listened to."""


class _Waiting:
    """One consumer's question, and what it has got so far."""

    __slots__ = ("future", "patient", "room", "taken")

    def __init__(self, room: dict[Topic, int], future: asyncio.Future[list[Record]], *, patient: bool) -> None:
        self.room = room
        self.future = future
        self.patient = patient
        """It waits for something to come due; else one lease answers it."""
        self.taken: list[Record] = []


class _Group:
    """Those who want the same length of lease for the same holder: one store call serves them all."""

    __slots__ = ("holder", "impatient", "lease_for", "queues", "wanted")

    def __init__(self, holder: str, lease_for: Millis) -> None:
        self.holder = holder
        self.lease_for = lease_for
        self.queues: dict[Topic, OrderedDict[_Waiting, None]] = {}
        """By topic, the longest waiting first. One that leaves is taken out at once: where nothing comes due for
        days, those who ask again and again would pile up."""
        self.wanted: Counter[Topic] = Counter()
        self.impatient: list[_Waiting] = []

    def put(self, waiting: _Waiting) -> None:
        for topic, count in waiting.room.items():
            self.queues.setdefault(topic, OrderedDict())[waiting] = None
            self.wanted[topic] += count
        if not waiting.patient:
            self.impatient.append(waiting)

    def drop(self, waiting: _Waiting) -> None:
        """It wants no more."""
        for topic, count in waiting.room.items():
            self._leave(waiting, topic, count)
        waiting.room = {}

    def next_for(self, topic: Topic) -> _Waiting | None:
        """The one that has waited longest and has room for one more of `topic`."""
        for waiting in self.queues.get(topic, ()):
            if not waiting.future.done():
                return waiting
        return None

    def hand(self, record: Record, waiting: _Waiting) -> None:
        topic = record.topic
        waiting.taken.append(record)
        if waiting.room[topic] == 1:
            self._leave(waiting, topic, 1)
            del waiting.room[topic]
        else:
            waiting.room[topic] -= 1
            self.wanted[topic] -= 1

    def _leave(self, waiting: _Waiting, topic: Topic, count: int) -> None:
        queue = self.queues[topic]
        del queue[waiting]
        self.wanted[topic] -= count
        if not queue:
            del self.queues[topic], self.wanted[topic]

    def asked(self) -> dict[Topic, int]:
        """The wants of one lease: of every topic something, so that none waits for another."""
        share = max(1, _MOST // max(1, len(self.wanted)))
        return {topic: min(count, share) for topic, count in self.wanted.items()}


class LongPoll(LeaseLoop):
    """`lease` waits for what is due, `extend` keeps it, and `settle` ends it by the policy of its topic.

    Make it in the running loop, `start` it, and `close` it before the client. `started` and `settled` are called for
    each lease that is handed out and each outcome that was accepted. `may_note`: whether this caller may write one more
    line into the log of events, which all share.
    """

    _log = _log

    def __init__(
        self,
        client: Client,
        *,
        policy_of: Callable[[Topic], Policy],
        started: Callable[[Record, Millis], None] = lambda record, now: None,
        settled: Callable[[Topic, OutcomeKind], None] = lambda topic, verdict: None,
        may_note: Callable[[str], object] = lambda who: True,
    ) -> None:
        super().__init__(client)
        self._policy_of = policy_of
        self._started = started
        self._settled = settled
        self._may_note = may_note
        self._loop = asyncio.get_running_loop()
        self._groups: dict[tuple[str, Millis], _Group] = {}
        self._listening: dict[Topic, asyncio.Task[Listening]] = {}
        self._unasked: dict[Topic, float] = {}
        """Since when nobody has been seen to ask for a topic that is listened to."""
        self._tidies_at = float("-inf")
        self._afterwards: set[asyncio.Task[None]] = set()
        self.waiting = 0
        """How many wait now."""

    async def start(self, routes: Sequence[RouteSettings] = ()) -> None:
        """Begin to lease; `routes`: how the topics are worked on that are left to consumers, to be announced."""
        self._start_leasing()
        self._announce(routes)

    async def close(self) -> None:
        """Everybody who waits gets what there is: nothing."""
        await self._stop_leasing()
        for group in self._groups.values():
            for waiting in {one for queue in group.queues.values() for one in queue}:
                self._answer(group, waiting)
        if self._afterwards:
            await asyncio.wait(self._afterwards)
        await self._stop(list(self._listening))

    async def lease(self, room: Mapping[Topic, int], *, holder: str, lease_for: Millis, wait: float) -> list[Record]:
        """Up to so many due tasks of each topic, as soon as there is one; none after `wait` seconds (0: one look).

        If the caller is cancelled, nothing stays leased for it. Raises StoreError where the store is away.
        """
        if self._stopping:
            return []
        await self._listen(room)
        group = self._groups.get((holder, lease_for))
        if group is None:
            group = self._groups[holder, lease_for] = _Group(holder, lease_for)
        waiting = _Waiting(dict(room), self._loop.create_future(), patient=wait > 0)
        group.put(waiting)
        self.waiting += 1
        self._waker.kick()
        timer = self._loop.call_later(wait, self._answer, group, waiting) if wait > 0 else None
        try:
            return await waiting.future
        except asyncio.CancelledError:
            self.release(waiting.taken)
            raise
        finally:
            self.waiting -= 1
            if timer is not None:
                timer.cancel()
            group.drop(waiting)
            if not group.wanted and self._groups.get((holder, lease_for)) is group:
                del self._groups[holder, lease_for]

    def release(self, records: Sequence[Record]) -> None:
        """These were not begun: due again at once, counting nothing."""
        if records:
            self._settle_later([release(record) for record in records], "given back")

    async def extend(self, leases: Sequence[Lease], length: Millis) -> list[bool]:
        """Keep these for a length from now; false where the lease was gone. Raises StoreError."""
        now = self.clock.now()
        return await self.store.extend(leases, now=now, until=now + self.clock.span(length))

    async def settle(self, ended: Sequence[tuple[Lease, Outcome]], *, who: str) -> list[bool]:
        """Record how these leases ended; false where the lease was gone, and nothing changed. Raises StoreError.

        A plain Done needs no look at the task; what the policy decides (when to try again, whether it is too late)
        does, so the tasks of such outcomes are read first, all in one call.
        """
        looked_up = [place for place, (_, outcome) in enumerate(ended) if not _plain(outcome)]
        refs = [Ref(ended[place][0].topic, ended[place][0].key) for place in looked_up]
        found = dict(zip(looked_up, await self.store.get(refs), strict=True)) if refs else {}
        sent: list[tuple[int, Settlement, Record | None]] = []
        for place, (lease, outcome) in enumerate(ended):
            record, retention = found.get(place), self.config.retention_of(lease.topic)
            if _plain(outcome):
                keep = retention.keep_until(State.DONE, self.clock.now())
                sent.append((place, Settlement(*lease, OutcomeKind.DONE, None, keep), None))
            elif record is not None and record.token == lease.token and record.state is State.LEASED:
                told = settlement(record, outcome, self._policy_of(lease.topic), retention, self.clock)
                sent.append((place, told, record))
        settled = [False] * len(ended)
        if not sent:
            return settled
        accepted = await all_answers(await self.store.settle([told for _, told, _ in sent], now=self.clock.now()))
        for (place, told, record), ok in zip(sent, accepted, strict=True):
            settled[place] = ok
            if ok:
                self._settled(told.topic, told.outcome)
                self._history.ended(told.topic, told.outcome)
                if record is not None and told.outcome in (OutcomeKind.RETRY, OutcomeKind.DEAD):
                    self._note_failure(record, told, who)
        return settled

    def _note_failure(self, record: Record, told: Settlement, who: str) -> None:
        if self._may_note(who):
            kind = EventKind.RETRY if told.outcome is OutcomeKind.RETRY else EventKind.DEAD
            self._note(kind, record, told.why, who, told.next_at)
        else:
            self._recorder.dropped += 1

    # --- the loop

    def _wants(self) -> bool:
        """True if anybody waits. Now and then, end the subscriptions that nobody has asked for in a while."""
        if self._loop.time() >= self._tidies_at:
            self._tidies_at = self._loop.time() + _FORGET_AFTER / 4
            self._later(self._stop_listening())
        return bool(self._groups)

    async def _turn(self) -> Millis | None:
        """Ask for everybody who waits, and hand out what came; the next wake of what they still want."""
        wakes: list[Millis] = []
        for group in list(self._groups.values()):
            asked = {topic: count for topic, count in group.asked().items() if topic not in self.pause_gate.topics}
            looking, group.impatient = group.impatient, []
            if not asked:  # nobody is left, or all that is asked for is paused
                for waiting in looking:
                    self._answer(group, waiting)
                continue
            leased = await self._lease(asked, group.lease_for, group.holder)
            got = Counter(record.topic for record in leased.tasks)
            if any(got[topic] == count < group.wanted[topic] for topic, count in asked.items()):
                self._waker.kick()  # it got all that one call asks for, and more is wanted
            self._hand_out(group, leased.tasks, leased.now)
            for waiting in looking:
                self._answer(group, waiting)
            if leased.wake is not None:
                wakes.append(leased.wake)
        return min(wakes, default=None)

    def _hand_out(self, group: _Group, tasks: Sequence[Record], now: Millis) -> None:
        got: dict[int, _Waiting] = {}
        unfitting: list[Settlement] = []
        left: list[Record] = []
        for record in tasks:
            refused = self._refusal(record, self._policy_of(record.topic), now, group.holder)
            if refused is not None:
                unfitting.append(refused)
                if refused.outcome is OutcomeKind.DEAD:
                    self._note(EventKind.DEAD, record, refused.why, group.holder)
                continue
            waiting = group.next_for(record.topic)
            if waiting is None:
                left.append(record)
                continue
            group.hand(record, waiting)
            got[id(waiting)] = waiting
            self._started(record, now)
            self._history.began(record.topic, (record.planned_at,), now)
        for waiting in got.values():
            self._answer(group, waiting)
        self.release(left)
        if unfitting:
            self._settle_later(unfitting, "settled")
            self._waker.kick()  # they left room, and there may be more

    def _answer(self, group: _Group, waiting: _Waiting) -> None:
        if not waiting.future.done():
            group.drop(waiting)
            waiting.future.set_result(waiting.taken)

    def _failed(self, error: Exception) -> None:
        for group in list(self._groups.values()):
            for waiting in {one for queue in group.queues.values() for one in queue}:
                if not waiting.future.done():
                    group.drop(waiting)
                    waiting.future.set_exception(error)
            group.impatient.clear()

    def _settle_later(self, settlements: list[Settlement], what: str) -> None:
        async def settle() -> None:
            try:
                await all_answers(await self.store.settle(settlements, now=self.clock.now()))
            except StoreError as error:
                _log.warning("%d leases that should be %s run out by themselves: %s", len(settlements), what, error)

        self._later(settle())

    def _later(self, work: Coroutine[Any, Any, None]) -> None:
        task = begin(work, "desk, in the background")
        self._afterwards.add(task)
        task.add_done_callback(self._afterwards.discard)

    # --- wake-ups

    async def _listen(self, topics: Mapping[Topic, int]) -> None:
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

    async def _stop_listening(self) -> None:
        """End what nobody has asked for in a while."""
        now = self._loop.time()
        asked = {topic for group in self._groups.values() for topic in group.wanted}
        for topic in self._listening.keys() - asked:
            self._unasked.setdefault(topic, now)
        over = [topic for topic, since in self._unasked.items() if now - since >= _FORGET_AFTER]
        for topic in over:
            del self._unasked[topic]
        await self._stop([topic for topic in over if topic not in asked])

    async def _stop(self, topics: Sequence[Topic]) -> None:
        """All at once: each may be a word to the store."""
        ending = [self._listening.pop(topic) for topic in topics if topic in self._listening]
        if ending:
            await asyncio.wait(ending)
        heard = [one.result() for one in ending if not one.cancelled() and one.exception() is None]
        await asyncio.gather(*(one.close() for one in heard), return_exceptions=True)


def _plain(outcome: Outcome) -> bool:
    return isinstance(outcome, Done) and outcome.again is None
