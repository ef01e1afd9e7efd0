"""The pictures of a report: for each family its own, with bide as the line that others are held against.

Which pictures there are is known without drawing one, so that a document can name them at once. A picture is drawn with
placeholder colours, which become CSS variables (#0a0a01 is --lab-0a0a01), so that the same drawing is right on a light
page and on a dark one. Series differ in colour and in dash, so that a reader who tells no colours apart still can.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from xml.sax.saxutils import escape, quoteattr

from bide_lab.figures import MEASURES, SHARES, Measure, figure
from bide_lab.findings import Findings, Row
from bide_lab.strategies import Family

if TYPE_CHECKING:
    from matplotlib.axes import Axes

INK, MUTED, GRID, PAGE = "#010101", "#020202", "#030303", "#040404"
LOST, TWICE = "#0b0b01", "#0b0b02"
SERIES = tuple(f"#0a0a{number:02x}" for number in range(1, 8))
DASHES: tuple[Any, ...] = ("-", (0, (6, 1.6)), (0, (1.4, 1.2)), (0, (6, 1.6, 1.4, 1.6)), (0, (3, 1.2)))
LIGHT = {
    INK: "#1d2733", MUTED: "#5b6775", GRID: "#e3e7ec", PAGE: "#ffffff", LOST: "#c2410c", TWICE: "#2468b2",
    **dict(zip(SERIES, ("#0b6fb8", "#c8501e", "#0a8a68", "#a5488f", "#b98300", "#4c9fd6", "#7a6a58"), strict=True)),
}  # fmt: skip
DARK = {
    INK: "#eef2f6", MUTED: "#9aa7b5", GRID: "#2b3440", PAGE: "#151b23", LOST: "#ff9a5c", TWICE: "#6db3f2",
    **dict(zip(SERIES, ("#5cb0f0", "#ff935c", "#3ecfa6", "#e397cf", "#f0bd45", "#a8d8f5", "#c2b29e"), strict=True)),
}  # fmt: skip
"""Shades of the colours of Okabe and Ito, that people who tell few colours apart tell apart; each readable on its page.
"""
_WIDTH = 4.1
"""Inches: as wide as a telephone shows without making letters smaller, and half of a page."""
_LINES = 7
"""Curves that one picture holds at most, besides that of bide."""
_LEAST_MS = 0.05
"""Lateness below this is drawn as this: a logarithmic axis has no zero."""
_MARK = "drawn by bide lab report"
"""The beginning of the first line of a picture."""
_FONT = (
    "system-ui, -apple-system, &quot;Segoe UI&quot;, Roboto, &quot;Noto Sans&quot;, &quot;DejaVu Sans&quot;, sans-serif"
)
_SETTINGS: Mapping[Any, Any] = {
    "svg.fonttype": "none", "font.size": 9, "axes.edgecolor": MUTED, "axes.labelcolor": MUTED, "xtick.color": MUTED,
    "ytick.color": MUTED, "text.color": INK, "axes.grid": True, "grid.color": GRID, "grid.linewidth": 0.8,
    "axes.spines.top": False, "axes.spines.right": False, "axes.axisbelow": True, "legend.frameon": False,
    "legend.fontsize": 8.5, "xtick.labelsize": 8.5, "ytick.labelsize": 8.5, "lines.linewidth": 1.7,
}  # fmt: skip


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
        """Without a style of its own: `alone` gives it one."""
        import matplotlib
        from matplotlib.figure import Figure

        file = io.StringIO()
        with matplotlib.rc_context({**_SETTINGS, "svg.hashsalt": self.name}):
            drawing = Figure(figsize=(_WIDTH, self.height), layout="constrained")
            self.draw_on(drawing.subplots())
            nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
            drawing.savefig(file, format="svg", transparent=True, metadata=nothing)
        return _tidy(file.getvalue(), self.name, f"{self.family.title}: {self.caption}")


def _tidy(text: str, name: str, title: str) -> str:
    """Without what the page or the file around it says, and with variables for colours."""
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>\s*", "", text, flags=re.DOTALL)
    text = re.sub(r"<defs>\s*<style.*?</style>\s*</defs>\s*", "", text, flags=re.DOTALL)
    text = re.sub(r"font-family: [^;\"]*", f"font-family: {_FONT}", text)
    text = re.sub(r"font: ([\d.]+px)[^;\"]*", rf"font: \1 {_FONT}", text)
    for placeholder in LIGHT:
        text = text.replace(placeholder, f"var(--lab-{placeholder[1:]})")
    # several pictures stand on one page: a name that nothing refers to goes, the others are made from `hashsalt`
    used = set(re.findall(r"#([\w-]+)[\"')]", text))
    text = re.sub(r' id="([^"]+)"', lambda found: found[0] if found[1] in used else "", text)
    text = re.sub(r' (?:width|height)="[\d.]+pt"', "", text, count=2)
    across = float(re.findall(r'viewBox="[\d.]+ [\d.]+ ([\d.]+)', text)[0])
    lines = f"max-width: {across * 4 / 3:.0f}px; stroke-linejoin: round; stroke-linecap: butt"
    opening = f'<svg role="img" aria-label={quoteattr(title)} class="picture" data-name="{name}" style="{lines}"'
    head, rest = text.replace("<svg", opening, 1).split(">", 1)
    stripped = (line.strip() for line in f"{head}><title>{escape(title)}</title>{rest}".splitlines())
    return "\n".join(line for line in stripped if line) + "\n"


def colours(element: str) -> tuple[str, str]:
    """The rules that give an element the colours of a light page, and those of a dark one where that is wanted."""
    light, dark = (
        f"{element} {{ {' '.join(f'--lab-{name[1:]}: {value};' for name, value in shades.items())} }}"
        for shades in (LIGHT, DARK)
    )
    return light, f"@media (prefers-color-scheme: dark) {{ {dark} }}"


def alone(picture: str, note: str) -> str:
    """The picture as a file of its own, that knows light and dark by itself; `note` is a comment in it."""
    head, rest = picture.split(">", 1)
    width = re.search(r"max-width: (\d+)px", head)
    size = f' width="{width[1]}"' if width else ""
    return f"<!-- {note} -->\n{head}{size}><style>{' '.join(colours('svg'))}</style>{rest}"


def write_pictures(drawn: Sequence[Picture], folder: Path, note: str = "") -> list[Path]:
    """A file for each; pictures that an earlier report left in the folder go. `note` is added to their first line."""
    paths = [folder / f"{one.name}.svg" for one in drawn]
    for old in folder.glob("*.svg"):
        if old not in paths and old.read_text(encoding="utf-8").startswith(f"<!-- {_MARK}"):
            old.unlink()
    for one, path in zip(drawn, paths, strict=True):
        path.write_text(alone(one.svg(), f"{_MARK} {note}".strip()), encoding="utf-8")
    return paths


def pictures(found: Findings) -> list[Picture]:
    """All that can be drawn of what was measured, by family."""
    return [one for family in found.families for one in _of_family(found, family)]


def _of_family(found: Findings, family: Family) -> Iterator[Picture]:
    rows = [row for row in found.of(family) if row.measured]
    beside = [*rows, *found.guests(family)]

    def curves(kind: str, caption: str, has: Callable[[Row], object], draw: Callable[..., None]) -> Iterator[Picture]:
        """As few pictures as hold all rows, with about the same number in each."""
        own, guests = [row for row in rows if has(row)], [row for row in beside[len(rows) :] if has(row)]
        pieces = -(-len(own) // _LINES)
        for number in range(pieces):
            some = [*own[number * len(own) // pieces : (number + 1) * len(own) // pieces], *guests]
            name = f"{family.name}-{kind}" if number == 0 else f"{family.name}-{kind}-{number + 1}"
            part = f", {number + 1} of {pieces}" if pieces > 1 else ""
            height = 2.35 + 0.17 * ((len(some) + 1) // 2)  # with a legend in two columns
            yield Picture(name, family, f"{caption}{part}", height, partial(draw, rows=some))

    def is_late(row: Row) -> Sequence[float]:
        seen = row.figures("steady")
        return seen.late if seen is not None else ()

    reach = [one for row in beside for one in is_late(row)]
    yield from curves("lateness", "How late, under a steady load", is_late, partial(_lateness, reach=reach))
    for kind, caption, names in (
        ("throughput", "Tasks fired a second, in a burst", ("completed",)),
        ("idle", "Processor time while nothing is due", ("idle-cpu", "idle-server-cpu")),
        ("memory", "Memory for each task that waits", ("bytes", "server-bytes")),
    ):
        measures = [MEASURES[name] for name in names if any(row.value(MEASURES[name]) is not None for row in beside)]
        some = [row for row in beside if any(row.value(one) is not None for one in measures)]
        if any(row in rows for row in some):
            height = 0.55 + (0.27 if len(measures) == 1 else 0.36 + 0.25 / len(some)) * len(some)
            draw = partial(_bars, rows=some, measures=measures)
            yield Picture(f"{family.name}-{kind}", family, caption, height, draw)
    for operation in dict.fromkeys(name for row in rows for name in row.curves):
        what, _, unit = operation.rpartition("_")
        kind, caption = f"cost-{operation.replace('_', '-')}", (what or unit).capitalize()
        draw = partial(_cost, operation=operation, unit=unit)
        yield from curves(kind, f"{caption}, by how many wait", lambda row, name=operation: name in row.curves, draw)  # type: ignore[misc]
    harmful = dict.fromkeys(name for row in rows for name in row.measured if any(row.harm(name)))
    if hurt := [(row, name) for name in harmful for row in beside if row.figures(name) is not None]:
        height, draw = 1.0 + 0.36 * len(hurt), partial(_faults, cells=hurt)
        yield Picture(f"{family.name}-faults", family, "Lost, and done twice, where any were", height, draw)


def _styles(rows: Sequence[Row]) -> Iterator[tuple[Row, Mapping[str, Any]]]:
    """How each row's line is drawn: bide's in ink, if it is a guest here; the others by colour and dash."""
    guest = not all(row.is_bide for row in rows)
    others = [row for row in rows if not (row.is_bide and guest)]
    for row in rows:
        if row not in others:
            yield row, {"color": INK, "linewidth": 2.6, "linestyle": "-", "zorder": 5}
        else:
            number = others.index(row)
            yield row, {"color": SERIES[number % len(SERIES)], "linestyle": DASHES[number % len(DASHES)], "zorder": 3}


def _lateness(axes: Axes, rows: Sequence[Row], reach: Sequence[float]) -> None:
    """The share of the tasks that was late by at most so much; `reach` holds all that the axis has to show."""
    for row, style in _styles(rows):
        late = [max(_LEAST_MS, one) for one in row.measured["steady"].late]
        axes.plot(late, [share * 100 for share in SHARES], label=row.name, **style)
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


def _bars(axes: Axes, rows: Sequence[Row], measures: Sequence[Measure]) -> None:
    """A bar for each row; with two measures a bar each, of its own processes and of the servers."""
    thick = 0.62 / len(measures)
    most = max((value for row in rows for one in measures if (value := row.value(one)) is not None), default=0) or 1
    for place, (row, style) in enumerate(_styles(rows)):
        values = [(number, measure, value) for number, measure in enumerate(measures)
                  if (value := row.value(measure)) is not None]  # fmt: skip
        for at, (number, measure, value) in enumerate(values):
            middle = place + (at - (len(values) - 1) / 2) * thick
            axes.barh(middle, value, height=thick * 0.92, color=style["color"], alpha=1 if number == 0 else 0.45)
            axes.text(value + most * 0.015, middle, measure.words(value), va="center", fontsize=8)
    _names(axes, [row.name for row in rows])
    axes.set_xlim(0, most * 1.26)
    axes.locator_params(axis="x", nbins=4)
    axes.xaxis.set_major_formatter(lambda value, _: figure(value))
    if len(measures) > 1:
        _with_legend(axes, {measure.whose: (MUTED, 1 if measure is measures[0] else 0.45) for measure in measures})


def _cost(axes: Axes, rows: Sequence[Row], operation: str, unit: str) -> None:
    """One operation against how many tasks wait."""
    for row, style in _styles(rows):
        points = sorted((float(count), value) for count, value in row.curves[operation].items())
        axes.plot(*zip(*points, strict=True), label=row.name, marker="o", markersize=3, **style)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("tasks that wait")
    axes.set_ylabel(unit)
    axes.yaxis.set_major_formatter(lambda value, _: figure(value))
    # a range within one power of ten would have no number at all
    axes.yaxis.set_minor_formatter(lambda value, _: figure(value) if f"{value:e}"[0] in "25" else "")
    _with_legend(axes)


def _faults(axes: Axes, cells: Sequence[tuple[Row, str]]) -> None:
    """Two bars for each cell, in percent of the tasks that had to fire."""
    found = [(row.harm(name), row.measured[name].expected or 1) for row, name in cells]
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
