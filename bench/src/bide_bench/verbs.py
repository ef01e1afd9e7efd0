"""The workloads of callers: `schedule`, `change` (moves and cancels), and `churn`, which does all of it for long."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

from bide.app import Bide
from bide.cli.output import current_millis
from bide.core.answers import Answer
from bide.core.instants import as_datetime
from bide.core.records import Ref
from bide_bench.plan import BATCH, Limit, Plan, Report, in_batches, per_second, random_keys, rounded
from bide_bench.target import HOUR
from bide_bench.worker import PAYLOAD, Work
from bide_bench.workers import Workers, fill, stage, wait_settled

CALLERS = 256
GROUP, GROUP_SIZE = "bench-group", 1000
_LONGEST_SINGLE = 0.5
"""Most seconds of single calls in one round: each waits for the disk."""
SOON = (1_000, 5_000)
"""The range in milliseconds for tasks of `churn` that are due soon."""
_MINUTE = 60.0
_TICK = 0.05
_MOST = 10_000
"""Most tasks of one tick of `churn`: a backlog is made up for, but not all at once."""

Call = Callable[[], Coroutine[Any, Any, Answer]]
Timed = tuple[int, float]
"""A number of calls, and their seconds."""


def _note(answers: Sequence[Answer], faults: list[str]) -> None:
    refused = [answer.result.value for answer in answers if not answer.ok]
    if refused and len(faults) < 10:
        faults.append(f"{len(refused)} calls were not done; the first answer: {refused[0]}")


async def _in_a_crowd(calls: Sequence[Call], faults: list[str]) -> Timed:
    """Time single calls from 256 concurrent callers."""
    ahead = iter(calls)

    async def caller() -> None:
        for call in ahead:
            answer = await call()
            if not answer.ok:  # checked here to keep the measured loop short
                _note([answer], faults)

    began = time.perf_counter()
    await asyncio.gather(*(caller() for _ in range(CALLERS)))
    return len(calls), time.perf_counter() - began


async def _in_bulk(
    call: Callable[[Sequence[Any]], Coroutine[Any, Any, Sequence[Answer]]], items: Sequence[Any], faults: list[str]
) -> Timed:
    """Time calls with 1000 items each."""
    began = time.perf_counter()
    for some in in_batches(items):
        _note(await call(some), faults)
    return len(items), time.perf_counter() - began


async def _one_by_one(calls: Sequence[Call], faults: list[str]) -> Timed:
    """Time sequential calls, for at most half a second."""
    began, done = time.perf_counter(), 0
    for call in calls:
        answer = await call()
        if not answer.ok:
            _note([answer], faults)
        done += 1
        if time.perf_counter() - began > _LONGEST_SINGLE:
            break
    return done, time.perf_counter() - began


async def schedule(plan: Plan, limit: Limit) -> Report:
    """Schedule N tasks in each of three ways, in rounds that alternate with each other and with the raw limit."""
    topic, count, target = "bench.schedule", plan.count(300_000), plan.target
    rounds = max(1, min(20, count // BATCH))
    size = -(-count // rounds)
    timed: dict[str, list[Timed]] = {name: [] for name in ("single", "concurrent", "bulk")}
    stored: list[str] = []
    faults: list[str] = []
    before, grown = await target.size(), 0
    async with stage(plan) as on:
        app = on.app

        async def many(keys: Sequence[str]) -> Sequence[Answer]:
            return await app.schedule_many([app.new(topic, PAYLOAD, key=key, delay="1h") for key in keys])

        def calls(keys: Sequence[str]) -> list[Call]:
            return [partial(app.schedule, topic, PAYLOAD, key=key, delay="1h") for key in keys]

        for number in range(rounds):
            plan.progress("scheduling", number, rounds)
            await limit.measure(max(1, size // BATCH))
            keys = random_keys(3 * size)
            grown -= await target.size()  # only around bulk calls: callers and the raw limit use space too
            timed["bulk"].append(await _in_bulk(many, keys[:size], faults))
            grown += await target.size()
            await limit.measure(max(1, size // BATCH))  # again, so that its table grows at the same rate
            timed["concurrent"].append(await _in_a_crowd(calls(keys[size : 2 * size]), faults))
            timed["single"].append(await _one_by_one(calls(keys[2 * size :]), faults))
            stored += keys[: 2 * size + timed["single"][-1][0]]
        plan.progress("checking", rounds, rounds)
        missing = 0
        for some in in_batches(stored):
            found = await app.get_many([(topic, key) for key in some])
            missing += sum(task is None or task.payload_bytes != PAYLOAD for task in found)
        if missing:
            faults.append(f"{missing} acknowledged tasks are not in the store")
        of_file = await target.size() - before
    if target.owned:  # everything is written only after the close
        of_file = await target.size() - before
    per_task = of_file / len(stored) if target.kind == "sqlite" else grown / (size * rounds)
    figures = {f"{name}_per_s": per_second(each) for name, each in timed.items()}
    return Report(fields={**figures, "bytes_per_task": round(per_task)}, faults=faults)


async def change(plan: Plan, limit: Limit) -> Report:
    """Of N pending tasks, move half and cancel half by single calls, then in bulk; then shift a group."""
    topic, count, faults = "bench.change", plan.count(20_000), list[str]()
    async with stage(plan) as on:
        app = on.app
        keys = await fill(app, topic, count, plan=plan, delay="1h")
        half = count // 2
        moved, cancelled = ([Ref(topic, key) for key in some] for some in (keys[:half], keys[half:]))
        base = current_millis() + 2 * HOUR
        timed: dict[str, list[Timed]] = {name: [] for name in ("move", "cancel", "bulk_move", "bulk_cancel")}
        rounds = max(1, min(10, half // BATCH))
        parts = [slice(half * number // rounds, half * (number + 1) // rounds) for number in range(rounds)]
        moves = [(ref, as_datetime(base + number)) for number, ref in enumerate(moved)]
        for part in parts:
            plan.progress("moving and cancelling", part.start, half)
            await limit.measure()
            calls: list[Call] = [partial(app.reschedule, *ref, at=at) for ref, at in moves[part]]
            timed["move"].append(await _in_a_crowd(calls, faults))
            calls = [partial(app.cancel, *ref) for ref in cancelled[part]]
            timed["cancel"].append(await _in_a_crowd(calls, faults))
        faults += await _misplaced(app, moved, base)
        moves = [(ref, as_datetime(base + HOUR + number)) for number, ref in enumerate(moved)]
        for part in parts:
            plan.progress("moving in bulk", part.start, half)
            await limit.measure()
            timed["bulk_move"].append(await _in_bulk(app.reschedule_many, moves[part], faults))
        faults += await _misplaced(app, moved, base + HOUR)
        for part in parts:
            timed["bulk_cancel"].append(await _in_bulk(app.cancel_many, moved[part], faults))
        shift_ms = await _shift(app, topic, faults)
        left_behind = len([task async for task in app.find(topic=topic)])
    rates = {f"{name}_per_s": per_second(each) for name, each in timed.items()}
    return Report(fields={**rates, "shift_ms": shift_ms, "left_behind": left_behind}, faults=faults)


async def _shift(app: Bide, topic: str, faults: list[str]) -> float:
    """Time the shift of a group of 1000 by ten minutes, in milliseconds, and check each task."""
    tasks = [app.new(topic, PAYLOAD, key=key, group=GROUP, delay="1h") for key in random_keys(GROUP_SIZE)]
    before = {task.record.key: task.record.due_at for task in await app.schedule_many(tasks) if task.record}
    began = time.perf_counter()
    answers = await app.shift(group=GROUP, by="-10m")
    took = time.perf_counter() - began
    _note(answers, faults)
    after = {answer.record.key: answer.record.due_at for answer in answers if answer.record}
    if after != {key: due_at - 600_000 for key, due_at in before.items()}:
        faults.append("a shift did not move each task of its group by its length")
    _note(await app.cancel_group(GROUP), faults)
    return rounded(took * 1000)


async def _misplaced(app: Bide, refs: Sequence[Ref], first: int) -> list[str]:
    """Check that each task wakes when its move said: the first at `first`, each of the others a millisecond later."""
    found = await app.get_many(refs)
    wrong = sum(task is None or task.record.wake_at != first + number for number, task in enumerate(found))
    return [f"{wrong} tasks do not wake when their move said"] if wrong else []


async def churn(plan: Plan, limit: Limit) -> Report:
    """R tasks a second for some time, with N pending ones: the effect of long use on a store.

    Of ten scheduled tasks, five are due within seconds and five in an hour or two, like the N pending ones; of the
    pending, two are moved to within seconds and three are cancelled, at random. So seven of ten are delivered by a
    worker process, and every part of every index is written and emptied again.

    Each minute a line has the time of leases that returned tasks (p50 and p99, as the worker sees it, with the round
    trip), the lateness of handlers, and the size of the store; the end is compared with the first line. With a
    snapshot, lines cover three phases: before it is held, while it is, and after it, when vacuum catches up.
    """
    work = Work(topic="bench.churn")
    async with stage(plan, work, counted=True) as on:
        waiting = await fill(on.app, work.topic, plan.count(100_000), plan=plan, delay="90m")
        async with on.workers() as workers:
            await workers.go()
            run = _Churn(plan, on.app, workers, work.topic, waiting)
            await run.go()
            await wait_settled(workers, run.ahead, plan=plan, within=SOON[1] / 1000 + 30, what="the last")
            early = sum(int(one["early"]) for one in await workers.figures())
            await workers.stop()
            accepted = workers.settled
        left = len([True async for _ in on.app.find(topic=work.topic)])
    fields = {
        "course": run.course(),
        "growth": run.growth(),
        "lost": max(0, run.ahead - accepted),
        "duplicated": max(0, accepted - run.ahead),
        "early": early,
        "left_behind": abs(left - len(run.waiting)),
    }
    return Report(fields=fields, faults=run.faults)


class _Churn:
    """One run of `churn`."""

    def __init__(self, plan: Plan, app: Bide, workers: Workers, topic: str, waiting: list[str]) -> None:
        self.waiting = waiting
        """Keys of the tasks that are far off."""
        self.ahead = 0
        """Tasks so far that will be completed."""
        self.faults: list[str] = []
        self._plan = plan
        self._app = app
        self._workers = workers
        self._topic = topic
        self._random = random.Random(1)
        self._scheduled = 0
        self._last_line = (0.0, 0, 0)
        """Seconds, scheduled tasks and completed tasks at the last line."""
        self._lines: list[Mapping[str, Any]] = []

    async def go(self) -> None:
        """Run one phase, or three of equal length, each with lines of its own."""
        plan, begun = self._plan, time.monotonic()
        phases = (False, True, False) if plan.snapshot else (False,)
        lasts = plan.seconds / len(phases)
        lines = max(2 if plan.snapshot else 4, round(lasts / _MINUTE))
        for number, holds in enumerate(phases):
            async with plan.target.snapshot() if holds else nullcontext():
                for line in range(1, lines + 1):
                    ends = (number + line / lines) * lasts
                    while (passed := time.monotonic() - begun) < ends:
                        plan.progress("churning", round(passed), round(plan.seconds))
                        await self._tick(min(_MOST, int(passed * plan.rate) - self._scheduled))
                        await asyncio.sleep(max(0.0, _TICK - (time.monotonic() - begun - passed)))
                    await self._report_line(ends, snapshot=holds)

    async def _tick(self, count: int) -> None:
        if count <= 0:
            return
        app, topic = self._app, self._topic
        soon, far = random_keys(self._share(count, 5)), random_keys(self._share(count, 5))
        tasks = [app.new(topic, PAYLOAD, key=key, delay=self._soon()) for key in soon]
        tasks += [app.new(topic, PAYLOAD, key=key, delay=f"{HOUR + self._random.randrange(HOUR)}ms") for key in far]
        moved = [(self._taken(), self._soon()) for _ in range(min(len(self.waiting), self._share(count, 2)))]
        cancelled = [self._taken() for _ in range(min(len(self.waiting), self._share(count, 3)))]
        self._scheduled += count
        _note(await app.schedule_many(tasks), self.faults)
        _note(await app.reschedule_many(moved), self.faults)
        _note(await app.cancel_many(cancelled), self.faults)
        self.waiting += far
        self.ahead += len(soon) + len(moved)

    def _share(self, count: int, tenths: int) -> int:
        """This many of ten, exact over time."""
        return (self._scheduled + count) * tenths // 10 - self._scheduled * tenths // 10

    def _soon(self) -> str:
        return f"{self._random.randint(*SOON)}ms"

    def _taken(self) -> Ref:
        """Take a random pending task."""
        place = self._random.randrange(len(self.waiting))
        self.waiting[place], self.waiting[-1] = self.waiting[-1], self.waiting[place]
        return Ref(self._topic, self.waiting.pop())

    async def _report_line(self, passed: float, *, snapshot: bool) -> None:
        """Report one line of figures."""
        said = await self._workers.figures()
        (before, scheduled, completed), now = self._last_line, sum(int(one["accepted"]) for one in said)
        lasted = max(passed - before, _TICK)
        line: dict[str, Any] = {
            "seconds": rounded(passed),
            "scheduled_per_s": rounded((self._scheduled - scheduled) / lasted),
            "completed_per_s": rounded((now - completed) / lasted),
        }
        for name in ("lease_p50_ms", "lease_p99_ms", "late_p50_ms", "late_p99_ms"):
            worst = max((one[name] for one in said if one[name] is not None), default=None)
            line[name] = None if worst is None else rounded(worst)
        line |= {"snapshot": snapshot, **await self._plan.target.health()}
        self._last_line = passed, self._scheduled, now
        self._lines.append(line)
        self._plan.report_line(line)

    def course(self) -> dict[str, Mapping[str, Any]]:
        """The first and the last line; with a snapshot also the last while it was held, and the first after it."""
        lines = self._lines
        held = [number for number, line in enumerate(lines) if line["snapshot"]]
        found = {"start": lines[0]}
        if held:
            found["held"] = lines[held[-1]]
            if held[-1] + 1 < len(lines) - 1:
                found["after"] = lines[held[-1] + 1]
        return {**found, "end": lines[-1]}

    def growth(self) -> dict[str, float]:
        """The ratios of the last line to the first, for figures that are not zero."""
        first, last = self._lines[0], self._lines[-1]
        return {
            name: rounded(last[name] / first[name])
            for name in first
            if name.endswith(("_ms", "bytes")) and first[name] and last[name] is not None
        }
