"""Sends the outcomes of this process's deliveries to the store, in batches.

One batch is in flight at a time (one per part of a store with several parts, so that no part waits for an unavailable
one); outcomes that come meanwhile go with the next. Without a backlog, an outcome goes out at the end of the current
turn of the event loop. With a backlog (`busy`), outcomes gather for some milliseconds: on SQLite a task settled among a
thousand costs 9 µs, among a hundred 14 µs, since each commit writes every index page that it touched. If a process dies
before it sends an outcome, the task is delivered again. While the store is unavailable, the settler keeps retrying. It
gives up an outcome only when the worker closes; then the lease expires and the task is delivered again (P2).
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Sequence
from functools import partial

from msgspec import Struct, field

from bide.core.errors import PartlyFailed, StoreError
from bide.core.records import Settlement
from bide.engine.background import begin
from bide.engine.delivery.executor import Delivery
from bide.ports import Clock, Pending, Store

_log = logging.getLogger("bide.settler")
_LIMIT = 1_000
_GATHER = 0.01
"""Seconds for which outcomes gather while there is a backlog."""
_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 1.0
_CATCHING_UP = 1.0
"""The most seconds that the next lease waits for outcomes whose own leases have expired."""

OnSettled = Callable[[Delivery, Settlement, bool], None]


class Settler:
    """Takes outcomes by `put`, and calls `on_settled` when the store has answered, with True if it accepted."""

    def __init__(self, store: Store, clock: Clock, on_settled: OnSettled, busy: Callable[[], bool]) -> None:
        self._make = partial(_Outbox, store, clock, on_settled, busy)
        parts = store.features.parts
        self._part_of = None if parts is None else parts.part_of
        self._outboxes: dict[int, _Outbox] = {}

    def put(self, delivery: Delivery, settlement: Settlement) -> None:
        part = 0 if self._part_of is None else self._part_of(settlement.topic, settlement.key)
        outbox = self._outboxes.get(part)
        if outbox is None:
            outbox = self._outboxes[part] = self._make()
        outbox.put(delivery, settlement)

    def behind(self, by: float) -> list[_Outbox]:
        """The outboxes with outcomes whose leases end before `by`. If they are not sent first, their own worker may
        lease those tasks and run them again. In a store with several parts, unavailable parts are left out.
        """
        return [
            outbox
            for outbox in self._outboxes.values()
            if outbox.earliest < by and (self._part_of is None or not outbox.failing)
        ]

    async def catch_up(self, by: float) -> None:
        """Before a lease, send the outcomes of `behind`, as long as the store accepts them."""
        loop = asyncio.get_running_loop()
        ends = loop.time() + _CATCHING_UP
        while (late := self.behind(by)) and loop.time() < ends:
            await asyncio.wait([outbox.hurry() for outbox in late], timeout=_CATCHING_UP)
            if any(outbox.failing for outbox in late):
                return

    async def drain(self) -> None:
        """Wait until every outcome so far is in the store, or was given up because the store is unreachable."""
        await asyncio.gather(*(outbox.drain() for outbox in self._outboxes.values()))


class _Outbox(Struct, eq=False):
    """The outcomes in transit to one part of the store."""

    _store: Store
    _clock: Clock
    _on_settled: OnSettled
    _more_to_come: Callable[[], bool]
    _loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)
    _outbox: list[tuple[Delivery, Settlement]] = []
    _late: set[Pending[bool]] = set()
    _busy: bool = False
    _task: asyncio.Task[None] | None = None
    _timer: asyncio.TimerHandle | None = None
    _closing: bool = False
    _earliest: float = math.inf
    """When the first lease ends, among the waiting outcomes."""
    _sending: float = math.inf
    """The same, among those in flight."""
    _answered: asyncio.Future[None] | None = None
    _pausing: asyncio.Future[None] | None = None
    failing: bool = False
    """True after the store has failed a batch, until it accepts one."""

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
        """Send at once, or with a backlog once enough outcomes have gathered or some time has passed."""
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
        self._task = begin(self._send(batch), "settler")
        self._task.add_done_callback(self._sent)

    def _sent(self, task: asyncio.Task[None]) -> None:
        """Go on however the sending ended, even if it was cancelled before its first step."""
        self._task, self._sending = None, math.inf
        self._answered_all(failing=False)
        if self._outbox:
            self._later()
        else:
            self._busy = False

    async def _send(self, batch: list[tuple[Delivery, Settlement]]) -> None:
        """Send until the store has all outcomes. Only those whose part of the store is unavailable are resent."""
        pause = _FIRST_PAUSE
        while True:
            left, why = list[tuple[Delivery, Settlement]](), None
            for one, answer in zip(batch, await self._ask(batch), strict=True):
                if isinstance(answer, int):
                    self._tell(*one, bool(answer))
                elif isinstance(answer, StoreError):
                    left.append(one)
                    why = why or answer
                elif isinstance(answer, Pending):
                    self._answer_later(*one, answer)
            if not left:
                return
            self._answered_all(failing=True)
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
        """Send the gathering outcomes now. The future is done when the store has given any answer."""
        if self._timer is not None:
            self._timer.cancel()
            self._start()
        if self._pausing is not None and not self._pausing.done():
            self._pausing.set_result(None)
        if self._answered is None:
            self._answered = self._loop.create_future()
        return self._answered

    def _answered_all(self, *, failing: bool) -> None:
        self.failing = failing
        if self._answered is not None:
            self._answered.set_result(None)
            self._answered = None

    async def _ask(self, batch: list[tuple[Delivery, Settlement]]) -> Sequence[object]:
        """The store's answers, with an error for each failed outcome. A defect fails only its own outcome."""
        try:
            accepted = await self._store.settle([one for _, one in batch], now=self._clock.now())
            if len(accepted) != len(batch):
                raise RuntimeError(f"{len(accepted)} answers to {len(batch)} outcomes")
        except PartlyFailed as partly:
            return partly.answers
        except StoreError as error:
            return [error] * len(batch)
        except Exception as defect:  # noqa: BLE001 - an error of the store must not fail the other outcomes
            if len(batch) > 1:
                return [answer for one in batch for answer in await self._ask([one])]
            _, settlement = batch[0]
            _log.exception("the outcome of %s/%s cannot be kept; it is delivered again when its lease has ended",
                           settlement.topic, settlement.key)  # fmt: skip
            return [defect]
        return accepted

    def _tell(self, delivery: Delivery, settlement: Settlement, accepted: bool) -> None:
        try:
            self._on_settled(delivery, settlement, accepted)
        except Exception:  # noqa: BLE001 - an observer's defect must not stop other observers
            _log.exception("%s/%s is settled, and an observer of it failed", settlement.topic, settlement.key)

    def _answer_later(self, delivery: Delivery, settlement: Settlement, answer: Pending[bool]) -> None:
        """Wait in the background for a task that an open transaction has locked; other outcomes do not wait."""
        self._late.add(answer)

        def answered(answer: Pending[bool]) -> None:
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
