"""Dramatiq: a list of delayed messages, all of which the workers take into their memory until they are due.

Settings: 8 threads, its default for a process; `dramatiq_worker_timeout` 10 ms instead of 1000, since that is what its
lateness consists of; `dramatiq_queue_prefetch` 1,000 and `dramatiq_delay_queue_prefetch` 50,000, so that a burst fits.
It has no call for many, and is fastest with 2 callers. After a crash messages come back when the worker has not been
heard of for `heartbeat_timeout`; that is checked at random, `maintenance_chance` of a million commands, which is
raised for `crash`.
"""

from __future__ import annotations

import importlib
from typing import Any

from bench.contest import tasks
from bench.contest.client import LEASE, URL, BlockingClient, delay_until

dramatiq: Any = importlib.import_module("dramatiq")
brokers: Any = importlib.import_module("dramatiq.brokers.redis")

broker = brokers.RedisBroker(
    url=URL, **({} if LEASE is None else {"heartbeat_timeout": LEASE * 1000, "maintenance_chance": 100_000})
)
dramatiq.set_broker(broker)


handle = dramatiq.actor(tasks.handle, actor_name="handle")


class DramatiqClient(BlockingClient):
    callers = 2

    def send(self, payload: str, due: int) -> None:
        handle.send_with_options(args=(payload,), delay=delay_until(due))
