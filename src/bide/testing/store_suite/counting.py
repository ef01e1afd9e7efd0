"""Counting: how many tasks there are of each topic and state, and the forecast of what wakes when."""

from __future__ import annotations

from bide.core.instants import LAST_INSTANT
from bide.core.records import At, Cancel, Count, In, Move, State
from bide.ports import Store
from bide.testing.store_suite.acts import (
    HOUR,
    KEPT,
    NOW,
    SECOND,
    bring,
    counted,
    dead,
    do,
    done,
    extend,
    lease,
    new,
    put,
    put_one,
    retry,
    settle,
    take,
)
from bide.testing.store_suite.base import SuiteBase


async def forecast(store: Store, *edges: int, topic: str = "t") -> list[Count]:
    """The forecast of one topic; a topic that is not listed has nothing waiting in any interval."""
    tally = await store.tally(edges)
    return list(tally.forecast.get(topic, [Count(0)] * max(len(edges) - 1, 0)))


class Counting(SuiteBase):
    """P10 and P11: the counts are exact up to a limit, and go down again."""

    async def test_an_empty_store_counts_nothing(self, store: Store) -> None:
        tally = await store.tally()
        assert not any(count.number for count in tally.counts.values())
        assert not tally.forecast

    async def test_each_state_of_each_topic_is_counted(self, store: Store) -> None:
        for topic, times in (("a", 1), ("b", 2)):
            for state in State:
                for number in range(times):
                    await bring(store, state, f"{state.value}-{number}", topic=f"{topic}")
                    if state is State.WAITING:
                        await do(store, Move(topic, f"{state.value}-{number}", At(NOW + HOUR)))
        tally = await store.tally()
        for state in State:
            assert counted(tally, "a", state) == Count(1, True)
            assert counted(tally, "b", state) == Count(2, True)
            assert counted(tally, "c", state).number == 0

    async def test_of_named_topics_nothing_else_is_counted(self, store: Store) -> None:
        for topic in ("a", "b", "c"):
            await put_one(store, new("1", topic=topic))
        tally = await store.tally([0, NOW + 1], topics=["b", "nobody's", "c"])
        assert {topic for topic, _ in tally.counts} == set(tally.forecast) == {"b", "c"}
        assert tally.forecast["b"] == [Count(1)]
        assert not (await store.tally([0, NOW + 1], topics=[])).counts

    async def test_counts_follow_every_transition(self, store: Store) -> None:
        async def counts() -> tuple[int, ...]:
            tally = await store.tally()
            return tuple(counted(tally, "t", state).number for state in State)

        await put_one(store)
        assert await counts() == (1, 0, 0, 0, 0)
        await put_one(store)
        assert await counts() == (1, 0, 0, 0, 0)
        held = await take(store)
        assert await counts() == (0, 1, 0, 0, 0)
        assert await extend(store, held, until=NOW + 1)
        held = await take(store, now=NOW + 1)
        assert await counts() == (0, 1, 0, 0, 0), "a lost lease that is taken over is still one"
        assert await settle(store, retry(held, At(0)))
        assert await counts() == (1, 0, 0, 0, 0)
        assert await settle(store, dead(await take(store)))
        assert await counts() == (0, 0, 0, 0, 1)
        await put_one(store)
        assert await counts() == (1, 0, 0, 0, 0)
        assert await settle(store, done(await take(store), keep_until=NOW + SECOND))
        assert await counts() == (0, 0, 1, 0, 0)
        await store.purge(now=NOW + SECOND, limit=5)
        assert await counts() == (0, 0, 0, 0, 0)
        await put_one(store)
        await do(store, Cancel("t", "k", KEPT))
        assert await counts() == (0, 0, 0, 1, 0)
        await put_one(store)
        await take(store)
        await put_one(store)
        assert await counts() == (1, 0, 0, 0, 0), "a replaced lease is no longer one"
        assert await settle(store, done(await take(store)))
        assert await counts() == (0, 0, 0, 0, 0)

    async def test_an_interval_has_its_start_and_not_its_end(self, store: Store) -> None:
        await put(store, *(new(str(number), due=At(NOW + number)) for number in range(10)))
        numbers = [count.number for count in await forecast(store, NOW, NOW + 3, NOW + 4, NOW + 10, NOW + 11)]
        assert numbers == [3, 1, 6, 0]

    async def test_what_lies_outside_the_edges_is_not_counted(self, store: Store) -> None:
        await put(store, *(new(str(number), due=At(NOW + number)) for number in range(10)))
        assert [c.number for c in await forecast(store, NOW + 4, NOW + 6)] == [2]
        assert [c.number for c in await forecast(store, NOW + 100, LAST_INSTANT)] == [0]
        assert [c.number for c in await forecast(store, 0, NOW)] == [0]

    async def test_fewer_than_two_edges_make_no_interval(self, store: Store) -> None:
        await put_one(store)
        assert await forecast(store) == []
        assert await forecast(store, NOW) == []

    async def test_no_edges_no_forecast(self, store: Store) -> None:
        await put_one(store)
        assert not (await store.tally()).forecast
        assert counted(await store.tally([0, LAST_INSTANT]), "t", State.WAITING).number == 1

    async def test_the_forecast_counts_what_waits_and_nothing_else(self, store: Store) -> None:
        for state in State:
            await bring(store, state, state.value)
            if state is State.WAITING:
                await do(store, Move("t", state.value, At(NOW + HOUR)))
        assert [c.number for c in await forecast(store, 0, LAST_INSTANT)] == [1]

    async def test_the_forecast_is_by_topic_and_follows_a_move(self, store: Store) -> None:
        await put(store, new("k", topic="a"), new("k", topic="b"), new("l", topic="b"))
        edges = (NOW, NOW + 1, NOW + HOUR + 1)
        assert [c.number for c in await forecast(store, *edges, topic="a")] == [1, 0]
        assert [c.number for c in await forecast(store, *edges, topic="b")] == [2, 0]
        await do(store, Move("b", "k", In(HOUR)))
        assert [c.number for c in await forecast(store, *edges, topic="b")] == [1, 1]
        await lease(store, 1, topic="b")
        assert [c.number for c in await forecast(store, *edges, topic="b")] == [0, 1]

    async def test_a_count_that_is_not_exact_says_so(self, store: Store) -> None:
        await put(store, *(new(str(number)) for number in range(500)))
        count = counted(await store.tally([0, LAST_INSTANT]), "t", State.WAITING)
        assert count.number == 500 or (count.number < 500 and not count.exact)

    async def test_an_interval_is_counted_as_far_as_it_is_asked_to(self, store: Store) -> None:
        await put(store, *(new(str(number)) for number in range(50)))
        for upto in (1, 49, 50, 10_000, 1_000_000):
            [count] = (await store.tally([0, LAST_INSTANT], upto=upto)).forecast["t"]
            assert count == Count(50) or (upto < 50 and count == Count(upto, False)), upto
