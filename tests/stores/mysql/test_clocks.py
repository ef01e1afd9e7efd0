"""The server's clock counts: a caller whose clock is wrong schedules and works on time."""

from __future__ import annotations

import asyncio
import time

from tests.stores.mysql.conftest import OpensStore

from bide.core.records import In
from bide.testing.store_suite.acts import HOUR, done, hold, lease, new, put_one, see, settle

WRONG = 86_400_000
"""A caller's clock in 1970."""


def there() -> int:
    """The server is on this machine."""
    return time.time_ns() // 1_000_000


async def test_delays_leases_and_extensions_go_by_the_server(url: str, open_store: OpensStore) -> None:
    store = await open_store(url, clock="server")
    record = await put_one(store, new(due=In(600)), now=WRONG)
    assert abs(record.wake_at - there() - 600) < 5_000
    assert (await lease(store, now=WRONG + HOUR)).tasks == [], "not due there"
    await asyncio.sleep(0.65)
    leased = await lease(store, now=WRONG, lasts=HOUR)
    [held] = leased.tasks
    assert abs(held.wake_at - there() - HOUR) < 5_000
    assert abs(leased.now - there()) < 5_000
    assert held.token >= record.wake_at * 1_000
    assert await store.extend([hold(held)], now=WRONG, until=WRONG + 2 * HOUR) == [True]
    assert abs((await see(store, held)).wake_at - there() - 2 * HOUR) < 5_000
    assert await settle(store, done(held), now=WRONG)


async def test_the_clock_is_known(url: str, open_store: OpensStore) -> None:
    store = await open_store(url, clock="server")
    assert abs(await store.time() - there()) < 1_000
    clock = store.clock()
    assert clock is not None
    assert abs(clock.now() - there()) < 1_000
    assert (await open_store(url)).clock() is None
