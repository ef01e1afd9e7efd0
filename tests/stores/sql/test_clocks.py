"""The server's clock counts: a caller whose clock is wrong schedules and works on time."""

from __future__ import annotations

import time

from tests.stores.sql.fixtures import OpensStore
from tests.waiting import PATIENCE, until

from bide.core.instants import In
from bide.core.records import Leased
from bide.testing.store_suite.base import HOUR, done, hold, lease, new, put_one, see, settle

WRONG = 86_400_000
"""A caller's clock in 1970."""
NEAR = PATIENCE * 1_000
"""Milliseconds, far less than that is wrong by."""


def there() -> int:
    """The server is on this machine."""
    return time.time_ns() // 1_000_000


async def test_delays_leases_and_extensions_go_by_the_server(url: str, open_store: OpensStore) -> None:
    store = await open_store(url, clock="server")
    far = await put_one(store, new("far", due=In(HOUR)), now=WRONG)
    assert abs(far.wake_at - there() - HOUR) < NEAR
    assert (await lease(store, now=WRONG + 2 * HOUR)).tasks == [], "not due there"
    record = await put_one(store, new(due=In(10)), now=WRONG)

    async def due() -> list[Leased]:
        leased = await lease(store, now=WRONG, lasts=HOUR)
        return [leased] if leased.tasks else []

    found: list[Leased] = await until(due, "what is due there")
    [leased] = found
    [held] = leased.tasks
    assert abs(held.wake_at - there() - HOUR) < NEAR
    assert abs(leased.now - there()) < NEAR
    assert held.token >= record.wake_at * 1_000
    assert await store.extend([hold(held)], now=WRONG, until=WRONG + 2 * HOUR) == [True]
    assert abs((await see(store, held)).wake_at - there() - 2 * HOUR) < NEAR
    assert await settle(store, done(held), now=WRONG)


async def test_the_clock_is_known(url: str, open_store: OpensStore) -> None:
    store = await open_store(url, clock="server")
    assert abs(await store.time() - there()) < NEAR
    clock = store.clock()
    assert clock is not None
    assert abs(clock.now() - there()) < NEAR
    assert (await open_store(url)).clock() is None
