"""arq: one sorted set, polled by every worker.

Settings: `max_jobs` 100 instead of 10 ("potentially hundreds" at once, says its first page); `poll_delay` 10 ms instead
of 500, since that is what its lateness consists of; `keep_result` 0, since results are not read; no log line for each
job. It has no call for many, and is fastest with 16 callers. After a crash a job comes back when its `job_timeout` and
10 seconds more are over.
"""

from __future__ import annotations

import importlib
from typing import Any, ClassVar

from bench.contest.client import LEASE, URL, Client, as_time, choose_loop
from bench.contest.tasks import handle_async

connections: Any = importlib.import_module("arq.connections")


async def handle(context: dict[str, Any], payload: str) -> None:
    await handle_async(payload)


class WorkerSettings:
    """For `arq bench.contest.peers.arq.WorkerSettings`."""

    functions: ClassVar = [handle]
    redis_settings = connections.RedisSettings.from_dsn(URL)
    max_jobs = 100
    poll_delay = 0.01
    keep_result = 0
    job_timeout = 300 if LEASE is None else max(1, LEASE - 10)


QUIET = {"version": 1, "disable_existing_loggers": False}
"""For `--custom-log-dict`: its command would write two lines for every job."""


class ArqClient(Client):
    callers = 16

    async def open(self) -> None:
        self._pool = await connections.create_pool(WorkerSettings.redis_settings)

    async def close(self) -> None:
        await self._pool.aclose()

    async def schedule(self, payload: str, due: int) -> None:
        await self._pool.enqueue_job("handle", payload, _defer_until=as_time(due))


choose_loop()
