"""The routine work of a worker: extend its leases, purge ended tasks, and announce that it is alive."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Collection, Mapping, Sequence

from msgspec import Struct, field

from bide.core.errors import PartlyFailed, StoreError
from bide.core.instants import Millis
from bide.core.lifecycle import holds
from bide.core.records import Topic
from bide.engine.background import repeat
from bide.engine.delivery.executor import Delivery
from bide.ports import Clock, Store

_log = logging.getLogger("bide.lease_extender")
_LOST = "the lease was refused: cancelled, replaced, or held by another worker now"
PAGE = 1_000
"""The most tasks that one purge deletes."""
PURGE_EVERY = 60.0
"""Seconds between purges. The first one comes after a random part of this, so that workers do not purge in step."""
ANNOUNCE_EVERY = 2.0
"""Seconds between two announcements."""
PRESENCE: Millis = 6_000
"""The time for which a worker counts as live after its last announcement."""


class LeaseExtender(Struct, eq=False):
    """Extends the leases of the deliveries in `held` three times per lease, and calls `lost` for each refused one.

    Purges once a minute. Announces the worker as `holder` every two seconds, if the store keeps announcements, and
    passes the live workers to `announced`.
    """

    _store: Store
    _clock: Clock
    _lease: Millis
    _holder: str
    _topics: Collection[Topic]
    _held: Callable[[], list[Delivery]]
    _lost: Callable[[Delivery, str], None]
    _announced: Callable[[Mapping[str, Collection[Topic]]], None]
    asked_at: float = field(default_factory=lambda: asyncio.get_running_loop().time())
    """When leases were last extended."""
    _due_at: float = 0.0

    async def extend_for_ever(self) -> None:
        third = self._lease / 3000
        self._due_at = asyncio.get_running_loop().time() + third
        await repeat("the extension of leases", self._extend_in_time, third, log=_log, first_after=third)

    async def _extend_in_time(self) -> None:
        loop, third = asyncio.get_running_loop(), self._lease / 3000
        behind = loop.time() - self._due_at
        if behind > 2 * third:
            _log.warning(
                "the event loop was blocked for %.1f s, longer than a lease: a handler computes without awaiting; "
                "make it a plain function, so that it runs in a thread", behind,
            )  # fmt: skip
        try:
            await self.extend()
        finally:
            self._due_at = loop.time() + third

    async def extend(self) -> None:
        """Extend all held leases in one call; in another, read those that a handler has extended for longer."""
        asked_at = asyncio.get_running_loop().time()
        expires = asked_at + self._lease / 1000
        held, longer = list[Delivery](), list[Delivery]()
        for delivery in self._held():
            if not delivery.over:
                (held if delivery.expires < expires else longer).append(delivery)
        if held:
            await self._keep(held, expires)
        self.asked_at = asked_at
        if longer:
            await self._check(longer)

    async def _keep(self, held: list[Delivery], expires: float) -> None:
        now = self._clock.now()
        kept: Sequence[object]
        try:
            kept = await self._store.extend(
                [delivery.lease for delivery in held], now=now, until=now + self._clock.span(self._lease)
            )
        except PartlyFailed as partly:
            _log.warning("some leases could not be extended: %s", partly)
            kept = partly.answers
        except StoreError as error:
            _log.warning("%d leases could not be extended: %s", len(held), error)
            return
        for delivery, ok in zip(held, kept, strict=True):
            if isinstance(ok, StoreError):
                continue
            if ok:
                delivery.expires = max(delivery.expires, expires)
            elif not delivery.over:
                self._lost(delivery, _LOST)

    async def _check(self, longer: list[Delivery]) -> None:
        """Find the lost leases among `longer` by a read, since an extension would shorten the others."""
        try:
            found = await self._store.get([delivery.record.ref for delivery in longer])
        except StoreError as error:
            _log.warning("%d leases could not be checked: %s", len(longer), error)
            return
        for delivery, record in zip(longer, found, strict=True):
            if not delivery.over and not holds(record, delivery.token):
                self._lost(delivery, _LOST)

    # --- purge and presence

    async def purge_for_ever(self) -> None:
        await repeat("purging", self.purge, PURGE_EVERY, log=_log, first_after=PURGE_EVERY * random.random())

    async def purge(self) -> None:
        """Delete the ended tasks whose retention has passed, a page at a time."""
        purged = PAGE
        while purged == PAGE:
            purged = await self._store.purge(now=self._clock.now(), limit=PAGE)

    async def announce_for_ever(self) -> None:
        if self._store.features.workers is not None:
            await repeat("announcing this worker", self._announce, ANNOUNCE_EVERY, log=_log)

    async def leave(self) -> None:
        """Announce that this worker has stopped."""
        try:
            await self._announce(gone=True)
        except StoreError as error:
            _log.warning("leaving could not be announced; it shows by itself after a while: %s", error)

    async def _announce(self, *, gone: bool = False) -> None:
        if (workers := self._store.features.workers) is not None:
            now = self._clock.now()
            topics, until = ([], now) if gone else (list(self._topics), now + PRESENCE)
            self._announced(await workers.announce(self._holder, topics, until, now=now))
