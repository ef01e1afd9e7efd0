"""What is asked of a store is told once, however the store does it."""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

from bide import Bide, Task
from bide.stores.postgres.schema import SCHEMA
from bide.testing.history.events import Answered, Asked, Asks, Event, Settling
from bide.testing.history.recording import Journal, RecordedClient, Recording


async def test_what_is_asked_of_the_store_is_told_once(postgres_url: str, postgres_schema: str) -> None:
    """A verb over a group asks the store for its changes by itself."""
    told: list[Event] = []
    url = f"{postgres_url}?schema={postgres_schema}"
    await SCHEMA.migrate(url)
    app = Bide(url)
    journal = Journal(told.append, time_ns=time.monotonic_ns, clock=lambda: time.time_ns() // 1_000_000)
    app.instruments.append(Recording(journal, "one"))

    @app.handler("steady")
    async def steady(task: Task[Any]) -> None: ...

    async with app:
        client = RecordedClient(app, journal, "one/1")
        await client.schedule_many([client.new("steady", key=f"k{n}", group="g", delay="0s") for n in range(3)])
        await client.cancel_group("g")
        await client.schedule(client.new("steady", key="k4", delay="0s"))
        async with app.worker() as worker:
            await worker.until_empty()
    asked = Counter((one.asks, one.key) for one in told if isinstance(one, Asked))
    assert [asked[Asks.CANCEL, f"k{n}"] for n in range(3)] == [1, 1, 1]
    assert sum(isinstance(one, Answered) for one in told) == sum(asked.values())
    assert [one.key for one in told if isinstance(one, Settling)] == ["k4"]
