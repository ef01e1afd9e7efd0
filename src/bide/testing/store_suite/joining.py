"""Joining: tasks and the caller's data in one transaction, committed together or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from bide.core.errors import BadInput
from bide.core.instants import Millis
from bide.core.records import At, Cancel, Filter, In, Move, Page, Ref, Result, State
from bide.ports import JoinsTransaction, Notifies, Store
from bide.testing.store_suite.acts import (
    DAY,
    HOUR,
    KEPT,
    LEASE,
    NOW,
    SECOND,
    done,
    lease,
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

    async def test_the_callers_own_rows_are_committed_with_the_tasks(self, store: Store, tmp_path: Path) -> None:
        await put_one(store)
        held = await take(store)
        async with self.joining(store).transaction() as joined:
            await self.write_text(joined.connection, "the effect")
            assert await joined.settle([done(held)], now=NOW) == [True]
        assert await self.texts(tmp_path) == ["the effect"]
        assert await look(store, held) is None

    async def test_the_callers_own_rows_are_undone_with_the_tasks(self, store: Store, tmp_path: Path) -> None:
        await put_one(store)
        held = await take(store)

        async def fail() -> None:
            async with self.joining(store).transaction() as joined:
                await self.write_text(joined.connection, "the effect")
                assert await joined.settle([done(held)], now=NOW) == [True]
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            await fail()
        assert await self.texts(tmp_path) == []
        assert await see(store, held) == held

    async def test_the_verbs_join_the_callers_own_transaction(self, store: Store, tmp_path: Path) -> None:
        joins = self.joining(store)
        await put(store, new("settled"), new("moved", due=At(NOW + DAY)))
        held = await take(store)
        async with self.callers_transaction(tmp_path) as connection:
            joined = joins.using(connection)
            await self.write_text(connection, "an order")
            [added] = await joined.add([new("added", topic="n")], now=NOW)
            assert await joined.settle([done(held)], now=NOW) == [True]
            [moved] = await joined.change([Move("t", "moved", At(NOW + HOUR))], now=NOW)
        assert await self.texts(tmp_path) == ["an order"]
        assert await see(store, Ref("n", "added")) == added.record
        assert await look(store, held) is None
        assert await see(store, Ref("t", "moved")) == moved.record

    async def test_the_verbs_are_undone_with_the_callers_own_transaction(self, store: Store, tmp_path: Path) -> None:
        joins = self.joining(store)
        await put_one(store)
        held = await take(store)

        async def fail() -> None:
            async with self.callers_transaction(tmp_path) as connection:
                joined = joins.using(connection)
                await self.write_text(connection, "an order")
                await joined.add([new("added", topic="n")], now=NOW)
                assert await joined.settle([done(held)], now=NOW) == [True]
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            await fail()
        assert await self.texts(tmp_path) == []
        assert await look(store, Ref("n", "added")) is None
        assert await see(store, held) == held
        assert await settle(store, done(held))

    async def test_a_verb_that_fails_leaves_the_callers_transaction_usable(self, store: Store, tmp_path: Path) -> None:
        joins = self.joining(store)
        there = await put_one(store, new("there", due=At(NOW + DAY)))
        async with self.callers_transaction(tmp_path) as connection:
            joined = joins.using(connection)
            await self.write_text(connection, "an order")
            with pytest.raises(BadInput):
                await joined.add([new("ok"), new("a\ud800")], now=NOW)
            [added] = await joined.add([new("added", topic="n")], now=NOW)
        assert await self.texts(tmp_path) == ["an order"]
        assert await look(store, Ref("t", "ok")) is None, "of the one that failed nothing is left"
        assert await see(store, Ref("n", "added")) == added.record
        assert await see(store, there) == there

    async def test_the_callers_commit_tells_of_what_it_scheduled(self, store: Store, tmp_path: Path) -> None:
        joins = self.joining(store)
        if not isinstance(store, Notifies) or not self.hears_commits:
            pytest.skip("this store tells of no commit of others")
        heard: list[tuple[str, Millis]] = []
        listening = await store.listen(["t"], lambda topic, wake: heard.append((topic, wake)))
        try:
            async with self.callers_transaction(tmp_path) as connection:
                await joins.using(connection).add([new(due=At(NOW + SECOND))], now=NOW)
                assert heard == []
            await until(lambda: any(topic == "t" for topic, _ in heard), "tidings of the committed task")
        finally:
            await listening.close()

    async def test_several_calls_in_one_transaction_see_each_other(self, store: Store, tmp_path: Path) -> None:
        joins = self.joining(store)
        async with self.callers_transaction(tmp_path) as connection:
            joined = joins.using(connection)
            tokens = []
            for due in (DAY, HOUR, SECOND):
                [answer] = await joined.add([new(due=At(NOW + due))], now=NOW)
                tokens.append(record_of(answer).token)
            [moved] = await joined.change([Move("t", "k", At(NOW))], now=NOW)
            tokens.append(record_of(moved).token)
            assert tokens == sorted(set(tokens))
            assert await joined.get([Ref("t", "k")]) == [moved.record]
            [cancelled] = await joined.change([Cancel("t", "k")], now=NOW)
            assert cancelled.result is Result.CANCELLED
            [again] = await joined.add([new()], now=NOW)
            assert again.result is Result.CREATED
        assert await see(store, Ref("t", "k")) == again.record
        assert (await take(store)).token > tokens[-1]
