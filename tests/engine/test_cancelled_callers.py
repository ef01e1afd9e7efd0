"""A caller may be cancelled at any await of any verb: everybody else gets their answer, and nothing is kept."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from tests.engine.conftest import stores
from tests.waiting import PATIENCE

from bide import Bide

VERBS: dict[str, Callable[[Bide], Awaitable[object]]] = {
    "schedule": lambda app: app.schedule("t", key="k", group="g", delay="1h"),
    "schedule_many": lambda app: app.schedule_many([app.new("t", key=f"{n}", group="g", delay="1h") for n in range(9)]),
    "reschedule": lambda app: app.reschedule("t", "k", delay="2h"),
    "fire_many": lambda app: app.fire_many([("u", "k")]),
    "shift": lambda app: app.shift("g", "1h"),
    "cancel_group": lambda app: app.cancel_group("g"),
    "redrive": lambda app: app.redrive("t", "k"),
    "get": lambda app: app.get("t", "k"),
    "find": lambda app: anext(app.find(), None),
    "tally": lambda app: app.tally(["1h", "2h"]),
    "events": lambda app: app.events(),
    "pause": lambda app: app.pause("t"),
    "resume": lambda app: app.resume("t"),
    "open": lambda app: app.open(),
}


@stores("memory", "sqlite")
@pytest.mark.parametrize("verb", VERBS)
async def test_cancelled_at_every_await(store_url: str, verb: str) -> None:
    app = Bide(store_url, actor="ann")
    for turns in range(8):
        if verb != "open":
            await app.open()
            await app.schedule("t", key="k", group="g", delay="1h")
        beside = [asyncio.ensure_future(VERBS[verb](app)) for _ in range(2)]
        cancelled = asyncio.ensure_future(VERBS[verb](app))
        for _ in range(turns):
            await asyncio.sleep(0)
        cancelled.cancel()
        await asyncio.wait([cancelled], timeout=PATIENCE)
        async with asyncio.timeout(PATIENCE):
            await asyncio.gather(*beside)
            assert (await app.schedule("u", key="after", delay="1h")).ok
            assert await app.get("u", "after") is not None
            while app.open_in is not None:
                await app.close()
    assert {task for task in asyncio.all_tasks() if (task.get_name() or "").startswith("bide")} == set()
