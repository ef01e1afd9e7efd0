"""The life of a task: every function against the table, cell by cell, and the numbers over random lives."""

from __future__ import annotations

from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bide.core import lifecycle
from bide.core.answers import Answer
from bide.core.instants import LAST_INSTANT, At, Due, In
from bide.core.lifecycle import ABSENT, TABLE, Verb, next_token
from bide.core.records import (
    Cancel,
    Change,
    Move,
    NewTask,
    OnConflict,
    OutcomeKind,
    Record,
    Redrive,
    Result,
    Settlement,
    State,
)

NOW = 1_900_000_000_000
LATER = NOW + 60_000
CONFLICTS = {
    Verb.REPLACE: OnConflict.REPLACE,
    Verb.KEEP: OnConflict.KEEP,
    Verb.EARLIEST: OnConflict.EARLIEST,
    Verb.LATEST: OnConflict.LATEST,
    Verb.REFUSE: OnConflict.REFUSE,
}
SETTLES = {
    Verb.DONE: OutcomeKind.DONE,
    Verb.AGAIN: OutcomeKind.DONE,
    Verb.RETRY: OutcomeKind.RETRY,
    Verb.DEFER: OutcomeKind.DEFER,
    Verb.DEAD: OutcomeKind.DEAD,
}


def new_task(
    due: Due = In(1000),  # noqa: B008 - a frozen record
    *,
    id: str = "new",
    how: OnConflict = OnConflict.REPLACE,
    if_token: int | None = None,
) -> NewTask:
    return NewTask("order.close", "42", id, due, b"new", on_conflict=how, if_token=if_token)


def record_in(state: State, *, deadline: int | None = None, token: int = 7) -> Record:
    """A task in `state`, with every number that a task can have by then."""
    over, held = not state.live, state is State.LEASED
    return Record(
        "order.close", "42", "old", "user-7", state, NOW - 5_000, NOW - 5_000, NOW - 5_000 if held else 0, 3, 2, 1,
        token, "worker-1" if held else None, b"old", b"", deadline, "it failed", NOW - 9_000,
        NOW - 1 if over else None, LATER if over else None,
    )  # fmt: skip


def perform(
    verb: Verb, old: Record | None, *, now: int = NOW, token: int = 8, due: Due = In(1000), id: str = "new",  # noqa: B008
    if_token: int | None = None, holding: int = 7,
) -> tuple[str, Record | None]:  # fmt: skip
    """What the verb's function makes of `old`: the word of the table, and the task afterwards."""
    if verb in CONFLICTS:
        answer = lifecycle.schedule(new_task(due, id=id, how=CONFLICTS[verb], if_token=if_token), old, now, token)
        return answer.result, answer.record
    changes: dict[Verb, Change] = {
        Verb.MOVE: Move("order.close", "42", due, if_token),
        Verb.CANCEL: Cancel("order.close", "42", LATER, if_token),
        Verb.REDRIVE: Redrive("order.close", "42", id, due, if_token),
    }
    if verb in changes:
        answer = lifecycle.change(changes[verb], old, now, token)
        return answer.result, answer.record
    if verb is Verb.LEASE:
        if old is None or not lifecycle.may_lease(old, now):
            return "left alone", old
        return "taken", lifecycle.lease(old, now, now + 10_000, "worker-2", token)
    if not lifecycle.holds(old, holding):
        return "left alone", old
    assert old is not None
    if verb is Verb.EXTEND:
        return "taken", lifecycle.extend(old, now + 10_000)
    wake = due if verb in (Verb.AGAIN, Verb.RETRY, Verb.DEFER) else None
    asked = Settlement("order.close", "42", holding, SETTLES[verb], wake, LATER, "it failed again", id)
    return "taken", lifecycle.settle(asked, old, now, token)


@pytest.mark.parametrize("verb", Verb)
@pytest.mark.parametrize("state", [ABSENT, *State], ids=lambda state: state.value if state else "nothing")
def test_every_function_does_what_the_table_says(verb: Verb, state: State | None) -> None:
    word, to = TABLE[verb][state]
    old = None if state is None else record_in(state)
    # so that neither `earliest` nor `latest` finds that the time which is there wins
    due = At(NOW - 6_000) if verb is Verb.EARLIEST else At(NOW + 1_000)
    said, after = perform(verb, old, due=due)
    assert said == word
    assert (None if after is None else after.state) == to
    changed = word in {"taken", "created", "replaced", "moved", "cancelled", "cancelled_while_leased", "redriven"}
    if changed:
        assert after is not None
        assert after.token == (7 if verb is Verb.EXTEND else 8)
    else:
        assert after is old


@pytest.mark.parametrize("state", State)
def test_a_new_life_takes_nothing_from_the_old_one_but_the_key(state: State) -> None:
    old = record_in(state, deadline=NOW + 500)
    answer = lifecycle.schedule(new_task(), old, NOW, 8)
    assert answer.result == "replaced"
    assert answer.record == Record(
        "order.close", "42", "new", None, State.WAITING, NOW + 1000, NOW + 1000, 0, 0, 0, 0, 8, None, b"new", b"", None,
        None, NOW, None, None,
    )  # fmt: skip
    assert answer.was == (old.wake_at if state.live else None)


