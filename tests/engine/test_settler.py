"""The settler: a part of a store that is away holds back nobody else's outcomes, and it always comes to an end."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace
from tests.engine.conftest import nothing
from tests.waiting import forever, until

from bide import Bide, StoreUnavailable
from bide.core.instants import Millis
from bide.core.records import OutcomeKind, Settlement
from bide.engine.delivery.settler import Settler
from bide.ports import Features
from bide.stores.memory import MemoryStore
from bide.testing.clock import ManualClock


class TwoParts(MemoryStore):
    """A store of two parts, of which the second does not answer until it is `back`."""

    def __init__(self) -> None:
        super().__init__()
        self.back = asyncio.Event()
        self.asked: list[list[str]] = []

    @property
    def features(self) -> Features:
        return replace(super().features, parts=self)

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
    app.handler("work")(nothing)
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


@pytest.mark.parametrize("begun", [False, True], ids=["before its first step", "in the middle of a call"])
async def test_it_can_be_drained_after_its_task_was_cancelled(*, begun: bool) -> None:
    """As asyncio.run does with every task once. What was on its way is delivered again, what comes after is settled."""
    told, calls = list[str](), asyncio.Event()
    delivery: Any = SimpleNamespace(expires=1.0)

    async def settle(outcomes: Sequence[Settlement], *, now: Millis) -> list[bool]:
        if not calls.is_set():
            calls.set()
            await forever()
        return [True] * len(outcomes)

    store = MemoryStore()
    store.settle = settle  # type: ignore[method-assign]
    settler = Settler(store, ManualClock(), lambda _, outcome, accepted: told.append(outcome.key), lambda: False)
    settler.put(delivery, Settlement("work", "cut", 1, OutcomeKind.DONE))
    outbox = settler._outboxes[0]
    await (until(calls.is_set, "its call") if begun else asyncio.sleep(0))
    settler.put(delivery, Settlement("work", "next", 1, OutcomeKind.DONE))
    assert outbox._task is not None
    outbox._task.cancel()
    calls.set()
    await settler.drain()
    settler.put(delivery, Settlement("work", "last", 1, OutcomeKind.DONE))
    await settler.drain()
    assert told == ["next", "last"]
