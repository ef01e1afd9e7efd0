"""Leasing: who gets what when, how much, and what the answer says about the next wake."""

from __future__ import annotations

import pytest

from bide.core.records import At, Cancel, In, Record, Ref, State
from bide.ports import Store
from bide.testing.store_suite.base import (
    DAY,
    HOUR,
    LEASE,
    MINUTE,
    NOW,
    SECOND,
    SuiteBase,
    do,
    done,
    extend,
    hold,
    keys,
    lease,
    look,
    new,
    put,
    put_and_take,
    put_one,
    see,
    settle,
    take,
)


class Leasing(SuiteBase):
    """P1: never early. P2: again and again until it is settled. P3: one holder."""

    async def test_exactly_at_its_time_and_not_a_millisecond_before(self, store: Store) -> None:
        await put_one(store, new(due=At(NOW + HOUR)))
        assert (await lease(store, now=NOW + HOUR - 1)).tasks == []
        assert (await lease(store, now=NOW + HOUR)).tasks != []

    async def test_a_short_delay_added_after_a_long_one_is_on_time(self, store: Store) -> None:
        await put_one(store, new("far", due=In(365 * DAY)))
        assert self.wakes_at((await lease(store)).next_wake, NOW + 365 * DAY, NOW)
        await put_one(store, new("near", due=In(5)))
        await self.rests_until(store, NOW + 5)
        assert (await take(store, now=NOW + 5)).key == "near"

    async def test_a_clock_that_goes_back_makes_nothing_early(self, store: Store) -> None:
        await put_one(store, new("later", due=At(NOW + HOUR)))
        await put_one(store, new("now"))
        assert keys((await lease(store, now=NOW + MINUTE)).tasks) == ["now"]
        await put_one(store, new("between", due=At(NOW + SECOND)), now=NOW)
        assert (await lease(store, 5, now=NOW)).tasks == []
        assert keys((await lease(store, 5, now=NOW + SECOND)).tasks) == ["between"]

    async def test_a_lease_sets_holder_end_attempt_and_planned_time(self, store: Store) -> None:
        waiting = await put_one(store, new(due=At(NOW - MINUTE), deadline=NOW + DAY, group="g"), now=NOW - HOUR)
        leased = await store.lease({"t": 1}, now=NOW, until=NOW + 7 * SECOND, holder="worker-9")
        [held] = leased.tasks
        assert held == Record(
            "t", "k", waiting.id, "g", State.LEASED, NOW - MINUTE, NOW + 7 * SECOND, NOW - MINUTE, 1, 0, 0, held.token,
            "worker-9", b"{}", b"", NOW + DAY, None, NOW - HOUR, None, None,
        )  # fmt: skip
        assert leased.now == NOW
        assert held.token > waiting.token
        assert await see(store, held) == held

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

    async def test_a_leased_task_is_nobody_elses(self, store: Store) -> None:
        await put_one(store)
        await take(store, holder="one")
        assert (await lease(store, 5, now=NOW + LEASE - 1, holder="two")).tasks == []

    async def test_an_expired_lease_comes_back_with_a_new_token_and_one_more_loss(self, store: Store) -> None:
        await put_one(store)
        first = await take(store, holder="one")
        second = await take(store, now=NOW + LEASE, holder="two")
        assert (second.attempt, second.losses, second.failures) == (2, 1, 0)
        assert (second.holder, second.id) == ("two", first.id)
        assert second.token > first.token
        assert second.planned_at == first.planned_at == NOW, "lateness counts from the first"
        third = await take(store, now=NOW + 3 * LEASE)
        assert (third.attempt, third.losses, third.planned_at) == (3, 2, NOW)

    async def test_a_task_whose_holders_all_died_is_still_given_out(self, store: Store) -> None:
        await put_one(store)
        for attempt in range(1, 31):
            held = await take(store, now=NOW + attempt * DAY)
            assert (held.attempt, held.losses) == (attempt, attempt - 1)

    async def test_only_the_named_topics(self, store: Store) -> None:
        await put(store, *(new("k", topic=topic) for topic in ("a", "b", "c")))
        leased = await store.lease({"a": 5, "c": 5, "nobody": 5}, now=NOW, until=NOW + LEASE, holder="w")
        assert sorted(record.topic for record in leased.tasks) == ["a", "c"]
        assert (await see(store, Ref("b", "k"))).state is State.WAITING

    async def test_asking_for_no_topic_gives_nothing(self, store: Store) -> None:
        await put_one(store)
        leased = await store.lease({}, now=NOW, until=NOW + LEASE, holder="w")
        assert (leased.tasks, leased.next_wake, leased.now) == ([], None, NOW)

    async def test_asking_an_empty_store_gives_nothing(self, store: Store) -> None:
        leased = await lease(store, 10)
        assert (leased.tasks, leased.next_wake) == ([], None)

    async def test_a_lease_that_ends_at_once_is_given_out_once_per_call(self, store: Store) -> None:
        await put_one(store)
        assert len((await lease(store, 10, lasts=0)).tasks) == 1
        assert (await take(store, lasts=0)).attempt == 2


