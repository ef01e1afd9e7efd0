"""A flood of one topic, by the server's clock: after a lease that got all it wanted the next asks for nothing else."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable

import pytest

from bide.core.instants import In
from bide.core.names import new_id
from bide.core.records import Leased, NewTask
from bide.stores.postgres import PostgresStore
from bide.testing.proxy import Act, FaultProxy
from bide.testing.store_suite.base import add_all

Opens = Callable[..., Awaitable[PostgresStore]]
LEASE = 3_600_000


def _now() -> int:
    return time.time_ns() // 1_000_000


async def _flood(store: PostgresStore, count: int) -> None:
    await add_all(store, [NewTask("t", str(number), new_id(), In(0)) for number in range(count)], now=_now())
    await add_all(store, [NewTask("t", "later", new_id(), In(3_600_000))], now=_now())


async def _lease(store: PostgresStore, want: int) -> Leased:
    return await store.lease({"t": want}, now=_now(), until=_now() + LEASE, holder="w")


async def test_it_is_taken_whole_each_once(through: Opens) -> None:
    store = await through(clock="server")
    await _flood(store, 450)
    taken: list[str] = []
    tokens: list[int] = []
    for _ in range(4):
        leased = await _lease(store, 100)
        assert len(leased.tasks) == 100
        assert {record.holder for record in leased.tasks} == {"w"}
        assert all(record.attempt == 1 and record.wake_at > leased.now for record in leased.tasks)
        wakes = [record.planned_at for record in leased.tasks]
        assert wakes == sorted(wakes)
        taken += [record.key for record in leased.tasks]
        tokens.append(max(record.token for record in leased.tasks))
    last = await _lease(store, 100)
    taken += [record.key for record in last.tasks]
    assert sorted(taken, key=int) == [str(number) for number in range(450)]
    assert tokens == sorted(set(tokens)), "each lease has a higher token than the one before"
    assert last.next_wake is not None
    assert last.next_wake <= last.now + 1_000
    again = await _lease(store, 100)
    assert again.tasks == []
    assert again.next_wake is not None
    assert again.next_wake > again.now, "somebody who asks at once would never stop"


@pytest.mark.parametrize("act", [Act.CUT, Act.LOSE_REPLY], ids=["never arrived", "answer lost"])
async def test_what_is_cut_anywhere_is_taken_once(act: Act, proxy: FaultProxy, through: Opens) -> None:
    store = await through(clock="server")
    await _flood(store, 1_000)
    taken = [record.key for record in (await _lease(store, 50)).tasks]
    for place in range(20):
        fault = proxy.fault(act, skip=place)
        taken += [record.key for record in (await _lease(store, 50)).tasks]
        if not fault.hits:
            await proxy.heal()
            break
    assert place >= 1, "nothing was cut"
    while leased := (await _lease(store, 50)).tasks:
        taken += [record.key for record in leased]
    assert sorted(taken, key=int) == [str(number) for number in range(1_000)]
