"""The deliveries of one topic in one worker: a queue of what was leased, the runners that call its handler, and its
slots.

**Runners.** A runner is one long-lived asyncio task that calls handlers one after another. A handler that never
suspends costs no task and no turn of the loop; one that suspends lets the next runner go on (each wakes one more while
work is left). That is what a task per delivery would give, at a fraction of its cost (for a handler that does nothing
0.8 µs against 2.7). What a handler leaves in its context (a ContextVar it set) must not reach the next one, so a runner
whose context has changed ends, and a fresh one takes its place: comparing two contexts is O(1) while they share their
tree. So does a runner that was cancelled, be it by us (a time limit), by its handler, or by a loop that ends all its
tasks.

**Slots.** `slots_to_lease` says how many of each topic a worker can start now, so that no topic's flood takes all that
the others need (P6). Idle topics lend their slots. The last slot of each idle topic is kept back from a flood, together
at most an eighth of all: with ten topics that is a slot for each, with a thousand the flood still gets seven eighths.
Topics that are known to have more than they could start share the rest in equal parts, the one that runs least first.
The sum is never more than the free slots. Pure arithmetic, O(topics).
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from contextvars import copy_context
from datetime import timedelta
from typing import Any, Protocol

from msgspec.structs import replace

from bide.core.errors import LeaseLost, SetupError
from bide.core.instants import Length, Millis, When, duration
from bide.core.outcomes import Done, Outcome
from bide.core.records import Lease, Leased, Record, Topic
from bide.core.tasks import Task
from bide.engine.background import log_defect
from bide.engine.config import EngineConfig
from bide.engine.context import joining, set_running
from bide.engine.delivery.settlement import completion
from bide.ports import Clock, Route, Store

_log = logging.getLogger("bide.worker")
_LONGEST_TURN = 0.005
"""Seconds that a runner may call handlers without letting the event loop breathe."""
_LAST_WAIT = 5.0
"""Seconds that a handler has to end after it was cancelled as its worker stops."""


class DeliveryOwner(Protocol):
    """The worker, as its deliveries know it."""

    store: Store
    clock: Clock
    config: EngineConfig

    def completed(self, delivery: Delivery) -> None:
        """The handler's own transaction has settled it."""


class Delivery(Task[Any]):
    """The task that a handler is given, and what the worker knows of its lease.

    `over` is set once the outcome is settled or discarded, whatever the handler does from then on.
    """

    __slots__ = ("_began", "_owner", "expires", "over", "runner", "timer")

    def __init__(self, record: Record, owner: DeliveryOwner, expires: float, began: Millis) -> None:
        super().__init__(record)
        self._owner = owner
        self._began = began
        self.expires = expires
        """When the lease runs out, by the loop's clock; counted from before it was asked for, so never too late."""
        self.over = False
        self.runner: asyncio.Task[None] | None = None
        self.timer: asyncio.TimerHandle | None = None

    @property
    def lease(self) -> Lease:
        record = self.record
        return Lease(record.topic, record.key, record.token)

    @property
    def lateness(self) -> timedelta:
        """See `Task.lateness`."""
        return timedelta(milliseconds=self._began - self.record.planned_at)

    @asynccontextmanager
    async def transaction(self, *, again_at: When | None = None, again_in: Length | None = None) -> AsyncIterator[Any]:
        """See `Task.transaction`."""
        store, record = self._owner.store, self.record
        if (transactions := store.features.transactions) is None:
            raise SetupError("this store shares no database with handlers; sqlite:, postgresql: and mysql: do")
        done, committing = Done(again_at=again_at, again_in=again_in), False
        try:
            async with transactions.transaction() as joined:
                with joining(store, joined):
                    yield joined.connection
                clock, keep = self._owner.clock, self._owner.config.retentions.of(record.topic)
                settled = await joined.settle([completion(record, done, keep, clock)], now=clock.now())
                if self.over or not settled[0]:
                    raise LeaseLost(
                        f"{record.topic}/{record.key} is no longer ours: rolled back. The lease ended, the task was "
                        "cancelled or replaced, or the transaction scheduled this very key (use again_in= for that)"
                    )
                # From here no extension must ask to extend what the commit is about to end: it would be refused, and
                # the handler cancelled after its commit.
                self.over = committing = True
        except BaseException:
            if committing:
                self.over = False
            raise
        self._owner.completed(self)

    async def extend(self, by: Length) -> bool:
        """See `Task.extend`."""
        clock, length = self._owner.clock, duration(by, field="by")
        now = clock.now()
        kept = (await self._owner.store.extend([self.lease], now=now, until=now + clock.span(length)))[0]
        if kept:
            self.expires = max(self.expires, asyncio.get_running_loop().time() + length / 1000)
        return kept


