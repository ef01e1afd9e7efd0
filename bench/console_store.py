"""A store as a busy shop's is the evening before: a million tasks wait, and one second has many of them."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator

from bide import Bide, NewTask
from bide.core.instants import as_datetime

TOPICS = (
    "order.close", "order.remind", "order.archive", "coupon.remind", "post.publish", "payment.notify", "review.default",
    "meal.done", "subscription.renew", "event.remind",
)  # fmt: skip
PEAK = 41_000
"""Tasks that one second has, of a million; of fewer, as many of them."""
GROUP = "event-summer"
"""The group of the first five hundred tasks of event.remind."""
_GROUPED = 500
_AHEAD = 24 * 3_600_000
_BATCH = 1_000
_AT_ONCE = 4


def peak_of(tasks: int) -> int:
    """How many of so many are due in the one second."""
    return tasks * PEAK // 1_000_000


async def fill(store: str, tasks: int) -> int:
    """Put them there, due over the next 24 hours; the second with the peak, in milliseconds since the epoch.

    Nearly all of the peak is coupon.remind, as when coupons end at one hour; the rest is order.close.
    """
    async with Bide(store) as app:
        start = app.clock.now() // 1_000 * 1_000
        peak = start + _AHEAD // 2
        chance = random.Random(8420)
        waiting: set[asyncio.Task[object]] = set()
        for batch in _batches(app, tasks, start, peak, chance):
            waiting.add(asyncio.ensure_future(app.schedule_many(batch)))
            if len(waiting) >= _AT_ONCE:
                done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                for one in done:
                    one.result()
        await asyncio.gather(*waiting)
    return peak


def _batches(app: Bide, tasks: int, start: int, peak: int, chance: random.Random) -> Iterator[list[NewTask]]:
    """Made one at a time, as they are asked for."""
    batch: list[NewTask] = []
    at_peak, grouped = peak_of(tasks), 0
    for number in range(tasks):
        if number < at_peak:
            topic, due = "order.close" if number % 41 == 0 else "coupon.remind", peak + number % 1_000
        else:
            topic, due = TOPICS[number % len(TOPICS)], start + 60_000 + chance.randrange(_AHEAD - 60_000)
        group = None
        if topic == "event.remind" and grouped < _GROUPED:
            group, grouped = GROUP, grouped + 1
        payload = {"number": number, "customer": f"c{number % 9973}"}
        batch.append(app.new(topic, payload, key=f"{number:07d}", at=as_datetime(due), group=group))
        if len(batch) == _BATCH:
            yield batch
            batch = []
    if batch:
        yield batch
