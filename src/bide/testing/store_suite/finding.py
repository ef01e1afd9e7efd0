"""Tests of queries: every filter, in pages that neither skip nor repeat unchanged tasks; counts and forecasts."""

from __future__ import annotations

import base64
import contextlib
from collections.abc import Sequence
from itertools import pairwise, product

import msgspec
import pytest
from msgspec.structs import replace

from bide.core.errors import BadInput
from bide.core.instants import LAST_INSTANT, At, In
from bide.core.records import Cancel, Count, Filter, Move, Page, Record, Ref, State
from bide.ports import Store
from bide.testing.store_suite.base import (
    DAY,
    HOUR,
    KEPT,
    MINUTE,
    NOW,
    SECOND,
    SuiteBase,
    change_all,
    counted,
    dead,
    do,
    done,
    extend,
    keys,
    listed,
    matches,
    new,
    pages,
    place,
    put,
    put_one,
    settle,
    take,
)

FORGED: list[object] = [
    "", "a", "bb", "c", "g", "\0", "a\0a0", "bide:settings", -1, 0, NOW, 2**63 - 1, -(2**63), None, 0.5, [], b"a",
]  # fmt: skip
"""Values that an attacker may substitute for parts of a cursor."""
FROM, BEFORE = NOW + 3 * SECOND, NOW + 9 * SECOND
FILTERS = [
    Filter(topic=topic, state=state, group=group, wake_from=wake_from, wake_before=wake_before)
    for topic, state, group, wake_from, wake_before in product(
        (None, "a", "nobody"), (None, *State), (None, "g", "nobody"), (None, FROM), (None, BEFORE)
    )
]


def _encoded(parts: Sequence[object]) -> str:
    return base64.urlsafe_b64encode(msgspec.msgpack.encode(parts)).decode()


