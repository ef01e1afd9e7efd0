"""The life of a task: one table, and a function for each transition.

                schedule                    lease (wake_at <= now)
      (nothing) --------->  WAITING  ------------------------------>  LEASED
                             ^  ^ |                                    | | | |
           reschedule,       |  | |  cancel                            | | | +-- done ------> DONE  (or WAITING: again)
           fire_now, shift --+  | +-----------> CANCELLED <-- cancel --+ | +---- dead ------> DEAD
                                |                                        |                      |
                                +---- retry, defer ----------------------+                      |
                                +------------------------- redrive -----------------------------+
      LEASED with wake_at <= now (the holder died or hung) is leased again: same arrow, new token, next attempt.

`TABLE` gives the answer and the next state for every verb and state, and the functions below it the new record. A store
that decides in Python calls them; the store suite checks that a store that decides in SQL or Lua matches them. Each
costs O(1) and uses no clock and no I/O: `now` and `token` are arguments.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

from msgspec.structs import replace

from bide.core.answers import Answer
from bide.core.instants import LAST_INSTANT, Millis
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
    Token,
)


class Verb(StrEnum):
    """Every operation on a task."""

    REPLACE = "schedule replace"
    KEEP = "schedule keep"
    EARLIEST = "schedule earliest"
    LATEST = "schedule latest"
    REFUSE = "schedule refuse"
    MOVE = "move"
    CANCEL = "cancel"
    REDRIVE = "redrive"
    LEASE = "lease"
    EXTEND = "extend"
    DONE = "settle done"
    AGAIN = "settle done, again"
    RETRY = "settle retry"
    DEFER = "settle defer"
    DEAD = "settle dead"


ABSENT = None
_R, _S = Result, State
_TAKEN = "taken"
"""The verb applies and has no `Result` of its own (a worker's verb answers with the task, or with true)."""
_LEFT = "left alone"
"""The verb does not apply; nothing changes."""

Cell = tuple[str, State | None]
_OVER: Mapping[State | None, Cell] = {
    ABSENT: (_R.CREATED, _S.WAITING),
    _S.DONE: (_R.REPLACED, _S.WAITING),
    _S.CANCELLED: (_R.REPLACED, _S.WAITING),
    _S.DEAD: (_R.REPLACED, _S.WAITING),
}
_ENDED: Mapping[State | None, Cell] = {
    ABSENT: (_R.NOT_FOUND, ABSENT),
    _S.DONE: (_R.FINISHED, _S.DONE),
    _S.CANCELLED: (_R.FINISHED, _S.CANCELLED),
    _S.DEAD: (_R.FINISHED, _S.DEAD),
}


def _held(to: State) -> Mapping[State | None, Cell]:
    """The row of a worker's verb, which applies only to a task leased with its token."""
    states = (ABSENT, *State)
    return {state: (_TAKEN, to) if state is _S.LEASED else (_LEFT, state) for state in states}


TABLE: Mapping[Verb, Mapping[State | None, Cell]] = {
    Verb.REPLACE: {**_OVER, _S.WAITING: (_R.REPLACED, _S.WAITING), _S.LEASED: (_R.REPLACED, _S.WAITING)},
    Verb.KEEP: {
        **_OVER, _S.WAITING: (_R.KEPT, _S.WAITING), _S.LEASED: (_R.KEPT, _S.LEASED), _S.DONE: (_R.KEPT, _S.DONE),
    },
    # every schedule with `if_token` on a task with another token: `stale_token` instead
    # EARLIEST and LATEST on a waiting task: `kept` instead if the existing time wins
    Verb.EARLIEST: {**_OVER, _S.WAITING: (_R.REPLACED, _S.WAITING), _S.LEASED: (_R.KEPT, _S.LEASED)},
    Verb.LATEST: {**_OVER, _S.WAITING: (_R.REPLACED, _S.WAITING), _S.LEASED: (_R.REPLACED, _S.WAITING)},
    Verb.REFUSE: {
        **_OVER, _S.WAITING: (_R.REFUSED, _S.WAITING), _S.LEASED: (_R.REFUSED, _S.LEASED),
        _S.DONE: (_R.REFUSED, _S.DONE),
    },
    # MOVE on a waiting task: `refused` instead if it would pass the deadline
    Verb.MOVE: {**_ENDED, _S.WAITING: (_R.MOVED, _S.WAITING), _S.LEASED: (_R.UNDER_WAY, _S.LEASED)},
    Verb.CANCEL: {
        **_ENDED, _S.WAITING: (_R.CANCELLED, _S.CANCELLED), _S.LEASED: (_R.CANCELLED_WHILE_LEASED, _S.CANCELLED),
    },
    Verb.REDRIVE: {
        **_ENDED, _S.WAITING: (_R.UNDER_WAY, _S.WAITING), _S.LEASED: (_R.UNDER_WAY, _S.LEASED),
        _S.DEAD: (_R.REDRIVEN, _S.WAITING),
    },
    # LEASE applies when wake_at <= now: to waiting tasks, and to those of a lost holder
    Verb.LEASE: {**_held(_S.LEASED), _S.WAITING: (_TAKEN, _S.LEASED)},
    Verb.EXTEND: _held(_S.LEASED),
    Verb.DONE: _held(_S.DONE),
    Verb.AGAIN: _held(_S.WAITING),
    Verb.RETRY: _held(_S.WAITING),
    Verb.DEFER: _held(_S.WAITING),
    Verb.DEAD: _held(_S.DEAD),
}  # fmt: skip

_SCHEDULE = {choice: Verb(f"schedule {choice.value}") for choice in OnConflict}
_SETTLE = {outcome: Verb(f"settle {outcome.value}") for outcome in OutcomeKind}
_CREATED, _WAITING = Result.CREATED, State.WAITING
"""Bound once, because an enum member's lookup takes as long as making a record."""


def next_token(last: Token, now: Millis) -> Token:
    """The token after `last`. Tokens only rise; since they follow the clock, a new token also exceeds any token lost in
    a power failure."""
    return max(last + 1, now * 1000)


ADDED = frozenset({Result.CREATED, Result.REPLACED})
"""Results of `schedule` after which the answer's record is stored, replacing any existing one."""


def gone(old: Record, now: Millis) -> bool:
    """True once the retention of `old` has passed. Every verb treats it as absent; a purge only frees the space."""
    return old.keep_until is not None and old.keep_until <= now


def schedule(new: NewTask, old: Record | None, now: Millis, token: Token) -> Answer:
    """Schedule `new`, where `old` may exist. The answer's record is to be stored if it has `new.id`."""
    due_at = clamp(new.due.resolve(now))
    if old is None or gone(old, now):
        return Answer(_CREATED, _born(new, due_at, now, token))
    if new.if_token is not None and new.if_token != old.token:
        return Answer(Result.STALE_TOKEN, old)
    verb = _SCHEDULE[new.on_conflict]
    word, _ = TABLE[verb][old.state]
    if old.state is State.WAITING and (
        (verb is Verb.EARLIEST and due_at >= old.due_at) or (verb is Verb.LATEST and due_at <= old.due_at)
    ):
        word = Result.KEPT
    if word != Result.REPLACED:
        return Answer(Result(word), old)
    return Answer(Result.REPLACED, _born(new, due_at, now, token), old.wake_at if old.state.live else None)


def change(asked: Change, old: Record | None, now: Millis, token: Token) -> Answer:
    """Move, cancel or redrive. The answer's record is to be stored if it has `token`."""
    verb = Verb.MOVE if type(asked) is Move else Verb.CANCEL if type(asked) is Cancel else Verb.REDRIVE
    if old is None or gone(old, now):
        return Answer(Result.NOT_FOUND)
    word, _ = TABLE[verb][old.state]
    if word == Result.FINISHED:
        return Answer(Result.FINISHED, old)
    if asked.if_token is not None and asked.if_token != old.token:
        return Answer(Result.STALE_TOKEN, old)
    if word == Result.UNDER_WAY:
        return Answer(Result.UNDER_WAY, old)
    if type(asked) is Move:
        due_at = clamp(asked.due.resolve(now))
        wake_at = max(due_at, now)
        deadline = old.deadline if asked.deadline is None else asked.deadline
        if deadline is not None and wake_at > deadline:
            return Answer(Result.REFUSED, old)
        moved = replace(old, due_at=due_at, wake_at=wake_at, deadline=deadline, token=token)
        return Answer(Result.MOVED, moved, old.wake_at)
    if type(asked) is Cancel:
        return Answer(Result(word), _ended(old, State.CANCELLED, token, now, asked.keep_until, old.error, old.failures))
    assert type(asked) is Redrive
    return Answer(Result.REDRIVEN, _born_again(old, asked.id, clamp(asked.due.resolve(now)), now, token))


def may_lease(old: Record, now: Millis) -> bool:
    """True if `old` is due: never a millisecond before its `wake_at` (P1)."""
    return old.state.live and old.wake_at <= now


def lease(old: Record, now: Millis, until: Millis, holder: str, token: Token) -> Record:
    """Lease `old`, which is due, until `until`: the next attempt, and one more loss if it was already leased."""
    lost = old.state is State.LEASED
    return replace(
        old, state=State.LEASED, wake_at=until, planned_at=old.planned_at if lost else old.wake_at,
        attempt=old.attempt + 1, losses=old.losses + lost, token=token, holder=holder,
    )  # fmt: skip


def holds(old: Record | None, token: Token) -> bool:
    """True if `token` is that of the live lease, so that extend and settle apply (P3)."""
    return old is not None and old.state is State.LEASED and old.token == token


def extend(old: Record, until: Millis) -> Record:
    """Extend the lease of `old`, which the caller holds. Not a transition: the token stays."""
    return replace(old, wake_at=until)


def settle(asked: Settlement, old: Record, now: Millis, token: Token) -> Record:
    """Settle `old`, which the caller holds. If it ends with `keep_until <= now`, delete it at once."""
    verb = Verb.AGAIN if asked.outcome is OutcomeKind.DONE and asked.next_at is not None else _SETTLE[asked.outcome]
    _, to = TABLE[verb][State.LEASED]
    if to is not State.WAITING:
        assert to is not None
        error = asked.error if asked.error is not None else (old.error if verb is Verb.DEAD else None)
        failures = old.failures + (verb is Verb.DEAD and asked.failed)
        return _ended(old, to, token, now, asked.keep_until, error, failures)
    assert asked.next_at is not None
    next_at = clamp(asked.next_at.resolve(now))
    if verb is Verb.AGAIN:
        return _born_again(old, asked.next_id, next_at, now, token)
    deferred = verb is Verb.DEFER
    return replace(
        old, state=State.WAITING, wake_at=max(next_at, now), planned_at=0, attempt=old.attempt - deferred,
        failures=old.failures + (not deferred), losses=0, token=token, holder=None,
        error=old.error if deferred else asked.error,
    )  # fmt: skip


def clamp(millis: Millis) -> Millis:
    """The instant nearest to `millis`."""
    return 0 if millis < 0 else LAST_INSTANT if millis > LAST_INSTANT else millis


def _born(new: NewTask, due_at: Millis, now: Millis, token: Token) -> Record:
    return Record(
        new.topic, new.key, new.id, new.group, _WAITING, due_at, due_at if due_at > now else now, 0, 0, 0, 0,
        token, None, new.payload, new.options, new.deadline, None, now, None, None,
    )  # fmt: skip


def _born_again(old: Record, id: str, due_at: Millis, now: Millis, token: Token) -> Record:
    """The next life under the same key, without a deadline."""
    return Record(
        old.topic, old.key, id, old.group, State.WAITING, due_at, max(due_at, now), 0, 0, 0, 0, token, None,
        old.payload, old.options, None, None, now, None, None,
    )  # fmt: skip


def _ended(
    old: Record, to: State, token: Token, now: Millis, keep_until: Millis, error: str | None, failures: int
) -> Record:
    """End `old`. Its `wake_at` is free: for a leased task it becomes the start of the delivery (see `started_at`)."""
    wake_at = min(old.token // 1000, now) if old.state is State.LEASED else old.wake_at
    return replace(
        old, state=to, wake_at=wake_at, failures=failures, token=token, error=error, finished_at=now,
        keep_until=keep_until,
    )  # fmt: skip
