"""A worker in a process of its own: `python stopped_worker.py URL LEASE`. Each line it writes is an event and its time.

It ends when its standard input does.
"""

from __future__ import annotations

import asyncio
import sys
import time

from bide import Bide, Task
from bide.core.records import Record, Settlement
from bide.stores.redis import RedisStore


def say(what: str, key: str) -> None:
    sys.stdout.write(f"{what} {key} {time.monotonic()}\n")
    sys.stdout.flush()


async def main(url: str, lease: str) -> None:
    app = Bide(RedisStore(url), lease=lease)

    @app.handler("work", losses=100)
    async def work(task: Task[None]) -> None:
        say("delivered", task.key)
        await asyncio.sleep(0.02)

    def observe(record: Record, settlement: Settlement) -> None:
        say("settled", record.key)

    async with app, app.worker(observe=observe):
        say("ready", "-")
        await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