Ended = Callable[[Delivery, Outcome | BaseException | None], None]
"""Called with a delivery and its outcome, or the exception that the handler raised."""


class TopicExecutor:
    """Runs the deliveries of one route, at most `route.concurrency` at once. Calls `ended` for each outcome that
    counts, `freed` for each free slot, `timed_out` when a time limit passes, and `release` for what no handler will
    see.
    """

    def __init__(
        self,
        route: Route,
        ended: Ended,
        freed: Callable[[TopicExecutor], None],
        timed_out: Callable[[Delivery], None],
        release: Callable[[list[Delivery]], None],
    ) -> None:
        self.route = route
        self.backlogged = False
        """True if the store may have due tasks that there was no room for."""
        self.occupied = 0
        self.running: dict[Delivery, None] = {}
        """In the order in which they began, so that a run can be repeated: the order of a set would vary."""
        self.queue: deque[Delivery] = deque()
        self._ended = ended
        self._freed = freed
        self._timed_out = timed_out
        self._release = release
        self._loop = asyncio.get_running_loop()
        self._deliver = route.sink.deliver
        self._timeout = None if route.timeout is None else route.timeout / 1000
        self._parked: list[asyncio.Future[None]] = []
        self._runners: dict[asyncio.Task[None], None] = {}
        self._context = copy_context()
        self._closing = False
        self._waking = False
        self._idle: asyncio.Future[None] | None = None

    @property
    def free(self) -> int:
        return self.route.concurrency - self.occupied

    def start(self, deliveries: list[Delivery]) -> None:
        """Run these; there is room for them."""
        self.occupied += len(deliveries)
        self.queue.extend(deliveries)
        if deliveries:
            self._wake_one()

    def _wake_one(self) -> None:
        """Let one more runner take from the queue; not two: the one that comes wakes the next."""
        if self._waking:
            return
        while self._parked:
            parked = self._parked.pop()
            if not parked.done():
                self._waking = True
                parked.set_result(None)
                return
        if len(self._runners) < self.route.concurrency:
            self._waking = True
            runner = self._loop.create_task(
                self._run_queue(), name=f"bide {self.route.topic}", context=self._context.copy()
            )
            self._runners[runner] = None
            runner.add_done_callback(self._gone)

    def _gone(self, runner: asyncio.Task[None]) -> None:
        self._runners.pop(runner, None)
        log_defect(runner)

    async def _run_queue(self) -> None:
        """Run what is queued, one after another; park when there is nothing."""
        queue, loop = self.queue, self._loop
        me = asyncio.current_task()
        assert me is not None
        set_running(None)
        base = copy_context()
        try:
            while not self._closing:
                self._waking = False
                turn_ends = loop.time() + _LONGEST_TURN
                while queue:
                    delivery = queue.popleft()
                    if queue:
                        self._wake_one()
                    now = loop.time()
                    if delivery.over or now >= delivery.expires:
                        if not delivery.over:
                            self._release([delivery])  # no handler has seen it, so it must not count as lost
                        self._done_with(delivery)
                        continue
                    if not await self._run(delivery, me) or copy_context() != base:
                        return
                    if now >= turn_ends:
                        await asyncio.sleep(0)
                        turn_ends = loop.time() + _LONGEST_TURN
                if self._closing:
                    return
                parked = loop.create_future()
                self._parked.append(parked)
                await parked
        finally:
            self._runners.pop(me, None)
            self._waking = False  # it may have been this one that was to wake up
            if queue and not self._closing:
                self._wake_one()

    async def _run(self, delivery: Delivery, me: asyncio.Task[None]) -> bool:
        """Deliver, and report the outcome unless it was decided meanwhile. True if the runner may go on."""
        delivery.runner = me
        self.running[delivery] = None
        traced = delivery.record.options
        if traced:
            set_running(delivery.record)
        if self._timeout is not None:
            delivery.timer = self._loop.call_later(self._timeout, self._timed_out, delivery)
        ended: Outcome | BaseException | None
        try:
            ended = await self._deliver(delivery)
        except GeneratorExit as raised:
            if not _is_current(me):  # it is not the handler's: this coroutine itself is thrown away
                self._closing = True
                raise
            ended = raised
        except BaseException as raised:  # noqa: BLE001 - whatever a handler raises is how its delivery ended
            ended = raised
        try:
            if delivery.timer is not None:
                delivery.timer.cancel()
            if traced:
                set_running(None)
            if not delivery.over:
                self._ended(delivery, ended)
        finally:
            self.running.pop(delivery, None)
            self._done_with(delivery)
        if isinstance(ended, KeyboardInterrupt):
            raise ended  # of all that is raised it alone is meant for the loop
        return not (me.cancelling() or isinstance(ended, GeneratorExit))

    def _done_with(self, delivery: Delivery) -> None:
        delivery.over = True
        self.occupied -= 1
        if self._idle is not None and not self.occupied and not self._idle.done():
            self._idle.set_result(None)
        self._freed(self)

    def take_unstarted(self) -> list[Delivery]:
        """Remove and return what no handler has seen yet."""
        unstarted = list(self.queue)
        self.queue.clear()
        self.occupied -= len(unstarted)
        return unstarted

    async def idle(self, patience: float | None) -> bool:
        """Wait until nothing is queued or running, at most `patience` seconds. True if so."""
        if self.occupied:
            self._idle = self._loop.create_future()
            await asyncio.wait([self._idle], timeout=patience)
        return not self.occupied

    async def close(self) -> None:
        """End the runners; cancel whatever still runs. A handler that goes on all the same is logged and left
        behind.
        """
        self._closing = True
        for runner in list(self._runners):
            runner.cancel()
        if self._runners:
            await asyncio.wait(self._runners, timeout=_LAST_WAIT)
        for delivery in self.running:
            _log.error("%s/%s goes on although it was cancelled: the worker ends without it, and it is delivered "
                       "again when its lease has ended", delivery.topic, delivery.key)  # fmt: skip
            delivery.over = True


