"""docket (pydocket): a sorted set, from which workers move what is due to a stream.

Settings, from its page on production: `execution_ttl=0` ("maximum throughput": no state, no results); `concurrency` 50
(with 100 a worker uses up the 100 connections of redis-py's pool, and stops for seconds); both intervals, of which its
lateness consists and for one of which a full worker sleeps, at 10 ms instead of 100 and 250. `add_many` is its call for
many. It is fastest with 16 callers. `redelivery_timeout` is what others call a lease.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from bench.contest.client import LEASE, URL, Client, Item, as_time, run
from bench.contest.tasks import handle_async

docket: Any = importlib.import_module("docket")  # it is in this contestant's own environment only


async def handle(payload: str) -> None:
    await handle_async(payload)


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


async def work() -> None:
    """A worker, until it is ended."""
    async with make_docket() as opened:
        opened.register(handle)
        worker = docket.Worker(
            opened,
            concurrency=50,
            minimum_check_interval=timedelta(milliseconds=10),
            scheduling_resolution=timedelta(milliseconds=10),
            **({} if LEASE is None else {"redelivery_timeout": timedelta(seconds=LEASE)}),
        )
        async with worker:
            await worker.run_forever()


if __name__ == "__main__":  # its command cannot set `execution_ttl`
    run(work())
