"""Decides if a figure grows that is sampled again and again: a robust slope, its interval, and the rise allowed.

The slope is Theil and Sen's: the median of the slopes of all pairs of samples (H. Theil 1950, P. K. Sen 1968), which up
to 29 % of wild samples do not move. Its interval is Sen's own, from the spread of Kendall's rank statistic: the pairs'
slopes in order, and as many left out at either end as chance would put there in one of a hundred series that do not
grow. Both come from the samples alone, without a random number.

What a process holds is not noise around a line: it rises in steps while caches fill and arenas are opened, and then it
stays. So a figure *grows* only if three things are true of it after the warm-up:

- it rises, and not by chance: the whole interval lies above zero;
- it rises by more than is allowed, over the time that was looked at;
- it goes on rising: over the second half alone by more than half of what is allowed.

If the third is missing it has `settled`. A leak of one object for each task passes all three; see `BYTES`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import combinations
from statistics import fmean, median
from typing import Any, NamedTuple

from msgspec import Struct
from msgspec.structs import asdict

from bide.cli.bench.plan import rounded
from bide.engine.keeper import PURGE_EVERY

FLAT, SETTLED, GROWS = "flat", "settled", "grows"
WARM_UP = 0.2
"""The part of the time that is not looked at."""
_SURE = 2.576
"""Standard deviations on either side that hold 99 % of chance."""
_MOST = 120
"""Points that are compared with each other: more are put together first, each group by its median."""
_FEWEST = 4
MEBIBYTE = 1 << 20
LEAST = 300.0
"""Seconds of a run whose slopes count."""


class Allowed(NamedTuple):
    """By how much a figure may rise over the time that is looked at: by a part of what it is, at least by so much."""

    part: float
    least: float

    def of(self, mean: float) -> float:
        """In the unit of the figure."""
        return max(self.least, mean * self.part)


BYTES = Allowed(1 / 50, float(MEBIBYTE))
"""Memory; a mebibyte is what an allocator takes at a time. The smallest leak that a Python program can have for each
task is an object and the place that holds it, 24 bytes. At 500 tasks a second that is more than 8 MB in the twelve
minutes of a quarter of an hour that are looked at."""
BLOCKS = Allowed(1 / 50, 5_000.0)
"""Objects of Python's own allocator: what is under way varies; one for each task would be hundreds of thousands."""
FILES = Allowed(1 / 10, 2.0 * MEBIBYTE)
"""Bytes on disk: they come and go by the megabyte, when the store tidies up."""
FEW = Allowed(1 / 20, 2.0)
"""Threads, open files: connections come and go with load, a leak goes on."""
MANY = Allowed(1 / 4, 100.0)
"""Tasks that wait, are remembered, dead rows."""
LATENESS = Allowed(1 / 2, 2.0)
"""Milliseconds."""
_ALLOWED: Mapping[str, Allowed] = {
    **dict.fromkeys(("resident", "private", "used_bytes"), BYTES),
    **dict.fromkeys(("file_bytes", "wal_bytes", "table_bytes", "index_bytes", "bytes"), FILES),
    **dict.fromkeys(("descriptors", "threads", "processes"), FEW),
    **dict.fromkeys(("rows", "history", "live", "remembered"), MANY),
    **dict.fromkeys(("late_p50_ms", "late_p99_ms"), LATENESS),
    "blocks": BLOCKS,
}
"""By the end of a figure's name, the longest that fits. What is not here is only written down."""


class Slope(Struct, frozen=True, kw_only=True):
    """How one figure went; in its own unit."""

    mean: float
    first: float
    """The median of the first tenth after the warm-up."""
    last: float
    """The median of the last tenth."""
    per_minute: float
    low: float
    high: float
    """Where the slope lies, per minute, with 99 % certainty."""
    percent_per_hour: float
    """Of the mean; 0 where that is 0."""
    allowed: float
    """Over the time that was looked at."""
    verdict: str

    def rounded(self) -> dict[str, Any]:
        """As it is written down."""
        return {part: rounded(value) if isinstance(value, float) else value for part, value in asdict(self).items()}

    def __str__(self) -> str:
        return f"{rounded(self.per_minute)} a minute, from {rounded(self.first)} to {rounded(self.last)}"


