"""Scheduling: what a new task looks like, and what becomes of the one whose key it takes."""

from __future__ import annotations

import pytest

from bide.core.instants import LAST_INSTANT
from bide.core.names import new_id
from bide.core.records import At, Due, Filter, In, NewTask, OnConflict, Record, Ref, Result, State
from bide.ports import Store
from bide.testing.store_suite.acts import (
    DAY,
    HOUR,
    KEPT,
    MINUTE,
    NOW,
    SECOND,
    bring,
    done,
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


class Scheduling(SuiteBase):
    """P2: once `add` has answered, the task is there. P5: the newest word wins."""

    async def test_a_new_task_has_every_field_as_given(self, store: Store) -> None:
        life = new_id()
        task = NewTask(
            "orders", "42", life, At(NOW + HOUR), b"\x01payload", "user-7", b"\x80", NOW + DAY, OnConflict.REFUSE
        )
        [answer] = await store.add([task], now=NOW)
        assert answer.result is Result.CREATED
        assert answer.was is None
        record = record_of(answer)
        assert record == Record(
            "orders", "42", life, "user-7", State.WAITING, NOW + HOUR, NOW + HOUR, 0, 0, 0, 0, record.token, None,
            b"\x01payload", b"\x80", NOW + DAY, None, NOW, None, None,
        )  # fmt: skip
        assert record.token > 0
        assert await see(store, record) == record

    async def test_empty_optional_fields_stay_empty(self, store: Store) -> None:
        task = NewTask("t", "k", new_id(), At(NOW))
        record = await put_one(store, task)
        assert (record.group, record.deadline, record.error, record.holder) == (None, None, None, None)
        assert (record.payload, record.options) == (b"", b"")
        assert (record.finished_at, record.keep_until) == (None, None)
        assert await see(store, record) == record

    async def test_a_relative_time_counts_from_now(self, store: Store) -> None:
        record = await put_one(store, new(due=In(5 * MINUTE)))
        assert (record.due_at, record.wake_at) == (NOW + 5 * MINUTE, NOW + 5 * MINUTE)

    @pytest.mark.parametrize("due", [At(NOW - DAY), At(0), In(-DAY), At(-5), In(-2 * NOW)], ids=str)
    async def test_a_time_in_the_past_is_due_now_and_keeps_what_was_asked(self, store: Store, due: Due) -> None:
        record = await put_one(store, new(due=due))
        assert record.wake_at == NOW
        assert record.due_at == max(due.resolve(NOW), 0)
        assert (await take(store, now=NOW)).key == "k"

    async def test_nothing_lies_beyond_the_last_instant(self, store: Store) -> None:
        far = await put_one(store, new("far", due=At(LAST_INSTANT)))
        beyond = await put_one(store, new("beyond", due=In(LAST_INSTANT)))
        assert far.wake_at == beyond.wake_at == LAST_INSTANT
        assert (await lease(store, 2, now=LAST_INSTANT - 1)).tasks == []
        assert len((await lease(store, 2, now=LAST_INSTANT)).tasks) == 2

    async def test_a_replaced_task_has_only_the_new_time_and_payload(self, store: Store) -> None:
        await put_one(store, new(due=At(NOW), payload=b"old", group="g", options=b"\x80", deadline=KEPT))
        [answer] = await store.add([new(due=At(NOW + HOUR), payload=b"new")], now=NOW)
        assert (answer.result, answer.was) == (Result.REPLACED, NOW)
        record = record_of(answer)
        assert (record.payload, record.group, record.options, record.deadline) == (b"new", None, b"", None)
        assert (await lease(store, 5, now=NOW + HOUR - 1)).tasks == []
        assert (await take(store, now=NOW + HOUR)).payload == b"new"
        assert await listed(store, Filter(group="g")) == []

    async def test_replacing_a_running_task_refuses_the_old_outcome(self, store: Store) -> None:
        await put_one(store)
        held = await take(store)
        [answer] = await store.add([new(payload=b"new")], now=NOW + SECOND)
        assert (answer.result, answer.was) == (Result.REPLACED, held.wake_at)
        assert not await settle(store, done(held), now=NOW + SECOND)
        following = await take(store, now=NOW + SECOND)
        assert (following.payload, following.attempt, following.losses) == (b"new", 1, 0)
        assert following.token > held.token

    async def test_replacing_what_is_over_says_no_time_from_before(self, store: Store) -> None:
        await bring(store, State.DONE)
        [answer] = await store.add([new()], now=NOW)
        assert (answer.result, answer.was) == (Result.REPLACED, None)

    async def test_keep_meets_what_is_there_also_when_it_is_done(self, store: Store) -> None:
        for state in (State.WAITING, State.LEASED, State.DONE):
            there = await bring(store, state, state.value, topic=state.value)
            [answer] = await store.add(
                [new(state.value, topic=state.value, payload=b"second", on_conflict=OnConflict.KEEP)], now=NOW
            )
            assert answer.result is Result.KEPT
            assert answer.record == there
            assert answer.ok

    async def test_keep_schedules_again_once_the_done_task_is_forgotten(self, store: Store) -> None:
        await bring(store, State.DONE, keep_until=NOW + MINUTE)
        assert await store.purge(now=NOW + MINUTE, limit=10) == 1
        [answer] = await store.add([new(on_conflict=OnConflict.KEEP)], now=NOW + MINUTE)
        assert answer.result is Result.CREATED

    @pytest.mark.parametrize(
        ("on_conflict", "winning", "losing"),
        [(OnConflict.EARLIEST, -HOUR, HOUR), (OnConflict.LATEST, HOUR, -HOUR)],
        ids=["earliest", "latest"],
    )
    async def test_the_winning_time_brings_its_payload(
        self, store: Store, on_conflict: OnConflict, winning: int, losing: int
    ) -> None:
        there = await put_one(store, new(due=At(NOW + DAY), payload=b"first"))
        loser = new(due=At(NOW + DAY + losing), payload=b"loses", on_conflict=on_conflict)
        tie = new(due=At(NOW + DAY), payload=b"ties", on_conflict=on_conflict)
        winner = new(due=At(NOW + DAY + winning), payload=b"wins", on_conflict=on_conflict)
        lost, tied, won = await store.add([loser, tie, winner], now=NOW)
        assert (lost.result, lost.record) == (Result.KEPT, there)
        assert (tied.result, tied.record) == (Result.KEPT, there)
        assert (won.result, won.was) == (Result.REPLACED, NOW + DAY)
        now_is = await see(store, there)
        assert (now_is.payload, now_is.id, now_is.due_at) == (b"wins", winner.id, NOW + DAY + winning)

    async def test_earliest_goes_by_the_time_asked_for_not_by_the_wake(self, store: Store) -> None:
        there = await put_one(store, new(due=At(NOW - HOUR)))
        [answer] = await store.add([new(due=At(NOW - MINUTE), on_conflict=OnConflict.EARLIEST)], now=NOW)
        assert (answer.result, answer.record) == (Result.KEPT, there)

    @pytest.mark.parametrize(
        ("on_conflict", "result"),
        [(OnConflict.EARLIEST, Result.KEPT), (OnConflict.LATEST, Result.REPLACED)],
        ids=["earliest", "latest"],
    )
    async def test_which_time_wins_goes_by_what_was_asked_not_by_a_retry(
        self, store: Store, on_conflict: OnConflict, result: Result
    ) -> None:
        await put_one(store, new(due=At(NOW)))
        assert await settle(store, retry(await take(store), In(DAY)))
        [answer] = await store.add([new(due=At(NOW + HOUR), on_conflict=on_conflict)], now=NOW)
        assert answer.result is result

    async def test_earliest_keeps_a_running_task_and_latest_starts_anew(self, store: Store) -> None:
        await put_one(store)
        held = await take(store)
        [kept] = await store.add([new(due=At(0), on_conflict=OnConflict.EARLIEST)], now=NOW)
        assert (kept.result, kept.record) == (Result.KEPT, held)
        [latest] = await store.add([new(due=At(NOW + HOUR), on_conflict=OnConflict.LATEST)], now=NOW)
        assert latest.result is Result.REPLACED
        assert not await settle(store, done(held))

    async def test_refuse_answers_with_what_is_there(self, store: Store) -> None:
        there = await put_one(store)
        [answer] = await store.add([new(on_conflict=OnConflict.REFUSE)], now=NOW)
        assert (answer.result, answer.record, answer.ok) == (Result.REFUSED, there, False)

    @pytest.mark.parametrize("on_conflict", list(OnConflict), ids=str)
    @pytest.mark.parametrize("state", [State.DEAD, State.CANCELLED], ids=str)
    async def test_dead_and_cancelled_are_always_replaced(
        self, store: Store, state: State, on_conflict: OnConflict
    ) -> None:
        await bring(store, state)
        [answer] = await store.add([new(on_conflict=on_conflict)], now=NOW)
        assert answer.result is Result.REPLACED
        record = record_of(answer)
        assert (record.state, record.error, record.attempt) == (State.WAITING, None, 0)

    async def test_the_same_key_twice_in_one_batch_goes_in_order(self, store: Store) -> None:
        first, second = new(payload=b"first"), new(payload=b"second", due=At(NOW + HOUR))
        third = new(payload=b"third", on_conflict=OnConflict.KEEP)
        answers = await store.add([first, second, third], now=NOW)
        assert [answer.result for answer in answers] == [Result.CREATED, Result.REPLACED, Result.KEPT]
        now_is = await see(store, Ref("t", "k"))
        assert (now_is.payload, now_is.id) == (b"second", second.id)
        assert record_of(answers[0]).token < record_of(answers[1]).token == now_is.token
        assert answers[2].record == now_is

    async def test_one_key_in_two_topics_is_two_tasks(self, store: Store) -> None:
        await put(store, new("k", topic="a", payload=b"a"), new("k", topic="b", payload=b"b"))
        assert (await take(store, topic="a")).payload == b"a"
        other = await see(store, Ref("b", "k"))
        assert (other.state, other.payload) == (State.WAITING, b"b")

    async def test_a_deadline_before_the_due_time_is_kept_as_given(self, store: Store) -> None:
        record = await put_one(store, new(due=At(NOW + HOUR), deadline=NOW))
        assert (record.deadline, record.state) == (NOW, State.WAITING)
        assert await look(store, record) == record
