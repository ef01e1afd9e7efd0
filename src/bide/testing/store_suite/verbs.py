"""Tests of clients' verbs (schedule, move, fire, cancel, redrive) and every cell of the lifecycle table.

Then batches, names and payloads that broke other systems.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from bide.core import lifecycle
from bide.core.answers import Answer
from bide.core.instants import LAST_INSTANT, At, Due, In
from bide.core.lifecycle import TABLE, Verb
from bide.core.names import new_id
from bide.core.records import (
    Cancel,
    Change,
    Filter,
    Lease,
    Move,
    NewTask,
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
    bring,
    change_all,
    counted,
    dead,
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


class Scheduling(SuiteBase):
    """P2: once `add` has answered, the task is there. P5: the newest word wins."""

    async def test_a_new_task_has_every_field_as_given(self, store: Store) -> None:
        life = new_id()
        task = NewTask(
            "orders", "42", life, At(NOW + HOUR), b"\x01payload", "user-7", b"\x80", NOW + DAY, OnConflict.REFUSE
        )
        [answer] = await add_all(store, [task])
        assert answer.result is Result.CREATED
        assert answer.was is None
        record = record_of(answer)
        assert record == Record(
            "orders", "42", life, "user-7", State.WAITING, NOW + HOUR, NOW + HOUR, 0, 0, 0, 0, record.token, None,
            b"\x01payload", b"\x80", NOW + DAY, None, NOW, None, None,
        )  # fmt: skip
        assert record.token > 0
        assert await see(store, record) == record

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
        [answer] = await add_all(store, [new(due=At(NOW + HOUR), payload=b"new")])
        assert (answer.result, answer.was) == (Result.REPLACED, NOW)
        record = record_of(answer)
        assert (record.payload, record.group, record.options, record.deadline) == (b"new", None, b"", None)
        assert (await lease(store, 5, now=NOW + HOUR - 1)).tasks == []
        assert (await take(store, now=NOW + HOUR)).payload == b"new"
        assert await listed(store, Filter(group="g")) == []

    async def test_earliest_goes_by_the_time_asked_for_not_by_the_wake(self, store: Store) -> None:
        there = await put_one(store, new(due=At(NOW - HOUR)))
        [answer] = await add_all(store, [new(due=At(NOW - MINUTE), on_conflict=OnConflict.EARLIEST)])
        assert (answer.result, answer.record) == (Result.KEPT, there)

    @pytest.mark.parametrize(
        ("on_conflict", "result"),
        [(OnConflict.EARLIEST, Result.KEPT), (OnConflict.LATEST, Result.REPLACED)],
        ids=["earliest", "latest"],
    )
    async def test_which_time_wins_goes_by_what_was_asked_not_by_a_retry(
        self, store: Store, on_conflict: OnConflict, result: Result
    ) -> None:
        assert await settle(store, retry(await put_and_take(store, new(due=At(NOW))), In(DAY)))
        [answer] = await add_all(store, [new(due=At(NOW + HOUR), on_conflict=on_conflict)])
        assert answer.result is result

    async def test_the_same_key_twice_in_one_batch_goes_in_order(self, store: Store) -> None:
        first, second = new(payload=b"first"), new(payload=b"second", due=At(NOW + HOUR))
        third = new(payload=b"third", on_conflict=OnConflict.KEEP)
        answers = await add_all(store, [first, second, third])
        assert [answer.result for answer in answers] == [Result.CREATED, Result.REPLACED, Result.KEPT]
        now_is = await see(store, Ref("t", "k"))
        assert (now_is.payload, now_is.id) == (b"second", second.id)
        assert record_of(answers[0]).token < record_of(answers[1]).token == now_is.token
        assert answers[2].record == now_is

    async def test_a_free_key_meets_every_condition(self, store: Store) -> None:
        gone = await bring(store, State.DONE, keep_until=NOW + MINUTE)
        assert gone is not None
        over, free = new(if_token=gone.token - 1, group="g"), new("free", if_token=1, due=In(HOUR))
        answers = await add_all(store, [over, free], now=NOW + MINUTE)
        assert [answer.result for answer in answers] == [Result.CREATED, Result.CREATED]
        assert [answer.record for answer in answers] == [await see(store, Ref("t", key)) for key in ("k", "free")]
        assert record_of(answers[0]).token > gone.token

    async def test_what_was_read_while_it_waited_replaces_no_delivery(self, store: Store) -> None:
        waiting = await put_one(store)
        held = await take(store)
        stale = new(payload=b"new", if_token=waiting.token)
        assert await add_all(store, [stale]) == [Answer(Result.STALE_TOKEN, held)]
        assert await settle(store, done(held))
        assert (await add_all(store, [stale]))[0].result is Result.CREATED

    async def test_conditions_in_one_batch_go_in_order(self, store: Store) -> None:
        old = await put_one(store)
        plain = [new(str(number)) for number in range(5)]
        first = new(payload=b"first", due=In(HOUR), if_token=old.token)
        second, third = new(payload=b"second", due=In(HOUR), if_token=old.token), new(payload=b"third", due=In(HOUR))
        made, twice = new("free", if_token=1), new("free", payload=b"second", if_token=1)
        answers = await add_all(store, [first, *plain, made, second, twice, third])
        created = [Result.CREATED] * 6
        assert [answer.result for answer in answers] == [
            Result.REPLACED, *created, Result.STALE_TOKEN, Result.STALE_TOKEN, Result.REPLACED
        ]  # fmt: skip
        assert (answers[7].record, answers[8].record) == (answers[0].record, answers[6].record)
        assert (await see(store, old)).payload == b"third"
        assert (await see(store, Ref("t", "free"))).payload == b"{}"

    async def test_a_deadline_before_the_due_time_is_kept_as_given(self, store: Store) -> None:
        record = await put_one(store, new(due=At(NOW + HOUR), deadline=NOW))
        assert (record.deadline, record.state) == (NOW, State.WAITING)
        assert await look(store, record) == record


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

    async def test_a_task_moved_away_and_back_is_leased_once(self, store: Store) -> None:
        await put_one(store)
        assert (await lease(store, 0)).next_wake == NOW
        for _ in range(3):
            await do(store, Move("t", "k", At(NOW + HOUR)))
            await self.rests_until(store, NOW + HOUR)
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
        await settle(store, retry(await put_and_take(store), In(HOUR), error="no answer"))
        moved = record_of(await do(store, Move("t", "k", In(MINUTE))))
        assert (moved.attempt, moved.failures, moved.error) == (1, 1, "no answer")
        assert (await take(store, now=NOW + MINUTE)).attempt == 2

    async def test_a_move_past_the_deadline_is_refused(self, store: Store) -> None:
        record = await put_one(store, new(deadline=NOW + HOUR))
        past, upto = await change_all(store, [Move("t", "k", At(NOW + HOUR + 1)), Move("t", "k", At(NOW + HOUR))])
        assert (past.result, past.record, past.ok) == (Result.REFUSED, record, False)
        assert (upto.result, record_of(upto).due_at) == (Result.MOVED, NOW + HOUR)

    async def test_a_move_may_bring_a_new_deadline(self, store: Store) -> None:
        await put(store, new(deadline=NOW + HOUR))
        later = await do(store, Move("t", "k", At(NOW + DAY), None, NOW + DAY))
        moved = record_of(later)
        assert (later.result, moved.due_at, moved.deadline) == (Result.MOVED, NOW + DAY, NOW + DAY)
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
        answers = await change_all(store, [Cancel("t", "due"), Cancel("t", "later")])
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
        held = await put_and_take(store)
        assert (await do(store, Cancel("t", "k", KEPT))).result is Result.CANCELLED_WHILE_LEASED
        assert not await extend(store, held, until=NOW + HOUR)
        assert not await settle(store, retry(held, In(0)))
        assert (await lease(store, 5, now=NOW + DAY)).tasks == [], "neither a retry nor a redelivery follows"
        assert (await see(store, held)).state is State.CANCELLED

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

    async def test_a_mixed_batch_keeps_its_order_though_some_are_refused(self, store: Store) -> None:
        waiting, other = await put(store, new("waiting"), new("other"))
        await bring(store, State.DEAD, "dead", topic="d")
        asked: list[tuple[Change, Result]] = [
            (Move("t", "nobody", In(0)), Result.NOT_FOUND),
            (Move("t", "waiting", At(NOW + HOUR)), Result.MOVED),
            (Move("t", "waiting", At(NOW + DAY), waiting.token), Result.STALE_TOKEN),
            (Cancel("t", "other", 0, other.token), Result.CANCELLED),
            (Cancel("t", "other"), Result.NOT_FOUND),
            (Redrive("d", "dead", new_id(), In(0)), Result.REDRIVEN),
            (Redrive("d", "dead", new_id(), In(0)), Result.UNDER_WAY),
        ]
        answers = await change_all(store, [change for change, _ in asked])
        assert [answer.result for answer in answers] == [result for _, result in asked]
        assert (await see(store, waiting)).wake_at == NOW + HOUR
        assert await look(store, Ref("t", "other")) is None


SCHEDULES = {
    Verb.REPLACE: OnConflict.REPLACE,
    Verb.KEEP: OnConflict.KEEP,
    Verb.EARLIEST: OnConflict.EARLIEST,
    Verb.LATEST: OnConflict.LATEST,
    Verb.REFUSE: OnConflict.REFUSE,
}
CHANGES = (Verb.MOVE, Verb.CANCEL, Verb.REDRIVE)
SETTLES = {
    Verb.DONE: OutcomeKind.DONE,
    Verb.AGAIN: OutcomeKind.DONE,
    Verb.RETRY: OutcomeKind.RETRY,
    Verb.DEFER: OutcomeKind.DEFER,
    Verb.DEAD: OutcomeKind.DEAD,
}
STATES = (lifecycle.ABSENT, *State)
LATER = NOW + SECOND
"""The time of the second verb: a second after the task was brought into its state."""


def _name(value: object) -> str:
    return "absent" if value is None else str(value)


def _cells(*verbs: Verb) -> list[tuple[Verb, State | None]]:
    return [(verb, state) for verb in verbs for state in STATES]


def _token(old: Record | None, than_its: int) -> int:
    """A token that is so much more than the task's own."""
    return (1 if old is None else old.token) + than_its


