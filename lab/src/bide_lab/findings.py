"""The findings in a results file, strategy by strategy: the one source of the page, the tables and the pictures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from bide_lab.figures import MEASURES, Figures, Measure, Result
from bide_lab.strategies import OWN, Card, Family, card_of, catalogue, families, family_of
from bide_lab.strategy import Strategy
from bide_lab.workloads import WORKLOADS

NOT_ASKED = "not in this run"
NOT_SEEN = "not seen in this run"
NOT_WAITED_FOR = frozenset({"idle", "verbs", "trips", "cost"})
"""Workloads whose tasks need not have fired when they end."""


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
        return card_of(self.strategy) if self.family != OWN else None

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
    """A measure on which a strategy is ahead of bide on every store that bide was measured on."""

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
        self.better = [one for measure in MEASURES.values() if (one := self._better(measure)) is not None]
        self.families = [one for one in (*families(), OWN) if self.of(one)]
        """Those that have rows, bide last but for the reader's own."""

    def of(self, family: Family) -> list[Row]:
        return [row for row in self.rows if row.family == family]

    def guests(self, family: Family) -> list[Row]:
        """The row of bide's that another family is held against: on the servers that the family uses, if it was.

        Of several that use them as well, the one with most measured; none if bide has no workload of theirs.
        """
        rows = [row.strategy for row in self.of(family) if row.measured]
        within = sum(one.in_process for one in rows) * 2 > len(rows)

        def fits(row: Row) -> tuple[int, bool, int]:
            needs = set(row.strategy.needs)
            served = sum(needs <= set(one.needs) for one in rows) if needs else 0
            return served, row.strategy.in_process == within, len(row.measured)

        played = {name for row in self.of(family) for name in row.measured}
        measured = [row for row in self.bide if row.measured.keys() & played and row.family != family]
        return [max(measured, key=fits)] if measured else []

    def _better(self, measure: Measure) -> Better | None:
        """The best of bide's rows, and all that are better than that, measured in the same way."""
        have = {row: value for row in self.rows if (value := row.value(measure)) is not None and _sound(row, measure)}
        ours = [row for row in have if row.is_bide]
        if not ours:
            return None
        best = (max if measure.more_is_better else min)(ours, key=have.__getitem__)
        scale = best.results[measure.workload].scale
        ahead = [
            (row.name, value) for row, value in have.items()
            if not row.is_bide and measure.better(value, have[best]) and row.results[measure.workload].scale == scale
        ]  # fmt: skip
        ahead.sort(key=lambda one: one[1], reverse=measure.more_is_better)
        return Better(measure, best.name, have[best], ahead) if ahead else None


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
