"""Capabilities that only some stores have; skipped where there is none: notifications, presence, joining."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from pathlib import Path
from typing import TypeVar

import pytest

from bide.core.errors import BadInput
from bide.core.instants import At, In, Millis
from bide.core.names import new_id
from bide.core.records import Cancel, Filter, Move, Page, Redrive, Ref, Result, State
from bide.ports import JoinsTransaction, Store, WorkerRegistry
from bide.testing.store_suite.base import (
    DAY,
    HOUR,
    KEPT,
    LEASE,
    MINUTE,
    NOW,
    SECOND,
    Notices,
    SuiteBase,
    again,
    bring,
    defer,
    do,
    done,
    look,
    new,
    notified,
    put,
    put_and_take,
    put_one,
    record_of,
    retry,
    see,
    settle,
    take,
    until,
)


class Listening(SuiteBase):
    """P8: a wake-up cuts a sleep short and carries the time. Notifications may be late or double; here none is lost."""

    @staticmethod
    async def _hears(heard: Notices, topic: str, wake: Millis) -> None:
        """A notification of a wake at that time or of one before it, which makes the listener look."""
        await until(lambda: any(t == topic and at <= wake for t, at in heard), f"notice of {topic} at {wake}")
        heard.clear()

    async def test_a_new_task_is_told_of(self, store: Store) -> None:
        async with notified(store, ["t"]) as heard:
            await put_one(store, new(due=In(5 * SECOND)))
            await self._hears(heard, "t", NOW + 5 * SECOND)
            await put_one(store)
            await self._hears(heard, "t", NOW)

    async def test_one_that_was_moved_forward_is_told_of(self, store: Store) -> None:
        async with notified(store, ["t"]) as heard:
            await put_one(store, new(due=In(DAY)))
            await do(store, Move("t", "k", In(SECOND)))
            await self._hears(heard, "t", NOW + SECOND)

    async def test_one_that_was_redriven_is_told_of(self, store: Store) -> None:
        await bring(store, State.DEAD)
        async with notified(store, ["t"]) as heard:
            await do(store, Redrive("t", "k", new_id(), In(SECOND)))
            await self._hears(heard, "t", NOW + SECOND)

    async def test_one_that_waits_again_is_told_of(self, store: Store) -> None:
        await put_one(store)
        async with notified(store, ["t"]) as heard:
            for outcome in (retry, defer, again):
                assert await settle(store, outcome(await take(store, now=NOW + SECOND), At(NOW + SECOND)))
                await self._hears(heard, "t", NOW + SECOND)

    async def test_the_earliest_of_a_batch_is_told_of(self, store: Store) -> None:
        async with notified(store, ["a", "b"]) as heard:
            await put(
                store,
                *(new(str(delay), topic="a", due=In(delay * SECOND)) for delay in (7, 3, 5)),
                new("k", topic="b", due=In(9 * SECOND)),
            )
            await self._hears(heard, "a", NOW + 3 * SECOND)

    async def test_a_listener_hears_of_its_own_topics_only(self, store: Store) -> None:
        async with notified(store, ["mine"]) as heard:
            await put(store, new(topic="other"), new(topic="mine", due=In(SECOND)), new(topic="mine too"))
            await until(lambda: bool(heard), "notice of my topic")
            assert {topic for topic, _ in heard} == {"mine"}

    async def test_every_listener_hears(self, store: Store) -> None:
        async with notified(store, ["t"]) as one, notified(store, ["t", "u"]) as two:
            await put_one(store)
            await self._hears(one, "t", NOW)
            await self._hears(two, "t", NOW)

    async def test_after_a_close_nothing_more_is_heard(self, store: Store) -> None:
        async with notified(store, ["t"]) as closed:
            pass
        async with notified(store, ["t"]) as heard:
            await put_one(store)
            await self._hears(heard, "t", NOW)
        assert closed == []

    async def test_a_close_also_ends_what_is_on_its_way(self, store: Store) -> None:
        async with notified(store, ["t"]) as other:
            async with notified(store, ["t"]) as closed:
                await put_one(store)
            before = len(closed)
            await self._hears(other, "t", NOW)
            assert len(closed) == before

    async def test_a_listener_that_fails_harms_nobody(self, store: Store) -> None:
        if (wakes := store.features.wakes) is None:
            pytest.skip("this store tells of nothing")

        def fail(topic: str, wake: Millis) -> None:
            raise ValueError(f"{topic} {wake}")

        failing = await wakes.listen(["t"], fail)
        try:
            async with notified(store, ["t"]) as heard:
                assert (await put_one(store)).key == "k"
                await self._hears(heard, "t", NOW)
                assert (await take(store)).attempt == 1
        finally:
            await failing.close()


class Announcing(SuiteBase):
    """Workers and their topics: known to all, and forgotten when their time has passed."""

    @pytest.fixture
    def workers(self, store: Store) -> WorkerRegistry:
        if (workers := store.features.workers) is None:
            pytest.skip("this store does not know who works")
        return workers

    @staticmethod
    def seen(live: dict[str, list[str]]) -> dict[str, list[str]]:
        return {holder: sorted(topics) for holder, topics in live.items()}

    async def test_whoever_announces_is_seen_by_all(self, workers: WorkerRegistry) -> None:
        first = await workers.announce("one", ["a", "b"], NOW + MINUTE, now=NOW)
        assert self.seen(first) == {"one": ["a", "b"]}
        second = await workers.announce("two", ["b"], NOW + MINUTE, now=NOW)
        assert self.seen(second) == {"one": ["a", "b"], "two": ["b"]}

    async def test_one_whose_time_has_passed_is_gone(self, workers: WorkerRegistry) -> None:
        await workers.announce("one", ["a"], NOW + SECOND, now=NOW)
        before = await workers.announce("two", ["a"], NOW + MINUTE, now=NOW + SECOND - 1)
        assert set(before) == {"one", "two"}
        after = await workers.announce("two", ["a"], NOW + MINUTE, now=NOW + SECOND)
        assert set(after) == {"two"}

    async def test_to_announce_again_prolongs_and_renews_the_topics(self, workers: WorkerRegistry) -> None:
        await workers.announce("one", ["a"], NOW + SECOND, now=NOW)
        await workers.announce("one", ["b"], NOW + MINUTE, now=NOW)
        seen = self.seen(await workers.announce("two", ["c"], NOW + MINUTE, now=NOW + 2 * SECOND))
        assert seen == {"one": ["b"], "two": ["c"]}

    async def test_no_topics_means_that_it_has_gone(self, workers: WorkerRegistry) -> None:
        await workers.announce("one", ["a"], NOW + MINUTE, now=NOW)
        await workers.announce("two", ["a"], NOW + MINUTE, now=NOW)
        assert set(await workers.announce("one", [], NOW + MINUTE, now=NOW)) == {"two"}
        assert await workers.announce("two", [], NOW + MINUTE, now=NOW) == {}


Inside = TypeVar("Inside")


@asynccontextmanager
async def _failing(transaction: AbstractAsyncContextManager[Inside]) -> AsyncIterator[Inside]:
    """The transaction, whose block ends with an error."""
    with suppress(ZeroDivisionError):
        async with transaction as one:
            yield one
            raise ZeroDivisionError


class Joining(SuiteBase):
    """P12: where data and tasks share a database, completion joins the caller's own transaction."""

    @pytest.fixture
    def joins(self, store: Store) -> JoinsTransaction:
        if (transactions := store.features.transactions) is None:
            pytest.skip("this store shares no database with the caller")
        return transactions

    async def test_a_commit_does_all_of_it(self, store: Store, joins: JoinsTransaction) -> None:
        await put(store, new("old"), new("moved", due=At(NOW + DAY)))
        async with joins.transaction() as joined:
            assert joined.connection is not None
            [added] = await joined.add([new("new", topic="n")], now=NOW)
            [moved] = await joined.change([Move("t", "moved", At(NOW + HOUR))], now=NOW)
            assert (added.result, moved.result) == (Result.CREATED, Result.MOVED)
            assert await joined.get([Ref("n", "new"), Ref("t", "nobody")]) == [added.record, None]
            found = await joined.find(Filter(topic="n"), Page())
            assert found.tasks == [added.record]
        assert await see(store, Ref("n", "new")) == added.record
        assert (await see(store, Ref("t", "moved"))).wake_at == NOW + HOUR

    async def test_a_rollback_undoes_all_of_it(self, store: Store, joins: JoinsTransaction) -> None:
        there = await put_one(store, new("there", due=At(NOW + DAY)))
        async with _failing(joins.transaction()) as joined:
            await joined.add([new("new")], now=NOW)
            await joined.change([Cancel("t", "there")], now=NOW)
        assert await look(store, Ref("t", "new")) is None
        assert await see(store, there) == there
        await self.rests_until(store, NOW + DAY)

    async def test_a_settle_commits_with_the_transaction(self, store: Store, joins: JoinsTransaction) -> None:
        held = await put_and_take(store)
        async with joins.transaction() as joined:
            assert await joined.settle([done(held, keep_until=KEPT)], now=NOW + SECOND) == [True]
        assert (await see(store, held)).state is State.DONE
        assert not await settle(store, done(held))

    async def test_a_rolled_back_settle_leaves_the_lease_live(self, store: Store, joins: JoinsTransaction) -> None:
        held = await put_and_take(store)
        async with _failing(joins.transaction()) as joined:
            assert await joined.settle([done(held)], now=NOW) == [True]
        assert await see(store, held) == held
        assert await settle(store, retry(held, In(0)))

    async def test_a_lost_lease_cannot_be_settled_in_a_transaction_either(
        self, store: Store, joins: JoinsTransaction
    ) -> None:
        first = await put_and_take(store)
        second = await take(store, now=NOW + LEASE)
        async with joins.transaction() as joined:
            assert await joined.settle([done(first)], now=NOW + LEASE) == [False]
        assert await see(store, second) == second

    async def test_a_token_rises_also_after_a_rollback(self, store: Store, joins: JoinsTransaction) -> None:
        before = await put_one(store)
        seen: list[int] = []
        async with _failing(joins.transaction()) as joined:
            [answer] = await joined.change([Move("t", "k", In(HOUR))], now=NOW)
            seen.append(record_of(answer).token)
        assert seen[0] > before.token
        assert await see(store, before) == before
        assert (await take(store)).token > before.token

    async def test_a_foreign_connection_is_refused(self, store: Store, joins: JoinsTransaction) -> None:
        for foreign in (object(), None, "connection"):
            with pytest.raises(BadInput):
                joins.using(foreign)

    async def test_a_task_scheduled_in_a_transaction_is_told_of(self, store: Store, joins: JoinsTransaction) -> None:
        async with notified(store, ["t"]) as heard:
            async with joins.transaction() as joined:
                await joined.add([new(due=At(NOW + SECOND))], now=NOW)
            await until(lambda: ("t", NOW + SECOND) in heard, "notice of the committed task")

    async def test_the_callers_own_rows_are_committed_with_the_tasks(
        self, store: Store, joins: JoinsTransaction, tmp_path: Path
    ) -> None:
        held = await put_and_take(store)
        async with joins.transaction() as joined:
            await self.write_text(joined.connection, "the effect")
            assert await joined.settle([done(held)], now=NOW) == [True]
        assert await self.texts(tmp_path) == ["the effect"]
        assert await look(store, held) is None

    async def test_the_callers_own_rows_are_undone_with_the_tasks(
        self, store: Store, joins: JoinsTransaction, tmp_path: Path
    ) -> None:
        held = await put_and_take(store)
        async with _failing(joins.transaction()) as joined:
            await self.write_text(joined.connection, "the effect")
            assert await joined.settle([done(held)], now=NOW) == [True]
        assert await self.texts(tmp_path) == []
        assert await see(store, held) == held

    async def test_the_verbs_join_the_callers_own_transaction(
        self, store: Store, joins: JoinsTransaction, tmp_path: Path
    ) -> None:
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

    async def test_the_verbs_are_undone_with_the_callers_own_transaction(
        self, store: Store, joins: JoinsTransaction, tmp_path: Path
    ) -> None:
        held = await put_and_take(store)
        async with _failing(self.callers_transaction(tmp_path)) as connection:
            joined = joins.using(connection)
            await self.write_text(connection, "an order")
            await joined.add([new("added", topic="n")], now=NOW)
            assert await joined.settle([done(held)], now=NOW) == [True]
        assert await self.texts(tmp_path) == []
        assert await look(store, Ref("n", "added")) is None
        assert await see(store, held) == held
        assert await settle(store, done(held))

    async def test_a_verb_that_fails_leaves_the_callers_transaction_usable(
        self, store: Store, joins: JoinsTransaction, tmp_path: Path
    ) -> None:
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

    async def test_the_callers_commit_tells_of_what_it_scheduled(
        self, store: Store, joins: JoinsTransaction, tmp_path: Path
    ) -> None:
        if not self.hears_commits:
            pytest.skip("this store tells of no commit of others")
        async with notified(store, ["t"]) as heard:
            async with self.callers_transaction(tmp_path) as connection:
                await joins.using(connection).add([new(due=At(NOW + SECOND))], now=NOW)
                assert heard == []
            await until(lambda: any(topic == "t" for topic, _ in heard), "notice of the committed task")

    async def test_several_calls_in_one_transaction_see_each_other(
        self, store: Store, joins: JoinsTransaction, tmp_path: Path
    ) -> None:
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
