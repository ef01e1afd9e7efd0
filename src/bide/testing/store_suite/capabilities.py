"""What only some stores can: tell of an earlier wake, know who works, keep a log. Skipped where a store cannot."""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager

import pytest

from bide.core.events import Event, EventKind
from bide.core.instants import Millis
from bide.core.names import new_id
from bide.core.records import At, In, Move, Redrive, Ref, State
from bide.ports import KeepsEvents, Notifies, Shares, Store
from bide.testing.store_suite.acts import (
    DAY,
    MINUTE,
    NOW,
    SECOND,
    again,
    bring,
    defer,
    do,
    new,
    put,
    put_one,
    retry,
    settle,
    take,
    until,
)
from bide.testing.store_suite.base import SuiteBase

Tidings = list[tuple[str, Millis]]


class Listening(SuiteBase):
    """P8: a wake-up cuts a sleep short and carries the time. Tidings may be late or double; here none is lost."""

    @asynccontextmanager
    async def _ear(self, store: Store, topics: Collection[str]) -> AsyncIterator[Tidings]:
        if not isinstance(store, Notifies):
            pytest.skip("this store tells of nothing")
        heard: Tidings = []
        listening = await store.listen(topics, lambda topic, wake: heard.append((topic, wake)))
        try:
            yield heard
        finally:
            await listening.close()

    @staticmethod
    async def _hears(heard: Tidings, topic: str, wake: Millis) -> None:
        """Tidings of a wake at that time or of one before it, which makes the listener look."""
        await until(lambda: any(t == topic and at <= wake for t, at in heard), f"tidings of {topic} at {wake}")
        heard.clear()

    async def test_a_new_task_is_told_of(self, store: Store) -> None:
        async with self._ear(store, ["t"]) as heard:
            await put_one(store, new(due=In(5 * SECOND)))
            await self._hears(heard, "t", NOW + 5 * SECOND)
            await put_one(store)
            await self._hears(heard, "t", NOW)

    async def test_one_that_was_moved_forward_is_told_of(self, store: Store) -> None:
        async with self._ear(store, ["t"]) as heard:
            await put_one(store, new(due=In(DAY)))
            await do(store, Move("t", "k", In(SECOND)))
            await self._hears(heard, "t", NOW + SECOND)

    async def test_one_that_was_redriven_is_told_of(self, store: Store) -> None:
        await bring(store, State.DEAD)
        async with self._ear(store, ["t"]) as heard:
            await do(store, Redrive("t", "k", new_id(), In(SECOND)))
            await self._hears(heard, "t", NOW + SECOND)

    async def test_one_that_waits_again_is_told_of(self, store: Store) -> None:
        await put_one(store)
        async with self._ear(store, ["t"]) as heard:
            for outcome in (retry, defer, again):
                assert await settle(store, outcome(await take(store, now=NOW + SECOND), At(NOW + SECOND)))
                await self._hears(heard, "t", NOW + SECOND)

    async def test_the_earliest_of_a_batch_is_told_of(self, store: Store) -> None:
        async with self._ear(store, ["a", "b"]) as heard:
            await put(
                store,
                *(new(str(delay), topic="a", due=In(delay * SECOND)) for delay in (7, 3, 5)),
                new("k", topic="b", due=In(9 * SECOND)),
            )
            await self._hears(heard, "a", NOW + 3 * SECOND)

    async def test_a_listener_hears_of_its_own_topics_only(self, store: Store) -> None:
        async with self._ear(store, ["mine"]) as heard:
            await put(store, new(topic="other"), new(topic="mine", due=In(SECOND)), new(topic="mine too"))
            await until(lambda: bool(heard), "tidings of my topic")
            assert {topic for topic, _ in heard} == {"mine"}

    async def test_every_listener_hears(self, store: Store) -> None:
        async with self._ear(store, ["t"]) as one, self._ear(store, ["t", "u"]) as two:
            await put_one(store)
            await self._hears(one, "t", NOW)
            await self._hears(two, "t", NOW)

    async def test_after_a_close_nothing_more_is_heard(self, store: Store) -> None:
        async with self._ear(store, ["t"]) as closed:
            pass
        async with self._ear(store, ["t"]) as heard:
            await put_one(store)
            await self._hears(heard, "t", NOW)
        assert closed == []

    async def test_a_close_also_ends_what_is_on_its_way(self, store: Store) -> None:
        async with self._ear(store, ["t"]) as other:
            async with self._ear(store, ["t"]) as closed:
                await put_one(store)
            before = len(closed)
            await self._hears(other, "t", NOW)
            assert len(closed) == before

    async def test_a_listener_that_fails_harms_nobody(self, store: Store) -> None:
        if not isinstance(store, Notifies):
            pytest.skip("this store tells of nothing")

        def fail(topic: str, wake: Millis) -> None:
            raise ValueError(f"{topic} {wake}")

        failing = await store.listen(["t"], fail)
        try:
            async with self._ear(store, ["t"]) as heard:
                assert (await put_one(store)).key == "k"
                await self._hears(heard, "t", NOW)
                assert (await take(store)).attempt == 1
        finally:
            await failing.close()


