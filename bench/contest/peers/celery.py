"""Celery: a list; workers take every task at once, whenever it is due, and keep it in memory until then.

Settings: a pool of 8 threads, which here does more than processes; results ignored; `task_acks_late`, without which a
task that was running when its worker died is gone; `worker_prefetch_multiplier` 128, as its page on optimizing says for
many short tasks. It has no call for many, and is fastest with one caller. After a crash tasks come back when
`visibility_timeout` is over; that must be longer than the longest delay, or each task is delivered again and again, so
it is only lowered for `crash`, and so are `unacked_restore_interval` and `unacked_restore_throttle`, to 1.
"""

from __future__ import annotations

import importlib
from typing import Any

from bench.contest import tasks
from bench.contest.client import LEASE, URL, BlockingClient, as_time

celery: Any = importlib.import_module("celery")

app = celery.Celery("bench", broker=URL)
app.conf.update(
    task_ignore_result=True,
    task_acks_late=True,
    worker_prefetch_multiplier=128,
    broker_connection_retry_on_startup=True,
    broker_transport_options={}
    if LEASE is None
    else {"visibility_timeout": LEASE, "unacked_restore_interval": 1, "unacked_restore_throttle": 1},
)


handle = app.task(tasks.handle, name="handle")


class CeleryClient(BlockingClient):
    def send(self, payload: str, due: int) -> None:
        handle.apply_async((payload,), eta=as_time(due))
