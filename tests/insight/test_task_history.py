"""One task's life, told from its record, the log of events and the history by the minute."""

from __future__ import annotations

import asyncio
from typing import Any

from bide import Bide, Done, Retry, Task
from bide.core.events import Event, EventKind
from bide.core.instants import Millis
from bide.core.records import Record, State
from bide.engine.history import MINUTE
from bide.insight.task_history import Attempt, Ended, TaskHistory, cohort_of, history_of, task_history
from bide.testing import ManualClock
from bide.testing.virtual import VirtualClock, VirtualLoop, run_virtual

NOON: Millis = 29_000_000 * MINUTE


def record(**fields: Any) -> Record:
    given: dict[str, Any] = {
        "topic": "order.close", "key": "42", "id": "now", "group": None, "state": State.WAITING, "due_at": NOON,
        "wake_at": NOON, "planned_at": 0, "attempt": 0, "failures": 0, "losses": 0, "token": 1, "holder": None,
        "payload": b"", "options": b"", "deadline": None, "error": None, "created_at": NOON - MINUTE,
        "finished_at": None, "keep_until": None,
    }  # fmt: skip
    return Record(**given | fields)


def event(kind: EventKind, at: Millis, **fields: Any) -> Event:
    given: dict[str, Any] = {"topic": "order.close", "key": "42", "id": "now", "kind": kind, "at": at}
    return Event(**given | fields)


def retry(attempt: int, began: Millis, ended: Millis, again: Millis, error: str = "broken") -> Event:
    return event(EventKind.RETRY, ended, attempt=attempt, was=began, wake_at=again, who="w1", what=error)


def change(at: Millis, verb: str, was: Millis | None, wake_at: Millis | None, **fields: Any) -> Event:
    return event(EventKind.CHANGE, at, who="anna", what=verb, was=was, wake_at=wake_at, **fields)


def told(now: Record, *events: Event) -> TaskHistory:
    """`events` are the oldest first."""
    return history_of(now, list(reversed(events)))


def test_one_that_waits_has_no_deliveries() -> None:
    found = told(record())
    assert (found.attempts, found.missing, found.changes, found.earlier, found.last) == ([], [], [], [], None)
    assert found.first_due == NOON


def test_one_that_is_being_delivered() -> None:
    now = record(state=State.LEASED, planned_at=NOON, attempt=1, holder="w1", token=(NOON + 40) * 1000 + 3,
                 wake_at=NOON + 10_000)  # fmt: skip
    [one] = told(now).attempts
    assert one == Attempt(number=1, how=Ended.RUNNING, planned=NOON, began=NOON + 40, who="w1")
    assert (one.late, one.took) == (40, None)


def test_one_that_failed_twice_and_is_done() -> None:
    ended = record(state=State.DONE, planned_at=NOON + 3_000, attempt=3, failures=2, holder="w2",
                   wake_at=NOON + 3_005, finished_at=NOON + 3_050, error=None)  # fmt: skip
    found = told(ended, retry(1, NOON + 2, NOON + 10, NOON + 1_000), retry(2, NOON + 1_004, NOON + 1_010, NOON + 3_000))
    assert [(one.number, one.how.value, one.planned, one.late, one.took, one.again_at) for one in found.attempts] == [
        (1, "retry", NOON, 2, 8, NOON + 1_000),
        (2, "retry", NOON + 1_000, 4, 6, NOON + 3_000),
        (3, "done", NOON + 3_000, 5, 45, None),
    ]
    assert found.missing == []


def test_a_gap_in_the_log_is_told() -> None:
    waiting = record(attempt=4, failures=4)
    found = told(waiting, retry(3, NOON + 7, NOON + 8, NOON + 9))
    assert found.missing == [1, 2, 4]
    assert found.attempts[0].planned == NOON


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


def test_changes_tell_when_it_was_first_due_and_by_whom_it_was_moved() -> None:
    moved = record(due_at=NOON + 9_000, wake_at=NOON + 9_000)
    found = told(moved, change(NOON - 50, "reschedule: moved", NOON, NOON + 5_000),
                 change(NOON - 40, "shift: moved", NOON + 5_000, NOON + 9_000))  # fmt: skip
    assert found.first_due == NOON
    assert found.moved == 2
    assert [(*one.what.split(": "), one.was, one.wake_at, one.who) for one in found.changes] == [
        ("shift", "moved", NOON + 5_000, NOON + 9_000, "anna"),
        ("reschedule", "moved", NOON, NOON + 5_000, "anna"),
    ]


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


def test_earlier_lives_are_told_apart() -> None:
    again = record(id="now", attempt=0, created_at=NOON + 100, due_at=NOON + 100, wake_at=NOON + 100)
    found = told(
        again,
        event(EventKind.DEAD, NOON + 9, id="before", attempt=1, was=NOON + 5, who="w1", what="broken"),
        change(NOON + 100, "redrive: redriven", None, NOON + 100),
    )
    assert (found.attempts, found.missing, found.moved) == ([], [], 0)
    assert [(one.how, one.error) for one in found.earlier] == [(Ended.DEAD, "broken")]
    assert [(one.what.partition(":")[0], one.id) for one in found.changes] == [("redrive", found.record.id)]


def test_a_real_life_from_a_worker() -> None:
    """Scheduled, failed, retried, done."""

    async def live(loop: VirtualLoop) -> TaskHistory | None:
        app = Bide("memory:", keep_done="1h", clock=VirtualClock(loop))
        done = asyncio.Event()

        @app.handler("order.close")
        async def close(task: Task[Any]) -> Done | Retry:
            if task.attempt == 1:
                return Retry("not yet", delay="2s")
            done.set()
            return Done()

        async with app:
            async with app.worker():
                await close.schedule(None, key="42", delay="5s")
                await done.wait()
            await app.history.flush()
            return await task_history(app, "order.close", "42")

    found = run_virtual(live)
    assert found is not None
    assert [(one.number, one.how.value, one.late, one.error) for one in found.attempts] == [
        (1, "retry", 0, "not yet"), (2, "done", 0, ""),
    ]  # fmt: skip
    assert found.attempts[1].planned == found.attempts[0].again_at
    assert found.cohort is not None
    assert (found.cohort.begun, found.cohort.half) == (2, 0)


async def test_nothing_there_tells_nothing() -> None:
    async with Bide("memory:") as app:
        assert await task_history(app, "order.close", "42") is None


async def test_the_others_of_that_minute() -> None:
    clock = ManualClock(NOON)
    async with Bide("memory:", clock=clock) as app:
        assert await cohort_of(app.store, clock, "a", NOON, NOON) is None
        app.history.began("a", [NOON, NOON], NOON + 10)
        await app.history.flush()
        clock.advance(5 * MINUTE)
        app.history.began("a", [NOON] * 40, clock.now())
        app.history.began("b", [NOON] * 7, clock.now())
        await app.history.flush()
        found = await cohort_of(app.store, clock, "a", NOON, clock.now())
        assert found is not None
        assert (found.planned, found.begun) == (42, 40)
        assert found.half is not None
        assert found.half >= 5 * MINUTE
        assert found.idle == (NOON + MINUTE, NOON + 5 * MINUTE)
        near = await cohort_of(app.store, clock, "a", NOON, NOON + 10)
        assert near is not None
        assert (near.begun, near.half, near.idle) == (2, 10, None)


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