def judge(points: Sequence[tuple[float, float]], allowed: float, *, period: float = 0.0) -> Slope | None:
    """Of samples (seconds, value) in the order of time, the first fifth left out. None: too few to say anything.

    `allowed`: by how much it may rise from the end of the warm-up to the last sample. Of a figure that goes up and down
    within a `period` (seconds), the median of each whole one is taken. O(min(n, 120)^2).
    """
    if not points:
        return None
    begins = points[0][0] + WARM_UP * (points[-1][0] - points[0][0])
    after = [(at, value) for at, value in points if at >= begins]
    kept = [(at / 60, value) for at, value in _medians(after, period)]
    if len(kept) < _FEWEST or kept[-1][0] <= kept[0][0]:
        return None
    low, slope, high = interval(kept)
    span = kept[-1][0] - kept[0][0]
    mean = fmean(value for _, value in kept)
    tenth = max(1, len(kept) // 10)
    verdict = FLAT
    if low > 0 and slope * span > allowed:
        _, later, _ = interval(kept[len(kept) // 2 :])
        verdict = GROWS if later * span > allowed else SETTLED
    return Slope(
        mean=mean, first=median(value for _, value in kept[:tenth]), last=median(value for _, value in kept[-tenth:]),
        per_minute=slope, low=low, high=high, percent_per_hour=6000 * slope / mean if mean else 0.0,
        allowed=allowed, verdict=verdict,
    )  # fmt: skip


def interval(points: Sequence[tuple[float, float]]) -> tuple[float, float, float]:
    """The lower end, the slope, and the upper end. With one point: nothing is known, the slope is 0. O(n^2 log n).

    >>> interval([(0, 1.0), (1, 2.0), (2, 3.0)])
    (1.0, 1.0, 1.0)
    """
    slopes = sorted((right[1] - left[1]) / (right[0] - left[0]) for left, right in combinations(points, 2)
                    if right[0] != left[0])  # fmt: skip
    if not slopes:
        return -math.inf, 0.0, math.inf
    number = len(points)
    spread = _SURE * math.sqrt(number * (number - 1) * (2 * number + 5) / 18)
    at = max(0, math.floor((len(slopes) - spread) / 2))
    return slopes[at], median(slopes), slopes[-1 - at]


def _medians(points: Sequence[tuple[float, float]], period: float) -> Sequence[tuple[float, float]]:
    """One point for each whole period, counted from the end, and no more than `_MOST`; all if there is no period."""
    span = points[-1][0] - points[0][0]
    length = max(period, span / _MOST) if period or len(points) > _MOST else 0.0
    if not length:
        return points
    groups: dict[int, list[tuple[float, float]]] = {}
    for at, value in reversed(points):
        groups.setdefault(int((points[-1][0] - at) / length), []).append((at, value))
    return [
        (median(at for at, _ in group), median(value for _, value in group))
        for number, group in reversed(groups.items())
        if number < int(span / length)
    ]


def judged(samples: Sequence[Mapping[str, Any]]) -> dict[str, Slope]:
    """The slope of every figure of the samples that may not grow, by its name."""
    found: dict[str, Slope] = {}
    long = bool(samples) and samples[-1]["at"] - samples[0]["at"] >= LEAST * 0.9
    for name in dict.fromkeys(name for sample in samples for name in sample):
        kind = max((one for one in _ALLOWED if name == one or name.endswith(f"_{one}")), key=len, default=None)
        if kind is None:
            continue
        points = [(float(one["at"]), float(one[name])) for one in samples if name in one]
        allowed = _ALLOWED[kind].of(fmean(value for _, value in points))
        # what has ended is forgotten once a minute, and databases tidy up as often
        period = PURGE_EVERY if name.startswith(("store_", "server_", "remembered")) and long else 0.0
        slope = judge(points, allowed, period=period)
        if slope is not None:
            found[name] = slope
    return found
