"""What a results file says, strategy by strategy: the one source of the page, the tables and the pictures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bide_lab.card import Card, card_of
from bide_lab.catalogue import catalogue
from bide_lab.figures import Figures, Result
from bide_lab.report.families import FAMILIES, OWN, Family, family_of
from bide_lab.report.measures import MEASURES, Measure
from bide_lab.strategy import VERBS, Strategy
from bide_lab.workloads import WORKLOADS

NOT_ASKED = "not in this run"
NOT_SEEN = "not seen in this run"
NOT_WAITED_FOR = frozenset({"idle", "verbs", "trips", "cost"})
"""Workloads whose tasks need not have fired when they end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """A flaw, and what of it was seen."""

    text: str
    workload: str
    seen: str
    """In words with numbers; empty if nothing was, see `why_not`."""
    why_not: str
    """`NOT_SEEN`, or why the workload was not played; empty if it was seen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One strategy in a report."""

    name: str
    title: str
    family: Family
    needs: Sequence[str] = ()
    cannot: Mapping[str, str] | None = None
    """By verb; None of a strategy that only its results know."""
    precision: float = 0.0
    """Seconds of strategy time by which it is late by design."""
    in_process: bool = False
    flaws: Sequence[Known] = ()
    results: Mapping[str, Result]
    """By workload, in the order of the workloads."""
    card: Card | None = None

    @property
    def is_bide(self) -> bool:
        return self.family.name == "bide"

    @property
    def measured(self) -> Mapping[str, Result]:
        return {name: one for name, one in self.results.items() if one.figures is not None}

    @property
    def why_not(self) -> str:
        """Why nothing at all was measured; empty if something was."""
        if self.measured:
            return ""
        reasons = list(dict.fromkeys(one.why_not for one in self.results.values()))
        return "; ".join(reasons) or NOT_ASKED

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
        every = [result.figures.curve for result in self.measured.values() if result.figures]
        return {name: points for curve in every for name, points in curve.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Better:
    """A measure on which somebody is ahead of bide, and of every store that bide was measured on."""

    measure: Measure
    bide: str
    """The best row of bide's."""
    value: float
    ahead: Sequence[tuple[str, float]]
    """The best first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """All that a report tells."""

    rows: Sequence[Row]
    better: Sequence[Better]
    results: Sequence[Result]

    def of(self, family: Family) -> list[Row]:
        return [row for row in self.rows if row.family is family]

    @property
    def families(self) -> list[Family]:
        """Those that have rows, bide last but for the reader's own."""
        return [one for one in (*FAMILIES, OWN) if self.of(one)]

    @property
    def bide(self) -> list[Row]:
        return [row for row in self.rows if row.is_bide]

    @property
    def nobody_ahead(self) -> str:
        """Why no row is ahead of bide; empty if one is."""
        if self.better:
            return ""
        measured = any(row.measured for row in self.bide)
        return "Nowhere in this run." if measured else "bide was not measured in this run, so nothing can be said."

    def reference(self, family: Family) -> Row | None:
        """The row of bide's that a family's pictures hold it against: on the servers that the family uses, if it was.

        Of several that use them as well, the one with most measured.
        """
        rows = [row for row in self.of(family) if row.measured]
        within = sum(row.in_process for row in rows) * 2 > len(rows)

        def fits(row: Row) -> tuple[int, bool, int]:
            return (
                sum(set(row.needs) <= set(one.needs) for one in rows if row.needs),
                row.in_process == within,
                len(row.measured),
            )

        return max((row for row in self.bide if row.measured), key=fits, default=None)


def findings(results: Sequence[Result], strategies: Sequence[type[Strategy]] = ()) -> Findings:
    """Of all strategies of the lab and of `strategies`, whether they were measured or not."""
    every = {**catalogue(), **{one.name: one for one in strategies}}
    order = {name: number for number, name in enumerate(WORKLOADS)}
    by_name: dict[str, dict[str, Result]] = {name: {} for name in every}
    for one in sorted(results, key=lambda one: order.get(one.workload, len(order))):
        by_name.setdefault(one.strategy, {})[one.workload] = one
    rows = [
        _row(every[name], found) if name in every else Row(name=name, title="", family=OWN, results=found)
        for name, found in by_name.items()
    ]
    return Findings(rows=rows, better=_better(rows), results=results)


def _row(strategy: type[Strategy], results: Mapping[str, Result]) -> Row:
    flaws = []
    for flaw in strategy.flaws:
        result = results.get(flaw.workload)
        seen = flaw.seen(result.figures) if result is not None and result.figures is not None else ""
        why_not = "" if seen else NOT_ASKED if result is None else result.why_not or NOT_SEEN
        flaws.append(Known(text=flaw.text, workload=flaw.workload, seen=seen, why_not=why_not))
    family = family_of(strategy)
    return Row(
        name=strategy.name, title=strategy.title, family=family, needs=tuple(strategy.needs),
        cannot={verb: strategy.cannot[verb] for verb in VERBS if verb in strategy.cannot},
        precision=strategy.precision or 0.0, in_process=strategy.in_process, flaws=flaws, results=results,
        card=card_of(strategy) if family is not OWN else None,
    )  # fmt: skip


def _better(rows: Sequence[Row]) -> list[Better]:
    """By measure: the best of bide's rows, and all that are better than that, measured in the same way."""
    found = []
    for measure in MEASURES:
        have = [(row, value) for row in rows if (value := row.value(measure)) is not None]
        ours = [one for one in have if one[0].is_bide and _sound(one[0], measure)]
        if not ours:
            continue
        best, value = (max if measure.more else min)(ours, key=lambda one: one[1])
        way = _way(best.results[measure.workload])
        ahead = [
            (row.name, theirs) for row, theirs in have
            if not row.is_bide and measure.better(theirs, value) and _sound(row, measure)
            and _way(row.results[measure.workload]) == way
        ]  # fmt: skip
        if ahead:
            ahead.sort(key=lambda one: one[1], reverse=measure.more)
            found.append(Better(measure=measure, bide=best.name, value=value, ahead=ahead))
    return found


def _sound(row: Row, measure: Measure) -> bool:
    """Whether the figure is worth comparing: who fires early or not at all is not punctual for that."""
    if measure.counts_harm:
        return True
    seen = row.figures(measure.workload)
    return seen is not None and not seen.early and not row.harm(measure.workload)[0]


def _way(result: Result) -> tuple[bool, float]:
    """What has to be the same for two figures to be comparable."""
    return result.quick, result.minute
