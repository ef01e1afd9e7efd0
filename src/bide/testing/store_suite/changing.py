"""Changing: moving, firing now, cancelling, sending again; and what a change in a batch does to its neighbours."""

from __future__ import annotations

import pytest

from bide.core.names import new_id
from bide.core.records import At, Cancel, Change, Due, Filter, In, Move, Redrive, Ref, Result, State
from bide.ports import Store
from bide.testing.store_suite.acts import (
    DAY,
    HOUR,
    KEPT,
    LEASE,
    MINUTE,
    NOW,
    SECOND,
    bring,
    defer,
    do,
    done,
    extend,
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
)
from bide.testing.store_suite.base import SuiteBase


class Changing(SuiteBase):
    """P4: every verb is one atomic transition per task. P5: the newest word wins."""

    @pytest.mark.parametrize("to", [NOW + SECOND, NOW + DAY, NOW + 400 * DAY])
    async def test_a_moved_task_is_due_at_the_new_time_and_at_no_other(self, store: Store, to: int) -> None:
        record = await put_one(store, new(due=At(NOW + HOUR)))
        answer = await do(store, Move("t", "k", At(to)))
        assert (answer.result, answer.was) == (Result.MOVED, NOW + HOUR)
        moved = record_of(answer)
        assert (moved.due_at, moved.wake_at, moved.id) == (to, to, record.id)
        assert (await lease(store, 5, now=to - 1)).tasks == []
        assert (await take(store, now=to)).planned_at == to

    async def test_fire_now_makes_it_due_now(self, store: Store) -> None:
        await put_one(store, new(due=At(NOW + 365 * DAY)))
        answer = await do(store, Move("t", "k", In(0)), now=NOW + MINUTE)
        assert (answer.result, record_of(answer).wake_at) == (Result.MOVED, NOW + MINUTE)
        assert (await take(store, now=NOW + MINUTE)).attempt == 1

    async def test_a_move_into_the_past_is_due_now(self, store: Store) -> None:
        await put_one(store, new(due=At(NOW + HOUR)))
        moved = record_of(await do(store, Move("t", "k", At(NOW - DAY)), now=NOW + SECOND))
        assert (moved.due_at, moved.wake_at) == (NOW - DAY, NOW + SECOND)

    async def test_a_due_task_moved_away_is_no_longer_due(self, store: Store) -> None:
        await put_one(store)
        assert (await lease(store, 0)).next_wake == NOW
        await do(store, Move("t", "k", At(NOW + HOUR)))
        leased = await lease(store, 5)
        assert leased.tasks == []
        assert self.wakes_at(leased.next_wake, NOW + HOUR, NOW)

    async def test_a_task_moved_away_and_back_is_leased_once(self, store: Store) -> None:
        await put_one(store)
        assert (await lease(store, 0)).next_wake == NOW
        for _ in range(3):
            await do(store, Move("t", "k", At(NOW + HOUR)))
            await do(store, Move("t", "k", At(NOW)))
        assert len((await lease(store, 10)).tasks) == 1
        assert (await lease(store, 10)).tasks == []

    async def test_a_second_click_on_fire_now_finds_it_under_way(self, store: Store) -> None:
        await put_one(store, new(due=At(NOW + HOUR)))
        await do(store, Move("t", "k", In(0)))
        held = await take(store)
        answer = await do(store, Move("t", "k", In(0)))
        assert (answer.result, answer.record, answer.ok) == (Result.UNDER_WAY, held, False)
        assert (await lease(store, 5, now=NOW + LEASE - 1)).tasks == []

    async def test_a_move_keeps_attempts_failures_and_the_last_error(self, store: Store) -> None:
        await put_one(store)
        await settle(store, retry(await take(store), In(HOUR), error="no answer"))
        moved = record_of(await do(store, Move("t", "k", In(MINUTE))))
        assert (moved.attempt, moved.failures, moved.error) == (1, 1, "no answer")
        assert (await take(store, now=NOW + MINUTE)).attempt == 2

    async def test_a_move_past_the_deadline_is_refused(self, store: Store) -> None:
        record = await put_one(store, new(deadline=NOW + HOUR))
        past, upto = await store.change([Move("t", "k", At(NOW + HOUR + 1)), Move("t", "k", At(NOW + HOUR))], now=NOW)
        assert (past.result, past.record, past.ok) == (Result.REFUSED, record, False)
        assert (upto.result, record_of(upto).due_at) == (Result.MOVED, NOW + HOUR)

    async def test_a_move_may_bring_a_new_deadline(self, store: Store) -> None:
        await put(store, new(deadline=NOW + HOUR))
        later = await do(store, Move("t", "k", At(NOW + DAY), None, NOW + DAY))
        assert (later.result, record_of(later).due_at, record_of(later).deadline) == (
            Result.MOVED,
            NOW + DAY,
            NOW + DAY,
        )
        assert await store.get([Ref("t", "k")]) == [later.record]
        over = await do(store, Move("t", "k", At(NOW + DAY), None, NOW + HOUR))
        assert (over.result, over.record) == (Result.REFUSED, later.record)
        kept = await do(store, Move("t", "k", At(NOW + MINUTE)))
        assert (kept.result, record_of(kept).deadline) == (Result.MOVED, NOW + DAY)

    @pytest.mark.parametrize("due", [In(0), At(NOW), At(0)], ids=["fire now", "before the deadline", "long ago"])
    async def test_once_the_deadline_has_passed_every_move_is_refused(self, store: Store, due: Due) -> None:
        record = await put_one(store, new(due=At(NOW + DAY), deadline=NOW + HOUR))
        answer = await do(store, Move("t", "k", due), now=NOW + HOUR + 1)
        assert (answer.result, answer.record) == (Result.REFUSED, record)
        assert (await do(store, Move("t", "k", due), now=NOW + HOUR)).result is Result.MOVED

    async def test_a_cancelled_task_is_never_leased(self, store: Store) -> None:
        await put(store, new("due"), new("later", due=At(NOW + HOUR)))
        assert (await lease(store, 0)).next_wake == NOW
        answers = await store.change([Cancel("t", "due"), Cancel("t", "later")], now=NOW)
        assert [answer.result for answer in answers] == [Result.CANCELLED] * 2
        leased = await lease(store, 5, now=NOW + DAY)
        assert (leased.tasks, leased.next_wake) == ([], None)

    async def test_a_cancel_answers_with_the_task_also_when_it_is_forgotten_at_once(self, store: Store) -> None:
        record = await put_one(store)
        answer = await do(store, Cancel("t", "k"), now=NOW + SECOND)
        ended = record_of(answer)
        assert (ended.id, ended.state, ended.finished_at) == (record.id, State.CANCELLED, NOW + SECOND)
        assert await look(store, record) is None
        assert (await do(store, Cancel("t", "k"))).result is Result.NOT_FOUND

    async def test_cancelling_a_running_task_tells_the_holder_at_its_next_extend(self, store: Store) -> None:
        await put_one(store)
        held = await take(store)
        assert (await do(store, Cancel("t", "k", KEPT))).result is Result.CANCELLED_WHILE_LEASED
        assert not await extend(store, held, until=NOW + HOUR)
        assert not await settle(store, retry(held, In(0)))
        assert (await lease(store, 5, now=NOW + DAY)).tasks == [], "neither a retry nor a redelivery follows"
        assert (await see(store, held)).state is State.CANCELLED

    async def test_a_second_cancel_finds_it_finished(self, store: Store) -> None:
        cancelled = await bring(store, State.CANCELLED)
        answer = await do(store, Cancel("t", "k", KEPT))
        assert (answer.result, answer.record) == (Result.FINISHED, cancelled)

    async def test_a_redriven_task_starts_a_new_life_without_a_deadline(self, store: Store) -> None:
        gone = await bring(store, State.DEAD, deadline=NOW + MINUTE, group="g")
        assert gone is not None
        life = new_id()
        answer = await do(store, Redrive("t", "k", life, In(HOUR)), now=NOW + SECOND)
        assert (answer.result, answer.was, answer.ok) == (Result.REDRIVEN, None, True)
        record = record_of(answer)
        assert (record.id, record.state, record.payload, record.group) == (life, State.WAITING, gone.payload, "g")
        assert (record.attempt, record.failures, record.losses, record.error) == (0, 0, 0, None)
        assert (record.deadline, record.finished_at, record.keep_until) == (None, None, None)
        assert (record.due_at, record.created_at) == (NOW + SECOND + HOUR, NOW + SECOND)
        assert (await take(store, now=NOW + SECOND + HOUR)).attempt == 1

    async def test_redrive_leaves_what_is_not_dead(self, store: Store) -> None:
        waiting = await put_one(store)
        answer = await do(store, Redrive("t", "k", new_id(), In(0)))
        assert (answer.result, answer.record) == (Result.UNDER_WAY, waiting)

    @pytest.mark.parametrize(
        "asked",
        [Move("t", "k", In(0)), Cancel("t", "k"), Redrive("t", "k", new_id(), In(0))],
        ids=["move", "cancel", "redrive"],
    )
    async def test_a_key_that_was_never_there_is_not_found(self, store: Store, asked: Change) -> None:
        await put(store, new("k", topic="other"), new("other"))
        answer = await do(store, asked)
        assert (answer.result, answer.record, answer.ok) == (Result.NOT_FOUND, None, False)

    async def test_a_mixed_batch_keeps_its_order_though_some_are_refused(self, store: Store) -> None:
        waiting, other = await put(store, new("waiting"), new("other"))
        await bring(store, State.DEAD, "dead", topic="d")
        changes: list[Change] = [
            Move("t", "nobody", In(0)),
            Move("t", "waiting", At(NOW + HOUR)),
            Move("t", "waiting", At(NOW + DAY), waiting.token),
            Cancel("t", "other", 0, other.token),
            Cancel("t", "other"),
            Redrive("d", "dead", new_id(), In(0)),
            Redrive("d", "dead", new_id(), In(0)),
        ]
        answers = await store.change(changes, now=NOW)
        assert [answer.result for answer in answers] == [
            Result.NOT_FOUND,
            Result.MOVED,
            Result.STALE_TOKEN,
            Result.CANCELLED,
            Result.NOT_FOUND,
            Result.REDRIVEN,
            Result.UNDER_WAY,
        ]
        assert (await see(store, waiting)).wake_at == NOW + HOUR
        assert await look(store, Ref("t", "other")) is None

    async def test_a_conditional_change_is_true_to_the_token_it_read(self, store: Store) -> None:
        read = await put_one(store)
        moved = await do(store, Move("t", "k", In(HOUR), read.token))
        assert moved.result is Result.MOVED
        stale = await do(store, Cancel("t", "k", 0, read.token))
        assert (stale.result, stale.record) == (Result.STALE_TOKEN, moved.record)
        fresh = await do(store, Cancel("t", "k", 0, record_of(moved).token))
        assert fresh.result is Result.CANCELLED

    async def test_a_deferred_task_can_be_moved_forward(self, store: Store) -> None:
        await put_one(store)
        held = await take(store)
        assert await settle(store, defer(held, In(HOUR)))
        assert (await do(store, Move("t", "k", In(MINUTE)))).was == NOW + HOUR
        following = await take(store, now=NOW + MINUTE)
        assert (following.attempt, following.losses) == (1, 0)
        assert await settle(store, done(following), now=NOW + MINUTE)

    async def test_a_whole_group_is_found_and_changed(self, store: Store) -> None:
        await put(store, *(new(str(number), group="g", due=At(NOW + HOUR)) for number in range(20)), new("not"))
        members = await listed(store, Filter(group="g"), limit=7)
        answers = await store.change([Move(m.topic, m.key, At(m.due_at - HOUR), m.token) for m in members], now=NOW)
        assert {answer.result for answer in answers} == {Result.MOVED}
        assert len(answers) == 20
        assert len((await lease(store, 100)).tasks) == 21
