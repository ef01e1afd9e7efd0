"""Sums of the events of a run: load, lateness, recovery; and the leases that a crash of the server may have undone.

`bide.testing.history` decides what is broken, and what a store says that it does not keep is no broken promise.
PostgreSQL commits leases without waiting for the disk or for a standby, and Redis answers before its replicas have
heard (docs/sql.md and docs/redis.md, "What survives what"). After a crash, or a failover, such a task is as it was
before its newest lease, or the extension of one. To the checker, which knows of no such thing, that looks like two live
leases, or like something shown that was over.

So a breach of what a lease stands for is put aside if the same task was leased, or its lease extended, within ten
seconds before such a trouble, or during it. That is all: what is lost, early or left behind, and tokens that do not
rise, are put aside for no trouble. Of the counting of attempts only that is which a lease alone would explain.
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
"""By name of a server: the troubles after which its newest leases may be gone."""
_PROMISES = ("P3", "P4", "P5")
_UNCOUNTED = "leased as attempt "
"""How a breach of P12 begins where a lease that was undone is not counted in the next."""
_BEFORE = 10_000_000_000
"""Nanoseconds: of what is committed without waiting, more than this is not under way. A quiet machine writes it within
half a second; on a busy one who writes gets its turn seconds later."""

Span = tuple[str, int, int]
"""A trouble, and from when to when it lasted, in nanoseconds of the monotonic clock."""


class Figures:
    """Adds up the events of one run, in the order of time."""

    def __init__(self, events: Iterable[Event]) -> None:
        self.verbs: dict[str, Counter[str]] = defaultdict(Counter)
        self.settled: Counter[str] = Counter()
        self.scheduled = self.deliveries = self.again = 0
        """`again`: deliveries after a lease that had ended without an outcome."""
        self.lateness: list[float] = []
        """Milliseconds from the wake to the first line of the handler, by the store's clock; without those deliveries
        that follow a lost lease."""
        self.moments: list[int] = []
        """When deliveries began."""
        self.failed: list[ev.Failed] = []
        """Calls of clients that the store, or the way to it, has failed."""
        self._asked: dict[int, ev.Asked] = {}
        self._settling: dict[int, ev.Settling] = {}
        self._after_loss: set[tuple[str, str, Token]] = set()
        for event in events:
            self._take(event)

    def recovery(self, spans: Sequence[Span]) -> dict[str, dict[str, float]]:
        """Of each kind of fault: seconds from its end to the next delivery."""
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
        if not event.error.startswith("CancelledError"):  # by its own caller
            self.failed.append(event)


# --- leases undone


def undone(
    name: str, violations: Sequence[Violation], events: Iterable[Event], spans: Sequence[Span]
) -> list[Violation]:
    """Those of `violations` that leases undone by a crash of the server called `name` account for."""
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
    """True if a lease that was undone can look like this."""
    return violation.promise in _PROMISES or (violation.promise == "P12" and violation.what.startswith(_UNCOUNTED))


def _goes_on(violation: Violation, at: int) -> bool:
    """True if one of its events came after that instant."""
    return any(event.at > at for event in violation.events)


def _held(events: Iterable[Event], suspects: Collection[tuple[str, str]]) -> dict[tuple[str, str], list[int]]:
    """When each of these was said to be leased, or its lease to be extended."""
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
