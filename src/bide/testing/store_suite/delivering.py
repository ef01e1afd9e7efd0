"""Tests of a delivery, from the lease (which worker gets which tasks, and the next wake) to the settled outcome.

Races, which exactly one caller wins, come last.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import pytest
from msgspec.structs import replace

from bide.core.answers import Answer
from bide.core.instants import At, Due, In
from bide.core.names import new_id
from bide.core.records import (
    Cancel,
    Filter,
    Move,
    OnConflict,
    OutcomeKind,
    Record,
    Redrive,
    Ref,
    Result,
    Settlement,
    State,
)
from bide.ports import Store
from bide.testing.store_suite.base import (
    DAY,
    HOUR,
    KEPT,
    LEASE,
    MINUTE,
    NOW,
    SECOND,
    SuiteBase,
    add_all,
    again,
    bring,
    change_all,
    dead,
    defer,
    do,
    done,
    extend,
    hold,
    keys,
    lease,
    listed,
    look,
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

    async def test_exactly_at_its_time_and_not_a_millisecond_before(self, store: Store) -> None:
        await put_one(store, new(due=At(NOW + HOUR)))
        assert (await lease(store, now=NOW + HOUR - 1)).tasks == []
        assert (await lease(store, now=NOW + HOUR)).tasks != []

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


class Settling(SuiteBase):
    """P2: delivered until settled. P3: a late settle with an old token is refused and changes nothing."""

    async def test_a_second_settle_is_refused(self, store: Store) -> None:
        held = await put_and_take(store)
        assert await settle(store, done(held, keep_until=KEPT))
        ended = await see(store, held)
        for outcome in (done(held, keep_until=KEPT), retry(held, In(0)), defer(held, In(0)), dead(held)):
            assert not await settle(store, outcome)
        assert await see(store, held) == ended

    async def test_the_same_lease_twice_in_one_batch_is_settled_once(self, store: Store) -> None:
        held = await put_and_take(store)
        assert await settle_all(store, [retry(held, In(HOUR)), done(held)]) == [True, False]
        assert (await see(store, held)).failures == 1

    async def test_a_lease_that_was_taken_over_can_be_neither_extended_nor_settled(self, store: Store) -> None:
        first = await put_and_take(store)
        second = await take(store, now=NOW + LEASE)
        assert not await extend(store, first, until=NOW + DAY, now=NOW + LEASE)
        for outcome in (done(first), retry(first, In(0)), dead(first), again(first, In(0))):
            assert not await settle(store, outcome, now=NOW + LEASE)
        assert await see(store, second) == second
        assert await settle(store, done(second), now=NOW + LEASE)

    async def test_an_expired_lease_that_nobody_took_can_be_settled(self, store: Store) -> None:
        held = await put_and_take(store)
        assert await settle(store, done(held), now=NOW + DAY)
        assert await look(store, held) is None

    async def test_retry_counts_a_failure_and_forgives_the_losses(self, store: Store) -> None:
        await put_and_take(store)
        held = await take(store, now=NOW + LEASE)
        assert (held.attempt, held.losses) == (2, 1)
        assert await settle(store, retry(held, In(MINUTE), error="refused"), now=NOW + LEASE)
        waiting = await see(store, held)
        assert (waiting.state, waiting.attempt, waiting.failures, waiting.losses) == (State.WAITING, 2, 1, 0)
        assert (waiting.error, waiting.holder, waiting.planned_at) == ("refused", None, 0)
        assert (waiting.wake_at, waiting.due_at) == (NOW + LEASE + MINUTE, NOW)
        assert (await lease(store, 5, now=NOW + LEASE + MINUTE - 1)).tasks == []
        following = await take(store, now=NOW + LEASE + MINUTE)
        assert (following.attempt, following.failures, following.error) == (3, 1, "refused")
        assert following.planned_at == NOW + LEASE + MINUTE

    async def test_defer_counts_nothing(self, store: Store) -> None:
        assert await settle(store, retry(await put_and_take(store), In(0), error="once"))
        for step in range(1, 6):
            held = await take(store, now=NOW + step * HOUR)
            assert (held.attempt, held.failures) == (2, 1)
            assert await settle(store, defer(held, In(HOUR)), now=NOW + step * HOUR)
        waiting = await see(store, Ref("t", "k"))
        assert (waiting.attempt, waiting.failures, waiting.losses, waiting.error) == (1, 1, 0, "once")

    async def test_defer_forgives_the_losses_and_gives_back_one_attempt(self, store: Store) -> None:
        await put_and_take(store)
        held = await take(store, now=NOW + LEASE)
        assert (held.attempt, held.losses) == (2, 1)
        assert await settle(store, defer(held, In(0)), now=NOW + LEASE)
        waiting = await see(store, held)
        assert (waiting.attempt, waiting.losses) == (1, 0)

    async def test_a_retry_in_the_past_is_due_now(self, store: Store) -> None:
        assert await settle(store, retry(await put_and_take(store), At(0)), now=NOW + SECOND)
        assert (await see(store, Ref("t", "k"))).wake_at == NOW + SECOND
        assert (await take(store, now=NOW + SECOND)).attempt == 2

    @pytest.mark.parametrize("failed", [False, True])
    async def test_a_death_counts_as_a_failure_if_a_delivery_failed(self, store: Store, *, failed: bool) -> None:
        assert await settle(store, retry(await put_and_take(store), In(0)))
        held = await take(store)
        assert await settle(store, replace(dead(held), failed=failed))
        assert ((await see(store, held)).failures, held.attempt) == (1 + failed, 2)

    async def test_dead_without_a_reason_keeps_the_last_failure(self, store: Store) -> None:
        assert await settle(store, retry(await put_and_take(store), In(0), error="the last failure"))
        assert await settle(store, dead(await take(store), error=None))
        assert (await see(store, Ref("t", "k"))).error == "the last failure"

    async def test_done_forgets_an_earlier_failure(self, store: Store) -> None:
        assert await settle(store, retry(await put_and_take(store), In(0), error="an earlier failure"))
        assert await settle(store, done(await take(store), keep_until=KEPT))
        ended = await see(store, Ref("t", "k"))
        assert (ended.error, ended.failures, ended.attempt) == (None, 1, 2)

    @pytest.mark.parametrize("wake", [In(HOUR), At(NOW + HOUR)], ids=["in", "at"])
    async def test_done_with_another_time_starts_the_next_life(self, store: Store, wake: In | At) -> None:
        first = await put_one(store, new(payload=b"p", group="g", options=b"\x80", deadline=NOW + MINUTE))
        assert await settle(store, retry(await take(store), In(0)))
        held = await take(store)
        life = new_id()
        assert await settle(store, again(held, wake, next_id=life))
        following = await see(store, held)
        assert (following.id, following.state, following.payload) == (life, State.WAITING, b"p")
        assert following.id != first.id
        assert (following.group, following.options, following.deadline) == ("g", b"\x80", None)
        assert (following.due_at, following.wake_at, following.created_at) == (NOW + HOUR, NOW + HOUR, NOW)
        assert (following.attempt, following.failures, following.losses, following.error) == (0, 0, 0, None)
        assert len(await listed(store, Filter(group="g"))) == 1
        assert (await take(store, now=NOW + HOUR)).attempt == 1

    @pytest.mark.parametrize("due", [At(NOW - DAY), At(0), In(-DAY), At(-5)], ids=str)
    async def test_a_next_life_in_the_past_wakes_now_and_keeps_what_was_asked(self, store: Store, due: Due) -> None:
        assert await settle(store, again(await put_and_take(store), due))
        following = await see(store, Ref("t", "k"))
        assert (following.due_at, following.wake_at) == (max(due.resolve(NOW), 0), NOW)
        held = await take(store)
        assert (held.due_at, held.planned_at) == (following.due_at, NOW)

    async def test_a_mixed_batch_keeps_its_order_though_some_are_refused(self, store: Store) -> None:
        await put(store, *(new(key) for key in "abcdef"))
        held = {record.key: record for record in (await lease(store, 6)).tasks}
        assert (await do(store, Cancel("t", "c"))).result is Result.CANCELLED_WHILE_LEASED
        outcomes = [
            done(held["a"]),
            Settlement("t", "nobody", 1, OutcomeKind.DONE),
            done(held["c"]),
            retry(held["b"], In(HOUR), error=None),
            dead(held["d"]),
            Settlement("nowhere", "a", held["a"].token, OutcomeKind.DEAD),
            defer(held["e"], In(HOUR)),
            again(held["f"], In(HOUR)),
        ]
        assert await settle_all(store, outcomes) == [True, False, False, True, True, False, True, True]
        states = [None if r is None else r.state for r in await store.get([Ref("t", key) for key in "abcdef"])]
        assert states == [None, State.WAITING, None, State.DEAD, State.WAITING, State.WAITING]

    async def test_of_a_batch_that_is_all_done_only_the_stale_is_refused(self, store: Store) -> None:
        await put(store, *(new(key) for key in "abc"))
        held = sorted((await lease(store, 3)).tasks, key=lambda record: record.key)
        assert (await do(store, Cancel("t", "b"))).result is Result.CANCELLED_WHILE_LEASED
        assert await settle_all(store, [done(record) for record in held]) == [True, False, True]
        assert await store.get([Ref("t", key) for key in "abc"]) == [None, None, None]

    @pytest.mark.parametrize("outcome", [retry, defer, again], ids=["retry", "defer", "again"])
    async def test_one_that_waits_again_can_be_moved_and_cancelled_like_any_other(
        self, store: Store, outcome: Callable[[Record, Due], Settlement]
    ) -> None:
        assert await settle(store, outcome(await put_and_take(store), In(DAY)))
        assert (await do(store, Move("t", "k", In(HOUR)))).was == NOW + DAY
        await self.rests_until(store, NOW + HOUR)
        assert (await do(store, Cancel("t", "k"))).result is Result.CANCELLED
        assert (await lease(store, 1)).next_wake is None

    async def test_an_ended_task_tells_when_its_delivery_began(self, store: Store) -> None:
        """`wake_at` has no other use then; it shows later why a task was late."""
        for number, end in enumerate((done, dead)):
            at = NOW + number * MINUTE
            await put_one(store, new(str(number)), now=at - SECOND)
            held = await take(store, now=at)
            assert held.started_at == at
            assert await settle(store, end(held, keep_until=at + DAY), now=at + 2 * SECOND)
            ended = await see(store, held)
            assert (ended.wake_at, ended.started_at, ended.finished_at) == (at, at, at + 2 * SECOND)
        at = NOW + HOUR
        await put_one(store, new("cancelled while leased"), now=at)
        held = await take(store, now=at)
        await do(store, Cancel("t", held.key, at + DAY), now=at + SECOND)
        assert (await see(store, held)).started_at == at
        waiting = await put_one(store, new("cancelled before", due=In(HOUR)), now=at + SECOND)
        assert waiting.started_at is None
        await do(store, Cancel("t", waiting.key, at + DAY), now=at + MINUTE)
        ended = await see(store, waiting)
        assert (ended.started_at, ended.wake_at) == (None, at + SECOND + HOUR)


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


AT_ONCE = 50

First = TypeVar("First")
Second = TypeVar("Second")


async def both(
    number: int, first: Coroutine[Any, Any, First], second: Coroutine[Any, Any, Second]
) -> tuple[First, Second]:
    """Run both at once, alternating which starts first."""
    if number % 2:
        two, one = await asyncio.gather(second, first)
    else:
        one, two = await asyncio.gather(first, second)
    return one, two


async def in_batches(races: int, race: Callable[[int, str], Coroutine[Any, Any, None]]) -> None:
    """Run the races, several at once, each with its number and its own topic."""
    for start in range(0, races, AT_ONCE):
        await asyncio.gather(*(race(number, f"t{number}") for number in range(start, start + AT_ONCE)))


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

    async def test_fifty_workers_hold_each_task_once(self, store: Store) -> None:
        await put(store, *(new(str(number)) for number in range(100)))
        answers = await asyncio.gather(*(lease(store, 7, holder=f"w{number}") for number in range(50)))
        held = [record for leased in answers for record in leased.tasks]
        assert sorted(record.key for record in held) == sorted(str(number) for number in range(100))
        assert await asyncio.gather(*(settle(store, done(record)) for record in held)) == [True] * 100

    async def test_lease_against_a_move(self, store: Store, rival: Store) -> None:
        async def race(number: int, topic: str) -> None:
            await put_one(store, new(topic=topic))
            leased, moved = await both(number, lease(store, topic=topic), do(rival, Move(topic, "k", At(NOW + HOUR))))
            now_is = await see(store, Ref(topic, "k"))
            if leased.tasks:
                assert (moved.result, now_is) == (Result.UNDER_WAY, leased.tasks[0])
            else:
                assert (moved.result, now_is) == (Result.MOVED, moved.record)

        await in_batches(self.races, race)

    async def test_lease_against_a_conditional_fire_now(self, store: Store, rival: Store) -> None:
        async def race(number: int, topic: str) -> None:
            record = await put_one(store, new(topic=topic))
            leased, fired = await both(
                number, lease(store, topic=topic), do(rival, Move(topic, "k", In(0), record.token))
            )
            [held] = leased.tasks
            assert fired.record is not None
            if fired.result is Result.MOVED:
                assert held.token > fired.record.token > record.token
            else:
                assert (fired.result, fired.record) == (Result.STALE_TOKEN, held)
            assert await see(store, held) == held

        await in_batches(self.races, race)

    async def test_lease_against_a_cancel(self, store: Store, rival: Store) -> None:
        async def race(number: int, topic: str) -> None:
            await put_one(store, new(topic=topic))
            leased, cancelled = await both(number, lease(store, topic=topic), do(rival, Cancel(topic, "k", KEPT)))
            assert (await see(store, Ref(topic, "k"))).state is State.CANCELLED
            if leased.tasks:
                assert cancelled.result is Result.CANCELLED_WHILE_LEASED
                assert not await settle(store, done(leased.tasks[0]))
            else:
                assert cancelled.result is Result.CANCELLED, "and no delivery starts afterwards"
            assert (await lease(store, topic=topic)).tasks == []

        await in_batches(self.races, race)

    async def test_lease_against_a_redrive(self, store: Store, rival: Store) -> None:
        async def race(number: int, topic: str) -> None:
            gone = await bring(store, State.DEAD, topic=topic)
            assert gone is not None
            leased, redriven = await both(
                number, lease(store, topic=topic), do(rival, Redrive(topic, "k", new_id(), In(0), gone.token))
            )
            assert redriven.result is Result.REDRIVEN
            assert redriven.record is not None
            held = leased.tasks or (await lease(store, topic=topic)).tasks
            assert [record.id for record in held] == [redriven.record.id], "delivered once, as the new life"
            assert (await do(rival, Redrive(topic, "k", new_id(), In(0)))).result is Result.UNDER_WAY

        await in_batches(self.races, race)

    @pytest.mark.parametrize("on_conflict", list(OnConflict), ids=str)
    async def test_lease_against_a_schedule(self, store: Store, rival: Store, on_conflict: OnConflict) -> None:
        due = At(NOW - HOUR if on_conflict is OnConflict.EARLIEST else NOW)
        if on_conflict is OnConflict.LATEST:
            due = At(NOW + 1)

        async def race(number: int, topic: str) -> None:
            old = await put_one(store, new(topic=topic))
            task = new(topic=topic, due=due, on_conflict=on_conflict)
            leased, [answer] = await both(number, lease(store, topic=topic), add_all(rival, [task]))
            now_is = await see(store, old)
            settled = [await settle(store, done(record)) for record in leased.tasks]
            if answer.result is Result.REPLACED:
                assert now_is.id == task.id
                assert settled == [record.id == task.id for record in leased.tasks], "only the new life counts"
            else:
                assert answer.result is (Result.REFUSED if on_conflict is OnConflict.REFUSE else Result.KEPT)
                assert now_is.id == old.id
                assert settled == [True]

        await in_batches(self.races, race)

    async def test_two_workers_race_for_a_lost_lease(self, store: Store, rival: Store) -> None:
        async def race(number: int, topic: str) -> None:
            lost = await put_and_take(store, new(topic=topic))
            one, two = await both(
                number,
                lease(store, topic=topic, now=NOW + LEASE, holder="one"),
                lease(rival, topic=topic, now=NOW + LEASE, holder="two"),
            )
            [held] = one.tasks + two.tasks
            assert (held.attempt, held.losses) == (2, 1)
            assert held.token > lost.token
            assert await see(store, held) == held

        await in_batches(self.races, race)

    @pytest.mark.parametrize("ends", [True, False], ids=["settle", "extend"])
    async def test_a_late_holder_against_the_next_lease(self, store: Store, rival: Store, *, ends: bool) -> None:
        async def race(number: int, topic: str) -> None:
            late = await put_and_take(store, new(topic=topic))
            if ends:
                asked = settle(store, done(late), now=NOW + LEASE)
            else:
                asked = extend(store, late, until=NOW + HOUR, now=NOW + LEASE)
            accepted, leased = await both(number, asked, lease(rival, topic=topic, now=NOW + LEASE))
            assert accepted is (leased.tasks == [])
            if not accepted or ends:
                assert await look(store, late) == (None if accepted else leased.tasks[0])

        await in_batches(self.races, race)

    async def test_a_settle_against_a_cancel(self, store: Store, rival: Store) -> None:
        async def race(number: int, topic: str) -> None:
            held = await put_and_take(store, new(topic=topic))
            outcome = (done(held, keep_until=KEPT), retry(held, In(0)), dead(held))[number % 3]
            settled, cancelled = await both(number, settle(store, outcome), do(rival, Cancel(topic, "k", KEPT)))
            now_is: Record = await see(store, held)
            if not settled:
                assert cancelled.result is Result.CANCELLED_WHILE_LEASED
                assert now_is.state is State.CANCELLED
            elif number % 3 == 1:
                assert (cancelled.result, now_is.state) == (Result.CANCELLED, State.CANCELLED)
            else:
                assert cancelled.result is Result.FINISHED
                assert now_is == cancelled.record

        await in_batches(self.races, race)

    async def test_many_schedules_of_one_free_key_make_one_task(self, store: Store, rival: Store) -> None:
        tasks = [new(on_conflict=OnConflict.KEEP) for _ in range(100)]
        answers = await asyncio.gather(
            *(add_all(rival if number % 2 else store, [task]) for number, task in enumerate(tasks))
        )
        results = [answer.result for [answer] in answers]
        assert (results.count(Result.CREATED), results.count(Result.KEPT)) == (1, 99)
        winner = tasks[results.index(Result.CREATED)]
        assert (await see(store, Ref("t", "k"))).id == winner.id
