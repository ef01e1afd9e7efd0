"""docket (pydocket): streams and a sorted set; a worker moves what is due from the set to the stream.

Settings, from its page on production: `execution_ttl=0` ("maximum throughput": no state, no results); `concurrency` as
high as bide's, since a worker that is full sleeps for `minimum_check_interval`; and both intervals at 10 ms instead of
100 and 250, since they are what its lateness consists of. `add_many` is its call for many. `redelivery_timeout` is what
is called a lease elsewhere.
"""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from bench.contest.client import LEASE, URL, Client, Item, as_time, run
from bench.contest.tasks import SECONDS, ended, started

docket: Any = importlib.import_module("docket")  # it is in this contestant's own environment only


async def handle(payload: str) -> None:
    started(payload)
    if SECONDS:
        await asyncio.sleep(SECONDS)
        ended(payload)


def make_docket() -> Any:
    return docket.Docket(name="bench", url=URL, execution_ttl=timedelta(0))


class DocketClient(Client):
    callers = 16
    bulk = True

    async def open(self) -> None:
        self._docket = make_docket()
        await self._docket.__aenter__()
        self._docket.register(handle)

    async def close(self) -> None:
        await self._docket.__aexit__(None, None, None)

    async def schedule(self, payload: str, due: int) -> None:
        await self._docket.add(handle, when=as_time(due))(payload)

    async def schedule_many(self, items: Sequence[Item]) -> None:
        call = self._docket.call
        await self._docket.add_many([call(handle, when=as_time(due))(payload) for payload, due in items])


CLIENT = DocketClient


async def work() -> None:
    """A worker, until it is ended."""
    async with make_docket() as opened:
        opened.register(handle)
        worker = docket.Worker(
            opened,
            concurrency=int(__import__("os").environ.get("X", "50")),
            minimum_check_interval=timedelta(milliseconds=10),
            scheduling_resolution=timedelta(milliseconds=10),
            **({} if LEASE is None else {"redelivery_timeout": timedelta(seconds=LEASE)}),
        )
        async with worker:
            await worker.run_forever()


if __name__ == "__main__":  # its command cannot set `execution_ttl`
    run(work())
