"""Tests of durability, retention and the optional capabilities: notifications, presence, transactions, the event log.

A test of a capability is skipped if the store does not have it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import pytest

from bide.core.errors import BadInput, StoreUnavailable
from bide.core.events import Event, EventKind
from bide.core.instants import At, In, Millis
from bide.core.names import new_id
from bide.core.records import Cancel, Filter, Lease, Move, Page, Ref, Result, State
from bide.ports import JoinsTransaction, KeepsEvents, Store, WorkerRegistry
from bide.testing.store_suite.base import (
    DAY,
    HOUR,
    KEPT,
    LEASE,
    MINUTE,
    NOW,
    SECOND,
    TIMED,
    Notices,
    SuiteBase,
    bring,
    call,
    change_all,
    dead,
    do,
    done,
    lease,
    listed,
    look,
    meant,
    new,
    notified,
    put,
    put_and_take,
    put_one,
    record_of,
    see,
    settle,
    settle_all,
    take,
    until,
)


class Listening(SuiteBase):
    """P8: a notification shortens a sleep and carries the wake time. It may be late or repeated; here none is lost."""

    @staticmethod
    async def _hears(heard: Notices, topic: str, wake: Millis) -> None:
        """Wait for a notification of this wake time or an earlier one, which makes the listener poll."""
        await until(lambda: any(t == topic and at <= wake for t, at in heard), f"notice of {topic} at {wake}")
        heard.clear()

    @pytest.mark.parametrize("verb", TIMED)
    async def test_one_that_wakes_earlier_is_told_of(self, store: Store, verb: str) -> None:
        state, asked = TIMED[verb]
        old = await bring(store, state)
        if state is State.WAITING:
            old = record_of(await do(store, Move("t", "k", In(DAY))))
        async with notified(store, ["t"]) as heard:
            await call(store, meant(asked(In(SECOND)), "t", old), NOW)
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

    async def test_a_lease_that_leaves_nothing_due_is_told_of(self, store: Store, rival: Store) -> None:
        wakes, workers = rival.features.wakes, store.features.workers
        if not self.tells_what_is_taken or wakes is None or workers is None:
            pytest.skip("this store does not tell what is taken")
        woken: list[Millis] = []
        heard: list[tuple[str, Millis, Millis]] = []
        listening = await wakes.listen(
            ["t"],
            lambda topic, wake: woken.append(wake),
            lambda topic, by, head, holder: heard.append((topic, by, head)),
        )
        for holder in ("w", "other"):
            await workers.announce(holder, ["t"], NOW + HOUR, now=NOW)
        try:
            await put(store, new("k", due=At(NOW + 1)), new("l", due=At(NOW + 2)), new("later", due=At(NOW + SECOND)))
            await until(lambda: bool(woken), "a notification: before it a listener may not have begun")
            now = NOW + 3
            for want in (1, 2):  # the first leaves one due, and tells nothing
                await store.lease({"t": want}, now=now, until=now + LEASE, holder="w")
            await until(lambda: bool(heard), "a message of what was taken")
            assert heard == [("t", NOW + 2, NOW + SECOND)]
        finally:
            await listening.close()

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
    """Workers and their topics: visible to all, and forgotten when their time is over."""

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
    """The transaction, with an error at the end of its block."""
    with suppress(ZeroDivisionError):
        async with transaction as one:
            yield one
            raise ZeroDivisionError


class Joining(SuiteBase):
    """P12: if data and tasks share a database, completion joins the caller's own transaction."""

    @pytest.fixture
    def joins(self, store: Store) -> JoinsTransaction:
        if (transactions := store.features.transactions) is None:
            pytest.skip("this store shares no database with the caller")
        return transactions

    @pytest.mark.parametrize("fails", [False, True], ids=["commit", "rollback"])
    @pytest.mark.parametrize("whose", ["the store's", "the store's, with rows of the caller's", "the caller's"])
    async def test_all_in_a_transaction_shares_its_fate(
        self, store: Store, joins: JoinsTransaction, tmp_path: Path, whose: str, *, fails: bool
    ) -> None:
        _, later = await put(store, new("settled"), new("moved", due=At(NOW + DAY)))
        held = await take(store)
        rows = [] if whose == "the store's" else ["an order"]
        transaction: AbstractAsyncContextManager[Any] = joins.transaction()
        if whose == "the caller's":
            transaction = self.callers_transaction(tmp_path)
        async with _failing(transaction) if fails else transaction as given:
            joined = joins.using(given) if whose == "the caller's" else given
            for text in rows:
                await self.write_text(joined.connection, text)
            [added] = await joined.add([new("added", topic="n")], now=NOW)
            assert await joined.settle([done(held)], now=NOW) == [True]
            [moved] = await joined.change([Move("t", "moved", At(NOW + HOUR))], now=NOW)
            assert (added.result, moved.result) == (Result.CREATED, Result.MOVED)
            assert await joined.get([Ref("n", "added"), held.ref]) == [added.record, None]
            assert (await joined.find(Filter(topic="n"), Page())).tasks == [added.record]
            await joined.record([event := _event("k", NOW)])
        if rows:
            assert await self.texts(tmp_path) == ([] if fails else rows)
        assert await look(store, Ref("n", "added")) == (None if fails else added.record)
        assert await look(store, held) == (held if fails else None)
        assert await see(store, later) == (later if fails else moved.record)
        assert await settle(store, done(held)) is fails
        if (log := store.features.events) is not None:
            assert await log.events() == ([] if fails else [event])
        told = (await lease(store, 1)).next_wake
        assert self.wakes_at(told, NOW + (DAY if fails else HOUR), NOW) or (told == NOW + LEASE and not self.exact_ends)

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


