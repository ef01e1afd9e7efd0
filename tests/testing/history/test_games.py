"""Histories as they are recorded, played at random, and reported."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from random import Random
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.testing.history.games import Game

from bide import Bide, Task
from bide.core.records import State
from bide.stores.postgres.schema import SCHEMA
from bide.testing.history.check import check
from bide.testing.history.events import Answered, Asked, Asks, Event, Held, Leased, Leasing, Seen, Settling
from bide.testing.history.recording import Journal, RecordedClient, Recording
from bide.testing.history.report import Violation


def game(seed: int, steps: int, *, lossy: float, slow: int) -> list[Event]:
    return asyncio.run(Game(Random(seed), lossy=lossy, slow=slow).play(steps))


@settings(max_examples=150)
@given(
    seed=st.integers(0, 2**32), steps=st.integers(1, 120), lossy=st.sampled_from([0.0, 0.1, 0.3]),
    slow=st.sampled_from([0, 3, 40, 200]),
)  # fmt: skip
def test_whatever_a_right_store_does_is_accepted(seed: int, steps: int, lossy: float, slow: int) -> None:
    report = check(game(seed, steps, lossy=lossy, slow=slow))
    assert [str(one) for one in report.violations] == []
    assert report.undecided == []


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


def held(key: str) -> Held:
    return Held("t", key, Seen(f"id-{key}", State.LEASED, 5, 9, 5, 1, 0, 0, 7_000, 1))


def test_of_a_lease_of_many_tasks_only_its_own_is_told() -> None:
    leasing = Leasing(1, "worker-1", 1_000_000, 5, {"t": 10}, 9)
    leased = Leased(1, 3_000_000, 5, [held("a"), held("b"), held("c")], None)
    told = str(Violation("P1", "t", "b", "leased 3 ms before its wake", [leasing, leased]))
    first, second, third = told.splitlines()
    assert first == "P1 t/b: leased 3 ms before its wake"
    assert "+0.000 ms  leasing" in second
    assert "+2.000 ms  leased" in third
    assert "key=b" in third
    assert "key=a" not in third
    assert "key=c" not in third
