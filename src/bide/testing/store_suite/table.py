"""Every cell of the lifecycle table: each verb on a task in each state, with each kind of `if_token`."""

from __future__ import annotations

import pytest

from bide.core import lifecycle
from bide.core.answers import Answer
from bide.core.instants import At, In
from bide.core.lifecycle import TABLE, Verb
from bide.core.names import new_id
from bide.core.records import (
    Cancel,
    Change,
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
    HOUR,
    KEPT,
    LEASE,
    NOW,
    SECOND,
    SuiteBase,
    add_all,
    bring,
    do,
    lease,
    look,
    new,
    settle,
)

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
"""When the second verb comes: a second after the task was brought into its state."""


def _name(value: object) -> str:
    return "absent" if value is None else str(value)


def _cells(*verbs: Verb) -> list[tuple[Verb, State | None]]:
    return [(verb, state) for verb in verbs for state in STATES]


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


def _scheduled(verb: Verb, due_at: int) -> NewTask:
    return new(
        due=At(due_at),
        payload=b'{"of": "after"}',
        options=b"\x80",
        on_conflict=SCHEDULES[verb],
        deadline=NOW + 9 * HOUR,
    )


async def _check(store: Store, verb: Verb, old: Record | None, answer: Answer, expected: Answer) -> None:
    """The answer is exactly the computed one, the store holds exactly what it says, and the table agrees."""
    state = None if old is None else old.state
    assert answer == expected
    now_is = await look(store, Ref("t", "k"))
    assert now_is == expected.record, "the answer carries the task as it now is"
    word, to = TABLE[verb][state]
    if answer.result == word:
        assert (None if now_is is None else now_is.state) == to
    changed = answer.record is not None and (old is None or answer.record.token != old.token)
    if changed:
        assert answer.record is not None
        assert old is None or answer.record.token > old.token
    else:
        assert now_is == old, f"{answer.result} changes nothing"


class EveryCell(SuiteBase):
    """P4: every verb is one transition and answers what happened; the table says which, for every state."""

    async def test_the_table_has_every_verb_and_every_state(self) -> None:
        assert set(TABLE) == set(Verb)
        assert all(set(row) == set(STATES) for row in TABLE.values())

    @pytest.mark.parametrize("shift", [-HOUR, 0, HOUR], ids=["earlier", "same time", "later"])
    @pytest.mark.parametrize(("verb", "state"), _cells(*SCHEDULES), ids=_name)
    async def test_schedule_does_what_the_table_says(
        self, store: Store, verb: Verb, state: State | None, shift: int
    ) -> None:
        old = await bring(store, state)
        task = _scheduled(verb, NOW + shift)
        [answer] = await add_all(store, [task], now=LATER)
        expected = lifecycle.schedule(task, old, LATER, 0 if answer.record is None else answer.record.token)
        if verb in (Verb.REPLACE, Verb.KEEP, Verb.REFUSE) or state is not State.WAITING:
            assert answer.result == TABLE[verb][state][0]
        elif shift == (-HOUR if verb is Verb.EARLIEST else HOUR):
            assert answer.result is Result.REPLACED
        else:
            assert answer.result is Result.KEPT, "the time that is there wins"
        await _check(store, verb, old, answer, expected)

    @pytest.mark.parametrize("condition", ["without a token", "with its token", "with an old token"])
    @pytest.mark.parametrize(("verb", "state"), _cells(*CHANGES), ids=_name)
    async def test_a_change_does_what_the_table_says(
        self, store: Store, verb: Verb, state: State | None, condition: str
    ) -> None:
        old = await bring(store, state)
        present = 1 if old is None else old.token
        token = {"without a token": None, "with its token": present, "with an old token": present - 1}[condition]
        asked = _change(verb, token)
        answer = await do(store, asked, now=LATER)
        expected = lifecycle.change(asked, old, LATER, 0 if answer.record is None else answer.record.token)
        word = TABLE[verb][state][0]
        if condition == "with an old token" and word not in (Result.NOT_FOUND, Result.FINISHED):
            word = Result.STALE_TOKEN
        assert answer.result == word
        await _check(store, verb, old, answer, expected)

    @pytest.mark.parametrize("condition", ["with its token", "with an old token", "with a later token"])
    @pytest.mark.parametrize(("verb", "state"), _cells(*SETTLES), ids=_name)
    async def test_a_settle_applies_to_the_live_lease_alone(
        self, store: Store, verb: Verb, state: State | None, condition: str
    ) -> None:
        old = await bring(store, state)
        present = 1 if old is None else old.token
        token = {"with its token": present, "with an old token": present - 1, "with a later token": present + 1}[
            condition
        ]
        asked = _settlement(verb, token)
        accepted = await settle(store, asked, now=LATER)
        assert accepted is (state is State.LEASED and condition == "with its token")
        now_is = await look(store, Ref("t", "k"))
        if not accepted:
            assert now_is == old, "a refused outcome changes nothing"
            return
        assert old is not None
        assert now_is is not None
        assert now_is == lifecycle.settle(asked, old, LATER, now_is.token)
        assert now_is.state is TABLE[verb][state][1]
        assert now_is.token > old.token

    @pytest.mark.parametrize("condition", ["with its token", "with an old token"])
    @pytest.mark.parametrize("state", STATES, ids=_name)
    async def test_an_extend_applies_to_the_live_lease_alone(
        self, store: Store, state: State | None, condition: str
    ) -> None:
        old = await bring(store, state)
        token = (1 if old is None else old.token) - (condition == "with an old token")
        [accepted] = await store.extend([Lease("t", "k", token)], now=LATER, until=NOW + HOUR)
        assert accepted is (state is State.LEASED and condition == "with its token")
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

    @pytest.mark.parametrize("verdict", [Verb.DONE, Verb.DEAD], ids=_name)
    async def test_ending_with_nothing_to_keep_leaves_nothing(self, store: Store, verdict: Verb) -> None:
        held = await bring(store, State.LEASED)
        assert held is not None
        assert await settle(store, Settlement("t", "k", held.token, SETTLES[verdict], keep_until=0), now=LATER)
        assert await look(store, held) is None