def _change(verb: Verb, token: int | None) -> Change:
    if verb is Verb.MOVE:
        return Move("t", "k", At(NOW + HOUR), token)
    if verb is Verb.CANCEL:
        return Cancel("t", "k", KEPT, token)
    return Redrive("t", "k", new_id(), In(HOUR), token)


def _settlement(verb: Verb, token: int) -> Settlement:
    wake = In(HOUR) if verb in (Verb.AGAIN, Verb.RETRY, Verb.DEFER) else None
    next_id = new_id() if verb is Verb.AGAIN else ""
    error = "it failed" if verb in (Verb.RETRY, Verb.DEAD) else None
    return Settlement("t", "k", token, SETTLES[verb], wake, KEPT, error, next_id)


def _scheduled(verb: Verb, due_at: int, if_token: int | None) -> NewTask:
    return new(
        due=At(due_at),
        payload=b'{"of": "after"}',
        group="g",
        options=b"\x80",
        on_conflict=SCHEDULES[verb],
        deadline=NOW + 9 * HOUR,
        if_token=if_token,
    )


async def _check(store: Store, verb: Verb, old: Record | None, answer: Answer, expected: Answer) -> None:
    """Check that the answer is the computed one, the store holds its record, and the lifecycle table agrees."""
    state = None if old is None else old.state
    assert answer == expected
    now_is = await look(store, Ref("t", "k"))
    assert now_is == expected.record, "the answer carries the task as it now is"
    word, to = TABLE[verb][state]
    if answer.result == word:
        assert (None if now_is is None else now_is.state) == to
    if now_is != old:
        assert now_is is None or old is None or now_is.token > old.token


