"""Each way of being wrong: a history that is wrong in just this, which is found, beside its twin, which is right."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from msgspec.structs import replace
from tests.testing.history.telling import START, At, In, Story

from bide.core.records import OnConflict, OutcomeKind, Result, State
from bide.testing.history.check import check
from bide.testing.history.events import Asks, Seen

Case = Callable[[Story, bool], object]
CASES: list[tuple[str, str, str, Case]] = []


def found(promise: str, *needles: str) -> Callable[[Case], Case]:
    """Registers a case: told with `wrong`, the promise is broken and the sentence has the needles."""

    def register(case: Case) -> Case:
        CASES.append((case.__name__, promise, "|".join(needles), case))
        return case

    return register


def said(wrong: bool, **fields: Any) -> dict[str, Any]:
    """What is answered in the place of what is right."""
    return fields if wrong else {}


# --- P1, never early


@found("P1", "2 ms before its wake")
def leased_early(story: Story, wrong: bool) -> None:
    task = story.schedule()
    story.pass_(97 if wrong else 99)
    story.settle_run(story.lease(task))


@found("P1", "40 ms earlier than it was asked for")
def due_cut_short(story: Story, wrong: bool) -> None:
    early = story.now + 61
    story.done(story.schedule(due=In(100), **said(wrong, due_at=early, wake_at=early)))


@found("P1", "leased for", "it was to wake at")
def retry_not_waited_for(story: Story, wrong: bool) -> None:
    held = story.run(story.schedule())
    again = story.settle(held, OutcomeKind.RETRY, wake=In(500), error="no")
    if wrong:
        again = replace(again, wake_at=again.wake_at - 300)
    story.done(again)


@found("P1", "leased for", "it was to wake at")
def moved_later_and_leased_before(story: Story, wrong: bool) -> None:
    task = story.move(story.schedule(due=In(50)), In(400))
    if wrong:
        task = replace(task, wake_at=task.wake_at - 100)
    story.done(task)


@found("P1", "25 ms before its wake")
def began_early_by_the_stores_clock(story: Story, wrong: bool) -> None:
    task = story.schedule(due=At(START + 200))
    story.pass_(174 if wrong else 199)
    held = story.lease(task, clock=START + 200)
    story.pass_(-1 if wrong else 0)
    story.begin(held)
    story.pass_(3)
    story.end(held)
    story.settle(held)


# --- P2, at least once; nothing dies that never ran


@found("P2", "in the end the store showed that there was no such task", "waiting")
def lost_at_the_end(story: Story, wrong: bool) -> None:
    task = story.schedule()
    if not wrong:
        story.done(task)
    story.pass_(10_000)
    story.over()


@found("P2", "in the end the store showed", "leased")
def lost_with_its_holder(story: Story, wrong: bool) -> None:
    held = story.run(story.schedule())
    story.pass_(2_000)
    if not wrong:
        story.settle_run(story.lease(held, lost=True))
    story.over()


@found("P2", "get was told that there was no such task")
def forgotten_while_it_waits(story: Story, wrong: bool) -> None:
    task = story.schedule()
    story.get(None if wrong else task)
    story.done(task)


@found("P2", "as if nothing were there")
def created_over_what_waits(story: Story, wrong: bool) -> None:
    first = story.schedule("a")
    story.done(story.schedule("b", over=first, result=Result.CREATED if wrong else Result.REPLACED))


@found("P2", "no delivery of it ever began")
def done_without_delivery(story: Story, wrong: bool) -> None:
    task = story.schedule()
    story.pass_(200)
    held = story.lease(task)
    if not wrong:
        story.begin(held)
    story.settle(held)
    story.over()


@found("P2", "settled as done before its delivery began")
def settled_before_delivery(story: Story, wrong: bool) -> None:
    task = story.schedule()
    story.pass_(200)
    held = story.lease(task)
    if not wrong:
        story.begin(held)
    story.settle(held)
    if wrong:
        story.begin(held)


@found("P2", "with the error 'full', and it never ran")
def dead_and_never_ran(story: Story, wrong: bool) -> None:
    task = story.schedule()
    story.pass_(200)
    held = story.lease(task)
    if not wrong:
        story.begin(held)
    story.settle(held, OutcomeKind.DEAD, error="full")


@found("P2", "dead by its deadline")
def dead_before_its_deadline(story: Story, wrong: bool) -> None:
    task = story.schedule(deadline=START + (5_000 if wrong else 150))
    story.pass_(200)
    story.settle(story.lease(task), OutcomeKind.DEAD, error="deadline: not after then")


@found("P2", "dead after 2 lost leases, of 3")
def dead_by_too_few_losses(story: Story, wrong: bool) -> None:
    story.events[0] = replace(story.events[0], losses=3 if wrong else 2)
    task = story.schedule()
    story.pass_(200)
    held = story.lease(task)
    for _ in range(2):
        story.pass_(2_000)
        held = story.lease(held, lost=True)
    story.settle(held, OutcomeKind.DEAD, error="holder lost: 2 leases in a row ended unsettled")


# --- P3, one holder


@found("P3", "two live leases at once")
def leased_twice(story: Story, wrong: bool) -> None:
    held = story.run(story.schedule(), until=1_000)
    story.pass_(500 if wrong else 1_000)
    story.settle_run(story.lease(held, lost=True, who="other"), who="other")


@found("P3", "two live leases at once")
def leased_in_spite_of_an_extension(story: Story, wrong: bool) -> None:
    held = story.run(story.schedule(), until=1_000)
    story.pass_(500)
    if wrong:
        held = story.extend(held)
    story.pass_(600)
    story.settle_run(story.lease(held, lost=True, who="other"), who="other")


@found("P3", "two live leases at once")
def leased_in_spite_of_an_extension_by_a_clock_that_is_wrong(story: Story, wrong: bool) -> None:
    """The store has a clock of its own, and the holder's is an hour ahead."""
    held = story.run(story.schedule(), until=1_000, wake_at=story.now + 1_102)
    story.pass_(500)
    held = story.extend(held, skew=3_600_000)
    story.pass_(600 if wrong else 1_010)
    story.settle_run(story.lease(held, lost=True, who="other"), who="other")


