"""What all pictures share: matplotlib, its colours as names that a page or a style sheet fills in, and tidy SVG.

A picture is drawn with placeholder colours, which become CSS variables, so that the same drawing is right on a light
page and on a dark one. Series differ in colour and in dash, so that a reader who tells no colours apart still can.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from xml.sax.saxutils import escape, quoteattr

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, MUTED, GRID, PAGE = "#010101", "#020202", "#030303", "#040404"
LOST, TWICE = "#0b0b01", "#0b0b02"
SERIES = tuple(f"#0a0a{number:02x}" for number in range(1, 8))
DASHES: tuple[Any, ...] = ("-", (0, (6, 1.6)), (0, (1.4, 1.2)), (0, (6, 1.6, 1.4, 1.6)), (0, (3, 1.2)))
WIDTH = 4.1
"""Inches: as wide as a telephone shows without making letters smaller, and half of a page."""

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
_LINES = "stroke-linejoin: round; stroke-linecap: butt"
_FONT = (
    "system-ui, -apple-system, &quot;Segoe UI&quot;, Roboto, &quot;Noto Sans&quot;, &quot;DejaVu Sans&quot;, sans-serif"
)


def variable(placeholder: str) -> str:
    """The name of the CSS variable that a placeholder becomes."""
    return f"--lab-{placeholder[1:]}"


def variables(colours: dict[str, str]) -> str:
    """The declarations that fill the names in."""
    return " ".join(f"{variable(name)}: {colour};" for name, colour in colours.items())


def style() -> str:
    """What a picture needs that stands alone."""
    return (
        f"svg {{ {variables(LIGHT)} }} "
        f"@media (prefers-color-scheme: dark) {{ svg {{ {variables(DARK)} }} }}"
    )  # fmt: skip


def drawn(name: str, title: str, height: float, draw: Callable[[Axes], None], *, width: float = WIDTH) -> str:
    """One picture as SVG without a style of its own: `alone` gives it one. Sizes are in inches."""
    import matplotlib
    from matplotlib.figure import Figure

    settings: Any = {
        "svg.fonttype": "none", "svg.hashsalt": name, "font.size": 9, "axes.edgecolor": MUTED, "axes.labelcolor": MUTED,
        "xtick.color": MUTED, "ytick.color": MUTED, "text.color": INK, "axes.grid": True, "grid.color": GRID,
        "grid.linewidth": 0.8, "axes.spines.top": False, "axes.spines.right": False, "axes.axisbelow": True,
        "legend.frameon": False, "legend.fontsize": 8.5, "xtick.labelsize": 8.5, "ytick.labelsize": 8.5,
        "lines.linewidth": 1.7,
    }  # fmt: skip
    with matplotlib.rc_context(settings):
        figure = Figure(figsize=(width, height), layout="constrained")
        draw(figure.subplots())
        return _tidy(figure, name, title)


def _tidy(figure: Figure, name: str, title: str) -> str:
    file = io.StringIO()
    figure.savefig(file, format="svg", transparent=True, metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    text = file.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>\s*", "", text, flags=re.DOTALL)
    text = re.sub(r"<defs>\s*<style.*?</style>\s*</defs>\s*", "", text, flags=re.DOTALL)
    text = re.sub(r"font-family: [^;\"]*", f"font-family: {_FONT}", text)
    text = re.sub(r"font: ([\d.]+px)[^;\"]*", rf"font: \1 {_FONT}", text)
    for placeholder in LIGHT:
        text = text.replace(placeholder, f"var({variable(placeholder)})")
    # several pictures stand on one page: a name that nothing refers to goes, the others are made from `hashsalt`
    used = set(re.findall(r"#([\w-]+)[\"')]", text))
    text = re.sub(r' id="([^"]+)"', lambda found: found[0] if found[1] in used else "", text)
    text = re.sub(r' (?:width|height)="[\d.]+pt"', "", text, count=2)
    _, _, across, _ = re.search(r'viewBox="([\d.]+) ([\d.]+) ([\d.]+) ([\d.]+)"', text).groups()  # type: ignore[union-attr]
    opening = f'<svg role="img" aria-label={quoteattr(title)} class="picture" data-name="{name}"'
    text = text.replace("<svg", f'{opening} style="max-width: {float(across) * 4 / 3:.0f}px; {_LINES}"', 1)
    head, rest = text.split(">", 1)
    lines = (line.strip() for line in f"{head}><title>{escape(title)}</title>{rest}".splitlines())
    return "\n".join(line for line in lines if line) + "\n"


def alone(picture: str, note: str) -> str:
    """The picture as a file of its own, that knows light and dark by itself; `note` is a comment in it."""
    head, rest = picture.split(">", 1)
    width = re.search(r"max-width: (\d+)px", head)
    size = f' width="{width[1]}"' if width else ""
    return f"<!-- {note} -->\n{head}{size}><style>{style()}</style>{rest}"
