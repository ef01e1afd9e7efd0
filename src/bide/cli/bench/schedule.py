"""The workload `schedule`: how fast one process can register tasks, one by one, in a crowd, and in bulk."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from bide.app import Bide
from bide.cli.bench.crew import stage
from bide.cli.bench.limits import BATCH, limit_of, random_keys
from bide.cli.bench.plan import Plan, Report, per_second
from bide.cli.bench.worker import PAYLOAD

TOPIC = "bench.schedule"
CALLERS = 256
_ROUNDS = 20
_LONGEST_SINGLE = 0.5
"""Seconds of one round that go to single calls, which wait for the disk one after another."""


async def schedule(plan: Plan) -> Report:
    """N tasks in each of the three ways, in rounds that take turns with each other and with the raw limit."""
    count = plan.count(300_000)
    rounds = max(1, min(_ROUNDS, count // BATCH))
    size = -(-count // rounds)
    single: list[tuple[int, float]] = []
    concurrent: list[tuple[int, float]] = []
    bulk: list[tuple[int, float]] = []
    stored: list[str] = []
    faults: list[str] = []
    size_before = plan.place.size()
    server_growth, memory_growth = Growth(plan.place.size), Growth(resident_bytes)
    in_bulk = 0
    with limit_of(plan) as limit:
        async with stage(plan) as (app, _):
            for number in range(rounds):
                plan.progress("scheduling", number, rounds)
                limit.measure(max(1, size // BATCH))
                keys = random_keys(size)
                with server_growth.counted(), memory_growth.counted():
                    bulk.append(await _in_bulk(app, keys, faults))
                in_bulk += size
                stored += keys
                limit.measure(max(1, size // BATCH))  # again, so that its table grows as ours does
                keys = random_keys(size)
                with server_growth.counted():
                    concurrent.append(await _concurrently(app, keys, faults))
                stored += keys
                keys = random_keys(size)
                with server_growth.counted():
                    timed = await _one_by_one(app, keys, faults)
                single.append(timed)
                stored += keys[: timed[0]]
            plan.progress("checking", rounds, rounds)
            faults += await _missing(app, stored)
            file_growth = plan.place.size() - size_before
        if plan.place.owned:  # only after the close has everything been written to its place
            file_growth = plan.place.size() - size_before
        if plan.place.server is not None:
            grown = server_growth.bytes / len(stored)
        else:
            grown = file_growth / len(stored) if plan.place.shared else memory_growth.bytes / in_bulk
        figures = {
            "single_per_s": per_second(single),
            "concurrent_per_s": per_second(concurrent),
            "bulk_per_s": per_second(bulk),
            "bytes_per_task": round(grown),
        }
        return Report(fields={**figures, **limit.fields(figures)}, faults=faults)


class Growth:
    """How much is more afterwards, summed over what is done inside: on a server the raw limit grows beside ours."""

    def __init__(self, size: Callable[[], int]) -> None:
        self.bytes = 0
        self._size = size

    @contextmanager
    def counted(self) -> Iterator[None]:
        before = self._size()
        yield
        self.bytes += self._size() - before


async def _in_bulk(app: Bide, keys: Sequence[str], faults: list[str]) -> tuple[int, float]:
    began = time.perf_counter()
    for first in range(0, len(keys), BATCH):
        answers = await app.schedule_many(
            [app.new(TOPIC, PAYLOAD, key=key, delay="1h") for key in keys[first : first + BATCH]]
        )
        if not all(answer.ok for answer in answers):
            faults.append("schedule_many did not answer `created` for each task")
    return len(keys), time.perf_counter() - began


async def _concurrently(app: Bide, keys: Sequence[str], faults: list[str]) -> tuple[int, float]:
    ahead = iter(keys)

    async def caller() -> None:
        for key in ahead:
            answer = await app.schedule(TOPIC, PAYLOAD, key=key, delay="1h")
            if not answer.ok:
                faults.append(f"schedule answered {answer.result.value}")

    began = time.perf_counter()
    await asyncio.gather(*(caller() for _ in range(CALLERS)))
    return len(keys), time.perf_counter() - began


async def _one_by_one(app: Bide, keys: Sequence[str], faults: list[str]) -> tuple[int, float]:
    began = time.perf_counter()
    done = 0
    for key in keys:
        answer = await app.schedule(TOPIC, PAYLOAD, key=key, delay="1h")
        done += 1
        if not answer.ok:
            faults.append(f"schedule answered {answer.result.value}")
        if time.perf_counter() - began > _LONGEST_SINGLE:
            break
    return done, time.perf_counter() - began


async def _missing(app: Bide, keys: Sequence[str]) -> list[str]:
    """What was acknowledged must be there, with what it carried."""
    missing = 0
    for first in range(0, len(keys), BATCH):
        found = await app.get_many([(TOPIC, key) for key in keys[first : first + BATCH]])
        missing += sum(1 for task in found if task is None or task.payload_bytes != PAYLOAD)
    return [f"{missing} acknowledged tasks are not in the store"] if missing else []


def resident_bytes() -> int:
    """The memory of this process that is in use; 0 where the system does not tell."""
    try:
        return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0