async def stock(store: Store) -> list[Record]:
    """Put 90 tasks in two topics, in two groups or none, and in all five states; return their records."""
    refs: list[Ref] = []
    for topic in ("a", "b"):
        for number in range(45):
            key, group = f"{number * 7 % 45:02}", (None, "g", "h")[number % 3]
            refs.append(Ref(topic, key))
            fate = number % 9
            task = new(key, topic=topic, group=group, options=b"\x80", deadline=KEPT if number % 2 else None)
            if fate < 5:
                await put_one(store, replace(task, due=At(NOW + fate * 4 * SECOND + number)))
                continue
            await put_one(store, task)
            if fate == 5:
                await do(store, Cancel(topic, key, KEPT), now=NOW + number % 2)
                continue
            held = await take(store, topic=topic, lasts=number * SECOND // 4)
            if fate == 6:
                assert await settle(store, done(held, keep_until=KEPT), now=NOW + number % 3)
            elif fate == 7:
                assert await settle(store, dead(held), now=NOW + number % 4)
            else:
                assert await extend(store, held, until=NOW + (1 + number % 13) * SECOND)
    records = [record for record in await store.get(refs) if record is not None]
    assert len(records) == 90
    assert {record.state for record in records} == set(State)
    return records


class Finding(SuiteBase):
    """P11: an index serves each page. Unchanged tasks are neither skipped nor repeated."""

    @pytest.mark.parametrize("limit", [1, 2, 7, 1_000])
    async def test_every_filter_shows_what_it_means_in_the_promised_order(self, store: Store, limit: int) -> None:
        records = await stock(store)
        for where in FILTERS if limit > 2 else FILTERS[:: 5 if limit == 1 else 3]:
            shown = await listed(store, where, limit=limit)
            expected = [record for record in records if matches(record, where)]
            assert sorted(shown, key=lambda record: record.ref) == sorted(expected, key=lambda r: r.ref), where
            places = [place(record, where) for record in shown]
            assert places == sorted(places), where

    async def test_every_page_but_the_last_is_full_and_the_last_has_no_cursor(self, store: Store) -> None:
        await put(store, *(new(f"{number:02}") for number in range(12)))
        for where in (Filter(topic="t"), Filter(state=State.WAITING), Filter(wake_from=NOW), Filter()):
            sizes = [len(page) async for page in pages(store, where, 4)]
            assert sizes == [4, 4, 4], "a page that happens to be the last says so"

    async def test_an_empty_store_has_one_empty_page(self, store: Store) -> None:
        for where in FILTERS:
            found = await store.find(where, Page(limit=10))
            assert (found.tasks, found.cursor) == ([], None)

    async def test_many_at_one_instant_are_paged_without_a_gap(self, store: Store) -> None:
        names = [f"{number:03}" for number in range(100)]
        await put(store, *(new(name) for name in names))
        for where in (Filter(state=State.WAITING), Filter(wake_before=NOW + 1), Filter(topic="t")):
            for limit in (1, 3, 10):
                assert sorted(keys(await listed(store, where, limit=limit))) == names

    @pytest.mark.parametrize(
        "where",
        [
            Filter(),
            Filter(topic="t"),
            Filter(group="g"),
            Filter(state=State.WAITING),
            Filter(topic="t", state=State.WAITING),
            Filter(wake_from=NOW + HOUR),
            Filter(topic="t", wake_from=NOW, wake_before=NOW + 100 * DAY),
            Filter(group="g", state=State.WAITING),
        ],
        ids=str,
    )
    async def test_what_stays_put_is_shown_once_while_others_move(self, store: Store, where: Filter) -> None:
        staying = [f"stay-{number:02}" for number in range(30)]
        moving = [f"move-{number:02}" for number in range(30)]
        await put(store, *(new(key, group="g", due=In(HOUR + (i % 6) * MINUTE)) for i, key in enumerate(staying)))
        await put(store, *(new(key, group="g", due=In(HOUR + (i % 6) * MINUTE)) for i, key in enumerate(moving)))
        shown: list[str] = []
        turn = 0
        async for page in pages(store, where, 4):
            shown += keys(page)
            key = moving[turn % 30]
            if page and page[-1].key.startswith("move"):
                key = page[-1].key  # even the task at the cursor's position
            if turn % 3 == 0:
                await do(store, Cancel("t", key))
            elif turn % 3 == 1:
                await do(store, Move("t", key, In(HOUR + (turn * 37 % 9) * MINUTE)))
            else:
                await put_one(store, new(key, group="g", due=In(HOUR + (turn * 17 % 9) * MINUTE)))
            turn += 1
            assert turn < 500, "the listing must come to an end"
        assert sorted(key for key in shown if key.startswith("stay")) == staying

    async def test_a_wake_range_includes_its_start_and_not_its_end(self, store: Store) -> None:
        await put_one(store, new(due=At(NOW + 10)))
        for wake_from, wake_before, there in [
            (NOW + 10, NOW + 11, True),
            (NOW + 9, NOW + 10, False),
            (NOW + 11, NOW + 20, False),
            (NOW + 10, NOW + 10, False),
            (NOW + 20, NOW, False),
        ]:
            shown = await listed(store, Filter(wake_from=wake_from, wake_before=wake_before))
            assert bool(shown) is there

    async def test_names_with_a_common_start_are_kept_apart(self, store: Store) -> None:
        names = ["a", "a ", "a:", "a:b", "aa", "ab", "A"]
        await put(store, *(new("k", topic=name, group=name) for name in names))
        for name in names:
            assert [record.topic for record in await listed(store, Filter(topic=name))] == [name]
            assert [record.topic for record in await listed(store, Filter(group=name))] == [name]
            assert [r.topic for r in await listed(store, Filter(topic=name, state=State.WAITING))] == [name]

    @pytest.mark.parametrize(
        "cursor", ["nonsense", "!", "AAAA", "eyJhIjoxfQ", "null", "[]", "0", "é☃", "' or 1=1 --", "x" * 5_000], ids=repr
    )
    async def test_a_cursor_that_is_not_from_here_is_refused(self, store: Store, cursor: str) -> None:
        await put(store, new("1"), new("2"))
        for where in (Filter(), Filter(group="g"), Filter(state=State.DEAD), Filter(wake_from=0)):
            with pytest.raises(BadInput, match="cursor"):
                await store.find(where, Page(limit=1, cursor=cursor))

    async def test_a_cursor_of_a_listing_in_another_order_is_refused(self, store: Store) -> None:
        await put(store, new("1", group="g"), new("2", group="g"))
        by_name = (await store.find(Filter(topic="t"), Page(limit=1))).cursor
        by_wake = (await store.find(Filter(state=State.WAITING), Page(limit=1))).cursor
        assert by_name is not None
        assert by_wake is not None
        with pytest.raises(BadInput, match="cursor"):
            await store.find(Filter(state=State.WAITING), Page(limit=1, cursor=by_name))
        with pytest.raises(BadInput, match="cursor"):
            await store.find(Filter(topic="t"), Page(limit=1, cursor=by_wake))

    async def test_a_forged_cursor_shows_nothing_that_is_not_asked_for(self, store: Store) -> None:
        """A cursor with any position is refused, or shows only tasks that match the filter."""
        for number, topic in enumerate(("a", "b", "c")):
            await put(store, *(new(f"{topic}{one}", topic=topic, group="g", due=In(one + number)) for one in range(4)))
        wheres = [
            Filter(topic="b"), Filter(group="g", topic="b"), Filter(topic="b", state=State.WAITING),
            Filter(topic="b", wake_from=NOW + 2), Filter(group="g"), Filter(state=State.WAITING, wake_before=NOW + 4),
        ]  # fmt: skip
        for where in wheres:
            genuine = (await store.find(where, Page(limit=1))).cursor
            assert genuine is not None
            sound = msgspec.msgpack.decode(base64.urlsafe_b64decode(genuine))
            for nth, value in product(range(len(sound)), FORGED):
                cursor = _encoded([*sound[:nth], value, *sound[nth + 1 :]])
                with contextlib.suppress(BadInput):
                    found = await store.find(where, Page(limit=20, cursor=cursor))
                    assert [one.ref for one in found.tasks if not matches(one, where)] == [], (where, value)
            if where.topic is not None:
                with pytest.raises(BadInput, match="cursor"):
                    await store.find(where, Page(cursor=_encoded(["a" if part == "b" else part for part in sound])))

    async def test_a_cursor_outlives_the_task_it_stands_on(self, store: Store) -> None:
        await put(store, *(new(str(number)) for number in range(4)))
        found = await store.find(Filter(topic="t"), Page(limit=2))
        await change_all(store, [Cancel("t", record.key) for record in found.tasks])
        rest = await store.find(Filter(topic="t"), Page(limit=5, cursor=found.cursor))
        assert keys(rest.tasks) == ["2", "3"]

    async def test_get_answers_in_the_order_asked(self, store: Store) -> None:
        await put(store, new("a"), new("b"), new("a", topic="u"))
        refs: Sequence[Ref] = [Ref("t", "b"), Ref("t", "nobody"), Ref("u", "a"), Ref("t", "b"), Ref("none", "a")]
        records = await store.get(refs)
        assert [None if r is None else (r.topic, r.key) for r in records] == [
            ("t", "b"), None, ("u", "a"), ("t", "b"), None,
        ]  # fmt: skip


async def forecast(store: Store, *edges: int, topic: str = "t") -> list[int]:
    """The forecast of one topic; a topic that is not listed has no waiting task in any interval."""
    tally = await store.tally(edges)
    return [count.number for count in tally.forecast.get(topic, [Count(0)] * max(len(edges) - 1, 0))]


class Counting(SuiteBase):
    """P10 and P11: the counts are exact up to a limit, and also decrease."""

    async def test_each_state_of_each_topic_and_what_wakes_in_each_interval(self, store: Store) -> None:
        """An interval has its start and not its end, and nothing but what waits."""
        records = await stock(store)
        edges = sorted({NOW, NOW + 1, KEPT, *(one.wake_at for one in records if one.state is State.WAITING)})
        tally = await store.tally(edges)
        for topic, state in product(("a", "b", "c"), State):
            number = sum((one.topic, one.state) == (topic, state) for one in records)
            assert counted(tally, topic, state) == Count(number), (topic, state)
        for topic in ("a", "b"):
            wakes = [one.wake_at for one in records if one.topic == topic and one.state is State.WAITING]
            ahead = [Count(sum(low <= wake < high for wake in wakes)) for low, high in pairwise(edges)]
            assert list(tally.forecast[topic]) == ahead
        assert await forecast(store, NOW + 100 * DAY, LAST_INSTANT, topic="a") == [0]
        assert await forecast(store, 0, NOW, topic="a") == [0]

    async def test_of_named_topics_nothing_else_is_counted(self, store: Store) -> None:
        for topic in ("a", "b", "c"):
            await put_one(store, new("1", topic=topic))
        tally = await store.tally([0, NOW + 1], topics=["b", "nobody's", "c"])
        assert {topic for topic, _ in tally.counts} == set(tally.forecast) == {"b", "c"}
        assert tally.forecast["b"] == [Count(1)]
        assert not (await store.tally([0, NOW + 1], topics=[])).counts

    async def test_fewer_than_two_edges_make_no_interval(self, store: Store) -> None:
        await put_one(store)
        assert not (await store.tally()).forecast
        assert await forecast(store) == await forecast(store, NOW) == []
        assert counted(await store.tally([0, LAST_INSTANT]), "t", State.WAITING).number == 1

    async def test_a_count_that_is_not_exact_says_so(self, store: Store) -> None:
        await put(store, *(new(str(number)) for number in range(500)))
        count = counted(await store.tally([0, LAST_INSTANT]), "t", State.WAITING)
        assert count.number == 500 or (count.number < 500 and not count.exact)

    async def test_an_interval_is_counted_as_far_as_it_is_asked_to(self, store: Store) -> None:
        await put(store, *(new(str(number)) for number in range(50)))
        for upto in (1, 49, 50, 10_000, 1_000_000):
            [count] = (await store.tally([0, LAST_INSTANT], upto=upto)).forecast["t"]
            assert count == Count(50) or (upto < 50 and count == Count(upto, False)), upto
