"""The workload `change`: how fast pending tasks can be moved and cancelled."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from datetime import datetime
from itertools import pairwise
from typing import Any

from bide.app import Bide
from bide.cli.bench.crew import stage
from bide.cli.bench.filling import fill
from bide.cli.bench.limits import BATCH, limit_of, random_keys
from bide.cli.bench.plan import Plan, Report, per_second, rounded
from bide.cli.bench.schedule import CALLERS
from bide.cli.bench.worker import PAYLOAD
from bide.core.answers import Answer
from bide.core.instants import as_datetime
from bide.core.records import Ref

TOPIC = "bench.change"
GROUP = "bench-group"
GROUP_SIZE = 1000
_ROUNDS = 10
_HOUR = 3_600_000

Timed = tuple[int, float]


async def change(plan: Plan) -> Report:
    """Of N pending, move half and cancel half by single calls, then the same in bulk, then shift a group."""
    count = plan.count(20_000)
    faults: list[str] = []
    with limit_of(plan) as limit:
        async with stage(plan) as (app, _):
            keys = await fill(app, TOPIC, count, delay="1h", plan=plan)
            moved, cancelled = keys[: count // 2], keys[count // 2 :]
            base = time.time_ns() // 1_000_000 + 2 * _HOUR
            whens = [base + number for number in range(len(moved))]
            later = [millis + _HOUR for millis in whens]
            timed: dict[str, list[Timed]] = {name: [] for name in ("move", "cancel", "bulk_move", "bulk_cancel")}
            rounds = max(1, min(_ROUNDS, count // 2 // BATCH))
            for part in _parts(len(moved), rounds):
                plan.progress("moving and cancelling", part.start, len(moved))
                limit.measure()
                timed["move"].append(await _in_a_crowd(_movers(app, moved[part], whens[part]), faults))
                timed["cancel"].append(await _in_a_crowd(_cancellers(app, cancelled[part]), faults))
            faults += await _misplaced(app, moved, whens)
            for part in _parts(len(moved), rounds):
                plan.progress("moving in bulk", part.start, len(moved))
                limit.measure()
                timed["bulk_move"].append(await _move_in_bulk(app, moved[part], later[part], faults))
            faults += await _misplaced(app, moved, later)
            for part in _parts(len(moved), rounds):
                timed["bulk_cancel"].append(await _cancel_in_bulk(app, moved[part], faults))
            shift_ms = await _shift(app, faults)
            left_behind = len([task async for task in app.find(topic=TOPIC)])
        figures = {
            **{f"{name}_per_s": per_second(rates) for name, rates in timed.items()},
            "shift_ms": shift_ms,
            "left_behind": left_behind,
        }
        return Report(fields={**figures, **limit.fields(figures)}, faults=faults)


def _parts(count: int, rounds: int) -> list[slice]:
    edges = [count * number // rounds for number in range(rounds + 1)]
    return [slice(first, last) for first, last in pairwise(edges)]


Call = Callable[[], Coroutine[Any, Any, Answer]]


def _movers(app: Bide, keys: Sequence[str], whens: Sequence[int]) -> list[Call]:
    def mover(key: str, at: datetime) -> Call:
        return lambda: app.reschedule(TOPIC, key, at=at)

    return [mover(key, as_datetime(when)) for key, when in zip(keys, whens, strict=True)]


def _cancellers(app: Bide, keys: Sequence[str]) -> list[Call]:
    def canceller(key: str) -> Call:
        return lambda: app.cancel(TOPIC, key)

    return [canceller(key) for key in keys]


async def _in_a_crowd(calls: Sequence[Call], faults: list[str]) -> Timed:
    """All of them, from 256 concurrent callers."""
    ahead = iter(calls)

    async def caller() -> None:
        for call in ahead:
            answer = await call()
            if not answer.ok:
                faults.append(f"a change of a waiting task answered {answer.result.value}")

    began = time.perf_counter()
    await asyncio.gather(*(caller() for _ in range(CALLERS)))
    return len(calls), time.perf_counter() - began


async def _move_in_bulk(app: Bide, keys: Sequence[str], whens: Sequence[int], faults: list[str]) -> Timed:
    moves = [(Ref(TOPIC, key), as_datetime(when)) for key, when in zip(keys, whens, strict=True)]
    began = time.perf_counter()
    for first in range(0, len(moves), BATCH):
        _all_ok(await app.reschedule_many(moves[first : first + BATCH]), faults)
    return len(moves), time.perf_counter() - began


async def _cancel_in_bulk(app: Bide, keys: Sequence[str], faults: list[str]) -> Timed:
    refs = [Ref(TOPIC, key) for key in keys]
    began = time.perf_counter()
    for first in range(0, len(refs), BATCH):
        _all_ok(await app.cancel_many(refs[first : first + BATCH]), faults)
    return len(refs), time.perf_counter() - began


async def _shift(app: Bide, faults: list[str]) -> float:
    """Move a group of 1000 by ten minutes; milliseconds. Each must have moved by just that."""
    tasks = [app.new(TOPIC, PAYLOAD, key=key, group=GROUP, delay="1h") for key in random_keys(GROUP_SIZE)]
    before = {task.record.key: task.record.due_at for task in await app.schedule_many(tasks) if task.record}
    began = time.perf_counter()
    answers = await app.shift(group=GROUP, by="-10m")
    took = time.perf_counter() - began
    _all_ok(answers, faults)
    after = {answer.record.key: answer.record.due_at for answer in answers if answer.record}
    if after != {key: due_at - 600_000 for key, due_at in before.items()}:
        faults.append("a shift did not move each task of its group by its length")
    _all_ok(await app.cancel_group(GROUP), faults)
    return rounded(took * 1000)


async def _misplaced(app: Bide, keys: Sequence[str], whens: Sequence[int]) -> list[str]:
    """Each must wake when its move said."""
    found = await app.get_many([Ref(TOPIC, key) for key in keys])
    wrong = sum(
        1 for task, when in zip(found, whens, strict=True) if task is None or task.record.wake_at != when
    )  # fmt: skip
    return [f"{wrong} tasks do not wake when their move said"] if wrong else []


def _all_ok(answers: Sequence[Answer], faults: list[str]) -> None:
    refused = [answer.result.value for answer in answers if not answer.ok]
    if refused:
        faults.append(f"{len(refused)} changes of waiting tasks were refused; the first answer: {refused[0]}")