@found("P3", "a settle with token", "was accepted")
def settled_with_an_old_token(story: Story, wrong: bool) -> None:
    held = story.run(story.schedule())
    story.pass_(2_000)
    newer = story.lease(held, lost=True, who="other")
    story.begin(newer, who="other")
    story.settle(held, ok=wrong)
    if not wrong:
        story.settle(newer)


@found("P3", "an extend with token", "was accepted")
def extended_after_a_cancel(story: Story, wrong: bool) -> None:
    held = story.run(story.schedule())
    story.cancel(held)
    story.extend(held, ok=wrong)


@found("P3", "was refused, though it was that of the live lease")
def refused_its_own(story: Story, wrong: bool) -> None:
    held = story.run(story.schedule())
    story.settle(held, ok=not wrong)
    story.over(drained=False)


@found("P3", "was refused, though it was that of the live lease")
def extension_refused(story: Story, wrong: bool) -> None:
    held = story.run(story.schedule())
    story.settle(story.extend(held, ok=not wrong))


@found("P3", "which no lease gave")
def delivered_without_a_lease(story: Story, wrong: bool) -> None:
    task = story.schedule()
    held = story.run(task)
    if wrong:
        story.begin(replace(held, token=held.token + 5))
    story.settle(held)


@found("P3", "two deliveries of the lease")
def delivered_twice_by_one_lease(story: Story, wrong: bool) -> None:
    held = story.run(story.schedule())
    if wrong:
        story.begin(held)
    story.settle(held)


@found("P3", "a settle with token", "was accepted")
def settled_twice(story: Story, wrong: bool) -> None:
    held = story.run(story.schedule())
    story.settle(held)
    story.settle(held, ok=wrong)


# --- P4, every verb is one transition, and answers what happened


@found("P4", "after the answer `cancelled`")
def delivered_after_cancelled(story: Story, wrong: bool) -> None:
    task = story.schedule()
    held = story.run(task)
    story.settle(held, OutcomeKind.RETRY, wake=In(0), error="x")
    again = story.lease(replace(held, state=State.WAITING, wake_at=story.now - 1, failures=1, error="x", planned_at=0))
    if not wrong:
        story.begin(again)
    waits = story.settle(again, OutcomeKind.DEFER, wake=In(1_000))
    story.cancel(waits)
    if wrong:
        story.begin(again)


