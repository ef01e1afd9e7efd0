"""procrastinate: a table, polled; a NOTIFY tells of new jobs, but of none that is due later.

Settings: `fetch_job_polling_interval`, of which its lateness consists, at 10 ms instead of 5 s; `concurrency` 30 with
as many connections; `delete_jobs` always, since results are not read. `batch_defer_async` is its call for many,
which share one due time. It is fastest with 16 callers. After a crash nothing comes back by itself: its page on stalled
jobs says to look for them and retry them, which for `crash` each worker does every second, by heartbeats a third of the
lease apart.
"""

from __future__ import annotations

import asyncio
import importlib
import sys
from collections.abc import Sequence
from itertools import groupby
from typing import Any

from bench.contest.client import LEASE, URL, Client, Item, as_time, run
from bench.contest.tasks import handle_async

procrastinate: Any = importlib.import_module("procrastinate")
_CONCURRENCY = 30

app = procrastinate.App(connector=procrastinate.PsycopgConnector(conninfo=URL, min_size=4, max_size=_CONCURRENCY))


async def _handle(payload: str) -> None:
    await handle_async(payload)


handle = app.task(name="handle")(_handle)


class ProcrastinateClient(Client):
    callers = 16
    bulk = True

    async def open(self) -> None:
        await app.open_async()

    async def close(self) -> None:
        await app.close_async()

    async def schedule(self, payload: str, due: int) -> None:
        await handle.configure(schedule_at=as_time(due)).defer_async(payload=payload)

    async def schedule_many(self, items: Sequence[Item]) -> None:
        """By its public call where all are due together; jobs with times of their own it takes one level below."""
        if len({due for _, due in items}) == 1:
            deferrer = handle.configure(schedule_at=as_time(items[0][1]))
            await deferrer.batch_defer_async(*({"payload": payload} for payload, _ in items))
            return
        made = [
            handle.configure(schedule_at=as_time(due)).make_new_job(payload=payload)
            for due, same in groupby(items, key=lambda item: item[1])
            for payload, _ in same
        ]
        await app.job_manager.batch_defer_jobs_async(jobs=made)


async def _recover(lease: int) -> None:
    while True:
        await asyncio.sleep(1)
        for job in await app.job_manager.get_stalled_jobs(seconds_since_heartbeat=lease):
            await app.job_manager.retry_job(job)


async def work() -> None:
    """A worker, until it is ended."""
    async with app.open_async():
        recovering = None if LEASE is None else asyncio.create_task(_recover(LEASE))
        beats = {} if LEASE is None else {"update_heartbeat_interval": LEASE / 3, "stalled_worker_timeout": LEASE}
        await app.run_worker_async(
            concurrency=_CONCURRENCY, fetch_job_polling_interval=0.01, delete_jobs="always", **beats
        )
        if recovering is not None:
            recovering.cancel()


async def set_up() -> None:
    """Make its tables."""
    async with app.open_async():
        await app.schema_manager.apply_schema_async()


if __name__ == "__main__":  # its command is told of another app by an import path, and of no connection's size
    run(set_up() if sys.argv[1:] == ["setup"] else work())
