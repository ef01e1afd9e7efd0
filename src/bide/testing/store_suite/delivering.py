"""Tests of a delivery, from the lease (which worker gets which tasks, and the next wake) to the settled outcome.

Races, which exactly one caller wins, come last.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from msgspec.structs import replace

from bide.core.answers import Answer
from bide.core.instants import At, In, Millis
from bide.core.names import new_id
from bide.core.records import Cancel, Move, OnConflict, Record, Redrive, Ref, Result, State
from bide.ports import Store
from bide.testing.store_suite.base import (
    DAY,
    HELD,
    HOUR,
    KEPT,
    LEASE,
    MINUTE,
    NOW,
    SECOND,
    Call,
    SuiteBase,
    Take,
    add_all,
    again,
    bring,
    call,
    change_all,
    dead,
    do,
    done,
    effect,
    extend,
    keys,
    lease,
    look,
    meant,
    new,
    put,
    put_and_take,
    put_one,
    record_of,
    retry,
    see,
    settle,
    settle_all,
    take,
)


class Leasing(SuiteBase):
    """P1: never early. P2: redelivered until settled. P3: one holder."""

    async def test_a_clock_that_goes_back_makes_nothing_early(self, store: Store) -> None:
        await put_one(store, new("later", due=At(NOW + HOUR)))
        await put_one(store, new("now"))
        assert keys((await lease(store, now=NOW + MINUTE)).tasks) == ["now"]
        await put_one(store, new("between", due=At(NOW + SECOND)), now=NOW)
        assert (await lease(store, 5, now=NOW)).tasks == []
        assert keys((await lease(store, 5, now=NOW + SECOND)).tasks) == ["between"]

    @pytest.mark.parametrize("count", [0, 1, 2, 3, 4, 1_000])
    async def test_as_many_as_wanted_oldest_first_and_never_more(self, store: Store, count: int) -> None:
        await put(store, *(new(str(age), due=At(NOW - age * SECOND)) for age in (2, 3, 1)), now=NOW - HOUR)
        assert keys((await lease(store, count)).tasks) == ["3", "2", "1"][:count]
        assert len((await lease(store, 1_000)).tasks) == max(3 - count, 0)

    async def test_oldest_first_whatever_the_order_they_came_in(self, store: Store) -> None:
        ages = [(number * 7919) % 1_000 for number in range(1_000)]
        await put(store, *(new(f"{age:04}", due=At(NOW + age)) for age in ages[:500]))
        await lease(store, 0, now=NOW + 300)
        await put(store, *(new(f"{age:04}", due=At(NOW + age)) for age in ages[500:]))
        taken: list[str] = []
        while batch := (await lease(store, 64, now=NOW + 1_000)).tasks:
            assert keys(batch) == sorted(keys(batch))
            taken += keys(batch)
        if not self.exact_order:
            taken.sort()
        assert taken == sorted(f"{age:04}" for age in ages)

    async def test_a_task_whose_holders_all_died_is_still_given_out(self, store: Store) -> None:
        await put_one(store)
        for attempt in range(1, 31):
            held = await take(store, now=NOW + attempt * DAY)
            assert (held.attempt, held.losses, held.planned_at) == (attempt, attempt - 1, NOW), "late since the first"

    async def test_a_task_moved_away_and_back_is_leased_once(self, store: Store) -> None:
        await put_one(store)
        assert (await lease(store, 0)).next_wake == NOW
        for _ in range(3):
            await do(store, Move("t", "k", At(NOW + HOUR)))
            await self.rests_until(store, NOW + HOUR)
            await do(store, Move("t", "k", At(NOW)))
        assert len((await lease(store, 10)).tasks) == 1
        assert (await lease(store, 10)).tasks == []

    async def test_only_the_named_topics(self, store: Store) -> None:
        await put(store, *(new("k", topic=topic) for topic in ("a", "b", "c")))
        leased = await store.lease({"a": 5, "c": 5, "nobody": 5}, now=NOW, until=NOW + LEASE, holder="w")
        assert sorted(record.topic for record in leased.tasks) == ["a", "c"]
        assert (await see(store, Ref("b", "k"))).state is State.WAITING
        nothing = await store.lease({}, now=NOW, until=NOW + LEASE, holder="w")
        assert (nothing.tasks, nothing.next_wake, nothing.now) == ([], None, NOW)

    async def test_a_lease_that_ends_at_once_is_given_out_once_per_call(self, store: Store) -> None:
        await put_one(store)
        assert len((await lease(store, 10, lasts=0)).tasks) == 1
        assert (await take(store, lasts=0)).attempt == 2


class Fairness(SuiteBase):
    """P6: no head-of-line blocking. P8: the next wake that `lease` returns lets a worker sleep exactly."""

    async def test_next_wake_is_the_earliest_of_the_asked_topics(self, store: Store) -> None:
        await put(
            store,
            new("a", topic="a", due=At(NOW + 3 * HOUR)),
            new("b", topic="b", due=At(NOW + 2 * HOUR)),
            new("c", topic="c", due=At(NOW + 1 * HOUR)),
        )
        leased = await store.lease({"a": 1, "b": 0}, now=NOW, until=NOW + LEASE, holder="w")
        assert self.wakes_at(leased.next_wake, NOW + 2 * HOUR, NOW)

    async def test_next_wake_follows_an_extend_and_a_settle(self, store: Store) -> None:
        await put(store, new("now"), new("later", due=At(NOW + DAY)))
        held = await take(store)
        assert await extend(store, held, until=NOW + HOUR)
        told = (await lease(store, 0)).next_wake
        assert self.wakes_at(told, NOW + HOUR if self.exact_ends else NOW + LEASE, NOW)
        assert await settle(store, done(held))
        assert self.wakes_at((await lease(store, 0)).next_wake, NOW + DAY, NOW)

    async def test_next_wake_follows_when_a_lease_would_have_ended(self, store: Store) -> None:
        await put(store, new("extended"), new("cancelled"), new("later", due=At(NOW + DAY)))
        held = {task.key: task for task in (await lease(store, 2)).tasks}
        assert await extend(store, held["extended"], until=NOW + HOUR)
        await do(store, Cancel("t", "cancelled"))
        await self.rests_until(store, NOW + HOUR, now=NOW + LEASE)
        await do(store, Cancel("t", "extended"))
        await self.rests_until(store, NOW + DAY, now=NOW + HOUR)

    async def test_next_wake_sees_an_earlier_one_added_later(self, store: Store) -> None:
        for delay in (365 * DAY, DAY, HOUR, MINUTE, SECOND, 5):
            await put_one(store, new(str(delay), due=In(delay)))
            assert self.wakes_at((await lease(store, 1)).next_wake, NOW + delay, NOW)
        assert (await take(store, now=NOW + 5)).key == "5"

    async def test_wanting_none_only_asks(self, store: Store) -> None:
        record = await put_one(store, now=NOW - HOUR)
        leased = await lease(store, 0, now=NOW + HOUR)
        assert leased.tasks == []
        assert leased.next_wake == NOW, "for a topic that only asks, it may lie in the past"
        assert await see(store, record) == record

    async def test_a_full_topics_backlog_does_not_show_in_next_wake(self, store: Store) -> None:
        await put(store, *(new(str(number), topic="full") for number in range(10)))
        await put_one(store, new("k", topic="calm", due=At(NOW + HOUR)))
        leased = await store.lease({"full": 3, "calm": 3}, now=NOW, until=NOW + LEASE, holder="w")
        assert len(leased.tasks) == 3
        assert self.wakes_at(leased.next_wake, NOW + HOUR, NOW), "else the worker would spin while it is full"
        alone = await lease(store, 2, topic="full")
        assert (len(alone.tasks), alone.next_wake) == (2, None)

    async def test_a_flood_of_one_topic_does_not_delay_another(self, store: Store) -> None:
        flood = [new(str(number), topic="flood", due=At(NOW - DAY)) for number in range(2_000)]
        await put(store, *flood, now=NOW - 2 * DAY)
        await put_one(store, new("k", topic="calm"))
        leased = await store.lease({"flood": 5, "calm": 5}, now=NOW, until=NOW + LEASE, holder="w")
        taken = [record.topic for record in leased.tasks]
        assert (taken.count("flood"), taken.count("calm")) == (5, 1)

    async def test_a_flood_of_large_payloads_comes_in_order_and_leaves_no_topic_out(self, store: Store) -> None:
        """A lease may stop early. Then it says that more is due, and a topic left out comes first next time."""
        flood = [new(f"{number:02}", topic="flood", due=At(NOW - 20 + number)) for number in range(12)]
        await put(store, *(replace(one, payload=bytes(200 * 1024)) for one in flood), now=NOW - SECOND)
        await put(store, *(new(str(number), topic="calm", due=At(NOW)) for number in range(12)))
        taken: list[str] = []
        calm = [1]
        while len(taken) < 12:
            leased = await store.lease({"flood": 12, "calm": 1}, now=NOW, until=NOW + LEASE, holder="w")
            calm.append([record.topic for record in leased.tasks].count("calm"))
            assert sum(calm[-2:]) >= 1
            more = [record.key for record in leased.tasks if record.topic == "flood"]
            assert more
            taken += more
            assert len(taken) == 12 or leased.heads["flood"] <= leased.now
        assert sorted(taken) == [one.key for one in flood]

    async def test_a_task_that_keeps_being_lost_does_not_hold_up_the_others(self, store: Store) -> None:
        await put_one(store, new("lost"))
        await take(store, lasts=1)
        await put(store, *(new(str(number), due=At(NOW + 2)) for number in range(3)))
        assert sorted(keys((await lease(store, 4, now=NOW + 2)).tasks)) == ["0", "1", "2", "lost"]


class Holding(SuiteBase):
    """P2: delivered until settled. P3: a late extend or settle with an old token is refused and changes nothing."""

    async def test_an_expired_lease_that_nobody_took_can_be_extended_and_settled(self, store: Store) -> None:
        held = await put_and_take(store)
        for late in range(NOW + DAY, NOW + 50 * DAY, DAY):
            assert (await lease(store, 0, now=late)).next_wake == held.wake_at
            assert await extend(store, held, until=late + HOUR, now=late)
            assert (await lease(store, 1, now=late + HOUR - 1)).tasks == []
            held = await see(store, held)
        assert await settle(store, done(held), now=NOW + 51 * DAY)
        assert await look(store, held) is None

    async def test_a_lease_that_was_taken_over_can_be_neither_extended_nor_settled(self, store: Store) -> None:
        first = await put_and_take(store)
        second = await take(store, now=NOW + LEASE)
        assert not await extend(store, first, until=NOW + DAY, now=NOW + LEASE)
        for outcome in (done(first), retry(first, In(0)), dead(first), again(first, In(0))):
            assert not await settle(store, outcome, now=NOW + LEASE)
        assert await see(store, second) == second
        assert await settle(store, done(second), now=NOW + LEASE)
        for outcome in (done(second), retry(second, In(0)), dead(second)):
            assert not await settle(store, outcome, now=NOW + LEASE)
        assert await look(store, second) is None


FAR_OFF = 2**53 // 1_000 + SECOND
"""An instant whose microseconds exceed the exact integers of a double."""


class Tokens(SuiteBase):
    """P12: the `token` of a (topic, key) only rises, so that a receiver can refuse an old one."""

    async def test_a_token_rises_also_after_the_key_was_done_and_forgotten(self, store: Store) -> None:
        last = 0
        for _ in range(5):
            held = await put_and_take(store)
            assert held.token > last
            last = held.token
            assert await settle(store, done(held))
            assert await look(store, held) is None

    async def test_a_token_rises_also_after_a_cancel_and_a_purge(self, store: Store) -> None:
        await put_one(store)
        cancelled = record_of(await do(store, Cancel("t", "k")))
        following = await put_one(store)
        assert following.token > cancelled.token
        ended = record_of(await do(store, Cancel("t", "k", NOW + SECOND)))
        assert await store.purge(now=NOW + SECOND, limit=10) == 1
        assert (await put_one(store, now=NOW)).token > ended.token

    async def test_a_token_rises_although_the_clock_goes_back(self, store: Store) -> None:
        last = 0
        for now in (NOW, NOW - 1_000 * SECOND, NOW + SECOND, NOW - SECOND, FAR_OFF, FAR_OFF, FAR_OFF - SECOND, NOW):
            record = await put_one(store, now=now)
            assert record.token > last
            last = record.token

    async def test_a_token_is_at_least_the_clock_in_microseconds(self, store: Store) -> None:
        assert (await put_one(store)).token >= NOW * 1_000

    @pytest.mark.parametrize("if_token", [0, 1, 2**53, 2**56, 2**60, 2**63 - 1])
    async def test_a_condition_that_no_token_meets_changes_nothing(self, store: Store, if_token: int) -> None:
        before = await put_one(store)
        for change in (
            Move("t", "k", In(0), if_token),
            Cancel("t", "k", if_token=if_token),
            Redrive("t", "k", new_id(), In(0), if_token),
        ):
            [answer] = await change_all(store, [change])
            assert answer.result in (Result.STALE_TOKEN, Result.UNDER_WAY), change
        [answer] = await add_all(store, [new(if_token=if_token)])
        assert answer == Answer(Result.STALE_TOKEN, before)
        assert await see(store, Ref("t", "k")) == before


TAKE = Take("t", "one")
RACES: dict[str, tuple[State, Call, Call]] = {
    "lease, move": (State.WAITING, TAKE, Move("t", "k", At(NOW + HOUR))),
    "lease, fire now if": (State.WAITING, TAKE, Move("t", "k", In(0), 0)),
    "lease, cancel": (State.WAITING, TAKE, Cancel("t", "k", KEPT)),
    "lease, replace": (State.WAITING, TAKE, new()),
    "lease, keep": (State.WAITING, TAKE, new(on_conflict=OnConflict.KEEP)),
    "lease, earliest": (State.WAITING, TAKE, new(due=At(NOW - HOUR), on_conflict=OnConflict.EARLIEST)),
    "lease, latest": (State.WAITING, TAKE, new(due=At(NOW + 1), on_conflict=OnConflict.LATEST)),
    "lease, refuse": (State.WAITING, TAKE, new(on_conflict=OnConflict.REFUSE)),
    "lease, redrive": (State.DEAD, TAKE, Redrive("t", "k", "", In(0), 0)),
    "lease, lease of a lost one": (State.LEASED, TAKE, Take("t", "two")),
    "lease, late settle": (State.LEASED, TAKE, done(HELD)),
    "lease, late extend": (State.LEASED, TAKE, HELD),
    "cancel, done": (State.LEASED, Cancel("t", "k", KEPT), done(HELD, keep_until=KEPT)),
    "cancel, retry": (State.LEASED, Cancel("t", "k", KEPT), retry(HELD, In(0))),
    "cancel, dead": (State.LEASED, Cancel("t", "k", KEPT), dead(HELD)),
}
AT_ONCE = 50


def in_order(calls: Sequence[Call], old: Record | None, now: Millis) -> tuple[list[object], Record | None]:
    """The answers that the lifecycle gives to calls one after another, and the task after them."""
    answers = []
    for number, asked in enumerate(calls, 1):
        answer, old = effect(asked, old, now, 2**60 + number)
        answers.append(answer)
    return answers, old


def without_tokens(seen: Any) -> Any:
    """The same, but no record has a token."""
    if isinstance(seen, list | tuple) and not isinstance(seen, Call):
        return [without_tokens(one) for one in seen]
    if isinstance(seen, Answer):
        return replace(seen, record=without_tokens(seen.record))
    return replace(seen, token=0) if isinstance(seen, Record) else seen


class Racing(SuiteBase):
    """P3: one holder. P4: a lost race is an answer. The rival is a second client if the store can have one."""

    async def test_fifty_workers_take_no_task_twice(self, store: Store, rival: Store) -> None:
        await put(store, *(new(str(number)) for number in range(1_500)))
        taken: list[tuple[str, int]] = []

        async def work(number: int) -> None:
            mine = rival if number % 2 else store
            while batch := (await lease(mine, 1 + number % 7, holder=f"w{number}")).tasks:
                taken.extend((record.key, record.token) for record in batch)
                assert all(await settle_all(mine, [done(record) for record in batch]))

        await asyncio.gather(*(work(number) for number in range(50)))
        assert len(taken) == 1_500
        assert len({key for key, _ in taken}) == 1_500

    @pytest.mark.parametrize(("state", "first", "second"), RACES.values(), ids=RACES)
    async def test_of_two_calls_one_comes_first(
        self, store: Store, rival: Store, state: State, first: Call, second: Call
    ) -> None:
        """Both do what the lifecycle says, in one order or in the other."""
        now = NOW + LEASE

        async def race(number: int) -> None:
            topic = f"t{number}"
            old = await bring(store, state, topic=topic)
            one, two = meant(first, topic, old), meant(second, topic, old)
            asked = [call(store, one, now), call(rival, two, now)]
            answers = await asyncio.gather(*(asked if number % 2 else asked[::-1]))
            seen = [answers if number % 2 else answers[::-1], await look(store, Ref(topic, "k"))]
            this, (others, last) = in_order([one, two], old, now), in_order([two, one], old, now)
            assert without_tokens(seen) in (without_tokens(this), without_tokens([others[::-1], last]))

        for start in range(0, self.races, AT_ONCE):
            await asyncio.gather(*(race(number) for number in range(start, start + AT_ONCE)))

    async def test_many_schedules_of_one_free_key_make_one_task(self, store: Store, rival: Store) -> None:
        tasks = [new(on_conflict=OnConflict.KEEP) for _ in range(100)]
        answers = await asyncio.gather(
            *(add_all(rival if number % 2 else store, [task]) for number, task in enumerate(tasks))
        )
        results = [answer.result for [answer] in answers]
        assert (results.count(Result.CREATED), results.count(Result.KEPT)) == (1, 99)
        winner = tasks[results.index(Result.CREATED)]
        assert (await see(store, Ref("t", "k"))).id == winner.id