@found("P4", "leased with id a, but the task had ended: cancelled")
def leased_after_a_cancel(story: Story, wrong: bool) -> None:
    task = story.schedule()
    ended = story.cancel(task, keep=60_000)
    story.pass_(200)
    if wrong:
        story.lease(task, token=ended.token + 1_000_000)


@found("P4", "a move answered `moved`, but the task was leased")
def moved_what_was_leased(story: Story, wrong: bool) -> None:
    held = story.run(story.schedule())
    waits = replace(held, state=State.WAITING, planned_at=0)
    story.move(waits if wrong else held, In(500), result=Result.MOVED if wrong else Result.UNDER_WAY)
    if not wrong:
        story.settle(held)


@found("P4", "a cancel answered `cancelled`, but the task was leased")
def cancelled_as_if_it_waited(story: Story, wrong: bool) -> None:
    held = story.run(story.schedule())
    story.cancel(held, result=Result.CANCELLED if wrong else None)


@found("P4", "get shows due_at")
def shown_before_the_move(story: Story, wrong: bool) -> None:
    task = story.schedule()
    moved = story.move(task, In(700))
    story.get(moved, **said(wrong, due_at=task.due_at))


@found("P4", "was shown after that with token")
def shown_an_older_version(story: Story, wrong: bool) -> None:
    task = story.schedule()
    moved = story.move(task, In(700))
    story.get(task if wrong else moved)


@found("P4", "answered `kept`")
def kept_what_was_to_be_replaced(story: Story, wrong: bool) -> None:
    task = story.schedule(due=At(START + 500))
    story.kept(task, due=At(START + (200 if wrong else 900)), on_conflict=OnConflict.EARLIEST)


@found("P4", "answered `stale_token`")
def a_schedule_called_stale_that_was_not(story: Story, wrong: bool) -> None:
    task = story.schedule()
    stale = task.token if wrong else task.token - 1
    story.kept(task, on_conflict=OnConflict.REPLACE, if_token=stale, result=Result.STALE_TOKEN)


@found("P5", "leased as due at")
def a_next_life_due_at_another_time_than_was_asked(story: Story, wrong: bool) -> None:
    held = story.run(story.schedule())
    asked = At(START - 1_000)
    following = story.settle(held, OutcomeKind.DONE, wake=asked, next_id="b")
    story.lease(replace(following, due_at=following.wake_at) if wrong else following)


@found("P4", "schedule was told that there was no such task", "kept until")
def forgotten_too_early(story: Story, wrong: bool) -> None:
    held = story.run(story.schedule())
    ended = story.settle(held, keep_until=story.now + 10_000)
    story.pass_(2_000)
    if wrong:
        story.not_found(Asks.SCHEDULE)
    else:
        story.cancel(ended, result=Result.FINISHED)


@found("P4", "redrive answered `redriven`, but the task had ended: done")
def redrove_what_was_done(story: Story, wrong: bool) -> None:
    held = story.run(story.schedule())
    verdict = OutcomeKind.DONE if wrong else OutcomeKind.DEAD
    dead = story.settle(held, verdict, keep_until=story.now + 60_000, error=None if wrong else "x")
    story.done(story.redrive(dead))


@found("P4", "asked between", "and done at")
def done_at_another_time(story: Story, wrong: bool) -> None:
    early, due = story.now - 50, story.now + 50
    story.schedule(due=In(100), **said(wrong, created_at=early, due_at=due, wake_at=due))


@found("P4", "though the deadline is")
def moved_past_its_deadline(story: Story, wrong: bool) -> None:
    task = story.schedule(deadline=START + 1_000)
    story.move(task, In(2_000 if wrong else 500))


# --- P5, the newest word wins


@found("P5", "leased with id a, but the life that is to be delivered has id b")
def an_old_life_is_delivered(story: Story, wrong: bool) -> None:
    first = story.schedule("a", due=In(50))
    second = story.schedule("b", due=In(50), over=first)
    story.done(replace(second, id="a") if wrong else second)


@found("P5", "leased as due at")
def an_old_due_is_delivered(story: Story, wrong: bool) -> None:
    task = story.schedule(due=In(50))
    moved = story.move(task, In(200))
    story.done(replace(moved, due_at=task.due_at) if wrong else moved)


