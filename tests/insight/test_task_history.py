"""One task's life, told from its record, the log of events and the history by the minute."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace
from tests.fuzz.tasks import SOUND

from bide import Bide
from bide.core.events import Event, EventKind
from bide.core.instants import Millis
from bide.core.records import Record, State
from bide.engine.history import MINUTE
from bide.insight.task_history import Attempt, Ended, TaskHistory, cohort_of, history_of
from bide.testing import ManualClock

NOON: Millis = 29_000_000 * MINUTE


def record(**fields: Any) -> Record:
    given = {"id": "now", "due_at": NOON, "wake_at": NOON, "planned_at": 0, "attempt": 0, "token": 1}
    return replace(SOUND, **{**given, "created_at": NOON - MINUTE, **fields})


def event(kind: EventKind, at: Millis, **fields: Any) -> Event:
    return Event(**{"topic": SOUND.topic, "key": SOUND.key, "id": "now", "kind": kind, "at": at, **fields})


def retry(attempt: int, began: Millis, ended: Millis, again: Millis, error: str = "broken") -> Event:
    return event(EventKind.RETRY, ended, attempt=attempt, was=began, wake_at=again, who="w1", what=error)


def change(at: Millis, verb: str, was: Millis | None, wake_at: Millis | None, **fields: Any) -> Event:
    return event(EventKind.CHANGE, at, who="anna", what=verb, was=was, wake_at=wake_at, **fields)


def told(now: Record, *events: Event) -> TaskHistory:
    """`events` are the oldest first."""
    return history_of(now, list(reversed(events)))


def test_a_gap_in_the_log_is_told() -> None:
    waiting = record(attempt=4, failures=4)
    found = told(waiting, retry(3, NOON + 7, NOON + 8, NOON + 9))
    assert found.missing == [1, 2, 4]
    assert found.attempts[0].planned == NOON


def test_what_an_occurrence_left_out_is_no_delivery() -> None:
    dropped = event(EventKind.DROPPED, NOON - 1, id="before", attempt=1, was=NOON - 9, what="overlap: 2 did not run")
    dead = event(EventKind.DEAD, NOON - 1, id="before", attempt=1, was=NOON - 9, what="broken")
    assert [one.error for one in told(record(), dead, dropped).earlier] == ["broken"]


def test_a_lost_lease_is_the_delivery_before_the_one_that_found_it() -> None:
    now = record(state=State.LEASED, planned_at=NOON, attempt=2, losses=1, holder="w2", token=(NOON + 10_200) * 1000,
                 wake_at=NOON + 20_200)  # fmt: skip
    found = told(now, event(EventKind.LOSS, NOON + 10_201, attempt=2, who="w2", what="lease lost"))
    assert [(one.number, one.how.value, one.who) for one in found.attempts] == [(1, "lost", None), (2, "running", "w2")]
    assert found.attempts[1].late == 10_200
    assert found.missing == []


def test_the_dead_tell_of_their_last_delivery_though_the_log_forgot_it() -> None:
    dead = record(state=State.DEAD, planned_at=NOON, attempt=1, failures=0, holder="w1", wake_at=NOON + 5,
                  finished_at=NOON + 9, error="no such order")  # fmt: skip
    for events in ([], [event(EventKind.DEAD, NOON + 9, attempt=1, was=NOON + 5, who="w1", what="no such order")]):
        [one] = told(dead, *events).attempts
        assert (one.how, one.late, one.took, one.error) == (Ended.DEAD, 5, 4, "no such order")


def test_a_delivery_after_a_move_is_planned_for_the_new_time() -> None:
    waiting = record(attempt=1, failures=1, due_at=NOON + 500, wake_at=NOON + 2_000)
    found = told(waiting, change(NOON - 50, "reschedule: moved", NOON, NOON + 500),
                 retry(1, NOON + 501, NOON + 600, NOON + 2_000))  # fmt: skip
    assert (found.attempts[0].planned, found.attempts[0].late) == (NOON + 500, 1)


def test_what_is_not_known_is_not_made_up() -> None:
    # moved after the first delivery: what that was planned for is nowhere written
    waiting = record(attempt=1, failures=1, due_at=NOON + 9_000, wake_at=NOON + 9_000)
    found = told(waiting, retry(1, NOON + 1, NOON + 2, NOON + 3_000),
                 change(NOON + 50, "reschedule: moved", NOON + 3_000, NOON + 9_000))  # fmt: skip
    assert found.attempts[0].late is None
    # one that is said to be planned for long after it began was not
    found = told(record(attempt=1, failures=1), retry(1, NOON - 5_000, NOON, NOON + 3_000))
    assert found.attempts[0].planned is None
    # the log hears of a delivery a moment after it ended, and reckons from then
    found = told(record(attempt=1, failures=1), retry(1, NOON - 5, NOON, NOON + 3_000))
    assert (found.attempts[0].planned, found.attempts[0].late) == (NOON - 5, 0)


async def test_a_long_wait_is_looked_at_in_part() -> None:
    clock = ManualClock(NOON)
    async with Bide("memory:", clock=clock) as app:
        clock.advance(10 * 60 * MINUTE)
        app.history.began("a", [NOON], clock.now())
        await app.history.flush()
        found = await cohort_of(app.store, clock, "a", NOON, clock.now())
        assert found is not None
        assert (found.planned, found.begun) == (1, 1)
        assert found.idle == (NOON + MINUTE, NOON + 60 * MINUTE)


def test_what_died_without_a_delivery_was_not_late() -> None:
    for error, late in (("deadline: not after 2026-01-01", None), ("holder lost: 10 leases in a row", None), ("no", 5)):
        assert Attempt(number=1, how=Ended.DEAD, planned=1_000, began=1_005, error=error).late == late