class EveryCell(SuiteBase):
    """P4: every verb is one transition and answers with its result, as the table defines it for every state.

    P12: its record has the `id` of its life and a higher token than the one before.
    """

    async def test_the_table_has_every_verb_and_every_state(self) -> None:
        assert set(TABLE) == set(Verb)
        assert all(set(row) == set(STATES) for row in TABLE.values())

    @pytest.mark.parametrize(
        ("shift", "than_its"), [(-HOUR, None), (0, None), (HOUR, None), (HOUR, 0), (HOUR, -1)],
        ids=["earlier", "same time", "later", "with its token", "with an old token"],
    )  # fmt: skip
    @pytest.mark.parametrize(("verb", "state"), _cells(*SCHEDULES), ids=_name)
    async def test_schedule_does_what_the_table_says(
        self, store: Store, verb: Verb, state: State | None, shift: int, than_its: int | None
    ) -> None:
        old = await bring(store, state)
        task = _scheduled(verb, NOW + shift, None if than_its is None else _token(old, than_its))
        [answer] = await add_all(store, [task], now=LATER)
        expected = lifecycle.schedule(task, old, LATER, 0 if answer.record is None else answer.record.token)
        if than_its == -1 and old is not None:
            assert answer.result is Result.STALE_TOKEN
        elif verb in (Verb.REPLACE, Verb.KEEP, Verb.REFUSE) or state is not State.WAITING:
            assert answer.result == TABLE[verb][state][0]
        elif shift == (-HOUR if verb is Verb.EARLIEST else HOUR):
            assert answer.result is Result.REPLACED
        else:
            assert answer.result is Result.KEPT, "the time that is there wins"
        await _check(store, verb, old, answer, expected)

    @pytest.mark.parametrize(
        "than_its", [None, 0, -1], ids=["without a token", "with its token", "with an old token"]
    )  # fmt: skip
    @pytest.mark.parametrize(("verb", "state"), _cells(*CHANGES), ids=_name)
    async def test_a_change_does_what_the_table_says(
        self, store: Store, verb: Verb, state: State | None, than_its: int | None
    ) -> None:
        old = await bring(store, state)
        asked = _change(verb, None if than_its is None else _token(old, than_its))
        answer = await do(store, asked, now=LATER)
        expected = lifecycle.change(asked, old, LATER, 0 if answer.record is None else answer.record.token)
        word = TABLE[verb][state][0]
        if than_its == -1 and word not in (Result.NOT_FOUND, Result.FINISHED):
            word = Result.STALE_TOKEN
        assert answer.result == word
        await _check(store, verb, old, answer, expected)

    @pytest.mark.parametrize("than_its", [0, -1, 1], ids=["with its token", "with an old token", "with a later token"])
    @pytest.mark.parametrize(("verb", "state"), _cells(*SETTLES), ids=_name)
    async def test_a_settle_applies_to_the_live_lease_alone(
        self, store: Store, verb: Verb, state: State | None, than_its: int
    ) -> None:
        old = await bring(store, state)
        asked = _settlement(verb, _token(old, than_its))
        accepted = await settle(store, asked, now=LATER)
        assert accepted is (state is State.LEASED and than_its == 0)
        now_is = await look(store, Ref("t", "k"))
        if not accepted:
            assert now_is == old, "a refused outcome changes nothing"
            return
        assert old is not None
        assert now_is is not None
        assert now_is == lifecycle.settle(asked, old, LATER, now_is.token)
        assert now_is.state is TABLE[verb][state][1]
        assert now_is.token > old.token

    @pytest.mark.parametrize("than_its", [0, -1], ids=["with its token", "with an old token"])
    @pytest.mark.parametrize("state", STATES, ids=_name)
    async def test_an_extend_applies_to_the_live_lease_alone(
        self, store: Store, state: State | None, than_its: int
    ) -> None:
        old = await bring(store, state)
        [accepted] = await store.extend([Lease("t", "k", _token(old, than_its))], now=LATER, until=NOW + HOUR)
        assert accepted is (state is State.LEASED and than_its == 0)
        now_is = await look(store, Ref("t", "k"))
        if accepted:
            assert old is not None
            assert now_is == lifecycle.extend(old, NOW + HOUR), "only wake_at changes; the token stays"
        else:
            assert now_is == old

    @pytest.mark.parametrize("state", STATES, ids=_name)
    async def test_a_lease_takes_what_the_table_says(self, store: Store, state: State | None) -> None:
        old = await bring(store, state)
        at = NOW + LEASE
        leased = await lease(store, 5, now=at, holder="another")
        now_is = await look(store, Ref("t", "k"))
        if TABLE[Verb.LEASE][state][1] is State.LEASED:
            assert old is not None
            assert now_is is not None
            assert leased.tasks == [now_is]
            assert now_is == lifecycle.lease(old, at, at + LEASE, "another", now_is.token)
            assert now_is.token > old.token
        else:
            assert leased.tasks == []
            assert now_is == old


