"""The kinds of chart that a report has: each draws some rows on the axes that it is given."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from bide_lab.figures import SHARES
from bide_lab.report.drawing import DASHES, INK, LOST, MUTED, SERIES, TWICE
from bide_lab.report.findings import Row
from bide_lab.report.measures import Measure, figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_LEAST_MS = 0.05
"""Lateness below this is drawn as this: a logarithmic axis has no zero."""


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


def lateness(axes: Axes, rows: Sequence[Row], reach: Sequence[float]) -> None:
    """What share of the tasks was late by at most so much; `reach` holds all that the axis has to show."""
    for row, way in _ways(rows):
        seen = row.figures("steady")
        assert seen is not None
        late = [max(_LEAST_MS, one) for one in seen.late]
        axes.plot(late, [share * 100 for share in SHARES], label=row.name, **way)
    axes.set_xscale("log")
    axes.set_xlim(max(_LEAST_MS, min(reach)) * 0.8, max(1.0, *reach) * 1.25)
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


def bars(axes: Axes, rows: Sequence[Row], measures: Sequence[Measure]) -> None:
    """A bar for each row; with two measures a bar each, of its own processes and of the servers."""
    thick = 0.62 / len(measures)
    most = max((value for row in rows for one in measures if (value := row.value(one)) is not None), default=0) or 1
    for place, (row, way) in enumerate(_ways(rows)):
        values = [(number, measure, value) for number, measure in enumerate(measures)
                  if (value := row.value(measure)) is not None]  # fmt: skip
        for at, (number, measure, value) in enumerate(values):
            middle = place + (at - (len(values) - 1) / 2) * thick
            axes.barh(middle, value, height=thick * 0.92, color=way["color"], alpha=1 if number == 0 else 0.45)
            axes.text(value + most * 0.015, middle, measure.words(value), va="center", fontsize=8)
    _names(axes, [row.name for row in rows])
    axes.set_xlim(0, most * 1.26)
    axes.locator_params(axis="x", nbins=4)
    axes.xaxis.set_major_formatter(lambda value, _: figure(value))
    if len(measures) > 1:
        _with_legend(axes, {measure.whose: (MUTED, 1 if measure is measures[0] else 0.45) for measure in measures})


def cost(axes: Axes, rows: Sequence[Row], operation: str, unit: str) -> None:
    """One operation against how many tasks wait."""
    for row, way in _ways(rows):
        points = sorted((float(count), value) for count, value in row.curves[operation].items())
        axes.plot(*zip(*points, strict=True), label=row.name, marker="o", markersize=3, **way)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("tasks that wait")
    axes.set_ylabel(unit)
    axes.yaxis.set_major_formatter(lambda value, _: figure(value))
    # a range within one power of ten would have no number at all
    axes.yaxis.set_minor_formatter(lambda value, _: figure(value) if f"{value:e}"[0] in "25" else "")
    _with_legend(axes)


def faults(axes: Axes, cells: Sequence[tuple[Row, str]]) -> None:
    """Two bars for each cell, in percent of what had to fire."""
    found = [(row.harm(name), seen.expected or 1) for row, name in cells if (seen := row.figures(name)) is not None]
    most = max(10.0, *(100 * count / expected for harm, expected in found for count in harm))
    for place, (harm, expected) in enumerate(found):
        for count, color, shift in zip(harm, (LOST, TWICE), (-0.17, 0.17), strict=True):
            share = 100 * count / expected
            axes.barh(place + shift, share, height=0.3, color=color)
            axes.text(share + most * 0.015, place + shift, f"{count:,}", va="center", fontsize=8)
    _names(axes, [f"{row.name}, {name}" for row, name in cells])
    axes.set_xlim(0, most * 1.14)
    axes.set_xlabel("% of the tasks that had to fire")
    _with_legend(axes, {"lost": (LOST, 1), "done twice": (TWICE, 1)})


def _names(axes: Axes, names: Sequence[str]) -> None:
    axes.set_yticks(range(len(names)), names)
    axes.tick_params(axis="y", length=0, labelcolor=INK)
    axes.set_ylim(len(names) - 0.45, -0.55)
    axes.grid(visible=False, axis="y")
    axes.spines["left"].set_visible(False)


def _with_legend(axes: Axes, patches: Mapping[str, tuple[str, float]] | None = None) -> None:
    """Below the axes: the lines by their labels, or `patches`, each with its colour and opacity."""
    from matplotlib.patches import Patch

    given = {"handles": [Patch(color=color, alpha=alpha, label=label) for label, (color, alpha) in patches.items()]
             } if patches else {}  # fmt: skip
    whole: Any = axes.figure
    whole.legend(
        loc="outside lower center", ncols=2, handlelength=2.6 if not patches else 1.6, columnspacing=1.6, **given
    )
