"""The findings in a results file, strategy by strategy: the one source of the page, the tables and the pictures."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from bide_lab.journal import MEASURES, Figures, Measure, Result
from bide_lab.strategies import Card, card_of, catalogue
from bide_lab.strategy import Strategy
from bide_lab.workloads import WORKLOADS

NOT_ASKED = "not in this run"
NOT_SEEN = "not seen in this run"
NOT_WAITED_FOR = frozenset({"idle", "verbs", "trips", "cost"})
"""Workloads whose tasks need not have fired when they end."""


class Family(NamedTuple):
    """Strategies that share an idea, and are drawn in one picture."""

    name: str
    """One word, as in the names of pictures."""
    title: str
    about: str
    """Their common idea, in two sentences or three."""
    numbers: tuple[int, ...]


FAMILIES = (
    Family(
        "scans", "Scans of a table",
        "The time stands in a column of a table, and somebody asks again and again which rows are due. It needs "
        "nothing that is not there already. How late a row is and how often the table is read for nothing are one and "
        "the same choice.",
        (1, 2, 3),
    ),
    Family(
        "zsets", "Sorted sets",
        "Redis keeps ids ordered by their times, so that asking for what is due is cheap. What differs is who asks, "
        "and in which order a task is taken out and done: that decides whether one is lost or done twice.",
        (4, 5, 6, 7),
    ),
    Family(
        "expiry", "Key expiry",
        "Each task is a key with a time to live, and the server tells when it has deleted one. The event is for "
        "whoever listens at that moment, and comes when the server gets round to the deletion.",
        (8,),
    ),
    Family(
        "brokers", "Brokers",
        "A broker holds a message for a while and then passes it on. Most can hold it for a few fixed lengths only, "
        "and none lets a message that is under way be moved.",
        (9, 10, 11),
    ),
    Family(
        "timers", "Timers in one process",
        "A data structure in the memory of one process knows what is next. Nothing is as quick, and nothing of it is "
        "left when the process ends.",
        (12, 13, 14, 15, 16, 17),
    ),
    Family(
        "held", "Held in memory",
        "A worker fetches a task at once and holds it, unacknowledged, until its time. The broker takes that for a "
        "worker that is slow, and after a while for one that is dead.",
        (18,),
    ),
    Family(
        "writes", "Two writes",
        "A row is written in one place and its timer in another. Between the two writes the process may die; what "
        "differs is who notices.",
        (19,),
    ),
    Family("bide", "bide", "One index of wake times and leases, on the store that is there.", (20,)),
)  # fmt: skip
OWN = Family("own", "Your own", "Strategies from files of your own.", ())
"""All that is in no file of the lab's."""


def family_of(strategy: type[Strategy]) -> Family:
    """By the number in the name of its file.

    >>> from bide_lab.strategies.s04_zset_poll import RemoveAfter
    >>> family_of(RemoveAfter).name
    'zsets'
    """
    found = re.match(r"bide_lab\..*\.s(\d\d)_", strategy.__module__)
    return next((one for one in FAMILIES if found and int(found[1]) in one.numbers), OWN)


class Known(NamedTuple):
    """A flaw, and what of it was seen."""

    text: str
    workload: str
    seen: str
    """In words with numbers; empty if nothing was, see `why_not`."""
    why_not: str
    """`NOT_SEEN`, or why the workload was not played; empty if it was seen."""