NAMES = [
    "a/b", "a:b", "a b", "a%b?c#d&e=f", "..", "-", "_", "%", "_%", "\\", "\\'", "'", '"', "''; drop table tasks; --",
    "`", "{tag}", "{}", "[x]", "*", "?", "a,b", "0", "null", "None", "é", "日本語", "🐝", "👩‍👩‍👧", "ا", "e\u0301",
    "É", "E\u0301", "a", "A", "\ufeff", "\u00a0", "x" * 200, "é" * 100,
]  # fmt: skip
PAYLOADS = [b"", b"\x00", b"a\x00b\x00", b"\xff\xfe\x80", b"'; --", bytes(range(256)), b"\n\r\t", b"\xc3\x28" * 1_000]
FAR = [2**31 - 1, 2**31, 2**31 + 1, 2**32 - 1, 2**32, 2**32 + 1, 3 * 2**33, 1_000 * 366 * DAY]


class Batches(SuiteBase):
    """Every verb takes batches: the answers have the length and order of the argument."""

    async def test_an_empty_batch_is_answered_with_nothing(self, store: Store) -> None:
        assert await add_all(store, []) == []
        assert await change_all(store, []) == []
        assert await store.get([]) == []
        assert await store.extend([], now=NOW, until=NOW + LEASE) == []
        assert await settle_all(store, []) == []
        assert await store.purge(now=NOW, limit=100) == 0

    async def test_many_in_one_call_through_a_whole_life(self, store: Store) -> None:
        many = self.many
        tasks = [new(f"{number:06}", due=At(NOW + number % 97), group="g") for number in range(many)]
        answers = await add_all(store, tasks)
        assert [record_of(answer).id for answer in answers] == [task.id for task in tasks]
        assert {answer.result for answer in answers} == {Result.CREATED}
        records = await store.get([Ref(task.topic, task.key) for task in tasks])
        assert records == [answer.record for answer in answers]
        moved = await change_all(store, [Move(task.topic, task.key, At(NOW)) for task in tasks])
        assert {answer.result for answer in moved} == {Result.MOVED}
        held = (await lease(store, many)).tasks
        assert len({record.key for record in held}) == many
        assert all(await store.extend([hold(record) for record in held], now=NOW, until=NOW + HOUR))
        half = many // 2
        outcomes = [done(record) for record in held[:half]] + [dead(record) for record in held[half:]]
        assert all(await settle_all(store, outcomes))
        assert counted(await store.tally(), "t", State.DEAD).number <= many - half
        assert len(await listed(store, Filter(group="g", state=State.DEAD))) == many - half
        assert await store.purge(now=KEPT, limit=many) == many - half
        assert await listed(store, Filter()) == []

    async def test_optional_fields_may_differ_within_one_batch(self, store: Store) -> None:
        tasks = [
            new("1", group="g"),
            new("2", deadline=NOW + DAY),
            new("3", options=b"\x80", payload=b""),
            new("4"),
            new("5", group="g", deadline=NOW + HOUR, options=b"\x81"),
        ]
        records = await put(store, *tasks)
        assert await store.get([Ref("t", task.key) for task in tasks]) == records
        assert [record.group for record in records] == ["g", None, None, None, "g"]
        assert [record.deadline for record in records] == [None, NOW + DAY, None, None, NOW + HOUR]
        assert [record.options for record in records] == [b"", b"", b"\x80", b"", b"\x81"]

    async def test_one_key_changed_twice_in_one_batch_goes_in_order(self, store: Store) -> None:
        record = await put_one(store)
        first, second, third = await change_all(
            store,
            [Move("t", "k", In(HOUR), record.token), Move("t", "k", In(DAY)), Cancel("t", "k", KEPT, record.token)],
        )
        assert (first.result, second.result, third.result) == (Result.MOVED, Result.MOVED, Result.STALE_TOKEN)
        assert second.was == NOW + HOUR
        assert third.record == second.record == await see(store, record)


