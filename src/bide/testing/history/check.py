"""The check of a history: did bide keep promises 1 to 5, 7, 10 and 12, task by task?

`check` splits the history by task (`gathered`). For each task it searches for an order in which every operation is
right (`search`, by the rules of `moves`), and it checks the deliveries (`deliveries`). It reports the first breach of
each task: `breach` turns the point where a search stopped into a promise, the events that show it, and one sentence.

**Limits.** It reports no false violation. A call without an answer may have taken effect at any later time, or never;
clocks are compared within `Header.slack` and may jump; a task whose retention is over may be forgotten at any later
time. So the check misses a violation that a lost answer could explain. It does not see what was not recorded: calls of
a client without a recording, and an outcome that a handler's own transaction settled.

**Cost**: O(n log n) in the events, about 7 microseconds and some hundred bytes for each event.
"""

from __future__ import annotations

from collections.abc import Iterable
from operator import attrgetter
from typing import Any

from bide.core.instants import Millis
from bide.testing.history import events as ev
from bide.testing.history.deliveries import Deliveries
from bide.testing.history.events import Event, Seen
from bide.testing.history.gathered import (
    ABSENT,
    LAST_WRITE,
    LEASED,
    NOBODY,
    REFUSED,
    SHOWN,
    Gathered,
    Op,
    differs,
    earliest,
    sentence,
)
from bide.testing.history.moves import Moves
from bide.testing.history.report import Late, Report, Violation, lateness_of
from bide.testing.history.search import Search, Stuck, Undecided

_BEFORE = 3
"""The number of operations before the wrong one that are reported with it."""


def breach(search: Search, stuck: Stuck, moves: Moves) -> Violation:
    """Name the promise that the first operation without a place in any order breaks."""
    culprit = min(stuck.active, key=attrgetter("answered"))
    if stuck.write is not None and (culprit.kind <= SHOWN or culprit is stuck.write):
        culprit = stuck.write
        assert stuck.wrong is not None
        wrong = _older(search, stuck, culprit, stuck.wrong)
    else:
        wrong = _wrong(search, stuck, culprit, moves)
    history = search.told
    return Violation(wrong[0], history.topic, history.key, sentence(wrong), _events(search, stuck, culprit))


def _wrong(search: Search, stuck: Stuck, op: Op, moves: Moves) -> tuple[Any, ...]:
    task, seen, kind = stuck.task, op.seen, op.kind
    live = task is not None and task.state.live
    if kind == ABSENT:
        what = f"{op.ask.asks.value} was told" if type(op.ask) is ev.Asked else "in the end the store showed"
        what += " that there was no such task"
        if task is None:  # only together with something else
            return "P4", what + ", at a time when there was one"
        if live:
            return "P2", what + "; but %s", task
        return "P4", what + "; but %s, and is kept until %s", task, task.keep_until
    verb = "a settle" if type(op.ask) is ev.Settling else "an extend"
    if kind == REFUSED:
        return "P3", verb + " with token %s was refused, though it was that of the live lease", op.token
    if seen is None:  # settled or extended
        return "P3", verb + " with token %s was accepted, but %s", op.token, task or NOBODY
    if type(op.ask) is ev.Left and not live and (seen.state.live or task is None):
        text = "the task is left in the store as %s with token %s, but %s"
        return "P10", text, seen.state, seen.token, task or NOBODY
    least = SHOWN if kind <= LAST_WRITE else LAST_WRITE
    for older in search.ops:
        if older.kind <= least and older.token < op.token and older.asked > op.answered:
            if older.kind == SHOWN:
                text = "the version with token %s was shown after that with token %s had been answered"
                return "P4", text, older.token, op.token
            return "P12", "token %s was given after token %s had been answered: it does not rise", older.token, op.token
    if kind <= LAST_WRITE:
        return "P4", "token %s was answered, but %s", op.token, task or NOBODY
    return _shown(search, stuck, op, seen, moves)


def _shown(search: Search, stuck: Stuck, op: Op, seen: Seen, moves: Moves) -> tuple[Any, ...]:
    task = stuck.task
    if op.token <= stuck.last and (task is None or task.token != op.token):
        return "P4", "the version with token %s was shown after that with token %s", op.token, stuck.last
    if task is not None and task.token != op.token:
        if seen.id != task.id and _lived(search, op).get(seen.id):
            return "P5", "the life with id %s is shown again with token %s, but %s", seen.id, op.token, task
        if differs(task, seen) in ("token", None):
            return "P12", "token %s is shown, though nothing happened since token %s", op.token, task.token
    wrong = None if task is None else moves.read(task, op)
    text = "a task with token %s is shown as %s, which nothing made it; %s"
    return wrong or ("P4", text, op.token, seen.state, task or NOBODY)


