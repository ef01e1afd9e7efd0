"""The settler on a store of several parts: one that is away holds back nobody else's outcomes."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from tests.waiting import until

from bide import Bide, StoreUnavailable, Task
from bide.core.instants import Millis
from bide.core.records import Settlement
from bide.stores.memory import MemoryStore


class TwoParts(MemoryStore):
    """A store of two parts, of which the second does not answer until it is `back`."""

    def __init__(self) -> None:
        super().__init__()
        self.back = asyncio.Event()
        self.asked: list[list[str]] = []

    def part_of(self, topic: str, key: str) -> int:
        return int(key.startswith("away"))

    async def settle(self, outcomes: Sequence[Settlement], *, now: Millis) -> list[bool]:
        self.asked.append([one.key for one in outcomes])
        if any(self.part_of(one.topic, one.key) for one in outcomes) and not self.back.is_set():
            await self.back.wait()
            raise StoreUnavailable("it was away")
        return await super().settle(outcomes, now=now)


async def test_who_is_away_holds_back_nobody_else() -> None:
    store = TwoParts()
    app = Bide(store)

    @app.handler("work")
    async def work(task: Task[Any]) -> None: ...

    async with app, app.worker() as worker:
        try:
            for name in ("away-1", "here-1"):
                await app.schedule("work", None, key=name, delay="0s")
            await until(lambda: worker.stats.done == 1, "the one that is here")
            await app.schedule("work", None, key="here-2", delay="0s")
            await until(lambda: worker.stats.done == 2, "the next one")
            assert await app.get("work", "away-1") is not None
        finally:
            store.back.set()
        await worker.until_empty()
        assert (worker.stats.done, worker.stats.lost) == (3, 0)
    assert all(len({key.split("-")[0] for key in batch}) == 1 for batch in store.asked)
