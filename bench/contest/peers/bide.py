"""bide: its shipped defaults, for the client and for `bide work`.

But for the handler's `concurrency`, which is 1000 as in the documentation's burst of messages (docs/scenarios.md): what
holds nothing while it runs need not be held back. What ended is deleted at once, as the others keep no results.
"""

from __future__ import annotations

from collections.abc import Sequence

from bench.contest.client import URL, Client, Item, as_time
from bench.contest.tasks import handle_async

from bide import Bide, Task
from bide.cli import main

app = Bide(URL, keep_done="0s", keep_cancelled="0s")


@app.handler("bench.peers", concurrency=1000)
async def handle(task: Task[bytes]) -> None:
    await handle_async(task.payload.decode())


class BideClient(Client):
    bulk = True

    async def open(self) -> None:
        await app.__aenter__()

    async def close(self) -> None:
        await app.__aexit__(None, None, None)

    async def schedule(self, payload: str, due: int) -> None:
        await handle.schedule(payload.encode(), at=as_time(due))

    async def schedule_many(self, items: Sequence[Item]) -> None:
        await handle.schedule_many([handle.new(payload.encode(), at=as_time(due)) for payload, due in items])


if __name__ == "__main__":  # its tables are made by the command that users have for it
    main(["migrate", "--store", URL])