@dataclass(frozen=True, eq=False)
class Row:
    """One strategy in a report."""

    name: str
    strategy: type[Strategy]
    """The base class itself for a strategy that only its results know."""
    results: Mapping[str, Result]
    """By workload, in the order of the workloads."""

    @cached_property
    def family(self) -> Family:
        return family_of(self.strategy)

    @cached_property
    def card(self) -> Card | None:
        return card_of(self.strategy) if self.family is not OWN else None

    @cached_property
    def flaws(self) -> Sequence[Known]:
        found = []
        for flaw in self.strategy.flaws:
            result, figures = self.results.get(flaw.workload), self.figures(flaw.workload)
            seen = flaw.seen(figures) if figures is not None else ""
            why_not = "" if seen else NOT_ASKED if result is None else result.why_not or NOT_SEEN
            found.append(Known(flaw.text, flaw.workload, seen, why_not))
        return found

    @property
    def is_bide(self) -> bool:
        return self.family.name == "bide"

    @property
    def measured(self) -> Mapping[str, Figures]:
        """By workload."""
        return {name: one.figures for name, one in self.results.items() if one.figures is not None}

    @property
    def why_not(self) -> str:
        """Why nothing at all was measured; empty if something was."""
        if self.measured:
            return ""
        return "; ".join(dict.fromkeys(one.why_not for one in self.results.values())) or NOT_ASKED

    def figures(self, workload: str) -> Figures | None:
        return self.results[workload].figures if workload in self.results else None

    def value(self, measure: Measure) -> float | None:
        seen = self.figures(measure.workload)
        return None if seen is None else measure.of(seen)

    def harm(self, workload: str) -> tuple[int, int]:
        """Tasks lost, and done twice."""
        seen = self.figures(workload)
        if seen is None or workload in NOT_WAITED_FOR:
            return 0, 0
        return seen.lost or 0, seen.duplicated or 0

    @property
    def curves(self) -> Mapping[str, Mapping[str, float]]:
        """All that was measured against how many wait, by operation."""
        return {name: points for seen in self.measured.values() for name, points in seen.curve.items()}


class Better(NamedTuple):
    """A measure on which somebody is ahead of bide, and of every store that bide was measured on."""

    measure: Measure
    bide: str
    """The best row of bide's."""
    value: float
    ahead: Sequence[tuple[str, float]]
    """The best first."""


class Findings:
    """All that a report tells."""

    def __init__(self, rows: Sequence[Row], results: Sequence[Result]) -> None:
        self.rows = rows
        self.results = results
        self.bide = [row for row in rows if row.is_bide]
        self.better = [one for measure in MEASURES if (one := self._better(measure)) is not None]
        self.families = [one for one in (*FAMILIES, OWN) if self.of(one)]
        """Those that have rows, bide last but for the reader's own."""

    def of(self, family: Family) -> list[Row]:
        return [row for row in self.rows if row.family is family]

    def reference(self, family: Family) -> Row | None:
        """The row of bide's that a family's pictures hold it against: on the servers that the family uses, if it was.

        Of several that use them as well, the one with most measured.
        """
        rows = [row.strategy for row in self.of(family) if row.measured]
        within = sum(one.in_process for one in rows) * 2 > len(rows)

        def fits(row: Row) -> tuple[int, bool, int]:
            needs = set(row.strategy.needs)
            served = sum(needs <= set(one.needs) for one in rows) if needs else 0
            return served, row.strategy.in_process == within, len(row.measured)

        return max((row for row in self.bide if row.measured), key=fits, default=None)

    def _better(self, measure: Measure) -> Better | None:
        """The best of bide's rows, and all that are better than that, measured in the same way."""
        have = [(row, value) for row in self.rows if (value := row.value(measure)) is not None and _sound(row, measure)]
        ours = [one for one in have if one[0].is_bide]
        if not ours:
            return None
        best, value = (max if measure.more else min)(ours, key=lambda one: one[1])
        way = _way(best.results[measure.workload])
        ahead = [
            (row.name, theirs) for row, theirs in have
            if not row.is_bide and measure.better(theirs, value) and _way(row.results[measure.workload]) == way
        ]  # fmt: skip
        ahead.sort(key=lambda one: one[1], reverse=measure.more)
        return Better(measure, best.name, value, ahead) if ahead else None


def findings(results: Sequence[Result], strategies: Sequence[type[Strategy]] = ()) -> Findings:
    """Of all strategies of the lab and of `strategies`, whether they were measured or not."""
    every = {**catalogue(), **{one.name: one for one in strategies}}
    order = {name: number for number, name in enumerate(WORKLOADS)}
    by_name: dict[str, dict[str, Result]] = {name: {} for name in every}
    for one in sorted(results, key=lambda one: order.get(one.workload, len(order))):
        by_name.setdefault(one.strategy, {})[one.workload] = one
    return Findings([Row(name, every.get(name, Strategy), found) for name, found in by_name.items()], results)


def _sound(row: Row, measure: Measure) -> bool:
    """True if the figure is worth comparing: firing early or not at all is not punctual."""
    seen = row.figures(measure.workload)
    return measure.counts_harm or (seen is not None and not seen.early and not row.harm(measure.workload)[0])


def _way(result: Result) -> tuple[bool, float]:
    """All that has to be the same for two figures to be comparable."""
    return result.quick, result.minute
