"""A worker: sleeps until the earliest wake time of its topics, then leases, delivers and settles the due tasks.

It leases only as many tasks as it can start now (P7). For the loop see `lease_loop`.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from itertools import islice
from typing import Any

from msgspec import Struct, field
from msgspec.structs import replace

from bide.core import lifecycle
from bide.core.events import EventKind
from bide.core.instants import NEVER, Millis
from bide.core.names import new_id
from bide.core.outcomes import End, Outcome, Retry
from bide.core.records import Leased, NewTask, OutcomeKind, Record, Settlement, Topic
from bide.engine.background import LEAST_PATIENCE, Background, begin
from bide.engine.client import Client
from bide.engine.delivery.executor import Delivery, TopicExecutor
from bide.engine.delivery.lease_extender import LeaseExtender
from bide.engine.delivery.lease_loop import LeaseLoop
from bide.engine.delivery.lease_plan import MOST_LOOKS, TopicWakes, kept_back, slots_to_lease
from bide.engine.delivery.occurrences import keeps_lease, replaced_by_next
from bide.engine.delivery.settlement import release, settlement_for
from bide.engine.delivery.settler import Settler
from bide.engine.delivery.tables import TableLoop
from bide.engine.registry import settings_of
from bide.ports import Listening, Route

_log = logging.getLogger("bide.worker")
_DECLARE_AGAIN = 1.0
"""Seconds between two attempts to declare a recurring task, as while an occurrence runs."""
_DECLARE_LATER = 30.0
"""The most seconds between two attempts that fail, since a token may lack an access for long."""
_FLOOD = 32
"""The deliveries of a topic in one lease from which it counts as a flood, if more are due."""

Observer = Callable[[Record, Settlement], None]
"""Called for each outcome that the store accepted."""


class Stats(Struct):
    """The counts of a worker."""

    leased: int = 0
    delivered: int = 0
    done: int = 0
    retried: int = 0
    deferred: int = 0
    dead: int = 0
    lost: int = 0
    """Leases lost before their outcome: the store refused to settle or extend them."""


class Worker(LeaseLoop):
    """Works on `routes` from `start` until `stop`; `stats` counts what it has done. `app.worker()` makes one."""

    _log = _log

    def __init__(
        self,
        client: Client,
        routes: Mapping[Topic, Route],
        *,
        observe: Observer | None = None,
        refused: Observer | None = None,
        name: str | None = None,
        tables: Sequence[TableLoop] = (),
    ) -> None:
        """`observe` is told of each outcome that the store accepts, `refused` of each that it does not."""
        self._routes = routes
        for instrument in client.instruments:
            routes = {topic: instrument.route(route) for topic, route in routes.items()}
        self._executors = {
            topic: TopicExecutor(route, self._ended, self._freed, self._time_out, self._release)
            for topic, route in routes.items()
        }
        super().__init__(client, of=self._executors)
        self.holder = name or f"{socket.gethostname()}:{os.getpid()}:{new_id()[-8:]}"
        self.stats = Stats()
        self.tables = tables
        self._observers = [one.observe for one in self._instruments] + ([] if observe is None else [observe])
        self._refused = refused
        # during a flood, outcomes may gather briefly before they are sent
        self._settler = Settler(self.store, self.clock, self._settled, lambda: self._flood and not self._stopping)
        self._topic_wakes = TopicWakes(self._executors, self.clock, self.config.cap, self.holder)
        self._lease_extender = LeaseExtender(
            self.store, self.clock, self.config.lease, self.holder, self._executors, self._held, self._lose,
            self._topic_wakes.turns.announced,
        )  # fmt: skip
        self._listening: Listening | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._draining: asyncio.Task[None] | None = None
        self._hurry: asyncio.Future[None]
        """Ends the grace of the drain."""
        self._hooks = Background()
        self._starting = Background()
        """Occurrences that are being added as tasks of their own."""
        self._flood = False
        self._short = False
        """True if the worker's slots, not a topic's own, limit how many tasks are leased."""
        self._busy: dict[Topic, TopicExecutor] = {}
        self._paused: frozenset[Topic] = frozenset()
        """The topics that were paused when the last lease was planned."""

    # --- start and stop

    async def start(self) -> None:
        """Subscribe, then begin to lease. Raises SetupError for a table that cannot be watched."""
        for table in self.tables:
            await table.start()
        if (wakes := self.store.features.wakes) is not None:
            self._listening = await wakes.listen(list(self._executors), self._on_wake, self._topic_wakes.note_taken)
        if self._executors:
            self._start_leasing()
        extender = self._lease_extender
        self._tasks.append(begin(extender.extend_for_ever(), "extend"))
        self._tasks.append(begin(extender.purge_for_ever(), "purge"))
        self._tasks.append(begin(extender.announce_for_ever(), "presence"))
        if self._executors:
            self._announce([settings_of(route, self.config) for route in self._routes.values()])
        for instrument in self._instruments:
            instrument.working(self.wakes)
            for table in self.tables:
                instrument.watching(table.watch.name, table.stats)

    async def stop(self, *, grace: Millis | None = None) -> None:
        """Drain: stop leasing, return unstarted tasks, let running handlers end, and cancel them after `grace`.

        A handler cancelled this way does not count against its task. Every call waits for the end of the one drain, in
        the grace of the first call. If a call is cancelled, the grace ends at once, and the call ends with the drain.
        """
        if self._draining is None:
            loop, length = asyncio.get_running_loop(), self.config.grace if grace is None else grace
            self._hurry = loop.create_future()
            self._draining = loop.create_task(self._drain(length / 1000, self._hurry), name="bide drain")
        try:
            await asyncio.shield(self._draining)
        except asyncio.CancelledError:
            if not self._hurry.done():
                self._hurry.set_result(None)
            await asyncio.wait([self._draining])
            raise

    async def _drain(self, grace: float, hurry: asyncio.Future[None]) -> None:
        """Drain in `grace` seconds, or less once `hurry` is done."""
        ends = asyncio.get_running_loop().time() + grace
        await self._stop_leasing()
        if self._listening is not None:
            await self._listening.close()
        for executor in self._executors.values():
            self._release(executor.take_unstarted())
        tables = asyncio.gather(*(table.stop(grace) for table in self.tables))
        idle = asyncio.gather(*(executor.idle(grace) for executor in self._executors.values()))
        either: list[asyncio.Future[Any]] = [idle, hurry]
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        await asyncio.gather(*(executor.close() for executor in self._executors.values()), self._starting.ended())
        idle.cancel()
        await tables
        await self._settler.drain()
        self._end_waits(self._emptied)
        for task in self._tasks:
            task.cancel()
        left = 0.0 if hurry.done() else ends - asyncio.get_running_loop().time()
        await asyncio.gather(*self._tasks, self._hooks.ended(max(left, LEAST_PATIENCE)), return_exceptions=True)
        await self._lease_extender.leave()

    async def until_empty(self) -> None:
        """Wait until this worker's topics and tables have nothing waiting, or leased by any worker.

        The end of another worker's delivery is noticed at most the longest sleep later. Raises RuntimeError on a stop.
        """
        fired = -1
        while fired != self._rows_fired:
            await asyncio.gather(*(table.until_empty() for table in self.tables))
            fired = self._rows_fired  # a task may write a row, and a row schedule a task
            if self._executors or self._stopping:
                await self._until_nothing_left()

    @property
    def _rows_fired(self) -> int:
        return sum(table.stats.fired for table in self.tables)

    async def _nothing_left(self, leased: Leased) -> bool:
        """True if a lease sent while this worker was idle found nothing waiting or leased, including paused topics."""
        if leased.tasks or leased.next_wake is not None or self._busy:
            return False
        paused, now = [topic for topic in self.pause_gate.topics if topic in self._executors], self.clock.now()
        if not paused:
            return True
        asked = dict.fromkeys(paused, 0)
        return (await self.store.lease(asked, now=now, until=now, holder=self.holder)).next_wake is None

    async def run_once(self) -> tuple[int, Millis | None]:
        """Lease, deliver and settle once. Returns the number of leased tasks and the next wake time.

        Used instead of `start` in tests that move the clock. The wake time is valid only if nothing was leased: a
        handler may have scheduled an earlier task.
        """
        await self.pause_gate.first()
        before = self.stats.leased
        wake = await self._deliver(self._plan(everything=True))
        await asyncio.gather(*(executor.idle(None) for executor in self._executors.values()), self._starting.ended())
        await self._settler.drain()
        await self._hooks.ended()
        return self.stats.leased - before, wake

    # --- lease

    @property
    def _free_slots(self) -> int:
        return self.config.concurrency - sum(executor.occupied for executor in self._busy.values())

    def _wants_turn(self) -> object:
        self._short = self._free_slots <= 0
        return not self._short or self._emptied

    async def _turn(self) -> Millis | None:
        if not self.pause_gate.known:
            await self.pause_gate.first()
        await self._catch_up()
        # `until_empty` needs a lease that was sent after its call, and while nothing ran here
        emptied = [] if self._busy else list(self._emptied)
        return await self._deliver(self._plan(everything=bool(emptied)), emptied)

    async def _catch_up(self) -> None:
        """Before leasing, settle ended and extend running deliveries whose leases may have expired.

        Otherwise a worker whose event loop was blocked would lease its own tasks and run them again. Costs nothing
        while settling and extending are on time.
        """
        loop, third = asyncio.get_running_loop(), self.config.lease / 3000
        for _ in range(2):
            now = loop.time()
            await self._settler.catch_up(now + third)
            if now - self._lease_extender.asked_at > 2 * third:
                await self._lease_extender.extend()
                await self._settler.catch_up(loop.time() + third)  # nothing succeeded while the store was unavailable
            if loop.time() - now < third:
                return  # otherwise the loop was blocked meanwhile, or the store slow: other leases may have expired

    def _plan(self, *, everything: bool) -> dict[Topic, int]:
        """How many tasks of each topic to request; 0: only its next wake. Paused topics are left out.

        `everything`: all other topics, also those where nothing may be due.
        """
        wakes, paused = self._topic_wakes, frozenset(self.pause_gate.topics)
        for topic in self._executors if everything else self._paused - paused:
            if topic in self._executors:
                wakes.note(topic)
        self._paused = paused
        due: dict[Topic, TopicExecutor] = {}
        looks: dict[Topic, TopicExecutor] = {}
        most = None if everything else MOST_LOOKS
        for topics, found in ((wakes.take_looks(), looks), (list(islice(wakes.due(), most)), due)):
            for topic in topics:
                executor = self._executors[topic]
                if topic in paused:
                    wakes.drop(topic)
                elif executor.free <= 0:
                    executor.backlogged = executor.unasked = True
                    wakes.drop(topic)
                else:
                    found[topic] = executor
        for topic in due:
            looks.pop(topic, None)
        free, slots = self._free_slots, self.config.concurrency
        idle = len(self._executors) - len({*self._busy, *(topic for topic, its in due.items() if its.backlogged)})
        asked = slots_to_lease(due, looks, free, kept_back(slots, idle))
        self._short = any(
            (its.backlogged or not asked[topic]) and its.free > asked[topic] for topic, its in due.items()
        )
        return {topic: count for topic, count in asked.items() if count or topic in looks or everything}

    async def _deliver(
        self, asked: Mapping[Topic, int], until_empty: Sequence[asyncio.Future[None]] = ()
    ) -> Millis | None:
        """Lease and start the due tasks. Returns when to lease next. `until_empty`: these end if nothing is left."""
        expires = asyncio.get_running_loop().time() + self.config.lease / 1000
        wakes = self._topic_wakes
        wakes.asking(asked)
        try:
            leased = await self._lease(asked, self.config.lease, self.holder)
        except BaseException:
            for topic in asked:
                wakes.note(topic)
            raise
        wakes.answered(asked, leased)
        self.stats.leased += len(leased.tasks)
        self._flood = False
        by_topic = defaultdict[Topic, list[Delivery]](list)
        for record in leased.tasks:
            by_topic[record.topic].append(Delivery(record, self, expires, leased.now))
        for topic, deliveries in by_topic.items():
            self._history.began(topic, [one.record.planned_at for one in deliveries], leased.now)
        for topic, count in asked.items():
            executor, deliveries = self._executors[topic], by_topic.get(topic, [])
            if not count and not deliveries:
                continue
            fit = [delivery for delivery in deliveries if self._fit(delivery, executor.route, leased.now)]
            cut = bool(deliveries) and leased.heads.get(topic, NEVER) <= leased.now  # more of it is due
            executor.backlogged = cut or len(deliveries) >= count
            if executor.backlogged:
                wakes.note(topic)  # it used all its slots, or tasks were refused, so more may be due
                self._flood |= count >= _FLOOD
            executor.start(fit)
            if executor.occupied:
                self._busy[topic] = executor
        if asked and next(wakes.due(), None) is not None:
            self._waker.kick()
        elif until_empty and await self._nothing_left(leased):
            self._end_waits(until_empty)
        self._waker.look_by(wakes.next_look())
        return wakes.next_wake()

    def _fit(self, delivery: Delivery, route: Route, now: Millis) -> bool:
        refused = self._refusal(delivery.record, route, now, self.holder)
        if refused is None:
            return True
        delivery.over = True
        if refused.own is None:
            self._settler.put(delivery, refused.settlement)
        else:
            self._starting.begin(self._start_and_settle(delivery, refused.own, refused.settlement), "occurrence")
        return False

    async def _start_and_settle(self, delivery: Delivery, own: NewTask, settlement: Settlement) -> None:
        if await self._start_own(own):
            self._settler.put(delivery, settlement)

    def _on_wake(self, topic: Topic, wake: Millis) -> None:
        executor = self._executors.get(topic)
        if executor is not None and executor.free > 0:
            super()._on_wake(topic, self._topic_wakes.note(topic, wake))
        elif executor is not None and topic not in self.pause_gate.topics:
            executor.backlogged = executor.unasked = True

    def _freed(self, executor: TopicExecutor) -> None:
        """Lease again for a freed slot if there may be a task for it."""
        if not executor.occupied:
            self._busy.pop(executor.route.topic, None)
        if executor.unasked:
            executor.unasked = False
            self._topic_wakes.note(executor.route.topic)
        if (executor.backlogged or self._short or self._emptied) and not self._waker.kicked:
            self._waker.kick()

    def _held(self) -> list[Delivery]:
        return [held for executor in self._executors.values() for held in (*executor.running, *executor.queue)]

    # --- settle

    def _ended(self, delivery: Delivery, ended: End) -> None:
        """Settle the outcome of a handler whose delivery is not over yet."""
        record = delivery.record
        self.stats.delivered += 1
        if ended is not None:
            cancelled = isinstance(ended, asyncio.CancelledError)
            if isinstance(ended, KeyboardInterrupt) or (cancelled and self._stopping):
                if not keeps_lease(record, self.clock.now() + self.config.lease):
                    self._settler.put(delivery, release(record))
                return
            if cancelled:
                ended = Retry("the handler was cancelled")
            elif not isinstance(ended, Outcome) and record.failures == 0:
                _log.warning("%s/%s failed for the first time", record.topic, record.key, exc_info=ended)
        route, keep = self._executors[record.topic].route, self.config.retentions.of(record.topic)
        try:
            decided = settlement_for(record, ended, route, keep, self.clock, traces=self.config.traces)
        except Exception as defect:  # noqa: BLE001 - the handler's own outcome class may lack attributes
            _log.warning("%s/%s: %r is no outcome that can be kept", record.topic, record.key, type(ended))
            decided = settlement_for(record, defect, route, keep, self.clock)
        self._settler.put(delivery, decided)

    def completed(self, delivery: Delivery, settlement: Settlement) -> None:
        delivery.over = True
        self.stats.delivered += 1
        self._settled(delivery, settlement, True)

    def _time_out(self, delivery: Delivery) -> None:
        """Settle the failure now. The handler's later outcome is discarded; its slot is freed when it ends."""
        if delivery.over or delivery.runner is None:
            return
        limit, loop = (self._executors[delivery.topic].route.timeout or 0) / 1000, asyncio.get_running_loop()
        left = delivery.ran_from + limit - loop.time() if limit else None
        if (replaced := replaced_by_next(delivery.record, self.clock.now())) is not None:
            self._settler.put(delivery, replaced)
        elif (early := delivery.limit(None)) is not None and (left is None or left > 0):  # the clock was set back
            delivery.timer = loop.call_later(early if left is None else min(early, left), self._time_out, delivery)
            return
        else:
            self._ended(delivery, TimeoutError(f"no outcome within {limit:g} s"))
        delivery.over = True
        delivery.runner.cancel()

    def _lose(self, delivery: Delivery, why: str) -> None:
        _log.warning("%s/%s: %s", delivery.topic, delivery.key, why)
        self.stats.lost += 1
        delivery.over = True
        if delivery.runner is not None:
            delivery.runner.cancel()

    def _settled(self, delivery: Delivery, settlement: Settlement, accepted: bool) -> None:
        record, stats = delivery.record, self.stats
        if not accepted:
            stats.lost += 1
            _log.info("%s/%s: outcome refused, the lease was gone", record.topic, record.key)
            if self._refused is not None:
                self._refused(record, settlement)
            return
        outcome = settlement.kind
        self._history.ended(record.topic, outcome)
        self._note_dropped(record, settlement, self.holder)
        if outcome is OutcomeKind.DONE:
            stats.done += 1
        elif outcome is OutcomeKind.RETRY:
            stats.retried += 1
            _log.warning("%s/%s, attempt %d, failed: %s", record.topic, record.key, record.attempt, settlement.why)
            self._note(EventKind.RETRY, record, settlement.why, self.holder, settlement.next_at)
        elif outcome is OutcomeKind.DEFER:
            stats.deferred += 1
        else:
            stats.dead += 1
            _log.error("%s/%s, attempt %d, is dead: %s", record.topic, record.key, record.attempt, settlement.why)
            self._note(EventKind.DEAD, record, settlement.why, self.holder)
            ended = replace(settlement, outcome=OutcomeKind.DEAD, next_at=None)
            task = delivery.now_as(lifecycle.settle(ended, record, self.clock.now(), record.token))
            self._hooks.call(self._executors[record.topic].route.on_dead, task)
        for observe in self._observers:
            observe(record, settlement)
        if self._emptied:
            self._waker.kick()

    def _release(self, deliveries: Iterable[Delivery]) -> None:
        """Return leases that no handler has begun, without counting a delivery."""
        for delivery in deliveries:
            delivery.over = True
            self._settler.put(delivery, release(delivery.record))