class Opening(SuiteBase):
    """P2: acknowledged tasks survive, within the store's stated durability."""

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
        for make in calls:
            with pytest.raises(StoreUnavailable):
                await make()

    async def test_two_stores_of_different_places_share_nothing(self, store: Store, tmp_path: Path) -> None:
        (tmp_path / "elsewhere").mkdir()
        async with self.opened(tmp_path / "elsewhere") as other:
            await put_one(store)
            assert await listed(other, Filter()) == []

    async def test_every_state_survives_a_close(self, store: Store, tmp_path: Path) -> None:
        if not self.durable:
            pytest.skip("this store ends with its process")
        for state in State:
            await bring(store, state, topic=state.value, group="g")
        await put_one(store, new("far", due=At(NOW + 400 * DAY), deadline=KEPT * 2, options=b"\x80"))
        before = await listed(store, Filter())
        await store.close()
        async with self.opened(tmp_path) as again:
            assert await listed(again, Filter()) == before
            assert len(await listed(again, Filter(group="g"))) == 5
            held = await see(again, Ref("leased", "k"))
            assert await settle(again, done(held)), "a lease outlives the connection it was taken on"
            assert (await take(again, topic="waiting")).attempt == 1
            assert await again.purge(now=KEPT, limit=100) == 3

    async def test_a_token_rises_also_across_a_close(self, store: Store, tmp_path: Path) -> None:
        if not self.durable:
            pytest.skip("this store ends with its process")
        last = 0
        for _ in range(3):
            async with self.opened(tmp_path) as opened:
                held = await put_and_take(opened)
                assert held.token > last
                last = held.token
                assert await settle(opened, done(held)), "and nothing of the task itself is left to go by"

    async def test_what_one_client_did_another_sees_at_once(self, store: Store, rival: Store) -> None:
        if not self.durable:
            pytest.skip("this store has one client")
        record = await put_one(store)
        assert await look(rival, record) == record
        held = await take(rival)
        [answer] = await change_all(store, [Move("t", "k", In(0))])
        assert (answer.result, answer.record) == (Result.UNDER_WAY, held)
        assert await settle(store, done(held)), "knowing its token is enough to settle a lease"
        assert await look(rival, record) is None

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
        if (schema := store.features.schema) is None:
            pytest.skip("this store has no schema")
        found, wanted = await schema.schema_version()
        assert found == wanted
        await schema.migrate()
        assert await schema.schema_version() == (found, wanted)

    async def test_a_store_with_a_clock_tells_it(self, store: Store) -> None:
        if (clock := store.features.clock) is None:
            pytest.skip("this store has no clock of its own")
        began = time.monotonic()
        first, second = await clock.time(), await clock.time()
        took = (time.monotonic() - began) * 1000  # each time is an estimate, with the error of its round trip
        assert 1_600_000_000_000 < first <= second + took + 1


ENDED = [State.DONE, State.CANCELLED, State.DEAD]