def _older(search: Search, stuck: Stuck, op: Op, wrong: tuple[Any, ...]) -> tuple[Any, ...]:
    """Distinguish a lease of the version before a change, which P5 forbids, from a version that never existed."""
    task, seen = stuck.task, op.seen
    if op.kind != LEASED or task is None or seen is None:
        return wrong
    lived = _lived(search, op)
    if wrong[0] == "P5" and task.id != seen.id and seen.id not in lived:
        return "P12", *wrong[1:]
    if (
        wrong[0] == "P1"
        and seen.planned_at < earliest(task.wake_at)
        and seen.planned_at != task.planned_at
        and seen.planned_at in lived.get(seen.id, ())
    ):
        text = "leased for %s, its wake before it was moved: it is to wake at %s"
        return "P5", text, seen.planned_at, task.wake_at
    return wrong


def _lived(search: Search, op: Op) -> dict[str, set[int]]:
    """The lives before an operation, by id, each with its wake times."""
    lived: dict[str, set[int]] = {}
    for one in search.ops:
        if one.kind <= LAST_WRITE and one.token < op.token and one.seen is not None:
            lived.setdefault(one.seen.id, set()).add(one.seen.wake_at)
    return lived


def _events(search: Search, stuck: Stuck, culprit: Op) -> list[Event]:
    waiting = set(map(id, stuck.active))
    before = [op for op in search.ops if op.asked <= culprit.answered and id(op) not in waiting and op is not culprit]
    before.sort(key=attrgetter("answered"))
    events: dict[int, Event] = {}
    for op in [*before[-_BEFORE:], culprit]:
        events[id(op.ask)] = op.ask
        events[id(op.answer)] = op.answer
    return sorted(events.values(), key=attrgetter("at"))


PURGED_AFTER: Millis = 61_000
"""The time that an ended task may remain after its retention: workers purge once a minute."""

__all__ = ["PURGED_AFTER", "Late", "Report", "Violation", "check"]


def check(events: Iterable[Event], *, late_over: Millis | None = None) -> Report:
    """Find the promises that a history, in the order of `at`, breaks, and count its events.

    `Report.late` lists the first deliveries that began more than `late_over` milliseconds after their planned instant.
    Raises ValueError for a history with an answer to a call that is not in it.
    """
    got = Gathered(events)
    rules = Deliveries(got)
    report, violations = got.report, list[Violation]()
    moves = Moves(got.header, got.clocks)
    for history in got.tasks.values():
        search = Search(history, moves, got.leasings_of(history.topic), got.exact)
        try:
            stuck = search.run()
        except Undecided:
            report.undecided.append((history.topic, history.key))
        else:
            if stuck is not None:
                violations.append(breach(search, stuck, moves))
        violations += rules.wrong(history)
    violations += rules.twice()
    report.most_held, wrong = rules.too_many()
    violations += wrong
    violations += rules.left(PURGED_AFTER)
    report.violations = _once(violations)
    _count(got, late_over)
    return report


def _once(violations: list[Violation]) -> list[Violation]:
    """The first violation of each task: one breach often causes more."""
    first: dict[tuple[str, str], Violation] = {}
    for violation in violations:
        first.setdefault((violation.topic, violation.key), violation)
    return list(first.values())


def _count(got: Gathered, late_over: Millis | None) -> None:
    """Count the deliveries, and how late they were."""
    report, lateness = got.report, list[Millis]()
    for history in got.tasks.values():
        report.deliveries += len(history.began)
        report.leases += len(history.leases)
        for _, one in history.began:
            if one.attempt > 1:
                report.redelivered += 1
                continue
            late = one.clock - one.planned_at
            lateness.append(late)
            if late_over is not None and late > late_over:
                report.late.append(Late(history.topic, history.key, one.planned_at, late))
    lateness.sort()
    report.lateness_p50 = lateness_of(lateness, 0.50)
    report.lateness_p99 = lateness_of(lateness, 0.99)
    report.lateness_worst = lateness[-1] if lateness else None
    report.keys = len(got.tasks)
