"""Sums of the events of a run: load, lateness, recovery. `bide.testing.history` decides what they break."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from bide.core.records import Result, Token
from bide.testing.history import events as ev
from bide.testing.history.events import Event
from bide_proofs.harness.command import percentiles
from bide_proofs.torture.undone import Span

_BEGINS = (Result.CREATED, Result.REPLACED, Result.REDRIVEN)


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
