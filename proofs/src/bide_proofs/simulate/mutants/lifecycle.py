"""Mutants of the lifecycle: of what a verb makes of a task."""

from __future__ import annotations

from bide.core.lifecycle import change, extend, lease, may_lease, next_token, schedule, settle
from bide_proofs.simulate.mutants.mutant import Mutant

OF_THE_LIFECYCLE = (
    Mutant(
        "leased-before-it-is-due", "P1", "A task may be leased when it is due within 5 ms.",
        may_lease, "old.wake_at <= now", "old.wake_at <= now + 5",
    ),
    Mutant(
        "retry-counts-from-the-due-time", "P1", "The pause before a retry is counted from when the task was due first.",
        settle, "asked.wake.resolve(now)", "asked.wake.resolve(old.due_at)",
    ),
    Mutant(
        "move-leaves-the-wake", "P1", "Rescheduling changes the due time, and not the time at which the task wakes.",
        change, "due_at=due_at, wake_at=wake_at,", "due_at=due_at,",
    ),
    Mutant(
        "token-kept-at-lease", "P3", "A lease gets the token that the task had before.",
        lease, "token=token, holder=holder", "holder=holder",
    ),
    Mutant(
        "extend-changes-nothing", "P3", "Extending answers yes and leaves the end of the lease where it was.",
        extend, "wake_at=until", "wake_at=old.wake_at",
    ),
    Mutant(
        "move-touches-what-is-leased", "P3", "Rescheduling a leased task makes it wait again, while it is delivered.",
        change, "if word == Result.UNDER_WAY:", "if word == Result.UNDER_WAY and type(asked) is not Move:",
    ),
    Mutant(
        "redrive-of-what-is-alive", "P4", "Redriving a task that waits or is leased begins a new life as well.",
        change, "if word == Result.UNDER_WAY:", "if word == Result.UNDER_WAY and type(asked) is not Redrive:",
    ),
    Mutant(
        "keep-replaces", "P4", "on_conflict=keep is taken for replace.",
        schedule, "verb = _SCHEDULE[new.on_conflict]",
        "verb = Verb.REPLACE if new.on_conflict is OnConflict.KEEP else _SCHEDULE[new.on_conflict]",
    ),
    Mutant(
        "keep-passes-over-done", "P4", "on_conflict=keep and refuse do not see a task that is done and remembered.",
        schedule, "if word != Result.REPLACED:", "if word != Result.REPLACED and old.state.live:",
    ),
    Mutant(
        "earliest-and-latest-swapped", "P4", "on_conflict=earliest keeps the later of two times, latest the earlier.",
        schedule, "(verb is Verb.EARLIEST and due_at >= old.due_at) or (verb is Verb.LATEST and due_at <= old.due_at)",
        "(verb is Verb.EARLIEST and due_at <= old.due_at) or (verb is Verb.LATEST and due_at >= old.due_at)",
    ),
    Mutant(
        "cancelled-though-leased", "P4", "Cancelling a leased task answers `cancelled`, as if nothing were running.",
        change, "return Answer(Result(word), _ended(", "return Answer(Result.CANCELLED, _ended(",
    ),
    Mutant(
        "deadline-not-asked-by-moves", "P4", "A move past the deadline is not refused.",
        change, "deadline is not None and wake_at > deadline", "deadline is not None and wake_at < 0",
    ),
    Mutant(
        "if-token-not-asked", "P5", "if_token is looked at only if it is from the future.",
        change, "asked.if_token != old.token", "asked.if_token > old.token",
    ),
    Mutant(
        "defer-counts", "P4", "Deferring counts as an attempt.",
        settle, "old.attempt - deferred", "old.attempt",
    ),
    Mutant(
        "losses-not-counted", "P2", "A lease after one that ended unsettled counts no loss.",
        lease, "old.losses + lost", "old.losses",
    ),
    Mutant(
        "attempt-not-counted", "P12", "A delivery after a lost lease has the number of the one before.",
        lease, "old.attempt + 1", "old.attempt + (not lost)",
    ),
    Mutant(
        "retry-begins-a-new-life", "P12", "After a failure a task has another id.",
        settle, "old, state=State.WAITING,", "old, id=f'{token:036d}', state=State.WAITING,",
    ),
    Mutant(
        "again-keeps-the-id", "P12", "The next life that Done(again_in=...) begins has the id of the one before.",
        settle, "_born_again(old, asked.next_id,", "_born_again(old, old.id,",
    ),
    Mutant(
        "redrive-keeps-the-id", "P12", "A redriven task has the id of the life that died.",
        change, "_born_again(old, asked.id,", "_born_again(old, old.id,",
    ),
    Mutant(
        "replace-keeps-the-id", "P12", "A task that replaces another has the id of that.",
        schedule, "return Answer(Result.REPLACED, _born(new, due_at, now, token),",
        "new = NewTask(new.topic, new.key, old.id, new.due, new.payload, new.group, new.options, new.deadline)\n"
        "    return Answer(Result.REPLACED, _born(new, due_at, now, token),",
    ),
    Mutant(
        "token-is-the-time", "P12", "A token is the time in microseconds, and not more than the last one.",
        next_token, "max(last + 1, now * 1000)", "now * 1000",
    ),
    Mutant(
        "token-kept-at-move", "P5", "Rescheduling leaves the token as it was.",
        change, "deadline=deadline, token=token", "deadline=deadline",
    ),
)  # fmt: skip