class Announcing(SuiteBase):
    """Who lives and works on what: known to all, and forgotten when its time has passed."""

    @staticmethod
    def sharing(store: Store) -> Shares:
        if not isinstance(store, Shares):
            pytest.skip("this store does not know who works")
        return store

    @staticmethod
    def seen(live: dict[str, list[str]]) -> dict[str, list[str]]:
        return {holder: sorted(topics) for holder, topics in live.items()}

    async def test_whoever_announces_is_seen_by_all(self, store: Store) -> None:
        shares = self.sharing(store)
        first = await shares.announce("one", ["a", "b"], NOW + MINUTE, now=NOW)
        assert self.seen(first) == {"one": ["a", "b"]}
        second = await shares.announce("two", ["b"], NOW + MINUTE, now=NOW)
        assert self.seen(second) == {"one": ["a", "b"], "two": ["b"]}

    async def test_one_whose_time_has_passed_is_gone(self, store: Store) -> None:
        shares = self.sharing(store)
        await shares.announce("one", ["a"], NOW + SECOND, now=NOW)
        before = await shares.announce("two", ["a"], NOW + MINUTE, now=NOW + SECOND - 1)
        assert set(before) == {"one", "two"}
        after = await shares.announce("two", ["a"], NOW + MINUTE, now=NOW + SECOND)
        assert set(after) == {"two"}

    async def test_to_announce_again_prolongs_and_renews_the_topics(self, store: Store) -> None:
        shares = self.sharing(store)
        await shares.announce("one", ["a"], NOW + SECOND, now=NOW)
        await shares.announce("one", ["b"], NOW + MINUTE, now=NOW)
        assert self.seen(await shares.announce("two", ["c"], NOW + MINUTE, now=NOW + 2 * SECOND)) == {
            "one": ["b"],
            "two": ["c"],
        }

    async def test_no_topics_means_that_it_has_gone(self, store: Store) -> None:
        shares = self.sharing(store)
        await shares.announce("one", ["a"], NOW + MINUTE, now=NOW)
        await shares.announce("two", ["a"], NOW + MINUTE, now=NOW)
        assert set(await shares.announce("one", [], NOW + MINUTE, now=NOW)) == {"two"}
        assert await shares.announce("two", [], NOW + MINUTE, now=NOW) == {}


def _event(key: str, at: Millis, *, kind: EventKind = EventKind.RETRY, topic: str = "t") -> Event:
    return Event(
        at=at, topic=topic, key=key, id=new_id(), kind=kind, attempt=2, who="ann", what="it failed", was=NOW, wake_at=at
    )


class Remembering(SuiteBase):
    """A capped log of what was out of the ordinary, found by task."""

    @staticmethod
    def keeping(store: Store) -> KeepsEvents:
        if not isinstance(store, KeepsEvents):
            pytest.skip("this store keeps no events")
        return store

    async def test_an_event_comes_back_as_it_was(self, store: Store) -> None:
        log = self.keeping(store)
        full = _event("k", NOW)
        bare = Event(at=NOW + 1, topic="t", key="l", id="", kind=EventKind.CHANGE)
        await log.record([full, bare])
        assert await log.events() == [bare, full]

    async def test_the_newest_come_first_up_to_the_limit(self, store: Store) -> None:
        log = self.keeping(store)
        events = [_event(str(number), NOW + number) for number in range(20)]
        await log.record(events[:10])
        await log.record(events[10:])
        assert await log.events(limit=5) == events[:-6:-1]
        assert await log.events(limit=1_000) == events[::-1]

    async def test_the_events_of_one_task_are_found_alone(self, store: Store) -> None:
        log = self.keeping(store)
        names = [("t", "k"), ("t", "l"), ("u", "k"), ("t", "k")]
        events = [_event(key, NOW + i, topic=topic) for i, (topic, key) in enumerate(names)]
        await log.record(events)
        assert await log.events(Ref("t", "k")) == [events[3], events[0]]
        assert await log.events(Ref("t", "k"), limit=1) == [events[3]]
        assert await log.events(Ref("t", "nobody")) == []

    async def test_events_of_every_kind_are_kept(self, store: Store) -> None:
        log = self.keeping(store)
        await log.record([])
        for number, kind in enumerate(EventKind):
            await log.record([_event("k", NOW + number, kind=kind)])
        assert [event.kind for event in await log.events(Ref("t", "k"))] == list(EventKind)[::-1]

    async def test_the_log_is_capped(self, store: Store) -> None:
        log = self.keeping(store)
        for start in range(0, 30_000, 5_000):
            await log.record([_event(str(number), NOW + number) for number in range(start, start + 5_000)])
        kept = await log.events(limit=1_000_000)
        assert 100 <= len(kept) < 30_000
        assert kept[0].key == "29999"
        assert await log.events(Ref("t", "0")) == []
        assert len(await log.events(Ref("t", "29999"))) == 1