def _is_current(task: asyncio.Task[Any]) -> bool:
    try:
        return asyncio.current_task() is task
    except RuntimeError:  # no loop runs
        return False


class TopicSlots(Protocol):
    """The slots of a topic, as `TopicExecutor` has them."""

    @property
    def free(self) -> int:
        """How many more of it could run."""
        ...

    @property
    def occupied(self) -> int: ...

    @property
    def backlogged(self) -> bool:
        """True if there may be due tasks that there was no room for."""
        ...


def slots_to_lease(topics: Mapping[Topic, TopicSlots], slots: int, turn: int = 0) -> dict[Topic, int]:
    """How many tasks to ask for, by topic, beginning with another topic each `turn`.

    Topics without room are left out, and so are backlogged ones that get no slot. 0: no slot is left for a topic that
    may have something due.
    """
    free = slots - sum(its.occupied for its in topics.values())
    opened = [topic for topic, its in topics.items() if its.free > 0]
    if free <= 0 or not opened:
        return {}
    if len(topics) == 1:  # there is none to share with
        return {opened[0]: min(free, topics[opened[0]].free)}
    begin = turn % len(opened)
    in_turn = opened[begin:] + opened[:begin]
    backlogged = sorted((one for one in in_turn if topics[one].backlogged), key=lambda one: topics[one].occupied)
    others = [one for one in in_turn if not topics[one].backlogged]
    kept = min(sum(not topics[one].occupied for one in others), max(slots // 8, min(2, slots // 2)))
    asked: dict[Topic, int] = {}
    free -= _share(topics, backlogged, free - kept, asked)
    asked |= dict.fromkeys(others, 0)
    _share(topics, others, free, asked)
    return asked


def _share(topics: Mapping[Topic, TopicSlots], among: Sequence[Topic], count: int, asked: dict[Topic, int]) -> int:
    """Add to `asked` equal parts of `count`, as far as there is room. Returns how many that were."""
    left = count
    while left > 0 and (among := [one for one in among if asked.get(one, 0) < topics[one].free]):
        part = max(1, left // len(among))
        for topic in among:
            has = asked.get(topic, 0)
            more = min(part, left, topics[topic].free - has)
            if more > 0:
                asked[topic] = has + more
                left -= more
    return max(0, count) - max(0, left)


async def lease_in_turn(ask: Callable[[Mapping[Topic, int]], Awaitable[Leased]], asked: Mapping[Topic, int]) -> Leased:
    """Lease what is `asked`; if nothing is due there, search the topics that ask for 0, by halves, for one that is due.

    One call, unless there are more topics than free slots: then as many as it takes to halve them, all together at
    twice the cost of one.
    """
    leased = await ask(asked)
    others = [topic for topic, count in asked.items() if not count]
    if leased.tasks or not others or not _due(leased):
        return leased
    free = max(1, sum(asked.values()))
    while len(others) > free:
        half = others[: max(free, len(others) // 2)]
        others = half if _due(await ask(dict.fromkeys(half, 0))) else others[len(half) :]
    return replace(await ask(dict.fromkeys(others, 1)), next_wake=leased.next_wake)


def _due(leased: Leased) -> bool:
    return leased.next_wake is not None and leased.next_wake <= leased.now
