"""The loop by which a worker leases, and the desk for consumers elsewhere.

So that no wake-up is lost: subscribe first, then lease; what the lease returns says how long to sleep; a notification
since the lease was *sent* counts; it only ever shortens the sleep; every sleep is capped. What is paused is not asked
for, wakes nobody, and is given back where the pause came while the lease was under way.
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from functools import partial

from bide.core.errors import StoreError
from bide.core.events import EventKind, event_of
from bide.core.instants import Millis
from bide.core.records import Due, Leased, Record, Settlement, Topic
from bide.engine.background import begin
from bide.engine.capacity import lease_in_turn
from bide.engine.client import Client
from bide.engine.pauses import HeldBack
from bide.engine.route_registry import RouteSettings, announce_for_ever
from bide.engine.verdicts import dead, given_back, unfit
from bide.engine.waker import Waker
from bide.ports import Policy

_PAUSE_AFTER_ERROR = 0.25


class LeaseLoop(ABC):
    """The loop of a holder of leases: a `_turn` whenever there is something to wake for and it `_wants` anything.

    It leases from the store of an open client, which is to stay open, and heeds that client's pauses at once.
    """

    _log: logging.Logger

    def __init__(self, client: Client, *, of: Collection[Topic] = ()) -> None:
        self.store, self.clock, self.terms = client.store, client.clock, client.terms
        self._recorder, self._history, self._heeding = client.recorder, client.history, client.heeding
        self._waker = Waker(self.clock, self.terms.cap)
        self.wakes = self._waker.wakes
        self.held_back = HeldBack(self.store, self.clock, self._waker.kick, of=of)
        self._stopping = False
        self._loops: list[asyncio.Task[None]] = []

    @abstractmethod
    def _wants(self) -> object:
        """Something true while a turn could lease anything."""

    @abstractmethod
    async def _turn(self) -> Millis | None:
        """Lease; the next wake."""

    def _failed(self, error: Exception) -> None:  # noqa: B027 - a worker has nobody to tell
        """A turn has failed; there is another one soon."""

    def _start_leasing(self) -> None:
        """To be called once the store is subscribed to."""
        self._heeding.append(self.held_back)
        self._loops += begin(self._lease_for_ever(), "leasing"), begin(self.held_back.look_for_ever(), "pauses")

    def _announce(self, routes: Sequence[RouteSettings]) -> None:
        """Let people see how the topics are worked on, as long as the loop runs."""
        self._loops.append(begin(announce_for_ever(self.store, self.clock, self.terms, routes), "routes"))

    async def _stop_leasing(self) -> None:
        """After the turn that is under way."""
        self._stopping = True
        self._waker.kick()
        if self.held_back in self._heeding:
            self._heeding.remove(self.held_back)
        if self._loops:
            await asyncio.wait(self._loops[:1])
            for loop in self._loops[1:]:
                loop.cancel()
            await asyncio.wait(self._loops)
        self._waker.close()

    async def _lease_for_ever(self) -> None:
        while not self._stopping:
            wake: Millis | None = None
            wanted = self._wants()
            if wanted:
                self._waker.forget()
                try:
                    await self.held_back.first()
                    wake = await self._turn()
                except Exception as error:  # noqa: BLE001 - the loop outlives its defects, loudly
                    say = self._log.warning if isinstance(error, StoreError) else self._log.exception
                    say("leasing failed, trying again in %.2f s: %s", _PAUSE_AFTER_ERROR, error)
                    self._failed(error)
                    await asyncio.sleep(_PAUSE_AFTER_ERROR)
                    continue
            await self._waker.sleep(wake)
            if not wanted:
                self._waker.forget()

    async def _lease(self, wants: Mapping[Topic, int], length: Millis, holder: str) -> Leased:
        now = self.clock.now()
        if not wants:
            return Leased([], None, now)
        until = now + self.clock.span(length)
        leased = await lease_in_turn(partial(self.store.lease, now=now, until=until, holder=holder), wants)
        if self._waker.capped and leased.tasks:
            self._waker.found(min(record.planned_at for record in leased.tasks), leased.now)
        return leased

    def _refusal(self, record: Record, policy: Policy, now: Millis, holder: str) -> Settlement | None:
        """The settlement of a task that was leased and must not be delivered; None: it may be. A loss is noted."""
        if record.topic in self.held_back.topics:  # since the lease was sent
            return given_back(record)
        if record.losses:
            self._note(EventKind.LOSS, record, f"lease lost, {record.losses} in a row", holder)
        elif record.deadline is None:
            return None
        why = unfit(record, policy, now)
        return None if why is None else dead(record, why, self.terms.retention_of(record.topic), now)

    def _note(self, kind: EventKind, record: Record, what: str, holder: str, wake: Due | None = None) -> None:
        """Write down in the log of events how a delivery of `record` ended, to wake then."""
        at, began = self.clock.now(), None if kind is EventKind.LOSS else record.started_at
        wake_at = None if wake is None else wake.resolve(at)
        self._recorder.note(event_of(record, kind, at=at, who=holder, what=what, was=began, wake_at=wake_at))

    def _hear(self, topic: Topic, wake: Millis) -> None:
        """A notification of the store."""
        if topic not in self.held_back.topics:
            self._waker.hear(wake)
