"""Opening and closing: what survives, who may open at once; and transactions that the caller shares."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from bide.core.errors import BadInput, StoreUnavailable
from bide.core.instants import Millis
from bide.core.records import At, Cancel, Filter, In, Lease, Move, Page, Ref, Result, State
from bide.ports import HasSchema, JoinsTransaction, Notifies, Store, TellsTime
from bide.testing.store_suite.acts import (
    DAY,
    HOUR,
    KEPT,
    LEASE,
    NOW,
    SECOND,
    bring,
    done,
    lease,
    listed,
    look,
    new,
    put,
    put_one,
    record_of,
    retry,
    see,
    settle,
    take,
    until,
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


class Joining(SuiteBase):
    """P12: where data and tasks share a database, completion joins the caller's own transaction."""

    @staticmethod
    def joining(store: Store) -> JoinsTransaction:
        if not isinstance(store, JoinsTransaction):
            pytest.skip("this store shares no database with the caller")
        return store

    async def test_a_commit_does_all_of_it(self, store: Store) -> None:
        await put(store, new("old"), new("moved", due=At(NOW + DAY)))
        async with self.joining(store).transaction() as joined:
            assert joined.connection is not None
            [added] = await joined.add([new("new", topic="n")], now=NOW)
            [moved] = await joined.change([Move("t", "moved", At(NOW + HOUR))], now=NOW)
            assert (added.result, moved.result) == (Result.CREATED, Result.MOVED)
            assert await joined.get([Ref("n", "new"), Ref("t", "nobody")]) == [added.record, None]
            found = await joined.find(Filter(topic="n"), Page())
            assert found.tasks == [added.record]
        assert await see(store, Ref("n", "new")) == added.record
        assert (await see(store, Ref("t", "moved"))).wake_at == NOW + HOUR

    async def test_a_rollback_undoes_all_of_it(self, store: Store) -> None:
        there = await put_one(store, new("there", due=At(NOW + DAY)))

        async def fail() -> None:
            async with self.joining(store).transaction() as joined:
                await joined.add([new("new")], now=NOW)
                await joined.change([Cancel("t", "there")], now=NOW)
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            await fail()
        assert await look(store, Ref("t", "new")) is None
        assert await see(store, there) == there
        asked = await lease(store, 5)
        assert asked.tasks == []
        assert self.wakes_at(asked.next_wake, NOW + DAY, NOW)

    async def test_a_settle_commits_with_the_transaction(self, store: Store) -> None:
        await put_one(store)
        held = await take(store)
        async with self.joining(store).transaction() as joined:
            assert await joined.settle([done(held, keep_until=KEPT)], now=NOW + SECOND) == [True]
        assert (await see(store, held)).state is State.DONE
        assert not await settle(store, done(held))

    async def test_a_rolled_back_settle_leaves_the_lease_live(self, store: Store) -> None:
        await put_one(store)
        held = await take(store)

        async def fail() -> None:
            async with self.joining(store).transaction() as joined:
                assert await joined.settle([done(held)], now=NOW) == [True]
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            await fail()
        assert await see(store, held) == held
        assert await settle(store, retry(held, In(0)))

    async def test_a_lost_lease_cannot_be_settled_in_a_transaction_either(self, store: Store) -> None:
        await put_one(store)
        first = await take(store)
        second = await take(store, now=NOW + LEASE)
        async with self.joining(store).transaction() as joined:
            assert await joined.settle([done(first)], now=NOW + LEASE) == [False]
        assert await see(store, second) == second

    async def test_a_token_rises_also_after_a_rollback(self, store: Store) -> None:
        before = await put_one(store)
        seen: list[int] = []

        async def fail() -> None:
            async with self.joining(store).transaction() as joined:
                [answer] = await joined.change([Move("t", "k", In(HOUR))], now=NOW)
                seen.append(record_of(answer).token)
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            await fail()
        assert seen[0] > before.token
        assert await see(store, before) == before
        assert (await take(store)).token > before.token

    async def test_a_foreign_connection_is_refused(self, store: Store) -> None:
        for foreign in (object(), None, "connection"):
            with pytest.raises(BadInput):
                self.joining(store).using(foreign)

    async def test_a_task_scheduled_in_a_transaction_is_told_of(self, store: Store) -> None:
        joins = self.joining(store)
        if not isinstance(store, Notifies):
            pytest.skip("this store tells of nothing")
        heard: list[tuple[str, Millis]] = []
        listening = await store.listen(["t"], lambda topic, wake: heard.append((topic, wake)))
        try:
            async with joins.transaction() as joined:
                await joined.add([new(due=At(NOW + SECOND))], now=NOW)
            await until(lambda: ("t", NOW + SECOND) in heard, "tidings of the committed task")
        finally:
            await listening.close()
