"""The process that schedules: `python -m bench.contest.produce NAME`, in the environment of that contestant.

It is told what to do by lines of JSON on its standard input, and answers each with one on its standard output; the end
of the input ends it.

    {"do": "warm", "count": N}                               tasks that are due now, and count for nothing
    {"do": "concurrent" | "bulk", "count": N, "due": MS, "spread": MS}
                                                             tasks 1 ... N, the first due at `due`, the others evenly
                                                             over `spread`  ->  {"seconds": ..., "ended": NS}
    {"do": "pace", "count": N, "rate": PER_SECOND, "ahead": MS}
                                                             each due so long after it is scheduled
"""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import sys
import time
from typing import Any

from bench.contest.client import BATCH, Client, items_of, now, run
from bench.contest.tasks import WARM_UP, text


async def _pace(client: Client, count: int, rate: float, ahead: int) -> None:
    calls = []
    begun = time.monotonic()
    for number in range(count):
        pause = begun + number / rate - time.monotonic()
        if pause > 0:
            await asyncio.sleep(pause)
        due = now() + ahead
        calls.append(asyncio.create_task(client.schedule(text(number + 1, due), due)))
    await asyncio.gather(*calls)


async def _obey(client: Client, order: dict[str, Any]) -> dict[str, Any]:
    match order["do"]:
        case "warm":
            due = now()
            items = [(text(WARM_UP, 0), due)] * order["count"]
            half = len(items) // 2 if client.bulk else len(items)
            await client.schedule_all(items[:half])
            if half < len(items):
                await client.schedule_many(items[half:])
            return {}
        case "pace":
            await _pace(client, order["count"], order["rate"], order["ahead"])
            return {"ended": time.time_ns()}
        case "concurrent" | "bulk" as way:
            items = items_of(order["count"], order["due"], order["spread"])
            began = time.perf_counter()
            if way == "concurrent":
                await client.schedule_all(items)
            else:
                for first in range(0, len(items), BATCH):
                    await client.schedule_many(items[first : first + BATCH])
            return {"seconds": time.perf_counter() - began, "ended": time.time_ns()}
        case unknown:
            raise ValueError(f"no such order: {unknown}")


async def _produce(client: Client, out: int) -> None:
    await client.open()
    try:
        _say(out, {"ready": True, "bulk": client.bulk})
        while line := await asyncio.to_thread(sys.stdin.readline):
            _say(out, await _obey(client, json.loads(line)))
    finally:
        await client.close()


def _say(out: int, what: dict[str, Any]) -> None:
    os.write(out, json.dumps(what).encode() + b"\n")


def main() -> None:
    # what the library prints goes to standard error, so that only answers go to the output
    out = os.dup(1)
    os.dup2(2, 1)
    module = importlib.import_module(f"bench.contest.peers.{sys.argv[1]}")
    classes = [one for one in vars(module).values() if isinstance(one, type) and issubclass(one, Client)]
    [its] = [one for one in classes if one.__module__ == module.__name__]
    run(_produce(its(), out))


if __name__ == "__main__":
    main()