class Fairness(SuiteBase):
    """P6: no head-of-line blocking. P8: what `lease` says about the next wake lets a worker sleep exactly."""

    async def test_next_wake_is_the_earliest_of_the_asked_topics(self, store: Store) -> None:
        await put(
            store,
            new("a", topic="a", due=At(NOW + 3 * HOUR)),
            new("b", topic="b", due=At(NOW + 2 * HOUR)),
            new("c", topic="c", due=At(NOW + 1 * HOUR)),
        )
        leased = await store.lease({"a": 1, "b": 0}, now=NOW, until=NOW + LEASE, holder="w")
        assert self.wakes_at(leased.next_wake, NOW + 2 * HOUR, NOW)

    async def test_next_wake_sees_the_end_of_a_lease(self, store: Store) -> None:
        await put(store, new("now"), new("later", due=At(NOW + DAY)))
        leased = await lease(store, 2)
        assert keys(leased.tasks) == ["now"]
        assert self.wakes_at(leased.next_wake, NOW + LEASE, NOW), "should its holder die, that is the next wake"

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
        for delay in (DAY, HOUR, MINUTE, SECOND, 1):
            await put_one(store, new(str(delay), due=In(delay)))
            assert self.wakes_at((await lease(store, 1)).next_wake, NOW + delay, NOW)

    async def test_next_wake_forgets_what_was_cancelled(self, store: Store) -> None:
        await put(store, new("near", due=In(MINUTE)), new("far", due=In(DAY)))
        await do(store, Cancel("t", "near"))
        assert self.wakes_at((await lease(store, 1)).next_wake, NOW + DAY, NOW)
        await do(store, Cancel("t", "far"))
        assert (await lease(store, 1)).next_wake is None

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

    async def test_a_topic_that_nobody_handles_delays_nobody(self, store: Store) -> None:
        await put(store, *(new(str(number), topic="unhandled", due=At(0)) for number in range(500)))
        await put_one(store, new("k", topic="handled", due=At(NOW + 1)))
        await self.rests_until(store, NOW + 1, topic="handled")
        assert len((await lease(store, 5, topic="handled", now=NOW + 1)).tasks) == 1

    async def test_a_far_off_task_does_not_hold_up_a_near_one(self, store: Store) -> None:
        await put_one(store, new("near", due=At(NOW + MINUTE)))
        for number in range(100):
            await put_one(store, new(f"far-{number}", due=At(NOW + 100 * DAY + number)))
            assert self.wakes_at((await lease(store, 1)).next_wake, NOW + MINUTE, NOW)
        assert (await take(store, now=NOW + MINUTE)).key == "near"

    async def test_a_task_that_keeps_being_lost_does_not_hold_up_the_others(self, store: Store) -> None:
        await put_one(store, new("lost"))
        await take(store, lasts=1)
        await put(store, *(new(str(number), due=At(NOW + 2)) for number in range(3)))
        assert sorted(keys((await lease(store, 4, now=NOW + 2)).tasks)) == ["0", "1", "2", "lost"]


class Extending(SuiteBase):
    """P3: a late extend with an old token is refused and changes nothing."""

    async def test_an_extended_lease_ends_later(self, store: Store) -> None:
        held = await put_and_take(store)
        assert await extend(store, held, until=NOW + HOUR, now=NOW + SECOND)
        kept = await see(store, held)
        assert (kept.wake_at, kept.token, kept.attempt, kept.planned_at) == (NOW + HOUR, held.token, 1, NOW)
        assert (await lease(store, 1, now=NOW + HOUR - 1)).tasks == []
        assert (await take(store, now=NOW + HOUR)).losses == 1

    async def test_an_expired_lease_that_nobody_took_can_be_extended(self, store: Store) -> None:
        held = await put_and_take(store)
        late = NOW + LEASE + MINUTE
        assert (await lease(store, 0, now=late)).next_wake == NOW + LEASE
        assert await extend(store, held, until=late + LEASE, now=late)
        assert (await lease(store, 1, now=late)).tasks == []
        assert await settle(store, done(held), now=late)

    async def test_an_old_token_is_refused_after_the_task_was_taken_over(self, store: Store) -> None:
        first = await put_and_take(store)
        second = await take(store, now=NOW + LEASE)
        assert not await extend(store, first, until=NOW + DAY, now=NOW + LEASE)
        assert await see(store, second) == second

    async def test_an_extend_can_be_repeated(self, store: Store) -> None:
        held = await put_and_take(store)
        for step in range(1, 50):
            assert await extend(store, held, until=NOW + step * SECOND + LEASE, now=NOW + step * SECOND)
        assert (await lease(store, 0)).next_wake is not None
        assert (await see(store, held)).wake_at == NOW + 49 * SECOND + LEASE
        assert len((await lease(store, 5, now=NOW + DAY)).tasks) == 1

    async def test_a_batch_of_extends_keeps_its_order_though_some_are_refused(self, store: Store) -> None:
        await put(store, new("a"), new("b"), new("c"))
        held = {record.key: record for record in (await lease(store, 3)).tasks}
        assert await settle(store, done(held["b"]))
        asked = [hold(held[key]) for key in "abca"]
        assert await store.extend(asked, now=NOW, until=NOW + HOUR) == [True, False, True, True]
        assert await look(store, held["b"]) is None