@found("P5", "its wake before it was moved")
def an_old_alarm_fires(story: Story, wrong: bool) -> None:
    task = story.schedule(due=In(50))
    moved = story.move(task, In(200))
    story.done(replace(moved, wake_at=task.wake_at) if wrong else moved)


@found("P5", "the life with id a is shown again")
def an_old_call_undoes_a_newer(story: Story, wrong: bool) -> None:
    first = story.schedule("a")
    second = story.schedule("b", over=first)
    story.get(replace(first, token=second.token + 1) if wrong else second)


@found("P5", "the task had ended: done")
def delivered_again_after_it_was_done(story: Story, wrong: bool) -> None:
    held = story.run(story.schedule())
    if wrong:
        story.settle(held, keep_until=story.now + 60_000)
    story.pass_(2_000)
    story.begin(story.lease(held, lost=True))


# --- P7, a worker holds only what it runs


@found("P7", "held 3 tasks at once, and has room for 2")
def holds_more_than_it_asked_for(story: Story, wrong: bool) -> None:
    many = [(f"k{number}", story.schedule(f"id{number}", key=f"k{number}")) for number in range(3)]
    story.pass_(200)
    held = story.leased(many[:2], wants=2)
    for (key, _), one in zip(many, held, strict=False):
        story.begin(one, key=key)
    if not wrong:
        story.end(held[0], key="k0")
        story.settle(held[0], key="k0")
    last = story.lease(many[2][1], key="k2")
    story.begin(last, key="k2")


@found("P7", "asked for 1 tasks of t and was given 2")
def given_more_than_it_asked_for(story: Story, wrong: bool) -> None:
    many = [(f"k{number}", story.schedule(f"id{number}", key=f"k{number}")) for number in range(2)]
    story.pass_(200)
    story.leased(many, wants=1 if wrong else 2)


@found("P7", "held 2 tasks at once, and has room for 1")
def fetches_ahead(story: Story, wrong: bool) -> None:
    story.events[0] = replace(story.events[0], room=1 if wrong else 2)
    many = [(f"k{number}", story.schedule(f"id{number}", key=f"k{number}")) for number in range(2)]
    story.pass_(200)
    for (key, _), one in zip(many, story.leased(many, wants=2), strict=True):
        story.begin(one, key=key)
        story.pass_(1)
        story.end(one, key=key)


# --- P10, nothing is left behind


@found("P10", "it is left as waiting")
def left_waiting(story: Story, wrong: bool) -> None:
    task = story.schedule()
    if wrong:
        story.pass_(60_000)
        story.left(task)
    else:
        story.done(task)
    story.over()


@found("P10", "was kept until", "and is there still")
def left_after_it_was_kept(story: Story, wrong: bool) -> None:
    held = story.run(story.schedule())
    ended = story.settle(held, keep_until=story.now + 10_000)
    story.pass_(80_000 if wrong else 40_000)
    story.left(replace(ended, finished_at=ended.finished_at))
    story.over()


@found("P10", "the task is left in the store as waiting", "there was no task")
def left_after_it_was_forgotten(story: Story, wrong: bool) -> None:
    task = story.schedule()
    ended = story.cancel(task)
    if wrong:
        story.left(replace(task, token=ended.token + 7))
    story.over()


@found("P10", "nobody ever asked for it")
def left_by_nobody(story: Story, wrong: bool) -> None:
    task = story.schedule()
    if wrong:
        story.left(replace(task, id="x"), key="other")
    story.done(task)
    story.over()


# --- P12, tokens, ids and attempts


@found("P12", "leased as attempt 3, but it must be attempt 2")
def an_attempt_is_left_out(story: Story, wrong: bool) -> None:
    held = story.run(story.schedule())
    again = story.settle(held, OutcomeKind.RETRY, wake=In(50), error="x")
    story.done(replace(again, attempt=2) if wrong else again)


@found("P12", "leased as attempt 1, but it must be attempt 2")
def an_attempt_is_not_counted(story: Story, wrong: bool) -> None:
    held = story.run(story.schedule())
    again = story.settle(held, OutcomeKind.RETRY, wake=In(50), error="x")
    story.done(replace(again, attempt=0) if wrong else again)


@found("P12", "delivered with attempt 7")
def a_delivery_has_another_attempt(story: Story, wrong: bool) -> None:
    task = story.schedule()
    story.pass_(200)
    held = story.lease(task)
    story.begin(held, **said(wrong, attempt=7))
    story.settle(held)