class Retention(SuiteBase):
    """P10: nothing is left of a task that has ended when its retention is over."""

    @pytest.mark.parametrize("state", ENDED, ids=str)
    async def test_what_is_kept_is_there_until_its_time_and_not_a_moment_longer(
        self, store: Store, state: State
    ) -> None:
        record = await bring(store, state, group="before", keep_until=NOW + HOUR)
        assert await store.purge(now=NOW + HOUR - 1, limit=10) == 0
        await self.alone(store, record, now=NOW + HOUR)
        assert await store.purge(now=NOW + HOUR, limit=10) == 1
        await self.alone(store, None, now=NOW + HOUR)

    async def test_purge_keeps_to_its_limit_and_takes_the_rest_next_time(self, store: Store) -> None:
        await put(store, *(new(str(number)) for number in range(10)))
        held = (await lease(store, 10)).tasks
        assert all(await settle_all(store, [done(record, keep_until=NOW + SECOND) for record in held]))
        assert await store.purge(now=NOW + SECOND, limit=0) == 0
        assert [await store.purge(now=NOW + SECOND, limit=4) for _ in range(4)] == [4, 4, 2, 0]
        assert await listed(store, Filter()) == []

    async def test_purge_takes_those_whose_time_has_passed_and_leaves_the_others(self, store: Store) -> None:
        for number in range(20):
            await bring(store, ENDED[number % 3], str(number), keep_until=NOW + 1 + (number * 7) % 20)
        assert await store.purge(now=NOW + 10, limit=100) == 10
        left = await listed(store, Filter(topic="t"))
        assert {record.keep_until for record in left} == set(range(NOW + 11, NOW + 21))

    async def test_after_everything_has_ended_nothing_is_left(self, store: Store) -> None:
        refs = [Ref(f"t{number % 7}", str(number)) for number in range(210)]
        await put(store, *(new(ref.key, topic=ref.topic, group=f"g{i % 5}") for i, ref in enumerate(refs)))
        wants = {f"t{number}": 20 for number in range(7)}
        held = (await store.lease(wants, now=NOW, until=NOW + LEASE, holder="w")).tasks
        assert len(held) == 140
        outcomes = [
            dead(record, keep_until=NOW + DAY) if i % 2 else done(record, keep_until=NOW + HOUR)
            for i, record in enumerate(held)
        ]
        assert all(await settle_all(store, outcomes))
        await change_all(store, [Cancel(ref.topic, ref.key, NOW + MINUTE) for ref in refs])
        assert await store.purge(now=NOW + DAY, limit=1_000) == 210
        for ref in refs:
            assert await look(store, ref) is None
        for number in range(5):
            assert await listed(store, Filter(group=f"g{number}")) == []
        await self.alone(store, None, now=NOW + DAY)
        asked = await store.lease(wants, now=NOW + 2 * DAY, until=NOW + 3 * DAY, holder="w")
        assert (asked.tasks, asked.next_wake) == ([], None)


def _event(key: str, at: Millis, *, kind: EventKind = EventKind.RETRY, topic: str = "t") -> Event:
    return Event(
        at=at, topic=topic, key=key, id=new_id(), kind=kind, attempt=2, who="ann", what="it failed", was=NOW, wake_at=at
    )


class Remembering(SuiteBase):
    """A capped log of unusual events, which can be queried by task."""

    @pytest.fixture
    def log(self, store: Store) -> KeepsEvents:
        if (log := store.features.events) is None:
            pytest.skip("this store keeps no events")
        return log

    async def test_an_event_comes_back_as_it_was(self, log: KeepsEvents) -> None:
        full = _event("k", NOW)
        bare = Event(at=NOW + 1, topic="t", key="l", id="", kind=EventKind.CHANGE)
        await log.record([full, bare])
        assert await log.events() == [bare, full]

    async def test_the_newest_come_first_up_to_the_limit(self, log: KeepsEvents) -> None:
        events = [_event(str(number), NOW + number) for number in range(20)]
        await log.record(events[:10])
        await log.record(events[10:])
        assert await log.events(limit=5) == events[:-6:-1]
        assert await log.events(limit=1_000) == events[::-1]

    async def test_the_events_of_one_task_are_found_alone(self, log: KeepsEvents) -> None:
        names = [("t", "k"), ("t", "l"), ("u", "k"), ("t", "k")]
        events = [_event(key, NOW + i, topic=topic) for i, (topic, key) in enumerate(names)]
        await log.record(events)
        assert await log.events(Ref("t", "k")) == [events[3], events[0]]
        assert await log.events(Ref("t", "k"), limit=1) == [events[3]]
        assert await log.events(Ref("t", "nobody")) == []

    async def test_events_of_every_kind_are_kept(self, log: KeepsEvents) -> None:
        await log.record([])
        for number, kind in enumerate(EventKind):
            await log.record([_event("k", NOW + number, kind=kind)])
        assert [event.kind for event in await log.events(Ref("t", "k"))] == list(EventKind)[::-1]

    async def test_the_log_is_capped(self, log: KeepsEvents) -> None:
        for start in range(0, 30_000, 5_000):
            await log.record([_event(str(number), NOW + number) for number in range(start, start + 5_000)])
        kept = await log.events(limit=1_000_000)
        assert 100 <= len(kept) < 30_000
        assert kept[0].key == "29999"
        assert await log.events(Ref("t", "0")) == []
        assert len(await log.events(Ref("t", "29999"))) == 1