def test_times_beyond_the_calendar_are_held_within_it() -> None:
    late = lifecycle.schedule(new_task(In(LAST_INSTANT)), None, NOW, 1).record
    assert late is not None
    assert late.wake_at == LAST_INSTANT
    early = lifecycle.change(Move("order.close", "42", In(-LAST_INSTANT)), late, NOW, 2).record
    assert early is not None
    assert (early.due_at, early.wake_at) == (0, NOW)


@pytest.mark.parametrize("state", State)
@pytest.mark.parametrize(
    "change",
    [
        Move("order.close", "42", In(0), 6),
        Cancel("order.close", "42", 0, 6),
        Redrive("order.close", "42", "new", In(0), 6),
    ],
    ids=lambda change: type(change).__name__,
)
def test_a_stale_token_changes_nothing(change: Change, state: State) -> None:
    old = record_in(state)
    answer = lifecycle.change(change, old, NOW, 8)
    ended = not state.live and not (type(change) is Redrive and state is State.DEAD)
    assert answer == Answer(Result.FINISHED if ended else Result.STALE_TOKEN, old)


def test_never_a_millisecond_early() -> None:
    for state in State:
        old = record_in(state)
        assert lifecycle.may_lease(old, old.wake_at) is state.live
        assert not lifecycle.may_lease(old, old.wake_at - 1)


def test_a_lost_lease_counts_and_lateness_goes_on_from_the_first() -> None:
    waiting = record_in(State.WAITING)
    first = lifecycle.lease(waiting, NOW, NOW + 10, "worker-1", 8)
    second = lifecycle.lease(first, NOW + 10, NOW + 20, "worker-2", 9)
    third = lifecycle.lease(second, NOW + 20, NOW + 30, "worker-3", 10)
    assert [one.losses for one in (first, second, third)] == [1, 2, 3]  # one was lost before
    assert [one.attempt for one in (first, second, third)] == [4, 5, 6]
    assert {one.planned_at for one in (first, second, third)} == {waiting.wake_at}
    assert third.holder == "worker-3"
    again = Settlement("order.close", "42", 10, OutcomeKind.RETRY, In(5))
    assert lifecycle.settle(again, third, NOW + 25, 11).losses == 0


@given(st.integers(0, 2**62), st.integers(0, LAST_INSTANT))
def test_a_token_only_ever_rises_and_is_never_behind_the_clock(last: int, now: int) -> None:
    token = next_token(last, now)
    assert token > last
    assert token >= now * 1000


# One step of a life: what is done, how far the clock goes before it (now and then backwards), and when it is due.
steps = st.lists(
    st.tuples(st.sampled_from(Verb), st.integers(-1_000, 20_000), st.integers(-5_000, 30_000), st.booleans()),
    max_size=60,
)


@given(steps)
def test_the_numbers_over_any_life(plan: list[tuple[Verb, int, int, bool]]) -> None:
    """A store in one variable: whatever happens in whatever order, the promises on token, id and attempt hold."""
    now, counter, fresh = NOW, 0, count(1)
    task: Record | None = None
    for verb, pause, ahead, stale in plan:
        now += pause
        old, id = task, f"life-{next(fresh)}"
        known = old.token - stale if old else 0
        word, task = perform(
            verb, old, now=now, token=next_token(counter, now), due=In(ahead), id=id,
            if_token=known if stale and old else None, holding=known,
        )  # fmt: skip
        if stale and old is not None and verb in {*CONFLICTS, Verb.MOVE, Verb.CANCEL, Verb.REDRIVE}:
            gone = lifecycle.gone(old, now)
            if verb not in CONFLICTS:
                assert task is (None if gone else old)
            elif not gone:
                assert (word, task) == (Result.STALE_TOKEN, old)
        check_step(verb, old, task, id, now)
        if task is not None:
            counter = max(counter, task.token)


def check_step(verb: Verb, old: Record | None, new: Record | None, id: str, now: int) -> None:
    """What must hold of any single step."""
    forgotten = old is not None and lifecycle.gone(old, now)
    if new is old or new is None:
        assert new is old or forgotten
        return
    last = 0 if old is None else old.token
    old = None if forgotten else old
    cell = TABLE[verb][None if old is None else old.state]
    assert new.state == cell[1]
    if verb is Verb.EXTEND:
        assert old is not None
        assert new.token == old.token
    else:
        assert new.token > last
    born = old is None or verb in CONFLICTS or verb in (Verb.REDRIVE, Verb.AGAIN)
    assert new.id == (id if born else old.id if old else None)
    if born:
        assert (new.attempt, new.failures, new.losses) == (0, 0, 0)
        assert new.error is None
    else:
        assert old is not None
        steps_up = {Verb.LEASE: 1, Verb.DEFER: -1}.get(verb, 0)
        assert new.attempt == old.attempt + steps_up
        assert new.failures == old.failures + (verb is Verb.RETRY)
        assert (new.payload, new.group, new.created_at) == (old.payload, old.group, old.created_at)
    assert 0 <= new.failures <= new.attempt
    if new.state is State.WAITING:
        assert new.wake_at >= now
        assert (new.holder, new.planned_at) == (None, 0)
    if new.state is State.LEASED:
        assert new.attempt >= 1
        assert new.holder is not None
    assert (new.finished_at is None) == new.state.live
    assert (new.keep_until is None) == new.state.live
    assert 0 <= new.wake_at <= LAST_INSTANT
