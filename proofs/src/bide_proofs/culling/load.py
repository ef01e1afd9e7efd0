"""The callers: many coroutines of one process that schedule at a rate, and move and cancel some of it meanwhile."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Coroutine
from datetime import timedelta

from bide.app import Bide
from bide.core.answers import Answer
from bide.core.errors import PartlyFailed, StoreError
from bide.core.records import NewTask
from bide_proofs.culling.crew import TOPIC
from bide_proofs.culling.lines import Answered, Asked, Journal

SHORTEST, LONGEST = 0.05, 3.0
"""Seconds of delay."""
_MOVED = _CANCELLED = 0.14
"""The parts of the tasks that are asked to be moved, and cancelled; for some it is too late then."""
_NEAR = 0.25
"""The part of those changes that is asked for within 20 ms of the due time, where it races with the lease."""
_REVIVED = 0.25
"""The part of the cancelled tasks whose key is scheduled once more: a new life."""
_CALLERS = 8
_TICK = 0.01
_MOST = 500
"""Tasks in one call."""


class Load:
    """What is asked of `app`; the journal tells each thing before it is asked, and its answer when it has come."""

    def __init__(self, app: Bide, journal: Journal, seed: int) -> None:
        self.scheduled = 0
        """Tasks that were acknowledged, those of keys that were cancelled before apart."""
        self.lasted = 0.0
        """Seconds from the first task that was asked for to the last one's answer."""
        self._app = app
        self._journal = journal
        self._chance = random.Random(seed)
        self._later: set[asyncio.Task[None]] = set()
        self._number = 0

    async def run(self, seconds: float, rate: float) -> None:
        """Schedule so many a second, for so long; then wait for the changes that are still to be asked for."""
        began = time.monotonic()
        await asyncio.gather(*(self._call(seconds, rate / _CALLERS) for _ in range(_CALLERS)))
        self.lasted = time.monotonic() - began
        while self._later:
            await asyncio.wait(self._later)

    async def _call(self, seconds: float, rate: float) -> None:
        began, asked = time.monotonic() + self._chance.uniform(0, _TICK), 0
        # what is missing at the end is still asked for: a rate that is not reached shows as a longer time
        while asked < int(seconds * rate):
            count = int(min(seconds, time.monotonic() - began) * rate) - asked
            if count > 0:
                await self._schedule(min(count, _MOST))
                asked += min(count, _MOST)
            await asyncio.sleep(_TICK)

    async def _schedule(self, count: int) -> None:
        delays = [self._chance.uniform(SHORTEST, LONGEST) for _ in range(count)]
        tasks = [self._new(f"k{self._number + place}", delay) for place, delay in enumerate(delays)]
        self._number += count
        if self._chance.random() < 0.5:
            answers = await self._schedule_together(tasks)
        else:
            answers = await asyncio.gather(*(self._schedule_one(task) for task in tasks))
        for task, delay, answer in zip(tasks, delays, answers, strict=True):
            if answer is not None:
                self.scheduled += 1
                if self._chance.random() < _MOVED:
                    self._begin(self._move(task.key, self._moment(delay)))
                if self._chance.random() < _CANCELLED:
                    self._begin(self._cancel(task.key, self._moment(delay)))

    def _new(self, key: str, delay: float) -> NewTask:
        return self._app.new(TOPIC, None, key=key, delay=timedelta(seconds=delay))

    async def _schedule_together(self, tasks: list[NewTask]) -> list[Answer | None]:
        for task in tasks:
            self._journal.say(Asked("schedule", task.key, time.time_ns(), task.id))
        answers: list[object]
        try:
            answers = [*await self._app.schedule_many(tasks)]
        except PartlyFailed as partly:
            answers = [*partly.answers]
        except StoreError as error:
            answers = [error] * len(tasks)
        return [self._heard("schedule", task.key, answer) for task, answer in zip(tasks, answers, strict=True)]

    async def _schedule_one(self, task: NewTask) -> Answer | None:
        return await self._ask("schedule", task.key, self._app.schedule_new(task), task.id)

    async def _move(self, key: str, moment: float) -> None:
        await asyncio.sleep(moment)
        kind = self._chance.randrange(3)
        if kind == 0:
            await self._ask("fire_now", key, self._app.fire_now(TOPIC, key))
            return
        delay = self._chance.uniform(LONGEST / 2, LONGEST) if kind == 1 else self._chance.uniform(0, LONGEST / 10)
        await self._ask("reschedule", key, self._app.reschedule(TOPIC, key, delay=timedelta(seconds=delay)))

    async def _cancel(self, key: str, moment: float) -> None:
        await asyncio.sleep(moment)
        answer = await self._ask("cancel", key, self._app.cancel(TOPIC, key))
        if answer is not None and answer.result == "cancelled" and self._chance.random() < _REVIVED:
            await self._schedule_one(self._new(key, self._chance.uniform(SHORTEST, LONGEST)))

    def _moment(self, delay: float) -> float:
        """How long from now a change of a task is asked for that is due after `delay`."""
        if self._chance.random() < _NEAR:
            return max(0.0, delay + self._chance.uniform(-0.02, 0.02))
        return self._chance.uniform(0, delay)

    def _begin(self, change: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(change)
        self._later.add(task)
        task.add_done_callback(self._later.discard)

    async def _ask(self, verb: str, key: str, call: Awaitable[Answer], id: str = "") -> Answer | None:
        self._journal.say(Asked(verb, key, time.time_ns(), id))
        try:
            return self._heard(verb, key, await call)
        except StoreError as error:
            return self._heard(verb, key, error)

    def _heard(self, verb: str, key: str, answer: object) -> Answer | None:
        at = time.time_ns()
        if not isinstance(answer, Answer):
            self._journal.say(Answered(verb, key, at, "failed", error=str(answer)))
            return None
        record, result = answer.record, answer.result.value
        if record is None:
            self._journal.say(Answered(verb, key, at, result))
        else:
            self._journal.say(Answered(verb, key, at, result, record.id, record.token, record.wake_at))
        return answer
