"""Workloads of strategies in one process's memory: the cost of an operation, a lap, a time-out that is put off."""

from __future__ import annotations

import asyncio
import gc
import random
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import msgspec

from bide_bench.plan import rounded, uncollected
from bide_bench.timers import OPERATIONS, BideTimer, Contestant, timed_round
from bide_lab.figures import Figures
from bide_lab.journal import curve
from bide_lab.processes import Step, resident
from bide_lab.strategy import now
from bide_lab.workload import HOUR, Trial, batches, keys_of, processor_share, unless, workload

_ROUNDS = 15
_BATCH = 1_000
_ALIKE = 100_000
"""Tasks in all, in as many structures as that takes, over which memory is measured: a few pages more do not tell."""
_WHOLE = 1_000_000
"""So many are taken out to the last in the end, to see that none is lost; of more that would take minutes."""
_NEEDED = 600
"""Bytes of memory that a task is allowed here, the lists of the measurement included."""
_SLACK = 2_000_000_000
"""Nanoseconds that are waited for a connection that was not called idle yet."""
_STEPS = 66_000
"""Milliseconds that are gone through one by one: more than one bucket of the hierarchical wheel's third level."""


@workload(
    for_all=True,
    senseless=unless(
        lambda one: hasattr(one, "timer_of"), "it has no structure in memory that could be measured alone"
    ),
)
async def cost(trial: Trial, *, quick: bool) -> Figures:
    """nanoseconds of insert, cancel and advance, and bytes, with 1,000 to 10,000,000 tasks waiting.

    Each size has a process of its own, whose tasks are due within an hour. The curve: `insert_ns`, `cancel_ns`,
    `advance_ns` (nanoseconds a task, medians of rounds without garbage collection), `bytes` a task (growth of
    resident memory), and `pause_ns`, the longest of the steps of a millisecond in which a minute is gone through.
    """
    trial.setting = replace(trial.setting, minute=60.0)  # the bare timer, at its real scale
    curves: dict[str, dict[str, float]] = {}
    sizes = [10**power for power in range(3, 6 if quick else 8) if 10**power * _NEEDED < _available()]
    for size in sizes:
        process = await trial.process()
        for name, value in (await process.measure(cost_of, size)).items():
            curves.setdefault(name, {})[str(size)] = value
        await process.stop()
    return Figures(curve=curves, counts={"largest": sizes[-1]})


def _available() -> int:
    """Bytes of memory that this machine has left."""
    lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))


