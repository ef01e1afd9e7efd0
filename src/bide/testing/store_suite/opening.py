"""Opening and closing: what survives, and who may open at once."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from bide.core.errors import StoreUnavailable
from bide.core.records import At, Cancel, Filter, In, Lease, Move, Page, Ref, Result, State
from bide.ports import HasSchema, Store, TellsTime
from bide.testing.store_suite.acts import (
    DAY,
    KEPT,
    NOW,
    bring,
    done,
    lease,
    listed,
    look,
    new,
    put_one,
    see,
    settle,
    take,
)
from bide.testing.store_suite.base import SuiteBase


class Opening(SuiteBase):
    """P2: what was acknowledged is there again, within the store's stated durability."""

    async def test_it_is_a_store(self, store: Store) -> None:
        assert isinstance(store, Store)

    async def test_a_second_close_does_nothing(self, store: Store) -> None:
        await store.close()
        await store.close()

    async def test_a_closed_store_is_unavailable(self, store: Store) -> None:
        await put_one(store)
        await store.close()
        calls: list[Callable[[], Awaitable[object]]] = [
            lambda: store.add([new()], now=NOW),
            lambda: store.change([Cancel("t", "k")], now=NOW),
            lambda: store.get([Ref("t", "k")]),
            lambda: store.find(Filter(), Page()),
            lambda: store.tally(),
            lambda: lease(store),
            lambda: store.extend([Lease("t", "k", 1)], now=NOW, until=NOW),
            lambda: store.settle([], now=NOW),
            lambda: store.purge(now=NOW, limit=1),
        ]
        for call in calls:
            with pytest.raises(StoreUnavailable):
                await call()

    async def test_two_stores_of_different_places_share_nothing(self, store: Store, tmp_path: Path) -> None:
        (tmp_path / "elsewhere").mkdir()
        other = await self.make_store(tmp_path / "elsewhere")
        await other.open()
        try:
            await put_one(store)
            assert await listed(other, Filter()) == []
        finally:
            await other.close()

    async def test_every_state_survives_a_close(self, store: Store, tmp_path: Path) -> None:
        if not self.durable:
            pytest.skip("this store ends with its process")
        for state in State:
            await bring(store, state, topic=state.value, group="g")
        await put_one(store, new("far", due=At(NOW + 400 * DAY), deadline=KEPT * 2, options=b"\x80"))
        before = await listed(store, Filter())
        await store.close()
        again = await self.peer(store, tmp_path)
        try:
            assert await listed(again, Filter()) == before
            assert len(await listed(again, Filter(group="g"))) == 5
            held = await see(again, Ref("leased", "k"))
            assert await settle(again, done(held)), "a lease outlives the connection it was taken on"
            assert (await take(again, topic="waiting")).attempt == 1
            assert await again.purge(now=KEPT, limit=100) == 3
        finally:
            await again.close()

    async def test_a_token_rises_also_across_a_close(self, store: Store, tmp_path: Path) -> None:
        if not self.durable:
            pytest.skip("this store ends with its process")
        last = 0
        for _ in range(3):
            opened = await self.peer(store, tmp_path)
            try:
                await put_one(opened, now=NOW)
                held = await take(opened)
                assert held.token > last
                last = held.token
                assert await settle(opened, done(held)), "and nothing of the task itself is left to go by"
            finally:
                await opened.close()

    async def test_what_one_client_did_another_sees_at_once(self, store: Store, tmp_path: Path) -> None:
        if not self.durable:
            pytest.skip("this store has one client")
        other = await self.peer(store, tmp_path)
        try:
            record = await put_one(store)
            assert await look(other, record) == record
            held = await take(other)
            [answer] = await store.change([Move("t", "k", In(0))], now=NOW)
            assert (answer.result, answer.record) == (Result.UNDER_WAY, held)
            assert await settle(store, done(held)), "a lease is settled by whoever knows its token"
            assert await look(other, record) is None
        finally:
            await other.close()

    async def test_twenty_clients_can_open_a_new_store_at_once(self, tmp_path: Path) -> None:
        if not self.durable:
            pytest.skip("this store has one client")
        stores = [await self.make_store(tmp_path) for _ in range(20)]
        try:
            await asyncio.gather(*(store.open() for store in stores))
            await asyncio.gather(*(put_one(store, new(str(number))) for number, store in enumerate(stores)))
            for store in stores:
                assert len(await listed(store, Filter())) == 20
        finally:
            await asyncio.gather(*(store.close() for store in stores))

    async def test_an_open_store_has_the_schema_that_the_code_wants(self, store: Store) -> None:
        if not isinstance(store, HasSchema):
            pytest.skip("this store has no schema")
        found, wanted = await store.schema_version()
        assert found == wanted
        await store.migrate()
        assert await store.schema_version() == (found, wanted)

    async def test_a_store_with_a_clock_tells_it(self, store: Store) -> None:
        if not isinstance(store, TellsTime):
            pytest.skip("this store has no clock of its own")
        first = await store.time()
        assert 1_600_000_000_000 < first <= await store.time()
