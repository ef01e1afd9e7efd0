"""The verdict on a played plan: the history by its own checker, and what only a world that sees all can tell.

- P6, P8: in the calm, when nothing is broken any more, whatever comes due begins at once (`LATE`), or after the longest
  sleep if wake-ups are lost even then; whatever came due before is long begun. Topics that have room for one delivery
  at a time are left out here, and looked at in `outcomes`.
- P8, P11: in the calm a process asks its store so often as its work, its cap and its presence need, and no oftener.
- P9: while there is no room for new work, nothing else is refused for that.
- P10: nothing ended is left that has been kept for longer than anything is kept.
- P2, P3, P6, P7: what a worker owes its deliveries (`outcomes`).
- no callback, and no coroutine that nobody waits for, raised anything.
"""

from __future__ import annotations

from msgspec import Struct

from bide.core.instants import Millis
from bide.core.records import Token
from bide.testing.history import events as ev
from bide.testing.history.check import PURGED_AFTER, Report, check
from bide.testing.history.report import Violation
from bide_proofs.simulate.outcomes import owed
from bide_proofs.simulate.plan import ALONE, UNHANDLED, Plan, Storm, room_of
from bide_proofs.simulate.world import Played

LATE: Millis = 60
"""Of a delivery in the calm: the journeys of a wake-up and of a lease, and whole milliseconds on both sides."""
_PER_SECOND = 3.0
"""Calls to one shard by what a worker does for ever: presence, pauses, purge; and the keeper's."""
_PER_DELIVERY = 6.0
_LONGEST_KEPT: Millis = 20_000
"""For tasks that end dead; all others are kept for a shorter time."""


class Judgement(Struct, frozen=True):
    wrong: list[Violation]
    report: Report


def judged(plan: Plan, played: Played) -> Judgement:
    """All that was wrong, what the history shows first."""
    report = check(played.history)
    wrong = [*report.violations, *_late(plan, played), *_busy(plan, played), *_refused(played), *_kept(played)]
    wrong += owed(played.history, calm=_settled(plan), lease=plan.setup.lease, room=room_of, late=_may_take(plan))
    wrong += [Violation("defect", "", "", what, []) for what in played.defects]
    return Judgement(wrong, report)


def _late(plan: Plan, played: Played) -> list[Violation]:
    """Deliveries that began late though nothing was broken."""
    setup = plan.setup
    settled = _settled(plan)
    pause, broken = (setup.cap + 2 * setup.lease) * 1_000_000, setup.calm * 1_000_000
    may_take = _may_take(plan)
    lost: set[Token] = set()
    wrong = []
    for event in played.history:
        if isinstance(event, ev.Fault):  # one who dies in the calm does so by its handler
            broken = max(broken, event.at)
        elif isinstance(event, ev.Leased):
            lost |= {held.task.token for held in event.tasks if held.task.losses}
        elif isinstance(event, ev.Began) and event.topic not in (ALONE, UNHANDLED) and event.token not in lost:
            late = event.clock - event.planned_at
            if event.at - late * 1_000_000 > broken + pause and late > may_take:
                what = f"began {late} ms late though nothing was broken, and there was room for it"
                wrong.append(Violation("P8", event.topic, event.key, what, [event]))
            elif event.at > settled and late > event.at // 1_000_000 - setup.calm + may_take:
                what = f"was due before all was mended, and began {event.at // 1_000_000 - setup.calm} ms after that"
                wrong.append(Violation("P6", event.topic, event.key, what, [event]))
    return wrong


def _may_take(plan: Plan) -> Millis:
    """From when a task is due until its delivery begins, in the calm."""
    deaf = any(isinstance(step, Storm) and step.at > plan.setup.calm for step in plan.steps)
    return LATE + plan.setup.cap if deaf else LATE


def _settled(plan: Plan) -> int:
    """Nanoseconds after which nothing suffers any more from what was broken before the calm."""
    setup = plan.setup
    return (setup.calm + setup.cap + 4 * setup.lease + 5_000) * 1_000_000


def _busy(plan: Plan, played: Played) -> list[Violation]:
    """Whoever asked its store more often than it had reason to."""
    setup = plan.setup
    seconds = (setup.length - setup.calm) / 1000
    work = sum(
        isinstance(event, (ev.Settling, ev.Asked)) and event.at > setup.calm * 1_000_000 for event in played.history
    )
    allowed = setup.shards * (seconds * (_PER_SECOND + 1000 / setup.cap + 3000 / setup.lease) + _PER_DELIVERY * work)
    plenty = f"within {seconds:.0f} s of calm; {allowed:.0f} is plenty"
    return [
        Violation("P8", "", "", f"{name} called its store {calls} times {plenty}", [])
        for name, calls in played.calls.items()
        if calls > allowed
    ]


def _refused(played: Played) -> list[Violation]:
    schedules = {
        event.call for event in played.history if isinstance(event, ev.Asked) and event.asks is ev.Asks.SCHEDULE
    }
    return [
        Violation("P9", "", "", "a full store refused something else than new work", [event])
        for event in played.history
        if isinstance(event, ev.Failed) and event.call not in schedules and event.error.startswith("StoreFull")
    ]


def _kept(played: Played) -> list[Violation]:
    """Tasks that should have been forgotten, by the processes' own terms and not by what they told the store."""
    wrong = []
    for event in played.history:
        if isinstance(event, ev.Left) and event.task.finished_at is not None:
            kept = event.clock - event.task.finished_at
            if kept > _LONGEST_KEPT + PURGED_AFTER:
                what = f"it is left as {event.task.state}, {kept} ms after its end; {_LONGEST_KEPT} is the most"
                wrong.append(Violation("P10", event.topic, event.key, what, [event]))
    return wrong
