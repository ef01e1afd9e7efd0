"""What rows are compared by: each measure with its workload, its unit, and which way is better."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from bide_lab.figures import Figures


@dataclass(frozen=True, slots=True, kw_only=True)
class Measure:
    """One figure of one workload."""

    name: str
    title: str
    """As it stands in a sentence: "lateness of half of the tasks"."""
    head: str
    """As it stands over a column."""
    workload: str
    unit: str
    of: Callable[[Figures], float | None]
    more: bool = False
    """Whether more is better."""
    counts_harm: bool = False
    """Whether it counts what went wrong."""

    @property
    def whose(self) -> str:
        """What uses it up."""
        return "servers" if "server" in self.name else "its processes"

    def better(self, one: float, other: float) -> bool:
        return one > other if self.more else one < other

    def words(self, value: float) -> str:
        return f"{figure(value)}{' ' if self.unit[:1].isalpha() else ''}{self.unit}"


def _rate(seen: Figures) -> float | None:
    """From the time at which all are due, since some take all out before they fire the first."""
    return seen.fired / seen.most * 1000 if seen.most else None


def _verb(name: str) -> Callable[[Figures], float | None]:
    def of(seen: Figures) -> float | None:
        cost = seen.verbs.get(name)
        return None if isinstance(cost, str) else cost

    return of


MEASURES = (
    Measure(name="late-p50", title="median lateness under a steady load", head="late p50", workload="steady",
            unit="ms", of=lambda seen: seen.p50),
    Measure(name="late-p99", title="p99 lateness under a steady load", head="late p99", workload="steady",
            unit="ms", of=lambda seen: seen.p99),
    Measure(name="completed", title="tasks fired a second in a burst, from its time on", head="fired/s",
            workload="burst", unit="/s", of=lambda seen: _rate(seen), more=True),
    Measure(name="burst-p99", title="p99 lateness in a burst", head="burst p99", workload="burst",
            unit="ms", of=lambda seen: seen.p99),
    Measure(name="scheduled", title="schedules a second", head="scheduled/s", workload="burst",
            unit="/s", of=lambda seen: seen.schedules_per_s, more=True),
    Measure(name="steady-cpu", title="processor time of its own processes under a steady load", head="CPU",
            workload="steady", unit="%", of=lambda seen: seen.client_cpu_pct),
    Measure(name="idle-cpu", title="processor time of its own processes while nothing is due", head="idle CPU",
            workload="idle", unit="%", of=lambda seen: seen.client_cpu_pct),
    Measure(name="idle-server-cpu", title="processor time of the servers while nothing is due",
            head="idle CPU, servers", workload="idle", unit="%", of=lambda seen: seen.server_cpu_pct),
    Measure(name="idle-trips", title="messages to the servers a second while nothing is due", head="asked/s, idle",
            workload="idle", unit="/s", of=lambda seen: seen.idle_trips_per_s),
    Measure(name="bytes", title="memory of its own processes for each task that waits", head="bytes/task",
            workload="idle", unit="B", of=lambda seen: seen.client_bytes_per_task),
    Measure(name="server-bytes", title="memory of the servers for each task that waits", head="bytes/task, servers",
            workload="idle", unit="B", of=lambda seen: seen.server_bytes_per_task),
    Measure(name="trips", title="messages to the servers for one task, from schedule to done", head="messages/task",
            workload="trips", unit="", of=lambda seen: seen.trips_per_task),
    *(
        Measure(name=f"verb-{verb}", title=f"time that a lone {verb} takes", head=verb, workload="verbs",
                unit="µs", of=_verb(verb))
        for verb in ("schedule", "reschedule", "cancel", "fire_now")
    ),
    *(
        Measure(name=f"{kind}-{workload}", title=f"tasks {word} when {when}", head=f"{word}, {workload}",
                workload=workload, unit="", of=of, counts_harm=True)
        for workload, when in (
            ("killed", "every consumer is killed"), ("cut", "every connection is cut"),
            ("two", "two of each consumer run"), ("away", "no consumer runs for six strategy-minutes"),
        )
        for kind, word, of in (
            ("lost", "lost", lambda seen: seen.lost), ("twice", "done twice", lambda seen: seen.duplicated),
        )
    ),
)  # fmt: skip
"""In the order in which they are reported."""
BY_NAME = {one.name: one for one in MEASURES}


def figure(value: float) -> str:
    """Three digits that count, in groups of three.

    >>> figure(0.0012), figure(3.14159), figure(27182.8), figure(12.0), figure(0)
    ('0.0012', '3.14', '27,200', '12', '0')
    """
    if value == 0:
        return "0"
    if abs(value) >= 100:
        digits = len(str(int(abs(value))))
        return f"{round(value, min(0, 3 - digits)):,.0f}" if value != int(value) or digits > 4 else f"{value:,.0f}"
    text = f"{value:.3g}"
    return f"{value:.4f}".rstrip("0").rstrip(".") if "e" in text else text
