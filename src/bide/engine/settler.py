"""Tells the store how deliveries ended: those of this process, in batches, and those of consumers elsewhere.

One batch is under way at a time (for each part of a store that has several, so that none waits for one that is away);
what ends meanwhile goes with the next. As long as there is nothing else to do, an outcome goes out at the end of this
turn of the event loop. While a backlog is worked off (`busy`), outcomes gather for some milliseconds: on SQLite a task
settled among a thousand costs 9 µs, among a hundred 14 µs, since each commit writes every page of the index that it
touched. What has not been told when a process dies is delivered again. A store that is away is asked again and again:
an outcome is given up only when the worker closes, and then the lease runs out and the task is delivered once more, as
P2 allows.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Sequence
from functools import partial

from bide.core.errors import PartlyFailed, StoreError
from bide.core.events import EventKind
from bide.core.instants import Millis
from bide.core.outcomes import Done, Outcome
from bide.core.records import Lease, Record, Ref, Settlement, State, Topic, Verdict
from bide.engine.history import History
from bide.engine.lanes import Delivery, log_defect
from bide.engine.recorder import Recorder
from bide.engine.terms import Terms
from bide.engine.verdicts import Policy, settlement
from bide.ports import AnswersApart, Clock, Parted, Store

_log = logging.getLogger("bide.settler")
_LIMIT = 1_000
_GATHER = 0.01
"""Seconds that outcomes gather while a backlog is worked off."""
_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 1.0
_CATCHING_UP = 1.0
"""Seconds that a lease waits at most for outcomes whose own leases have run out."""

Told = Callable[[Delivery, Settlement, bool], None]


class Settler:
    """`put` an outcome; `told` is called when the store has it, with whether it was accepted."""

    def __init__(self, store: Store, clock: Clock, told: Told, busy: Callable[[], bool]) -> None:
        self._make = partial(_Outbox, store, clock, told, busy)
        self._part_of = store.part_of if isinstance(store, Parted) else None
        self._outboxes: dict[int, _Outbox] = {}

    def put(self, delivery: Delivery, settlement: Settlement) -> None:
        part = 0 if self._part_of is None else self._part_of(settlement.topic, settlement.key)
        outbox = self._outboxes.get(part)
        if outbox is None:
            outbox = self._outboxes[part] = self._make()
        outbox.put(delivery, settlement)

    def behind(self, by: float) -> list[_Outbox]:
        """Those with outcomes whose leases end before `by`; but none that waits for one part of the store among many.

        Such a task would be leased again by its own worker, and run again, before it is settled.
        """
        return [
            outbox
            for outbox in self._outboxes.values()
            if outbox.earliest < by and (self._part_of is None or not outbox.failing)
        ]

    async def catch_up(self, by: float) -> None:
        """Before a lease: see that those outcomes are told first, as long as the store takes them."""
        loop = asyncio.get_running_loop()
        ends = loop.time() + _CATCHING_UP
        while (late := self.behind(by)) and loop.time() < ends:
            await asyncio.wait([outbox.hurry() for outbox in late], timeout=_CATCHING_UP)
            if any(outbox.failing for outbox in late):
                return

    async def drain(self) -> None:
        """Wait until everything put so far has been told to the store, or given up because it cannot be reached."""
        await asyncio.gather(*(outbox.drain() for outbox in self._outboxes.values()))


class _Outbox:
    """The outcomes on their way to one part of the store."""

    def __init__(self, store: Store, clock: Clock, told: Told, busy: Callable[[], bool]) -> None:
        self._settle = store.settle_apart if isinstance(store, AnswersApart) else store.settle
        self._late: set[asyncio.Future[bool]] = set()
        self._clock = clock
        self._told = told
        self._more_to_come = busy
        self._loop = asyncio.get_running_loop()
        self._outbox: list[tuple[Delivery, Settlement]] = []
        self._busy = False
        self._task: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._closing = False
        self._earliest = self._sending = math.inf
        """When the first of the leases ends whose outcomes wait, and of those that are on their way."""
        self._answered: asyncio.Future[None] | None = None
        self._pausing: asyncio.Future[None] | None = None
        self.failing = False
        """True after the store has not taken a batch, until it takes one."""

    @property
    def earliest(self) -> float:
        return min(self._earliest, self._sending)

    def put(self, delivery: Delivery, settlement: Settlement) -> None:
        self._outbox.append((delivery, settlement))
        if delivery.expires < self._earliest:
            self._earliest = delivery.expires
        if not self._busy:
            self._busy = True
            self._later()

    def _later(self) -> None:
        """Begin at once, or while more is to come, when there is enough of it or some time has passed."""
        if len(self._outbox) < _LIMIT and not self._closing and self._more_to_come():
            self._timer = self._loop.call_later(_GATHER, self._start)
        else:
            self._loop.call_soon(self._start)

    def _start(self) -> None:
        self._timer = None
        batch = self._outbox[:_LIMIT]
        del self._outbox[:_LIMIT]
        self._sending = self._earliest
        if not self._outbox:
            self._earliest = math.inf
        self._task = self._loop.create_task(self._send(batch), name="bide settler")
        self._task.add_done_callback(self._sent)

    def _sent(self, task: asyncio.Task[None]) -> None:
        """However it ended: also if it was cancelled before its first step."""
        log_defect(task)
        self._task, self._sending = None, math.inf
        self._told_all(failing=False)
        if self._outbox:
            self._later()
        else:
            self._busy = False

    async def _send(self, batch: list[tuple[Delivery, Settlement]]) -> None:
        """Until the store has them all. What failed alone, since its part of the store is away, is sent again alone."""
        pause = _FIRST_PAUSE
        while True:
            left, why = list[tuple[Delivery, Settlement]](), None
            for one, answer in zip(batch, await self._ask(batch), strict=True):
                if isinstance(answer, int):
                    self._tell(*one, bool(answer))
                elif isinstance(answer, StoreError):
                    left.append(one)
                    why = why or answer
                elif isinstance(answer, asyncio.Future):
                    self._held_up(*one, answer)
            if not left:
                return
            self._told_all(failing=True)
            batch = left
            if self._closing:
                _log.error("%d outcomes could not be settled before closing; they will be delivered again: %s",
                           len(batch), why)  # fmt: skip
                return
            _log.warning("settling %d outcomes failed, trying again in %.2f s: %s", len(batch), pause, why)
            self._pausing = self._loop.create_future()
            await asyncio.wait([self._pausing], timeout=pause)
            pause = min(pause * 2, _LONGEST_PAUSE)

    def hurry(self) -> asyncio.Future[None]:
        """Send now what waits for a moment; what is returned is done when the store has answered, whatever it said."""
        if self._timer is not None:
            self._timer.cancel()
            self._start()
        if self._pausing is not None and not self._pausing.done():
            self._pausing.set_result(None)
        if self._answered is None:
            self._answered = self._loop.create_future()
        return self._answered

    def _told_all(self, *, failing: bool) -> None:
        self.failing = failing
        if self._answered is not None:
            self._answered.set_result(None)
            self._answered = None

    async def _ask(self, batch: list[tuple[Delivery, Settlement]]) -> Sequence[object]:
        """The store's answers, with an error in the place of what failed. A defect falls on each outcome alone."""
        try:
            accepted = await self._settle([one for _, one in batch], now=self._clock.now())
            if len(accepted) != len(batch):
                raise RuntimeError(f"{len(accepted)} answers to {len(batch)} outcomes")
        except PartlyFailed as partly:
            return partly.answers
        except StoreError as error:
            return [error] * len(batch)
        except Exception as defect:  # noqa: BLE001 - whatever the store raises must not take the others along
            if len(batch) > 1:
                return [answer for one in batch for answer in await self._ask([one])]
            _, settlement = batch[0]
            _log.exception("the outcome of %s/%s cannot be kept; it is delivered again when its lease has ended",
                           settlement.topic, settlement.key)  # fmt: skip
            return [defect]
        return accepted

    def _tell(self, delivery: Delivery, settlement: Settlement, accepted: bool) -> None:
        try:
            self._told(delivery, settlement, accepted)
        except Exception:  # noqa: BLE001 - an observer's defect must not keep the others from being told
            _log.exception("%s/%s is settled, and telling of it failed", settlement.topic, settlement.key)

    def _held_up(self, delivery: Delivery, settlement: Settlement, answer: asyncio.Future[bool]) -> None:
        """Somebody's open transaction holds the task up: the outcomes of others do not wait for it."""
        self._late.add(answer)

        def answered(answer: asyncio.Future[bool]) -> None:
            self._late.discard(answer)
            error = asyncio.CancelledError("cancelled") if answer.cancelled() else answer.exception()
            if error is None:
                self._tell(delivery, settlement, answer.result())
            elif self._closing or not isinstance(error, StoreError):
                _log.error("an outcome could not be settled before closing; it will be delivered again: %s", error)
            else:
                self.put(delivery, settlement)

        answer.add_done_callback(answered)

    async def drain(self) -> None:
        self._closing = True
        while self._busy or self._late:
            if self._busy:
                await asyncio.wait([self.hurry()])
            else:
                await asyncio.wait(self._late)
        self._closing = False


