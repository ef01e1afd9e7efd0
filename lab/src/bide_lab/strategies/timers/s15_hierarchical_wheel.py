"""S15: near times in fine buckets, far times in coarse ones that are filed again when they begin."""

from __future__ import annotations

from bide.timers import HierarchicalWheel
from bide_lab.figures import Figures
from bide_lab.strategies.timers.in_process import InMemory
from bide_lab.strategy import GONE, Flaw

_PAUSE = 200_000
"""Nanoseconds in one go that are worth a word: a fifth of the millisecond that it promises."""


def _filed_again(seen: Figures) -> str:
    pauses = {int(size): spent for size, spent in seen.curve.get("pause_ns", {}).items()}
    most = max(pauses, default=0)
    if not most or pauses[most] < _PAUSE:
        return ""
    return f"with {most:,} waiting one step of a millisecond takes {pauses[most] / 1e6:,.1f} ms"


class HierarchicalWheels(InMemory):
    """Wheels of 256 buckets, each bucket of which is one whole turn of the finer wheel."""

    name = "S15"
    title = "hierarchical wheel"
    flaws = (
        GONE,
        Flaw("a coarse bucket that begins is filed again in one go, and holds up what is due", "cost", _filed_again),
    )
    kind_of_timer = HierarchicalWheel