class OddInput(SuiteBase):
    """Every value that passes the checks of the core is stored and returned unchanged."""

    async def test_names_of_every_kind_go_through_a_whole_life(self, store: Store) -> None:
        await put(store, *(new(name, topic=name, group=name) for name in NAMES))
        for name in NAMES:
            held = await take(store, topic=name, holder=name)
            assert (held.topic, held.key, held.group, held.holder) == (name, name, name, name)
            assert await see(store, Ref(name, name)) == held
            assert await listed(store, Filter(group=name)) == [held]
            assert await listed(store, Filter(topic=name, state=State.LEASED)) == [held]
            assert await settle(store, retry(held, In(0), error=name))
            assert (await see(store, held)).error == name
            assert (await do(store, Cancel(name, name))).result is Result.CANCELLED
            assert await look(store, held) is None
        assert await listed(store, Filter()) == []

    async def test_names_are_listed_in_the_order_of_their_characters(self, store: Store) -> None:
        await put(store, *(new(name) for name in NAMES))
        assert [record.key for record in await listed(store, Filter(topic="t"), limit=5)] == sorted(NAMES)

    async def test_a_topic_and_a_key_never_run_together(self, store: Store) -> None:
        pairs = [("a", "b:c"), ("a:b", "c"), ("a:b:c", "d"), ("ab", "c"), ("a", "bc")]
        await put(store, *(new(key, topic=topic, payload=f"{topic}|{key}".encode()) for topic, key in pairs))
        for topic, key in pairs:
            assert (await see(store, Ref(topic, key))).payload == f"{topic}|{key}".encode()

    @pytest.mark.parametrize("payload", PAYLOADS, ids=lambda payload: repr(payload[:8]))
    async def test_a_payload_comes_back_byte_for_byte(self, store: Store, payload: bytes) -> None:
        held = await put_and_take(store, new(payload=payload, options=payload))
        assert (held.payload, held.options) == (payload, payload)
        assert type(held.payload) is bytes
        assert await settle(store, dead(held))
        [ended] = await listed(store, Filter(state=State.DEAD))
        assert (ended.payload, ended.options) == (payload, payload)

    async def test_a_payload_of_a_mebibyte_comes_back_byte_for_byte(self, store: Store) -> None:
        payload = bytes(range(256)) * 4_096
        await put(store, new("big", payload=payload), new("small"))
        held = {record.key: record for _ in range(2) for record in (await lease(store, 5)).tasks}
        assert held["big"].payload == payload
        assert held["small"].payload == b"{}"

    async def test_an_error_of_any_text_and_length_is_kept(self, store: Store) -> None:
        await put_one(store)
        for error in ("", "line\nline", "日本語 🐝", "'; --", "x" * 8_000, "\ttab", "E\n\x1fTrace\n  x\n"):
            held = await take(store)
            assert await settle(store, retry(held, In(0), error=error))
            assert (await see(store, held)).error == error

    async def test_long_and_short_delays_each_come_at_their_time(self, store: Store) -> None:
        delays = sorted({0, 1, 5, 63, 64, 65, 999, 1_000, 4_095, 4_096, 2**16, 2**20 + 1, 2**24, *FAR})
        await put(store, *(new(str(delay), due=In(delay)) for delay in delays))
        for earlier, delay in zip([-1, *delays], delays, strict=False):
            asked = await lease(store, 0, now=NOW + max(earlier, 0))
            assert self.wakes_at(asked.next_wake, NOW + delay, NOW + max(earlier, 0))
            if delay:
                assert (await lease(store, 5, now=NOW + delay - 1, lasts=KEPT)).tasks == []
            held = await take(store, now=NOW + delay, lasts=KEPT)
            assert held.key == str(delay)
            assert await extend(store, held, until=NOW + delay + KEPT, now=NOW + delay)
            assert await settle(store, done(held), now=NOW + delay)

    async def test_a_damaged_task_stops_no_other(self, store: Store, tmp_path: Path) -> None:
        await put(store, new("damaged", due=At(NOW - HOUR), group="g"), new("sound", group="g"), now=NOW - DAY)
        await self.damage(tmp_path, Ref("t", "damaged"))
        leased = await lease(store, 5)
        assert "sound" in keys(leased.tasks)
        outcomes = [done(record) for record in leased.tasks if record.key == "sound"]
        assert await settle_all(store, outcomes) == [True]
        # it must neither be leased endlessly nor keep a worker awake
        for _ in range(3):
            assert (await lease(store, 5)).tasks == []
        assert (await lease(store, 5)).next_wake in (None, NOW + LEASE)

    async def test_a_damaged_task_is_seen_and_can_be_replaced(self, store: Store, tmp_path: Path) -> None:
        await put(store, new("damaged", group="g"), new("sound", group="g"))
        await self.damage(tmp_path, Ref("t", "damaged"))
        for where in (Filter(), Filter(topic="t"), Filter(group="g"), Filter(state=State.WAITING), Filter(wake_from=0)):
            assert "sound" in keys(await listed(store, where, limit=1))
        assert (await store.get([Ref("t", "damaged"), Ref("t", "sound")]))[1] is not None
        assert counted(await store.tally(), "t", State.WAITING).number >= 1
        [answer] = await add_all(store, [new("damaged", payload=b"again")])
        assert answer.result in (Result.REPLACED, Result.CREATED)
        assert sorted(record.payload for record in (await lease(store, 5)).tasks) == [b"again", b"{}"]