class Settling:
    """Tells the store how deliveries elsewhere ended, by the policy of a worker's own.

    A plain Done needs no look at the task; what the policy decides (when to try again, whether it is too late) does, so
    the tasks of such outcomes are read first, all in one call. `settled` is called for each outcome that was accepted.
    `may_note`: whether this caller may write one more line into the log of events, which all share.
    """

    def __init__(
        self,
        store: Store,
        *,
        clock: Clock,
        terms: Terms,
        recorder: Recorder,
        policy_of: Callable[[Topic], Policy],
        settled: Callable[[Topic, Verdict], None] | None = None,
        history: History | None = None,
        may_note: Callable[[str], object] = lambda who: True,
    ) -> None:
        self._store = store
        self._clock = clock
        self._terms = terms
        self._recorder = recorder
        self._policy_of = policy_of
        self._settled = settled
        self._history = history
        self._may_note = may_note

    async def settle(self, ended: Sequence[tuple[Lease, Outcome]], *, who: str) -> list[bool]:
        """Record how these leases ended; false where the lease was gone, and nothing changed. Raises StoreError."""
        looked_up = [place for place, (_, outcome) in enumerate(ended) if not _plain(outcome)]
        refs = [Ref(ended[place][0].topic, ended[place][0].key) for place in looked_up]
        found = dict(zip(looked_up, await self._store.get(refs), strict=True)) if refs else {}
        sent: list[tuple[int, Settlement, Record | None]] = []
        for place, (lease, outcome) in enumerate(ended):
            record = found.get(place)
            if _plain(outcome):
                keep = self._terms.retention_of(lease.topic).keep_until(State.DONE, self._clock.now())
                sent.append((place, Settlement(*lease, Verdict.DONE, None, keep), None))
            elif record is not None and record.token == lease.token and record.state is State.LEASED:
                told = settlement(
                    record, outcome, self._policy_of(lease.topic), self._terms.retention_of(lease.topic), self._clock
                )
                sent.append((place, told, record))
        settled = [False] * len(ended)
        if not sent:
            return settled
        accepted = await self._store.settle([told for _, told, _ in sent], now=self._clock.now())
        for (place, told, record), ok in zip(sent, accepted, strict=True):
            settled[place] = ok
            if ok and self._settled is not None:
                self._settled(told.topic, told.verdict)
            if ok and self._history is not None:
                self._history.ended(told.topic, told.verdict)
            if ok and record is not None and told.verdict in (Verdict.RETRY, Verdict.DEAD):
                self._note(record, told, who)
        return settled

    async def extend(self, leases: Sequence[Lease], length: Millis) -> list[bool]:
        """Keep these for a length from now; false where the lease was gone. Raises StoreError."""
        now = self._clock.now()
        return await self._store.extend(leases, now=now, until=now + self._clock.span(length))

    def _note(self, record: Record, told: Settlement, who: str) -> None:
        if not self._may_note(who):
            self._recorder.dropped += 1
            return
        kind = EventKind.RETRY if told.verdict is Verdict.RETRY else EventKind.DEAD
        self._recorder.delivered(record, kind, told.why, at=self._clock.now(), who=who, wake=told.wake)


def _plain(outcome: Outcome) -> bool:
    return isinstance(outcome, Done) and outcome.again is None
