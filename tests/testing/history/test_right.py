"""What is right is accepted, also where answers were lost and clocks jumped: told by hand, and the report of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from msgspec.structs import replace
from tests.testing.history.telling import START, At, In, Story

from bide.core.instants import Millis
from bide.core.records import OnConflict, OutcomeKind, Result, State
from bide.testing.history import events as ev
from bide.testing.history.__main__ import main
from bide.testing.history.check import Report, check
from bide.testing.history.events import Asks, encode


def assert_right(events: list[ev.Event]) -> Report:
    report = check(events)
    assert [str(one) for one in report.violations] == []
    assert report.undecided == []
    return report


# --- what lost answers explain


def held_until(task: ev.Seen, end: Millis) -> ev.Seen:
    """As it is leased for the first time, by an answer that was lost."""
    return replace(task, state=State.LEASED, attempt=1, wake_at=end, planned_at=task.wake_at, token=task.token + 1_000)


def lost_schedule(story: Story) -> None:
    story.fail(story.ask(Asks.SCHEDULE, id="a", due=In(100)))
    story.get(None)
    born = story.born("a", In(100), group="g")
    story.now += 1
    story.get(born)
    story.done(born)


def lost_schedule_that_is_done_much_later(story: Story) -> None:
    story.fail(story.ask(Asks.SCHEDULE, id="b", due=In(100)))
    first = story.schedule("a", due=In(2_000))
    story.pass_(500)
    born = story.born("b", In(100))
    story.now += 1
    story.schedule("c", over=replace(born, wake_at=born.wake_at), on_conflict=OnConflict.REPLACE)
    assert first.wake_at != born.wake_at


def lost_cancel(story: Story) -> None:
    story.schedule()
    story.fail(story.ask(Asks.CANCEL, keeps=False))
    story.get(None)
    story.pass_(9_000)
    story.over()


def lost_cancel_of_which_nothing_more_was_heard(story: Story) -> None:
    story.schedule()
    story.ask(Asks.CANCEL, keeps=False)
    story.say(ev.Died("client", story.at))
    story.pass_(9_000)
    story.over()


def lost_move(story: Story) -> None:
    task = story.schedule()
    story.fail(story.ask(Asks.MOVE, due=At(START + 5_000)))
    story.done(replace(task, due_at=START + 5_000, wake_at=START + 5_000))


def lost_lease(story: Story) -> None:
    task = story.schedule(due=In(0))
    end = story.lease_lost(until=500)
    held = held_until(task, end)
    story.pass_(10)
    story.move(held, In(50), result=Result.UNDER_WAY)
    story.pass_(600)
    story.settle_run(story.lease(held, lost=True))
    story.over()


def lost_lease_that_was_cancelled(story: Story) -> None:
    task = story.schedule(due=In(0))
    end = story.lease_lost(until=500)
    held = held_until(task, end)
    story.cancel(held)
    story.over()


def lost_settle_that_is_sent_again(story: Story) -> None:
    held = story.run(story.schedule())
    story.fail(story.settling(held))
    story.settle(held, ok=False)
    story.get(None)
    story.over()


def lost_settle_that_was_not_done(story: Story) -> None:
    held = story.run(story.schedule())
    story.fail(story.settling(held))
    story.settle(held)
    story.over()


def lost_redrive(story: Story) -> None:
    held = story.run(story.schedule())
    story.settle(held, OutcomeKind.DEAD, keep_until=story.now + 90_000, error="x")
    story.fail(story.ask(Asks.REDRIVE, id="z", due=In(0)))
    born = story.born("z", In(0))
    story.now += 1
    story.done(born)


def lost_settle_that_begins_a_life(story: Story) -> None:
    held = story.run(story.schedule())
    story.fail(story.settling(held, wake=In(300), next_id="n"))
    born = story.born("n", In(300))
    story.now += 1
    story.done(replace(born, due_at=born.due_at - 1, wake_at=born.wake_at - 1, created_at=born.created_at - 1))


# --- what happens at once, and clocks that jump


def two_schedules_at_once(story: Story) -> None:
    one, two = story.ask(Asks.SCHEDULE, id="a", due=In(50)), story.ask(Asks.SCHEDULE, id="b", due=In(90))
    first = story.born("b", In(90))
    second = replace(story.born("a", In(50)), token=first.token + 1)
    story.answer(one, Result.REPLACED, second, first.wake_at)
    story.answer(two, Result.CREATED, first)
    story.done(second)


def a_get_during_a_cancel(story: Story) -> None:
    task = story.schedule()
    look, cancel = story.ask(Asks.GET), story.ask(Asks.CANCEL, keeps=False)
    ended = replace(task, state=State.CANCELLED, token=story.clock * 1000, finished_at=story.clock, keep_until=0)
    story.answer(cancel, Result.CANCELLED, ended)
    story.answer(look, None, task)
    story.get(None)


def the_clock_is_set_back(story: Story) -> None:
    task = story.schedule(due=At(START + 50))
    story.pass_(100)
    held = story.lease(task)
    story.lag = 3_600_000
    story.begin(held)
    again = story.settle(held, OutcomeKind.RETRY, wake=In(500), error="x")
    story.pass_(499)
    story.settle_run(story.lease(again))


def the_clock_leaps_ahead(story: Story) -> None:
    task = story.schedule(due=In(3_600_000))
    story.lag = -3_600_000
    story.pass_(1)
    story.settle_run(story.lease(task))


def purged_before_it_is_asked_for(story: Story) -> None:
    held = story.run(story.schedule())
    ended = story.settle(held, keep_until=story.now + 1_000)
    story.cancel(ended, result=Result.FINISHED)
    story.pass_(2_000)
    story.get(None)
    story.done(story.schedule("b"))


def kept_no_longer_and_not_yet_purged(story: Story) -> None:
    """Such a task is answered as absent, though the store holds it still."""
    held = story.run(story.schedule())
    ended = story.settle(held, keep_until=story.now + 1_000)
    story.cancel(ended, result=Result.FINISHED)
    story.pass_(5_000)
    story.get(None)
    story.pass_(5_000)
    story.left(ended)
    story.over()


def kept_no_longer_until_the_clock_is_set_back(story: Story) -> None:
    held = story.run(story.schedule())
    ended = story.settle(held, keep_until=story.now + 1_000)
    story.pass_(1_200)
    story.get(None)
    story.lag = 1_000
    story.pass_(100)
    story.get(ended)


def a_slow_holder_is_refused(story: Story) -> None:
    held = story.run(story.schedule())
    story.pass_(2_000)
    newer = story.lease(held, lost=True, who="other")
    story.extend(held, ok=False)
    story.settle_run(newer, who="other")
    story.settle(held, ok=False)


def an_extension_is_sent_twice(story: Story) -> None:
    """The answer of the first sending was lost; by the second, the lease had been settled."""
    held = story.run(story.schedule())
    story.say(ev.Extending(1_900, "worker", story.at, story.clock, "t", "k", held.token, story.clock + 900))
    longer = replace(held, wake_at=story.clock + 900)
    settling = story.settling(held)
    story.get(longer)
    story.told(1_900, ok=False)
    story.told(settling)


def extends_at_once(story: Story) -> None:
    held = story.run(story.schedule())
    calls = []
    for by in (900, 400):
        calls.append(1_000 + by)
        story.say(ev.Extending(1_000 + by, "worker", story.at, story.clock, "t", "k", held.token, story.clock + by))
    shorter = story.clock + 400
    story.now += 1
    for call in reversed(calls):
        story.told(call)
    story.get(replace(held, wake_at=shorter))
    story.pass_(450)
    story.settle_run(story.lease(held, lost=True))


@pytest.mark.parametrize(
    "tell",
    [
        lost_schedule, lost_schedule_that_is_done_much_later, lost_cancel, lost_cancel_of_which_nothing_more_was_heard,
        lost_move, lost_lease, lost_lease_that_was_cancelled, lost_settle_that_is_sent_again,
        lost_settle_that_was_not_done, lost_redrive, lost_settle_that_begins_a_life, two_schedules_at_once,
        a_get_during_a_cancel, the_clock_is_set_back, the_clock_leaps_ahead, purged_before_it_is_asked_for,
        a_slow_holder_is_refused, an_extension_is_sent_twice, extends_at_once, kept_no_longer_and_not_yet_purged,
        kept_no_longer_until_the_clock_is_set_back,
    ],
)  # fmt: skip
def test_what_can_be_explained_is_right(tell: object) -> None:
    assert callable(tell)
    story = Story()
    tell(story)
    assert_right(story.events)


def test_a_lost_answer_explains_one_effect_and_not_two() -> None:
    story = Story()
    story.schedule("a")
    story.fail(story.ask(Asks.CANCEL, keeps=False))
    story.get(None)
    story.schedule("b")
    assert_right(story.events)
    story.get(None)
    [violation] = check(story.events).violations
    assert violation.promise == "P2"


def test_a_question_that_certainly_was_not_done_explains_nothing() -> None:
    story = Story()
    story.schedule("a")
    story.fail(story.ask(Asks.CANCEL, keeps=False), unknown=False)
    story.get(None)
    report = check(story.events)
    assert [one.promise for one in report.violations] == ["P2"]
    assert report.failed == 1


# --- the report


def test_the_report_counts_and_says_what_was_late() -> None:
    story = Story()
    story.done(story.schedule(due=In(100)))
    late = story.schedule("b", due=In(100), key="late")
    story.pass_(400)
    held = story.lease(late, key="late")
    story.begin(held, key="late")
    story.over()
    report = check(story.events, late_over=200)
    assert (report.keys, report.calls, report.answered, report.deliveries, report.leases) == (2, 2, 2, 2, 2)
    assert [(one.key, one.lateness) for one in report.late] == [("late", 301)]
    assert report.lateness_p50 == report.lateness_worst == 301
    assert report.lateness_p99 == 301
    assert report.events == len(story.events)


def test_a_history_in_which_a_question_is_missing_says_which() -> None:
    with pytest.raises(ValueError, match=r"call 7, answered at 3, is not open: .*'asked' event"):
        check([ev.Answered(7, 3, 0)])


def test_the_command_prints_violations_and_numbers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    story = Story()
    story.done(story.schedule())
    right, wrong = tmp_path / "right.jsonl", tmp_path / "wrong.jsonl"
    right.write_bytes(b"".join(map(encode, story.events)))
    assert main([str(right)]) == 0
    assert json.loads(capsys.readouterr().out)["violations"] == {}

    story.get(story.born("x", In(5)))
    wrong.write_bytes(b"".join(map(encode, story.events)))
    assert main([str(wrong)]) == 1
    told, numbers = capsys.readouterr().out.split("\n\n")
    assert told.startswith("P4 t/k: ")
    assert "asks=get" in told
    assert json.loads(numbers)["violations"] == {"P4": 1}

    wrong.write_bytes(b'{"type":"no such event"}\n')
    with pytest.raises(SystemExit, match="2"):
        main([str(right), str(wrong)])
    assert f"{wrong}, line 1: " in capsys.readouterr().err
