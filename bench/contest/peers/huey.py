"""Huey: a list; a worker puts what is not due yet into a sorted set, which is looked through once a second.

Settings: 2 threads, with which it does most (8 where handlers sleep); the scheduler's interval is at its least, a
second; no results. It has no call for many, and is fastest with 2 callers. A task is taken off before it is executed,
and nothing brings back what a dead worker held; that includes all that its scheduler took out in that second and had
not yet put into the list.
"""

from __future__ import annotations

import importlib
from typing import Any

from bench.contest import tasks
from bench.contest.client import URL, BlockingClient, delay_until

library: Any = importlib.import_module("huey")

huey = library.RedisHuey("bench", url=URL, results=False)


handle = huey.task()(tasks.handle)


class HueyClient(BlockingClient):
    callers = 2

    def send(self, payload: str, due: int) -> None:
        handle.schedule((payload,), delay=delay_until(due) / 1000)
