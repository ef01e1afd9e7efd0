"""Keeps the leases of running handlers alive, all of them in one call, and tells a handler that it has lost its own."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from bide.core.errors import PartlyFailed, StoreError
from bide.core.instants import Millis
from bide.engine.delivery import Delivery
from bide.ports import Clock, Store

_log = logging.getLogger("bide.keeper")


class Keeper:
    """Extends what `held` gives, three times within a lease; `lost` is called for each that is refused."""

    def __init__(
        self,
        store: Store,
        clock: Clock,
        lease: Millis,
        held: Callable[[], list[Delivery]],
        lost: Callable[[Delivery, str], None],
    ) -> None:
        self._store = store
        self._clock = clock
        self._lease = lease
        self._held = held
        self._lost = lost
        self.blocked = 0
        """How often the event loop was found blocked for longer than a lease."""

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        lease = self._lease / 1000
        pause = lease / 3
        while True:
            expected = loop.time() + pause
            await asyncio.sleep(pause)
            behind = loop.time() - expected
            if behind > lease - pause:
                self.blocked += 1
                _log.warning(
                    "the event loop was blocked for %.1f s, longer than a lease: a handler computes without awaiting; "
                    "make it a plain function, so that it runs in a thread", behind,
                )  # fmt: skip
            await self.extend()

    async def extend(self) -> None:
        """One call for everything that is held now."""
        held = [delivery for delivery in self._held() if not delivery.over]
        if not held:
            return
        asked_at = asyncio.get_running_loop().time()
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
                delivery.expires = asked_at + self._lease / 1000
            elif not delivery.over:
                self._lost(delivery, "the lease was refused: cancelled, replaced, or held by somebody else now")
