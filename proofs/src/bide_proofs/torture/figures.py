"""Figures of a run (load, lateness, recovery), and the leases that a crash of the server may have undone.

`bide.testing.history` decides which promises are broken. A store's documented limits are not broken promises:
PostgreSQL commits leases without waiting for the disk or for a standby, and Redis answers before its replicas have the
data (docs/sql.md and docs/redis.md, "What survives what"). After a crash or a failover, such a task is as it was before
its newest lease or extension. The checker does not know this; it sees two live leases, or an old version shown again.

So a violation that concerns a lease is put aside if the same task was leased, or its lease extended, during such a
trouble or within ten seconds before it. Nothing else is put aside: not lost or early tasks, nor tasks left behind, nor
tokens that do not rise. A wrong count of attempts is put aside only if an undone lease alone explains it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from bide.core.records import Result, Token
from bide.testing.history import events as ev
from bide.testing.history.events import Event
from bide.testing.history.report import Violation
from bide_proofs.harness.command import percentiles

_BEGINS = (Result.CREATED, Result.REPLACED, Result.REDRIVEN)
UNDONE_BY: Mapping[str, Collection[str]] = {
    "postgres": ("kill -9 of the server", "OOM", "failover", "server restart", "disk full"),
    "redis-sentinel": ("kill -9 of the server", "SIGSTOP of the server", "hand-over", "failover"),
    "redis-cluster": ("kill -9 of the server", "SIGSTOP of the server", "hand-over", "failover"),
}
"""By name of a server, the troubles after which its newest leases may be lost."""
_PROMISES = ("P3", "P4", "P5")
_UNCOUNTED = "leased as attempt "
"""The beginning of a P12 violation for an undone lease that the next lease does not count."""
_BEFORE = 10_000_000_000
"""Nanoseconds that a commit without waiting may take to reach the disk. A quiet machine writes it within half a second;
on a busy one the writing process may get its turn seconds later."""

Span = tuple[str, int, int]
"""A trouble with its start and end, in nanoseconds of the monotonic clock."""


class Figures:
    """Adds up the events of one run, in the order of time."""

    def __init__(self, events: Iterable[Event]) -> None:
        self.verbs: dict[str, Counter[str]] = defaultdict(Counter)
        self.settled: Counter[str] = Counter()
        self.scheduled = self.deliveries = self.again = 0
        """`again`: deliveries after a lease that ended without an outcome."""
        self.lateness: list[float] = []
        """Milliseconds from the wake time to the handler's first line, by the store's clock, except for deliveries
        after a lost lease."""
        self.moments: list[int] = []
        """The times at which deliveries began."""
        self.failed: list[ev.Failed] = []
        """Calls of clients that failed because of the store or the connection to it."""
        self._asked: dict[int, ev.Asked] = {}
        self._settling: dict[int, ev.Settling] = {}
        self._after_loss: set[tuple[str, str, Token]] = set()
        for event in events:
            self._take(event)

    def recovery(self, spans: Sequence[Span]) -> dict[str, dict[str, float]]:
        """For each kind of fault, the percentiles of the seconds from its end to the next delivery."""
        lengths: dict[str, list[float]] = defaultdict(list)
        for kind, _, over in spans:
            place = bisect_left(self.moments, over)
            if place < len(self.moments):
                lengths[kind].append((self.moments[place] - over) / 1e9)
        return {kind: percentiles(those) for kind, those in sorted(lengths.items())}

    def load(self) -> dict[str, Any]:
        """Counts of calls, answers, deliveries and outcomes."""
        return {
            "scheduled": self.scheduled,
            "verbs": {verb: dict(sorted(words.items())) for verb, words in sorted(self.verbs.items())},
            "deliveries": self.deliveries,
            "settled": dict(sorted(self.settled.items())),
        }

    def _take(self, event: Event) -> None:
        if isinstance(event, ev.Asked):
            self._asked[event.call] = event
        elif isinstance(event, ev.Answered):
            asked = self._asked.pop(event.call)
            self.verbs[asked.asks][event.result or ("found" if event.task else "none")] += 1
            self.scheduled += event.result in _BEGINS
        elif isinstance(event, ev.Failed):
            self._failed(event)
        elif isinstance(event, ev.Leased):
            lost = [(held.topic, held.key, held.task.token) for held in event.tasks if held.task.losses]
            self.again += len(lost)
            self._after_loss.update(lost)
        elif isinstance(event, ev.Settling):
            self._settling[event.call] = event
        elif isinstance(event, ev.Told):
            settling = self._settling.pop(event.call, None)
            if settling is not None:
                self.settled[settling.verdict if event.ok else f"{settling.verdict} refused"] += 1
        elif isinstance(event, ev.Began):
            self.deliveries += 1
            self.moments.append(event.at)
            if (event.topic, event.key, event.token) not in self._after_loss:
                self.lateness.append(event.clock - event.planned_at)

    def _failed(self, event: ev.Failed) -> None:
        asked = self._asked.pop(event.call, None)
        if asked is None:
            return
        self.verbs[asked.asks]["unknown" if event.unknown else "failed"] += 1
        if not event.error.startswith("CancelledError"):  # cancelled by its own caller
            self.failed.append(event)


# --- leases undone


def undone(
    name: str, violations: Sequence[Violation], events: Iterable[Event], spans: Sequence[Span]
) -> list[Violation]:
    """The `violations` that are explained by leases undone in a crash of the server called `name`."""
    kinds = UNDONE_BY.get(name, ())
    windows = [(begun - _BEFORE, over) for kind, begun, over in spans if kind in kinds]
    if not windows:
        return []
    suspects = {(one.topic, one.key) for one in violations if _of_a_lease(one)}
    held = _held(events, suspects)
    return [
        one
        for one in violations
        if _of_a_lease(one)
        and any(begun <= at <= over and _goes_on(one, at) for begun, over in windows for at in held[one.topic, one.key])
    ]


def _of_a_lease(violation: Violation) -> bool:
    """True if an undone lease can cause this violation."""
    return violation.promise in _PROMISES or (violation.promise == "P12" and violation.what.startswith(_UNCOUNTED))


def _goes_on(violation: Violation, at: int) -> bool:
    """True if one of its events is later than `at`."""
    return any(event.at > at for event in violation.events)


def _held(events: Iterable[Event], suspects: Collection[tuple[str, str]]) -> dict[tuple[str, str], list[int]]:
    """The times at which each of these tasks was leased, or its lease extended, according to the answers."""
    held: dict[tuple[str, str], list[int]] = defaultdict(list)
    extending: dict[int, tuple[str, str]] = {}
    for event in events:
        if isinstance(event, ev.Leased):
            for one in event.tasks:
                if (one.topic, one.key) in suspects:
                    held[one.topic, one.key].append(event.at)
        elif isinstance(event, ev.Extending):
            if (event.topic, event.key) in suspects:
                extending[event.call] = (event.topic, event.key)
        elif isinstance(event, ev.Told) and event.call in extending:
            ref = extending.pop(event.call)
            if event.ok:
                held[ref].append(event.at)
    return held