async def cost_of(strategy: Any, size: int) -> dict[str, float]:
    """One point of each curve. Raises ValueError if not everything that was inserted came due once."""
    source = random.Random(size)
    batch = min(_BATCH, size)
    items = list(range(size + (_ROUNDS + 1) * batch))
    times = [source.randrange(1, HOUR) for _ in range(size)]
    ordered = sorted(times)
    first = items[:size]
    with uncollected():
        before = resident()
        alike = [BideTimer(strategy.timer_of(0)) for _ in range(max(1, _ALIKE // size))]
        for one in alike:
            one.advance(0)
            one.insert(first, times)
        grown = resident() - before
        taken: dict[str, list[float]] = {name: [] for name in OPERATIONS}
        fired = present = 0
        step = min(batch, max(1, size // 4 // (_ROUNDS + 1)))
        for number in range(_ROUNDS + 1):
            more = items[size + number * batch : size + (number + 1) * batch]
            later = [present + source.randrange(1, HOUR) for _ in more]
            present = ordered[(number + 1) * step - 1]
            spent, came = timed_round(alike[0], more, later, source.sample(more, batch), present)
            fired += came
            if number and came:
                for name, nanoseconds, count in zip(OPERATIONS, spent, (batch, batch, came), strict=True):
                    taken[name].append(nanoseconds / count)
        pause, came = _longest(alike[0], present)
        fired += came
        if size <= _WHOLE and (fired := fired + alike[0].advance(3 * HOUR)) != size:
            raise ValueError(f"{fired} of {size} items came due")
    return {
        **{f"{name}_ns": rounded(median(values)) for name, values in taken.items()},
        "bytes": round(max(0, grown) / len(alike) / size, 1), "pause_ns": rounded(pause),
    }  # fmt: skip


def _longest(one: Contestant, present: int) -> tuple[int, int]:
    """Nanoseconds of processor time of the longest step of a millisecond, and how many came due in all of them."""
    most = came = 0
    for at in range(present, present + _STEPS):
        began = time.thread_time_ns()
        came += one.advance(at)
        most = max(most, time.thread_time_ns() - began)
    return most, came


@workload(alone=False, senseless=unless(lambda one: hasattr(one, "has_laps"), "it has no laps"))
async def laps(trial: Trial, *, quick: bool) -> Figures:
    """5,000 tasks due in an hour on a ring that goes round in a minute of strategy time, and some in one lap."""
    far, near, turns = (5_000, 50, 2.5) if quick else (100_000, 1_000, 5.0)
    trial.option(lap=60)
    lap = trial.setting.span(60)
    ahead = round(lap * 1000)
    [process] = await trial.start()
    steps = batches([(key, HOUR + 60 * ahead) for key in keys_of(far, "far")])
    spread = [round(number * ahead / near) for number in range(near)]
    steps += [Step(at, "schedule", [(key, at + ahead)]) for at, key in zip(spread, keys_of(near), strict=True)]
    before, begin = await process.usage(), now()
    await process.play(begin, steps, callers=near)
    end = begin / 1000 + turns * lap
    await asyncio.sleep(max(0.0, end - time.time()))
    after = await process.usage()
    await trial.until_fired(near, by=end + lap + trial.patience)
    await trial.unharmed()
    figures = trial.judged(until=begin / 1000 + 2 * lap)
    late = [firing.at / 1e6 - firing.due for firing in trial.written()[1]]
    figures.client_cpu_pct = processor_share([before], [after])
    figures.counts = {
        **after["counts"], "laps": round((after["at"] - before["at"]) / lap, 2), "far": far, "near": near,
        "a_lap_late": sum(one > 0.8 * ahead for one in late),
    }  # fmt: skip
    return figures


_CONNECTIONS = 10_000
"""Quick or not: with a time-out of half a second more would be more packets than one process can send."""


@workload(senseless=unless(lambda one: hasattr(one, "touch"), "it has no connections to touch"))
async def touch(trial: Trial, *, quick: bool) -> Figures:
    """10,000 connections with a packet each per half time-out; what a packet costs, and who is called idle when.

    A tenth of them fall silent. `lost` are silent ones that were not called idle, `early` those called idle before
    their time-out had passed, and lateness counts from there. In `counts`: `touch_ns`, nanoseconds of one packet's
    touch, and what a look cost.
    """
    process = await trial.process()
    return msgspec.convert(await process.measure(touched, _CONNECTIONS), Figures)


async def touched(strategy: Any, connections: int) -> Figures:
    """Play `touch` on it, in real time."""
    traffic = _Traffic(round(strategy.time_out_after * 1e9), connections)
    memory = resident()
    gc.freeze()
    running = asyncio.create_task(strategy.run("worker", traffic))
    await asyncio.sleep(0)
    began, spent = time.monotonic_ns(), time.process_time()
    costs = await traffic.send(strategy.touch, began)
    spent, took = time.process_time() - spent, (time.monotonic_ns() - began) / 1e9
    grown = resident() - memory
    counts = {"packets_per_s": round(traffic.sent / took), "touch_ns": rounded(median(costs)), **strategy.counts()}
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    late = [ones[0] for ones in traffic.called.values()]
    silent = traffic.silent
    fired = sum(uid in traffic.called for uid in silent)
    return Figures(
        scheduled=connections, expected=len(silent), fired=fired, lost=len(silent) - fired,
        duplicated=sum(len(traffic.called.get(uid, "1")) - 1 for uid in silent),
        early=sum(one < 0 for one in late), late=curve(late), client_cpu_pct=round(spent / took * 100, 2),
        client_bytes_per_task=round(max(0, grown) / connections, 1), counts=counts,
    )  # fmt: skip


class _Traffic:
    """All connections, and which of them still send; and the effect, which is called for those that are idle."""

    def __init__(self, time_out: int, connections: int) -> None:
        """`time_out` in nanoseconds."""
        self._after = time_out
        self._uids = keys_of(connections, "c")
        random.Random(connections).shuffle(self._uids)
        # a tenth fall silent, evenly over two time-outs, the first when all have sent once
        some = self._uids[::10]
        self.silent = {uid: round((0.5 + 2 * number / len(some)) * time_out) for number, uid in enumerate(some)}
        self._last = dict.fromkeys(self._uids, 0)
        self.called: dict[str, list[float]] = {}
        """By connection: how late it was called idle, in milliseconds, each time."""
        self.sent = 0

    async def __call__(self, key: str, due: int) -> None:
        late = (time.monotonic_ns() - self._last[key] - self._after) / 1e6
        self.called.setdefault(key, []).append(late)

    async def send(self, touch: Callable[[str], None], began: int) -> list[float]:
        """Round and round, as many as are due by now; each connection once in half a time-out.

        Nanoseconds of a touch, on average of each batch.
        """
        turns, costs, turn = deque(self._uids), [], 0.0
        per_packet = self._after / 2 / len(turns)
        until = began + round(3.7 * self._after)
        last = until + _SLACK
        while (present := time.monotonic_ns()) < until or (
            present < last and not self.silent.keys() <= self.called.keys()
        ):
            batch = []
            while turn < present - began:
                turn += per_packet
                uid = turns[0]
                turns.rotate(-1)
                if self.silent.get(uid, last) > turn:
                    batch.append(uid)
            first = time.perf_counter_ns()
            for uid in batch:
                touch(uid)
            if batch:
                costs.append((time.perf_counter_ns() - first) / len(batch))
            self._last.update(dict.fromkeys(batch, present))
            self.sent += len(batch)
            await asyncio.sleep(0.001)
        return costs
