"""Many tasks put into a store before anything is measured."""

from __future__ import annotations

from bide.app import Bide
from bide.cli.bench.limits import BATCH, Limit, random_keys
from bide.cli.bench.plan import Plan
from bide.cli.bench.worker import PAYLOAD


async def fill(app: Bide, topic: str, count: int, *, delay: str, plan: Plan, limit: Limit | None = None) -> list[str]:
    """Put `count` tasks with random keys into the store, due after `delay`; their keys.

    With a `limit`, that is measured batch by batch beside it: an index costs more the larger it is, so a limit on a
    small table would say nothing of a large one.
    """
    keys: list[str] = []
    for first in range(0, count, BATCH):
        plan.progress(f"filling {topic}", first, count)
        if limit is not None:
            limit.measure()
        some = random_keys(min(BATCH, count - first))
        await app.schedule_many([app.new(topic, PAYLOAD, key=key, delay=delay) for key in some])
        keys += some
    return keys
