"""SAQ: a sorted set that one worker a second empties into a list, on which all wait.

Settings: `concurrency` 50 instead of 10; `max_concurrent_ops` 64 instead of 20, with as many callers, which is where it
is fastest; `ttl` -1, since results are not read; `retries` 3, since with its default of one attempt a job that a dead
worker held is not tried again. `scheduled` is in whole seconds and the timer `schedule` cannot be less than one, so
that a lateness of up to two seconds is by design. It has no call for many (`batch` only aborts together). After a crash
a job is swept when its `timeout` is over; for `crash` that is the lease, and the timer `sweep` 5 seconds instead of 60.
"""

from __future__ import annotations

import importlib
from typing import Any

from bench.contest.client import LEASE, URL, Client, choose_loop
from bench.contest.tasks import handle_async

saq: Any = importlib.import_module("saq")


async def handle(context: dict[str, Any], *, payload: str) -> None:
    await handle_async(payload)


queue = saq.Queue.from_url(URL, max_concurrent_ops=64)

settings = {"queue": queue, "functions": [handle], "concurrency": 50, "timers": {} if LEASE is None else {"sweep": 5}}
"""For `saq bench.contest.peers.saq.settings`."""


class SaqClient(Client):
    callers = 64

    async def open(self) -> None:
        await queue.connect()

    async def close(self) -> None:
        await queue.disconnect()

    async def schedule(self, payload: str, due: int) -> None:
        await queue.enqueue(
            "handle",
            payload=payload,
            scheduled=-(-due // 1000),
            ttl=-1,
            retries=3,
            **({} if LEASE is None else {"timeout": LEASE}),
        )


choose_loop()
