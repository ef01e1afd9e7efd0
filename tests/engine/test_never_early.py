"""Never early: no handler starts before its planned time, nor a part of a millisecond before the delay that its caller
asked for is over, by the exact clock, whatever the event loop's timers do.

Timers fire early: uvloop's by up to 1.2 ms, four times out of ten. So the first line of each handler reads the clock in
nanoseconds, and hundreds of short delays leave no room for luck.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from tests.waiting import not_before, pause

from bide import Bide, Task

WAVE = 50
MICROSECOND = timedelta(microseconds=1)
MILLISECOND = 1_000_000
"""In nanoseconds."""


def uvloop() -> asyncio.AbstractEventLoop:
    loop: asyncio.AbstractEventLoop = pytest.importorskip("uvloop").new_event_loop()
    return loop


LOOPS: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {"asyncio": asyncio.new_event_loop, "uvloop": uvloop}
TIMERS = {"memory": 2_000, "threads": 300, "a file": 500, "a server": 500}
"""Short timers in each place."""


async def late_by(url: str, timers: int, *, threads: bool = False) -> list[int]:
    """Nanoseconds from when it may start to the first line of the handler, of so many short timers."""
    app, chance = Bide(url), random.Random(7)
    asked: dict[str, int] = {}
    late: list[int] = []

    def note(task: Task[Any]) -> None:
        late.append(time.time_ns() - max(task.record.planned_at * MILLISECOND, asked[task.key]))

    if threads:

        @app.handler("tick")
        def ticks(task: Task[Any]) -> None:
            note(task)
    else:

        @app.handler("tick")
        async def tick(task: Task[Any]) -> None:
            note(task)

    async with app, app.worker() as worker:
        for _ in range(timers // WAVE):
            tasks = []
            for _ in range(WAVE):
                delay = timedelta(milliseconds=chance.uniform(1, 50))
                tasks.append(app.new("tick", delay=delay))
                asked[tasks[-1].key] = time.time_ns() + delay // MICROSECOND * 1_000
            await app.schedule_many(tasks)
            await pause(chance.uniform(0, 0.02), why="the waves come at any part of a millisecond")
        await worker.until_empty()
    return late


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("where", TIMERS)
def test_no_handler_starts_early(request: pytest.FixtureRequest, tmp_path: Path, where: str, loop: str) -> None:
    """The server's clock is this machine's, so that what it calls due can be compared."""
    url = f"sqlite:///{tmp_path}/ticks.db" if where == "a file" else "memory:"
    if where == "a server":
        server, name = request.getfixturevalue("redis_url"), request.getfixturevalue("redis_namespace")
        url = f"{server}?namespace={name}"
    with asyncio.Runner(loop_factory=LOOPS[loop]) as runner:
        late = runner.run(late_by(url, TIMERS[where], threads=where == "threads"))
    assert len(late) == TIMERS[where]
    not_before(min(late), 0, f"one of {sum(one < 0 for one in late)} handlers, by nanoseconds,")
