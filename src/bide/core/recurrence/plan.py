"""The rule and the policies of a recurring task, and the decisions that follow from them.

A recurring task is an ordinary task. When an occurrence ends, the task begins its next life at the rule's next instant,
computed from the *nominal* instant of the occurrence and never from the time at which it ran. The nominal instant is
not stored: it is the due time less the jitter, and the instant after it is simply the first one after the due time,
since jitter never reaches the next instant. So a moved occurrence, and one whose rule or jitter has changed meanwhile,
go on correctly.

Three decisions, each a pure function: when the first occurrence is due (`first`), what becomes of an occurrence that is
leased (`on_lease`: it may be older than the policy allows), and when the next one is due after it ended (`on_end`).
"""

from __future__ import annotations

from bisect import bisect_left
from enum import StrEnum
from functools import lru_cache

from msgspec import Struct

from bide.core.instants import LAST_INSTANT, Millis
from bide.core.recurrence.rules import Rule


class CatchUp(StrEnum):
    """The treatment of occurrences that no worker could start in time: see `app.recurring.add`."""

    LATEST = "latest"
    ALL = "all"
    NONE = "none"


class Overlap(StrEnum):
    """The treatment of an occurrence that comes while the one before it runs: see `app.recurring.add`."""

    SKIP = "skip"
    QUEUE = "queue"
    ALLOW = "allow"
    CANCEL_RUNNING = "cancel_running"


MOST = 100
"""The default for the occurrences that are caught up or queued."""
_PUNCTUAL: Millis = 60_000
"""With `catch_up="none"`, how late an occurrence may start unless a window is set."""
_COUNTED = 1_000
"""Dropped occurrences are counted up to this number."""


class Step(Struct, frozen=True, gc=False):
    """When the task is due next, and which occurrences are left out before that."""

    due_at: Millis | None
    """None: the rule has ended."""
    dropped: int = 0
    said: str | None = None
    """The occurrences left out, in words for the event log; None: there are none."""


class Recurrence(Struct, frozen=True, omit_defaults=True):
    """The rule and the policies of a recurring task; `app.recurring.add` explains each."""

    rule: Rule
    catch_up: CatchUp = CatchUp.LATEST
    window: Millis | None = None
    """The most by which an occurrence may be late and still run."""
    most: int = MOST
    overlap: Overlap = Overlap.SKIP
    deadline: Millis | None = None
    """The deadline of each occurrence, from its due time."""
    end_when_dead: bool = False
    declared: bool = False
    """True if the program declares it, as by `@app.cron`; False if it was added by a verb."""
    paused: bool = False

    def first(self, now: Millis, key: str) -> Millis | None:
        """When the first occurrence after `now` is due; None if there is none."""
        nominal = self.rule.after(now)
        return None if nominal is None else self.rule.fires_at(nominal, key)

    @property
    def _window(self) -> Millis | None:
        return _PUNCTUAL if self.window is None and self.catch_up is CatchUp.NONE else self.window

    def is_punctual(self, due_at: Millis, key: str, now: Millis) -> bool:
        """True if the occurrence is within its window and the latest, or was fired by hand during a pause."""
        if self.paused:
            return True
        later, window = self.rule.after(due_at), self._window
        latest = later is None or self.rule.fires_at(later, key) > now
        return latest and (window is None or now - due_at <= window)

    def on_lease(
        self, due_at: Millis, key: str, born_at: Millis, now: Millis, *, counted: int = _COUNTED
    ) -> Step | None:
        """None: the occurrence may run. Otherwise it is too old, and the task is to wait for another one.

        `born_at`: when this life of the task began. Dropped ones are counted up to `counted`. One step of the rule if
        the occurrence is punctual, else O(most + counted), once for all that are caught up before the next one comes.
        """
        if self.is_punctual(due_at, key, now):
            return None
        rule, since = self.rule, 0 if self._window is None else now - self._window
        nominal, coming = rule.nominal(due_at, key), rule.coming(now, key)
        queued = self.overlap is Overlap.QUEUE and born_at > due_at
        most = self.most if queued or self.catch_up is CatchUp.ALL else int(self.catch_up is CatchUp.LATEST)
        last = coming - 1 if coming is not None else rule.last or rule.until or now
        newest = _newest(rule, last, most) if most else ()
        recent = most > 0 and (len(newest) < most or nominal >= newest[0])
        if recent and rule.fires_at(nominal, key) >= since:
            return None
        place = bisect_left(newest, since, bisect_left(newest, nominal), key=lambda one: rule.fires_at(one, key))
        target = newest[place] if place < len(newest) else coming
        return self._without("overlap" if queued else "late", due_at + 1, target, key, 1, counted)

    def on_end(self, due_at: Millis, key: str, missed: Millis, now: Millis, *, lost: bool = False) -> Step:
        """When the next occurrence is due, after the one of `due_at` has ended.

        `missed`: those that were due until then did not overlap with it, but found no worker: it began then. `lost`: it
        had begun before, and its lease was lost, so `catch_up` decides about them. O(occurrences counted).
        """
        rule = self.rule
        if self.paused:
            return Step(LAST_INSTANT)
        later = rule.after(due_at)
        if later is None:
            return Step(None)
        due = rule.fires_at(later, key)
        if lost and due <= missed:
            return self.on_lease(due, key, due, now) or Step(due)
        caught_up = self.catch_up is CatchUp.ALL and due <= missed
        if due > now or caught_up or self.overlap is Overlap.QUEUE or self.overlap is Overlap.ALLOW:
            return Step(due)
        return self._without("overlap", later, rule.coming(now, key), key, 0, _COUNTED)

    def _without(self, why: str, first: Millis, target: Millis | None, key: str, dropped: int, counted: int) -> Step:
        """Leave out the occurrences from `first` on until `target`, besides those that are `dropped` already."""
        dropped += len(self.rule.upto(first, LAST_INSTANT if target is None else target - 1, counted - dropped))
        count = f"{dropped}" if dropped < _COUNTED else f"{_COUNTED:,} or more"
        said = f"{why}: {count} occurrence{'' if dropped == 1 else 's'} did not run"
        return Step(None if target is None else self.rule.fires_at(target, key), dropped, said)


@lru_cache(maxsize=16)
def _newest(rule: Rule, last: Millis, most: int) -> tuple[Millis, ...]:
    return tuple(rule.latest(0, last, most))
