"""The tables of docs/reliability.md, made from the results of torture and soak: torture.jsonl and soak.jsonl.

Each line is the report of one run; the newest line of each store counts. A store without a line was not run yet.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from msgspec import Struct

from bide.core.errors import BadInput
from bide_proofs.harness.command import markdown_table
from bide_proofs.soak.measure import GROWS, Slope, figure_of

_NAMES: Mapping[str, str] = {
    "sqlite": "SQLite", "redis": "Redis", "redis-cluster": "Redis Cluster", "redis-sentinel": "Redis Sentinel",
    "postgres": "PostgreSQL", "mariadb": "MariaDB", "mysql": "MariaDB", "http": "HTTP",
}  # fmt: skip
"""The name of a store on the page, by its name in a report."""
_SOAKED = ("SQLite", "Redis", "PostgreSQL", "MariaDB", "HTTP")
_BROKEN = (("P2", "lost"), ("P1", "early"), ("P4", "delivered after cancelled"), ("P3", "stale token accepted"))
"""The failures of a run under faults: the broken promise, and its name in older reports."""
_KIB, _MIB = 1024, 1024 * 1024


class _Run(Struct):
    """The fields of both kinds of report."""

    store: str
    seconds: float
    load: dict[str, Any]
    wrong: dict[str, int]
    lateness_ms: dict[str, float]

    @property
    def name(self) -> str:
        return _NAMES.get(self.store, self.store)

    @property
    def minutes(self) -> str:
        return _number(round(self.seconds / 60, 1))

    def late(self, part: str) -> str:
        """A percentile of the lateness; empty if there was no delivery."""
        return _number(self.lateness_ms[part]) if part in self.lateness_ms else ""


class Torture(_Run):
    """The fields of a report of `bide_proofs.torture` that are shown."""

    about: dict[str, str]
    processes: dict[str, int]
    faults: dict[str, int]
    cannot: dict[str, str]
    delivered_again: int
    recovery_seconds: dict[str, dict[str, float]]

    def row(self) -> list[str]:
        lost, *others = (next((self.wrong[name] for name in names if name in self.wrong), 0) for names in _BROKEN)
        load = {name: _sum(value) for name, value in self.load.items() if name != "deliveries"}
        return [
            f"**{self.name}**", self.about["version"], self.minutes, _counts(self.processes), _counts(load),
            *map(_number, (self.load["deliveries"], lost, self.delivered_again, *others, _sum(self.wrong))),
            self.late("most"),
        ]  # fmt: skip

    def fault_rows(self) -> Iterable[list[str]]:
        for kind, number in self.faults.items():
            way_back = self.recovery_seconds.get(kind, {})
            times = (_number(way_back[part] * 1000) if way_back else "" for part in ("p50", "most"))
            yield [f"**{self.name}**", kind, _number(number), *times]


class Soak(_Run):
    """The fields of a report of `bide_proofs.soak` that are shown."""

    maximum_per_s: float
    rate: float
    deliveries: int
    lost: int
    duplicated: int
    early: int
    judged: bool
    slopes: dict[str, Slope]

    def row(self) -> list[str]:
        figures = (
            self.maximum_per_s, self.rate, _sum(self.load["schedule"]), self.deliveries, self.lost, self.duplicated,
            self.early, self.wrong["left"],
        )  # fmt: skip
        return [f"**{self.name}**", self.minutes, *map(_number, figures), *map(self.late, ("p50", "p99", "most"))]

    def chapter(self) -> str:
        """The verdict on the slopes, and a table of them."""
        growing = [_figure(name)[0] for name, slope in self.slopes.items() if slope.verdict == GROWS]
        verdict = f"Growing: {', '.join(growing)}." if growing else "Nothing grows."
        if not self.judged:
            verdict = "The run was too short for its slopes to count."
        rows = []
        for name, slope in self.slopes.items():
            words, unit = _figure(name)
            rows.append(
                [f"**{words}**", _in_unit(slope.mean, unit), _in_unit(slope.per_minute, unit),
                 f"{_in_unit(slope.low, unit)} to {_in_unit(slope.high, unit)}",
                 _number(slope.percent_per_hour), _in_unit(slope.allowed, unit), slope.verdict]
            )  # fmt: skip
        heads = ["figure", "mean", "slope per minute", "99 % certain", "% of the mean per hour",
                 "allowed over the run", "verdict"]  # fmt: skip
        return f"### {self.name}\n\n{verdict}\n\n{markdown_table(heads, rows, right=range(1, 6))}"


class Results:
    """The reports in the results files of one folder. Raises BadInput for an invalid line."""

    def __init__(self, folder: Path) -> None:
        self._torture = _newest(folder / "torture.jsonl", Torture)
        self._soak = _newest(folder / "soak.jsonl", Soak)

    def torture(self) -> str:
        """Two tables: the load, faults and failures of each store; and the recovery from each kind of fault."""
        heads = ["store", "version", "minutes", "processes", "load", "deliveries", "lost", "delivered again", "early",
                 "delivered after cancelled", "stale tokens accepted", "all that was wrong",
                 "worst lateness, ms"]  # fmt: skip
        rows = _rows(self._torture, _NAMES.values(), len(heads))
        parts = [markdown_table(heads, rows, right={2, *range(5, 13)})]
        if faults := list(chain.from_iterable(run.fault_rows() for run in _in_order(self._torture, _NAMES.values()))):
            heads = ["store", "fault", "injected", "recovery p50, ms", "worst recovery, ms"]
            parts.append(markdown_table(heads, faults, right={2, 3, 4}))
        return "\n\n".join(parts) + "\n"

    def cannot(self) -> str:
        """The troubles that could not be caused in these runs, with the reasons."""
        stores: dict[tuple[str, str], list[str]] = {}
        for run in _in_order(self._torture, _NAMES.values()):
            for what, why in run.cannot.items():
                stores.setdefault((what, why), []).append(run.name)
        if not stores:
            return "Nothing was noted so far.\n"
        return "".join(f"- {what} ({', '.join(names)}): {why}\n" for (what, why), names in stores.items())

    def soak(self) -> str:
        """A table of all stores, and for each store a table of its figures and their slopes."""
        heads = ["store", "minutes", "maximum/s", "tasks/s", "scheduled", "deliveries", "lost", "duplicated", "early",
                 "left behind", "late p50, ms", "late p99, ms", "worst, ms"]  # fmt: skip
        table = markdown_table(heads, _rows(self._soak, _SOAKED, len(heads)), right=range(1, 13))
        return "\n\n".join([table, *(run.chapter() for run in _in_order(self._soak, _SOAKED) if run.slopes)]) + "\n"


R = TypeVar("R", Torture, Soak)


def _newest(path: Path, kind: type[R]) -> dict[str, R]:
    """The last line of each store, by its name, in order of first appearance. A truncated line is skipped."""
    found: dict[str, R] = {}
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    for number, line in enumerate(lines, start=1):
        if not line.endswith(b"\n"):
            continue
        try:
            run = msgspec.json.decode(line, type=kind)
        except msgspec.MsgspecError as error:
            said = line.decode(errors="replace")
            raise BadInput(f"{path.name}, line {number}", said, f"the report of a run: {error}") from None
        found[run.name] = run
    return found


def _in_order(runs: Mapping[str, R], expected: Iterable[str]) -> list[R]:
    """The reports of the expected stores first, then any others."""
    return [runs[name] for name in dict.fromkeys([*expected, *runs]) if name in runs]


def _rows(runs: Mapping[str, R], expected: Iterable[str], width: int) -> list[list[str]]:
    """A row for each expected store, even if it was not run; then rows for any others."""
    not_yet: list[str] = ["not run yet", *[""] * (width - 2)]
    return [
        runs[name].row() if name in runs else [f"**{name}**", *not_yet] for name in dict.fromkeys([*expected, *runs])
    ]


def _figure(name: str) -> tuple[str, str]:
    """The name and the unit of a figure.

    >>> _figure("worker-1_resident"), _figure("late_p99_ms")
    (('worker 1: resident memory', 'bytes'), ('lateness p99', 'ms'))
    """
    if (known := figure_of(name)) is None:
        return name, ""
    whose, figure = known[0].replace("-", " "), known[1]
    return f"{whose}: {figure.words}" if whose else figure.words, figure.unit


def _in_unit(value: float, unit: str) -> str:
    """
    >>> _in_unit(2097152, "bytes"), _in_unit(-512, "bytes"), _in_unit(1.25, "ms")
    ('2 MiB', '-0.5 KiB', '1.25 ms')
    """
    if unit != "bytes":
        return f"{_number(value)} {unit}".rstrip()
    size, named = (_MIB, "MiB") if abs(value) >= _MIB else (_KIB, "KiB")
    return f"{_number(value / size)} {named}" if value else "0"


def _number(value: float) -> str:
    """Format a number with three significant digits, or a large or whole one without decimals.

    >>> _number(1234567), _number(0.12345), _number(12.0)
    ('1,234,567', '0.123', '12')
    """
    return f"{value:,.0f}" if value == round(value) or abs(value) >= 100 else f"{value:.3g}"


def _counts(numbers: Mapping[str, float]) -> str:
    return ", ".join(f"{_number(number)} {name}" for name, number in numbers.items())


def _sum(value: Any) -> float:
    """The sum of all numbers in a nested mapping."""
    return sum(map(_sum, value.values())) if isinstance(value, Mapping) else value
