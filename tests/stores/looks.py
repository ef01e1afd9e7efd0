"""What the tests of the SQL servers' looks share: a worker that goes on looking."""

from __future__ import annotations

import asyncio
import time

from bide.core.records import Record
from bide.ports import Store
from bide.testing.store_suite.acts import MINUTE, lease


async def soon(store: Store, seconds: float = 1.5) -> list[Record]:
    """What can be leased within that time."""
    for _ in range(int(seconds / 0.05)):
        if found := (await lease(store, 5, lasts=MINUTE)).tasks:
            return found
        await asyncio.sleep(0.05)
    return []


async def goes_on(store: Store, seconds: float) -> None:
    """Leases, and finds nothing."""
    ends = time.monotonic() + seconds
    while time.monotonic() < ends:
        assert (await lease(store, 5, lasts=MINUTE)).tasks == []
        await asyncio.sleep(0.05)
