"""A worker in a process of its own: `python -m tests.stores.redis.stopped_worker URL LEASE`.

Each line that it writes is an event, its key and its token. It ends when its input does.
"""

from __future__ import annotations

import asyncio
import sys

from tests.waiting import pause

from bide import Bide, Task
from bide.core.records import OutcomeKind, Record, Settlement
from bide.stores.redis import RedisStore


def say(what: str, key: str, token: int) -> None:
    sys.stdout.write(f"{what} {key} {token}\n")
    sys.stdout.flush()


async def main(url: str, lease: str) -> None:
    app = Bide(RedisStore(url), lease=lease, keep_done="0s")

    @app.handler("work", losses=1_000)
    async def work(task: Task[None]) -> None:
        say("delivered", task.key, task.record.token)
        await pause(0.02, why="there is something to interrupt")

    def observe(record: Record, settlement: Settlement) -> None:
        if settlement.outcome is OutcomeKind.DONE:
            say("done", record.key, record.token)

    async with app, app.worker(observe=observe):
        say("ready", "-", 0)
        await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