class AppWorker(Struct, eq=False, kw_only=True):
    """A worker together with its client: opens the client if needed, and enters as the running `Worker`.

    Sinks that are async context managers are entered before it works, and left after it has stopped.
    """

    client: Client
    routes: Mapping[Topic, Route]
    tables: Callable[[], Sequence[TableLoop]]
    observe: Observer | None
    name: str | None
    declared: Sequence[Callable[[], NewTask]]
    """The makers of the recurring tasks that the program declares."""
    _entered: AsyncExitStack = field(default_factory=AsyncExitStack)

    async def __aenter__(self) -> Worker:
        async with AsyncExitStack() as entered:
            await entered.enter_async_context(self.client)
            for sink in {id(route.sink): route.sink for route in self.routes.values()}.values():
                if isinstance(sink, AbstractAsyncContextManager):
                    await entered.enter_async_context(sink)
            worker = Worker(self.client, self.routes, observe=self.observe, name=self.name, tables=self.tables())
            entered.push_async_callback(worker.stop)  # also stops the started parts if a later part fails to start
            if self.declared:
                declaring = begin(self._declare(), "declared")
                entered.push_async_callback(_cancelled, declaring)
            await worker.start()
            self._entered = entered.pop_all()
        return worker

    async def _declare(self) -> None:
        """Add the declared tasks. Those with a running occurrence, and those that failed, are tried again."""
        left, pause = dict.fromkeys(self.declared, False), _DECLARE_AGAIN
        while left:
            left, errors = await self.client.recurring.declare(left)
            pause = min(2 * pause, _DECLARE_LATER) if errors else _DECLARE_AGAIN
            if errors:
                why = errors[0]
                _log.warning("declaring %d recurring tasks failed, trying again in %g s: %s", len(errors), pause, why)
            if left:
                await asyncio.sleep(pause)

    async def __aexit__(self, *exc_info: object) -> None:
        await self._entered.aclose()


async def _cancelled(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.wait([task])
