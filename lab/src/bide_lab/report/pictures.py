"""The pictures of a report: for each family its own, with bide as the line that others are held against.

Which pictures there are is known without drawing one, so that a document can name them where matplotlib is not there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from bide_lab.report import charts
from bide_lab.report.drawing import drawn
from bide_lab.report.families import Family
from bide_lab.report.findings import Findings, Row
from bide_lab.report.measures import BY_NAME

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_LINES = 7
"""Curves that one picture holds at most, besides that of bide."""


@dataclass(frozen=True, slots=True)
class Picture:
    """One drawing, not drawn yet."""

    name: str
    """Of its file: the family, and what is drawn."""
    family: Family
    caption: str
    height: float
    """Inches."""
    draw_on: Callable[[Axes], None]

    def svg(self) -> str:
        """Without a style of its own."""
        return drawn(self.name, f"{self.family.title}: {self.caption}", self.height, self.draw_on)


def pictures(found: Findings) -> list[Picture]:
    """All that can be drawn of what was measured, by family."""
    return [one for family in found.families for one in _of_family(found, family)]


def _of_family(found: Findings, family: Family) -> Iterator[Picture]:
    reference = found.reference(family)
    rows = [row for row in found.of(family) if row.measured]
    guests = [reference] if reference is not None and reference not in rows else []
    late = [row for row in rows if (seen := row.figures("steady")) is not None and seen.late]
    host = [row for row in guests if (seen := row.figures("steady")) is not None and seen.late]
    reach = [one for row in [*late, *host] if (seen := row.figures("steady")) is not None for one in seen.late]
    for name, part, some in _split(f"{family.name}-lateness", late):
        draw = partial(charts.lateness, rows=[*some, *host], reach=reach)
        yield Picture(name, family, f"How late, under a steady load{part}", 2.35 + _legend([*some, *host]), draw)
    for kind, caption, names in (
        ("throughput", "Tasks fired a second, in a burst", ("completed",)),
        ("idle", "Processor time while nothing is due", ("idle-cpu", "idle-server-cpu")),
        ("memory", "Memory for each task that waits", ("bytes", "server-bytes")),
    ):
        beside = [*rows, *guests]
        measures = [BY_NAME[name] for name in names if any(row.value(BY_NAME[name]) is not None for row in beside)]
        some = [row for row in beside if any(row.value(one) is not None for one in measures)]
        if any(row in rows for row in some):
            height = 0.55 + (0.27 if len(measures) == 1 else 0.36 + 0.25 / len(some)) * len(some)
            draw = partial(charts.bars, rows=some, measures=measures)
            yield Picture(f"{family.name}-{kind}", family, caption, height, draw)
    for operation in dict.fromkeys(name for row in rows for name in row.curves):
        what, unit = operation_words(operation)
        name, caption = operation.replace("_", "-").replace(" ", "-"), f"{what[:1].upper()}{what[1:]}"
        host = [row for row in guests if operation in row.curves]
        for whole, part, some in _split(f"{family.name}-cost-{name}", [row for row in rows if operation in row.curves]):
            draw = partial(charts.cost, rows=[*some, *host], operation=operation, unit=unit)
            yield Picture(whole, family, f"{caption}, by how many wait{part}", 2.35 + _legend([*some, *host]), draw)
    if hurt := _hurt(rows, [*rows, *guests]):
        height, draw = 1.0 + 0.36 * len(hurt), partial(charts.faults, cells=hurt)
        yield Picture(f"{family.name}-faults", family, "Lost, and done twice, where any were", height, draw)


def _split(name: str, rows: Sequence[Row]) -> Iterator[tuple[str, str, Sequence[Row]]]:
    """As few pictures as hold all rows, with about the same number in each: name, which of several it is, and rows."""
    if not rows:
        return
    pieces = -(-len(rows) // _LINES)
    for number in range(pieces):
        begin, end = number * len(rows) // pieces, (number + 1) * len(rows) // pieces
        part = f", {number + 1} of {pieces}" if pieces > 1 else ""
        yield name if number == 0 else f"{name}-{number + 1}", part, rows[begin:end]


def _legend(rows: Sequence[Row]) -> float:
    """The height of a legend in two columns."""
    return 0.17 * ((len(rows) + 1) // 2)


def _hurt(rows: Sequence[Row], beside: Sequence[Row]) -> list[tuple[Row, str]]:
    """The cells of those workloads in which any of `rows` lost a task or did one twice."""
    names = dict.fromkeys(name for row in rows for name in row.measured if any(row.harm(name)))
    return [(row, name) for name in names for row in beside if row.figures(name) is not None]


def operation_words(operation: str) -> tuple[str, str]:
    """What a curve shows, and its unit.

    >>> operation_words("insert_ns"), operation_words("bytes")
    (('insert', 'ns'), ('bytes', 'bytes'))
    """
    name, _, unit = operation.replace(" ", "_").rpartition("_")
    if name and unit in ("ns", "us", "bytes"):
        return name.replace("_", " "), {"us": "µs"}.get(unit, unit)
    return operation.replace("_", " "), "bytes" if "bytes" in operation else "ns"
