"""Whether a figure that is looked at again and again grows: a robust slope, how sure it is, and what is allowed.

The slope is Theil and Sen's: the median of the slopes of all pairs of samples (H. Theil 1950, P. K. Sen 1968), which up
to 29 % of wild samples do not move. Its interval is Sen's own, from the spread of Kendall's rank statistic: the pairs'
slopes in order, and as many left out at either end as chance would put there in one of a hundred series that do not
grow. Both come from the samples alone, without a random number.

What a process holds is not noise around a line: it rises in steps while caches fill and arenas are opened, and then it
stays. So a figure *grows* only if three things are true of it after the warm-up:

- it rises, and not by chance: the whole interval lies above zero;
- it rises by more than is allowed, over the time that was looked at;
- it goes on rising: over the second half alone by more than half of what is allowed.

If the third is missing it has `settled`. A leak of one object for each task passes all three; see `allowed_bytes`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import combinations
from statistics import fmean, median

from msgspec import Struct

FLAT, SETTLED, GROWS = "flat", "settled", "grows"
WARM_UP = 0.2
"""The part of the time that is not looked at."""
_SURE = 2.576
"""Standard deviations on either side that hold 99 % of chance."""
_MOST = 120
"""Points that are compared with each other: more are put together first, each group by its median."""
_FEWEST = 4
MEBIBYTE = 1 << 20


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


def judge(points: Sequence[tuple[float, float]], allowed: float, *, period: float = 0.0) -> Slope | None:
    """Of samples (seconds, value) in the order of time, the first fifth left out. None: too few to say anything.

    `allowed`: by how much it may rise from the end of the warm-up to the last sample. Of a figure that goes up and down
    within a `period` (seconds), the median of each whole one is taken. O(min(n, 120)^2).
    """
    if not points:
        return None
    begins = points[0][0] + WARM_UP * (points[-1][0] - points[0][0])
    after = [(at, value) for at, value in points if at >= begins]
    kept = _together([(at / 60, value) for at, value in (_whole(after, period) if period else after)])
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


def _whole(points: Sequence[tuple[float, float]], period: float) -> Sequence[tuple[float, float]]:
    """One for each whole period, counted from the end."""
    groups: dict[int, list[tuple[float, float]]] = {}
    for at, value in points:
        groups.setdefault(int((points[-1][0] - at) / period), []).append((at, value))
    whole = int((points[-1][0] - points[0][0]) / period)
    return [
        (median(at for at, _ in groups[number]), median(value for _, value in groups[number]))
        for number in range(whole - 1, -1, -1)
        if number in groups
    ]


def _together(points: Sequence[tuple[float, float]]) -> Sequence[tuple[float, float]]:
    """At most `_MOST` of them, each the median of some that follow each other."""
    some = -(-len(points) // _MOST)
    if some <= 1:
        return points
    groups = [points[first : first + some] for first in range(0, len(points), some)]
    return [(median(at for at, _ in group), median(value for _, value in group)) for group in groups]


def allowed_bytes(mean: float) -> float:
    """By how much memory may rise: a fiftieth of what it is, at least a mebibyte (what an allocator takes at a time).

    The smallest leak that a Python program can have for each task is an object and the place that holds it, 24 bytes.
    At 500 tasks a second that is more than 8 MB in the twelve minutes of a quarter of an hour that are looked at.
    """
    return max(float(MEBIBYTE), mean / 50)


def allowed_blocks(mean: float) -> float:
    """Objects of Python's own allocator: what is under way varies; one for each task would be hundreds of thousands."""
    return max(5_000.0, mean / 50)


def allowed_files(mean: float) -> float:
    """Bytes on disk, and rows that are dead: they come and go by the megabyte, when the store tidies up."""
    return max(2.0 * MEBIBYTE, mean / 10)


def allowed_few(mean: float) -> float:
    """Threads, open files: connections come and go with load, a leak goes on."""
    return max(2.0, mean / 20)


def allowed_many(mean: float) -> float:
    """Tasks that wait, are remembered, dead rows."""
    return max(100.0, mean / 4)


def allowed_ms(mean: float) -> float:
    """Lateness: two milliseconds, or half of what it is."""
    return max(2.0, mean / 2)