# --- one step, after a task was scheduled

Step = Callable[[Story, bool, Seen], object]
STEPS: dict[str, tuple[str, str, Step]] = {
    "kept nothing": ("P4", "on_conflict=keep answered `replaced`, but the task was waiting", lambda story, wrong, task:
        story.schedule("b", over=task, on_conflict=OnConflict.KEEP if wrong else OnConflict.REPLACE)),
    "replaced though the token differs": ("P4", "and done to the one with token", lambda story, wrong, task:
        story.schedule("b", over=task, if_token=task.token - wrong)),
    "kept though the token differs": ("P4", "answered `kept`", lambda story, wrong, task:
        story.kept(task, on_conflict=OnConflict.KEEP, if_token=task.token - wrong)),
    "changed in spite of if_token": ("P4", "asked for the version with token", lambda story, wrong, task:
        story.move(task, In(300), if_token=task.token - wrong)),
    "kept what was cancelled for good": ("P4", "was not to keep the task", lambda story, wrong, task:
        story.cancel(task, keep=5_000, keeps=not wrong)),
    "tells another wake": ("P4", "says that the wake before was", lambda story, wrong, task:
        story.move(replace(task, wake_at=task.wake_at + 9 * wrong), In(700))),
    "a token does not rise": ("P12", "it does not rise", lambda story, wrong, task:
        story.move(task, In(500), **said(wrong, token=task.token - 1))),
    "a token is given twice": ("P12", "was given twice", lambda story, wrong, task:
        story.move(task, In(500), **said(wrong, token=task.token))),
    "a token rises by itself": ("P12", "is shown, though nothing happened", lambda story, wrong, task:
        story.get(task, **said(wrong, token=task.token + 3))),
    "a token lags behind the clock": ("P12", "is less than the store's clock", lambda story, wrong, task:
        story.schedule("b", key="other", **said(wrong, token=story.now * 1000 - 5_000))),
    "a life has another id": ("P12", "a schedule made id z, but it must be b", lambda story, wrong, task:
        story.schedule("b", key="other", **said(wrong, id="z"))),
    "a new life has a past": ("P12", "a schedule made attempt 2, but it must be 0", lambda story, wrong, task:
        story.schedule("b", key="other", **said(wrong, attempt=2))),
    "two tasks have one id": ("P12", "which is that of t/k", lambda story, wrong, task:
        story.schedule("a" if wrong else "b", key="other")),
    "a move changes the id": ("P12", "a move made id z, but it must be a", lambda story, wrong, task:
        story.move(task, In(500), **said(wrong, id="z"))),
    "a lease changes the id": ("P12", "leased with id z", lambda story, wrong, task:
        story.done(replace(task, **said(wrong, id="z")))),
    "wakes before it is due": ("P1", "which is 7 ms before it is due", lambda story, wrong, task:
        story.done(story.schedule("b", due=At(START + 100), over=task, **said(wrong, wake_at=START + 93)))),
}  # fmt: skip


def after_a_schedule(step: Step) -> Case:
    return lambda story, wrong: step(story, wrong, story.schedule())


CASES += [(name, promise, needle, after_a_schedule(step)) for name, (promise, needle, step) in STEPS.items()]


@pytest.mark.parametrize(("promise", "needles", "case"), [one[1:] for one in CASES], ids=[one[0] for one in CASES])
def test_what_is_wrong_is_found_and_its_twin_is_right(promise: str, needles: str, case: Case) -> None:
    story = Story()
    case(story, False)
    assert [str(one) for one in check(story.events).violations] == []

    story = Story()
    case(story, True)
    report = check(story.events)
    assert {one.promise for one in report.violations} == {promise}, [str(one) for one in report.violations]
    [violation] = report.violations
    for needle in needles.split("|"):
        assert needle in violation.what, violation.what
    assert violation.events, "events show it"
    assert violation.events == sorted(violation.events, key=lambda event: event.at)
    assert not report.undecided
    assert not report.ok


def test_every_promise_is_broken_in_some_way() -> None:
    assert {case[1] for case in CASES} == {"P1", "P2", "P3", "P4", "P5", "P7", "P10", "P12"}
    assert len(CASES) >= 50
