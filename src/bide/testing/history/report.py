"""The result of a check: the promises that were broken, each with the events that show it, and the numbers."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from bide.core.instants import Millis
from bide.core.records import Topic
from bide.testing.history.events import Event, Leased


class Violation(Struct, frozen=True):
    """One promise that was broken, for one task where `topic` names one."""

    promise: str
    """P1 to P12, as the README lists them; "defect" for a failure that no promise covers."""
    topic: Topic
    key: str
    what: str
    """One sentence, with the numbers."""
    events: list[Event]
    """The events that show it, in the order of time."""

    @property
    def headline(self) -> str:
        """The violation without its events, in one line."""
        where = f" {self.topic}/{self.key}" if self.topic else ""
        return f"{self.promise}{where}: {self.what}"

    def __str__(self) -> str:
        lines = [self.headline]
        first = self.events[0].at if self.events else 0
        lines += [f"    {words(self._of_it(event), first)}" for event in self.events]
        return "\n".join(lines)

    def _of_it(self, event: Event) -> Event:
        """Reduce the answer to a lease of many tasks to this task."""
        if not isinstance(event, Leased) or len(event.tasks) < 2:
            return event
        return replace(event, tasks=[held for held in event.tasks if (held.topic, held.key) == (self.topic, self.key)])


class Late(Struct, frozen=True):
    """A first delivery that began later than allowed."""

    topic: Topic
    key: str
    planned_at: Millis
    lateness: Millis


class Report(Struct, kw_only=True):
    """The result of a check. Times are in milliseconds of the store's clock."""

    violations: list[Violation] = []
    undecided: list[tuple[Topic, str]] = []
    """Tasks with so many possible orders that the search gave up: neither right nor wrong."""
    late: list[Late] = []
    """First deliveries later than the bound that `check` was given."""
    events: int = 0
    calls: int = 0
    """Calls of clients."""
    answered: int = 0
    failed: int = 0
    """Calls of clients and workers that failed and certainly had no effect."""
    unknown: int = 0
    """Calls of clients and workers that may or may not have taken effect."""
    keys: int = 0
    leases: int = 0
    deliveries: int = 0
    redelivered: int = 0
    """Deliveries that were not the first of their life."""
    settled: int = 0
    refused: int = 0
    """Extends and settles that were refused."""
    deaths: int = 0
    faults: int = 0
    most_held: int = 0
    """The greatest number of deliveries that one holder had at once: leased and not ended."""
    lateness_p50: Millis | None = None
    lateness_p99: Millis | None = None
    lateness_worst: Millis | None = None
    """Lateness of first deliveries, from the planned instant to the handler's first line; None if there are none."""

    @property
    def ok(self) -> bool:
        """True if no promise was broken and every task could be decided."""
        return not self.violations and not self.undecided

    def summary(self) -> dict[str, object]:
        """The counts, with the number of violations of each promise."""
        counts: dict[str, object] = msgspec.to_builtins(self)
        broken: dict[str, int] = {}
        for violation in self.violations:
            broken[violation.promise] = broken.get(violation.promise, 0) + 1
        counts["violations"] = dict(sorted(broken.items()))
        counts["undecided"] = len(self.undecided)
        counts["late"] = len(self.late)
        return counts


def lateness_of(sorted_lateness: Sequence[Millis], part: float) -> Millis | None:
    """The value that the fraction `part` of all values does not exceed."""
    if not sorted_lateness:
        return None
    return sorted_lateness[min(len(sorted_lateness) - 1, int(len(sorted_lateness) * part))]


def words(event: Event, first: int = 0) -> str:
    """Format an event as one line, with its time in milliseconds after `first`, the `at` of another event."""
    fields = msgspec.to_builtins(event)
    kind = fields.pop("type")
    fields.pop("at", None)
    at = (event.at - first) / 1_000_000
    told = " ".join(f"{name}={_value(value)}" for name, value in fields.items() if value not in (None, ""))
    return f"{at:+12.3f} ms  {kind:9} {told}"


def _value(value: object) -> str:
    if isinstance(value, dict):
        return "(" + " ".join(f"{name}={_value(its)}" for name, its in value.items() if its is not None) + ")"
    if isinstance(value, list):
        return "[" + ", ".join(_value(one) for one in value) + "]"
    return str(value)
