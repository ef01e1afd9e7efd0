"""The pictures of a report: for each family its own, with bide as the line that others are held against."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from bide.lab.figures import SHARES
from bide.lab.report.drawing import DASHES, INK, LOST, MUTED, SERIES, TWICE, drawn
from bide.lab.report.families import Family
from bide.lab.report.findings import Findings, Row
from bide.lab.report.measures import BY_NAME, Measure, figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_LEAST_MS = 0.05
"""Lateness below this is drawn as this: a logarithmic axis has no zero."""
_NOTHING_DUE = frozenset({"idle", "verbs"})
"""Workloads whose tasks are not waited for."""


class Picture(NamedTuple):
    """One drawing."""

    name: str
    """Of its file: the family, and what is drawn."""
    family: Family
    caption: str
    svg: str


def pictures(found: Findings) -> list[Picture]:
    """All that can be drawn of what was measured, by family. Raises MissingExtra without matplotlib."""
    return [one for family in found.families for one in _of_family(found, family)]


def _of_family(found: Findings, family: Family) -> Iterator[Picture]:
    reference = found.reference(family)
    rows = [row for row in found.of(family) if row.measured]
    beside = [*rows, *([reference] if reference is not None and reference not in rows else [])]

    def picture(kind: str, caption: str, height: float, draw: Callable[[Axes], None]) -> Picture:
        name = f"{family.name}-{kind}"
        return Picture(name, family, caption, drawn(name, f"{family.title}: {caption}", height, draw))

    curves = [row for row in beside if (seen := row.figures("steady")) is not None and seen.late]
    if any(row in rows for row in curves):
        yield picture(
            "lateness", "How late, under a steady load", 2.35 + _legend(curves), lambda axes: _lateness(axes, curves)
        )
    for kind, caption, names in (
        ("throughput", "Tasks fired a second, in a burst", ("completed",)),
        ("idle", "Processor time while nothing is due", ("idle-cpu", "idle-server-cpu")),
        ("memory", "Memory for each task that waits", ("bytes", "server-bytes")),
    ):
        measures = [BY_NAME[name] for name in names]
        some = [row for row in beside if any(row.value(one) is not None for one in measures)]
        if any(row in rows for row in some):
            height = 0.75 + (0.27 if len(names) == 1 else 0.36) * len(some)
            yield picture(kind, caption, height, partial(_bars, rows=some, measures=measures))
    for operation in dict.fromkeys(name for row in beside for name in _curve(row)):
        some = [row for row in beside if operation in _curve(row)]
        if any(row in rows for row in some):
            what, unit = operation_words(operation)
            caption = f"{what[:1].upper()}{what[1:]}, against how many wait"
            draw = partial(_cost, rows=some, operation=operation, unit=unit)
            yield picture(f"cost-{operation.replace('_', '-')}", caption, 2.35 + _legend(some), draw)
    if hurt := _hurt(rows, beside):
        height = 0.95 + 0.36 * len(hurt)
        yield picture("faults", "Tasks lost, and done twice, where any were", height, lambda axes: _faults(axes, hurt))


def _legend(rows: Sequence[Row]) -> float:
    """The height of a legend in two columns."""
    return 0.17 * ((len(rows) + 1) // 2)


def _ways(rows: Sequence[Row]) -> Iterator[tuple[Row, Mapping[str, Any]]]:
    """How each row's line is drawn: bide's in ink, if it is a guest here; the others by colour and dash."""
    guest = not all(row.is_bide for row in rows)
    others = [row for row in rows if not (row.is_bide and guest)]
    for row in rows:
        if row not in others:
            yield row, {"color": INK, "linewidth": 2.6, "linestyle": "-", "zorder": 5}
        else:
            number = others.index(row)
            yield row, {"color": SERIES[number % len(SERIES)], "linestyle": DASHES[number % len(DASHES)], "zorder": 3}


def _lateness(axes: Axes, rows: Sequence[Row]) -> None:
    for row, way in _ways(rows):
        seen = row.figures("steady")
        assert seen is not None
        late = [max(_LEAST_MS, one) for one in seen.late]
        axes.plot(late, [share * 100 for share in SHARES], label=row.name, **way)
    axes.set_xscale("log")
    axes.set_ylim(0, 101)
    axes.xaxis.set_major_formatter(_milliseconds)
    axes.xaxis.set_minor_formatter("")
    axes.set_xlabel("late by at most")
    axes.set_ylabel("% of tasks")
    _with_legend(axes)


def _milliseconds(value: float, _: object = None) -> str:
    """
    >>> _milliseconds(0.1), _milliseconds(100), _milliseconds(10_000)
    ('0.1 ms', '100 ms', '10 s')
    """
    return f"{value / 1000:g} s" if value >= 1000 else f"{value:g} ms"


def _bars(axes: Axes, rows: Sequence[Row], measures: Sequence[Measure]) -> None:
    """A bar for each row; with two measures a bar each, of its own processes and of the servers."""
    thick = 0.62 / len(measures)
    most = max((value for row in rows for one in measures if (value := row.value(one)) is not None), default=0) or 1
    for place, (row, way) in enumerate(_ways(rows)):
        for number, measure in enumerate(measures):
            at = place + (number - (len(measures) - 1) / 2) * thick
            value = row.value(measure)
            if value is None:
                continue
            axes.barh(at, value, height=thick * 0.92, color=way["color"], alpha=1 if number == 0 else 0.45)
            axes.text(value + most * 0.015, at, measure.words(value), va="center", fontsize=8)
    _names(axes, [row.name for row in rows])
    axes.set_xlim(0, most * 1.26)
    axes.locator_params(axis="x", nbins=4)
    axes.xaxis.set_major_formatter(lambda value, _: figure(value))
    if len(measures) > 1:
        from matplotlib.patches import Patch

        kinds = [Patch(color=MUTED, label="its processes"), Patch(color=MUTED, alpha=0.45, label="servers")]
        axes.legend(handles=kinds, loc="upper center", bbox_to_anchor=(0.5, -0.08 - 0.5 / len(rows)), ncols=2)


def _cost(axes: Axes, rows: Sequence[Row], operation: str, unit: str) -> None:
    for row, way in _ways(rows):
        points = sorted((float(count), value) for count, value in _curve(row)[operation].items())
        axes.plot(*zip(*points, strict=True), label=row.name, marker="o", markersize=3, **way)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("tasks that wait")
    axes.set_ylabel(unit)
    axes.yaxis.set_major_formatter(lambda value, _: figure(value))
    axes.yaxis.set_minor_formatter("")
    _with_legend(axes)


def _faults(axes: Axes, cells: Sequence[tuple[Row, str]]) -> None:
    """Two bars for each cell, in percent of what had to fire."""
    for place, (row, name) in enumerate(cells):
        seen = row.figures(name)
        assert seen is not None
        for count, color, shift in zip(_harm(row, name), (LOST, TWICE), (-0.17, 0.17), strict=True):
            share = 100 * count / (seen.expected or 1)
            axes.barh(place + shift, share, height=0.3, color=color)
            axes.text(min(share, 100) + 1.5, place + shift, f"{count:,}", va="center", fontsize=8)
    _names(axes, [f"{row.name}, {name}" for row, name in cells])
    axes.set_xlim(0, 112)
    axes.set_xlabel("% of the tasks that had to fire")
    from matplotlib.patches import Patch

    axes.legend(handles=[Patch(color=LOST, label="lost"), Patch(color=TWICE, label="done twice")],
                loc="upper center", bbox_to_anchor=(0.5, -0.1 - 1.0 / len(cells)), ncols=2)  # fmt: skip


def _hurt(rows: Sequence[Row], beside: Sequence[Row]) -> list[tuple[Row, str]]:
    """The cells of those workloads in which any of `rows` lost a task or did one twice."""
    names = dict.fromkeys(name for row in rows for name in row.measured if any(_harm(row, name)))
    return [(row, name) for name in names for row in beside if row.figures(name) is not None]


def _harm(row: Row, workload: str) -> tuple[int, int]:
    """Tasks lost, and done twice."""
    seen = row.figures(workload)
    if seen is None or workload in _NOTHING_DUE:
        return 0, 0
    return seen.lost or 0, seen.duplicated or 0


def _curve(row: Row) -> Mapping[str, Mapping[str, float]]:
    """All that was measured against how many wait."""
    every = [result.figures.curve for result in row.measured.values() if result.figures]
    return {name: points for curve in every for name, points in curve.items()}


def operation_words(operation: str) -> tuple[str, str]:
    """What a curve shows, and its unit.

    >>> operation_words("insert_ns"), operation_words("bytes")
    (('insert', 'ns'), ('bytes', 'bytes'))
    """
    name, _, unit = operation.replace(" ", "_").rpartition("_")
    if name and unit in ("ns", "us", "bytes"):
        return name.replace("_", " "), {"us": "µs"}.get(unit, unit)
    return operation.replace("_", " "), "bytes" if "bytes" in operation else "ns"


def _names(axes: Axes, names: Sequence[str]) -> None:
    axes.set_yticks(range(len(names)), names)
    axes.tick_params(axis="y", length=0, labelcolor=INK)
    axes.set_ylim(len(names) - 0.45, -0.55)
    axes.grid(visible=False, axis="y")
    axes.spines["left"].set_visible(False)


def _with_legend(axes: Axes) -> None:
    figure_of: Any = axes.figure
    figure_of.legend(loc="outside lower center", ncols=2, handlelength=2.6, columnspacing=1.6)
