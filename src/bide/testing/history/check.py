"""The check of a history: did bide keep promises 1 to 5, 7, 10 and 12, task by task?

`check` takes the history apart by task (`gathered`), looks for an order in which everything that was done to a task is
right (`search`, by the rules of `moves`), and looks at the deliveries (`deliveries`). What it says is the first breach
of each task, named after what it means (`breach`).

**What it can be sure of.** It accuses nobody wrongly: what was asked and never answered may have been done at any time
since, or never; clocks are compared with `Header.slack` and may jump; what has an end of its keeping may be forgotten
at any time after that. So it may miss what a lost answer could explain, and it does not see what was not written down:
a client that is not recorded, or an outcome that a handler's own transaction settled.

**What it costs**: O(n log n) in the events, about 7 microseconds each, and some hundred bytes beside each.
"""

from __future__ import annotations

from collections.abc import Iterable

from bide.core.instants import Millis
from bide.testing.history.breach import breach
from bide.testing.history.deliveries import Deliveries
from bide.testing.history.events import Event
from bide.testing.history.gathered import Gathered, gather
from bide.testing.history.moves import Moves
from bide.testing.history.report import Late, Report, Violation, lateness_of
from bide.testing.history.search import Search, Undecided

PURGED_AFTER: Millis = 61_000
"""Workers purge once a minute: so long may an ended task outstay the time that it is kept."""

__all__ = ["PURGED_AFTER", "Late", "Report", "Violation", "check"]


def check(events: Iterable[Event], *, late_over: Millis | None = None) -> Report:
    """The promises that a history, in the order of `at`, breaks, and its numbers.

    With `late_over`, first deliveries that began more than so many milliseconds after their planned instant are listed
    in `Report.late`. Raises ValueError for a history in which a question is missing that is answered.
    """
    got = gather(events)
    rules = Deliveries(got)
    violations: list[Violation] = []
    report = Report(violations=violations)
    moves = Moves(got.header, got.clocks)
    for told in got.tasks.values():
        search = Search(told, moves, got.leasings_of(told.topic), got.exact)
        try:
            stuck = search.run()
        except Undecided:
            report.undecided.append((told.topic, told.key))
        else:
            if stuck is not None:
                violations.append(breach(search, stuck, moves))
        violations += rules.wrong(told)
    violations += rules.twice()
    report.most_held, wrong = rules.too_many()
    violations += wrong
    violations += rules.left(PURGED_AFTER)
    report.violations = _once(violations)
    _count(got, report, late_over)
    return report


def _once(violations: list[Violation]) -> list[Violation]:
    """The first of each task: what follows from a breach is often one more."""
    first: dict[tuple[str, str], Violation] = {}
    for violation in violations:
        first.setdefault((violation.topic, violation.key), violation)
    return list(first.values())


def _count(got: Gathered, report: Report, late_over: Millis | None) -> None:
    lateness: list[Millis] = []
    for told in got.tasks.values():
        report.deliveries += len(told.began)
        report.leases += len(told.leases)
        for _, one in told.began:
            if one.attempt > 1:
                report.redelivered += 1
                continue
            late = one.clock - one.planned_at
            lateness.append(late)
            if late_over is not None and late > late_over:
                report.late.append(Late(told.topic, told.key, one.planned_at, late))
    lateness.sort()
    report.lateness_p50 = lateness_of(lateness, 0.50)
    report.lateness_p99 = lateness_of(lateness, 0.99)
    report.lateness_worst = lateness[-1] if lateness else None
    report.keys = len(got.tasks)
    report.events, report.calls, report.answered = got.events, got.calls, got.answered
    report.failed, report.unknown = got.failed, got.unknown
    report.settled, report.refused = got.settled, got.refused
    report.deaths, report.faults = got.deaths, got.faults
