"""The workload `churn`: what long use does to a store, while the number of tasks in it stays the same.

Of each ten tasks that are scheduled five are due within seconds, and five in an hour or two, beside the N that wait
already; of those that wait, taken at random, two are moved to within seconds and three are cancelled. So seven of ten
are delivered and completed, by a worker process, and every place of every index is written to and emptied again.

Each minute a line says how long a lease took that gave something out (p50 and p99, as the worker sees it, the way there
and back included), how late handlers began, and how large the store is; the end is compared with the first of them.
With a snapshot each line is of one phase: before it is held, while it is, and after it, when vacuum catches up.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any

from bide.app import Bide
from bide.cli.bench.crew import Crew, crew_of, settled, stage
from bide.cli.bench.filling import fill
from bide.cli.bench.limits import limit_of, random_keys
from bide.cli.bench.plan import Plan, Report, rounded
from bide.cli.bench.worker import PAYLOAD, Work
from bide.core.answers import Answer
from bide.core.errors import BadInput
from bide.core.records import Ref

TOPIC = "bench.churn"
MINUTE = 60.0
_TICK = 0.05
_MOST = 10_000
"""Tasks of one tick: what could not be done in time is made up for, but not all at once."""
SOON = (1_000, 5_000)
"""Milliseconds, from and to, of what is due within seconds."""
_HOUR = 3_600_000


async def churn(plan: Plan) -> Report:
    """R tasks a second for some time, N others waiting all along."""
    with limit_of(plan) as limit:
        limit.measure(5)
        work = Work(topic=TOPIC)
        async with stage(plan, work, counted=True) as (app, log):
            waiting = await fill(app, TOPIC, plan.count(100_000), delay="90m", plan=plan)
            async with crew_of(plan, app, log, [work], counted=True) as crew:
                await crew.go()
                run = _Run(plan, app, crew, waiting)
                await run.go()
                await settled(crew, run.ahead, plan=plan, within=SOON[1] / 1000 + 30, what="the last")
                early = sum(int(one["early"]) for one in await crew.figures())
                await crew.stop()
                accepted = crew.settled
            left = len([True async for _ in app.find(topic=TOPIC)])
        fields = {
            "course": run.course(),
            "growth": run.growth(),
            "lost": max(0, run.ahead - accepted),
            "duplicated": max(0, accepted - run.ahead),
            "early": early,
            "left_behind": abs(left - len(run.waiting)),
        }
        return Report(fields={**fields, **limit.fields({})}, faults=run.faults)


class _Run:
    """Some minutes of it."""

    def __init__(self, plan: Plan, app: Bide, crew: Crew, waiting: list[str]) -> None:
        self.waiting = waiting
        """Keys of what is far off."""
        self.ahead = 0
        """How many are to be completed, of those so far."""
        self.faults: list[str] = []
        self._plan = plan
        self._app = app
        self._crew = crew
        self._random = random.Random(1)
        self._scheduled = 0
        self._lines: list[Mapping[str, Any]] = []
        self._held: Mapping[str, Any] | None = None
        self._after: Mapping[str, Any] | None = None

    async def go(self) -> None:
        plan, seconds = self._plan, self._plan.seconds
        every = min(MINUTE, seconds / (6 if plan.snapshot else 4))
        begun, spoken, before = time.monotonic(), 0.0, (0, 0)
        with ExitStack() as held:
            holds = False
            while (passed := time.monotonic() - begun) < seconds:
                plan.progress("churning", round(passed), round(seconds))
                inside = plan.snapshot and seconds / 3 <= passed < seconds * 2 / 3
                if inside != holds:
                    if passed - spoken > every / 2:
                        before = await self._speak(passed, passed - spoken, before, snapshot=holds)
                        spoken = passed
                    held.close()
                    holds = inside
                    if inside:
                        held.enter_context(self._snapshot())
                await self._tick(min(_MOST, int(passed * plan.rate) - self._scheduled))
                if passed - spoken >= every and seconds - passed > every / 2:
                    before = await self._speak(passed, passed - spoken, before, snapshot=holds)
                    spoken = passed
                await asyncio.sleep(max(0.0, _TICK - (time.monotonic() - begun - passed)))
            await self._speak(seconds, seconds - spoken or every, before, snapshot=holds)

    def _snapshot(self) -> AbstractContextManager[None]:
        server = self._plan.place.server
        if server is None:
            raise BadInput("--snapshot", self._plan.place.kind, "a database server: PostgreSQL, MySQL")
        return server.snapshot()

    async def _tick(self, count: int) -> None:
        if count <= 0:
            return
        soon, far = random_keys(self._share(count, 5)), random_keys(self._share(count, 5))
        tasks = [self._app.new(TOPIC, PAYLOAD, key=key, delay=f"{self._soon()}ms") for key in soon]
        tasks += [self._app.new(TOPIC, PAYLOAD, key=key, delay=f"{_HOUR + self._some(_HOUR)}ms") for key in far]
        self._note(await self._app.schedule_many(tasks))
        self._scheduled += count
        moved = [(self._taken(), f"{self._soon()}ms") for _ in range(min(len(self.waiting), self._share(count, 2)))]
        self._note(await self._app.reschedule_many([(Ref(TOPIC, key), delay) for key, delay in moved]))
        cancelled = [self._taken() for _ in range(min(len(self.waiting), self._share(count, 3)))]
        self._note(await self._app.cancel_many([Ref(TOPIC, key) for key in cancelled]))
        self.waiting += far
        self.ahead += len(soon) + len(moved)

    def _share(self, count: int, tenths: int) -> int:
        """So many of ten, right over time."""
        return (self._scheduled + count) * tenths // 10 - self._scheduled * tenths // 10

    def _soon(self) -> int:
        return self._random.randint(*SOON)

    def _some(self, most: int) -> int:
        return self._random.randrange(most)

    def _taken(self) -> str:
        """One of what waits, any of them."""
        place = self._random.randrange(len(self.waiting))
        self.waiting[place], self.waiting[-1] = self.waiting[-1], self.waiting[place]
        return self.waiting.pop()

    def _note(self, answers: Sequence[Answer]) -> None:
        refused = [answer.result.value for answer in answers if not answer.ok]
        if refused and len(self.faults) < 10:
            self.faults.append(f"{len(refused)} calls were not done; the first answer: {refused[0]}")

    async def _speak(self, passed: float, lasted: float, before: tuple[int, int], *, snapshot: bool) -> tuple[int, int]:
        """One line; what was scheduled and completed until now."""
        said = await self._crew.figures()
        now = self._scheduled, sum(int(one["accepted"]) for one in said)
        times = {}
        for name in ("lease_p50_ms", "lease_p99_ms", "late_p50_ms", "late_p99_ms"):
            worst = max((one[name] for one in said if one[name] is not None), default=None)
            times[name] = None if worst is None else rounded(worst)
        line = {
            "seconds": rounded(passed),
            "scheduled_per_s": rounded((now[0] - before[0]) / lasted),
            "completed_per_s": rounded((now[1] - before[1]) / lasted),
            **times,
            "snapshot": snapshot,
            **self._plan.place.health(),
        }
        self._lines.append(line)
        if snapshot:
            self._held = line
        elif self._held is not None and self._after is None:
            self._after = line
        self._plan.tell(line)
        return now

    def course(self) -> dict[str, Mapping[str, Any]]:
        """The first line and the last; with a snapshot also the last while it was held, and the first after it."""
        held = {} if self._held is None else {"held": self._held}
        after = {} if self._after is None or self._after is self._lines[-1] else {"after": self._after}
        return {"start": self._lines[0], **held, **after, "end": self._lines[-1]}

    def growth(self) -> dict[str, float]:
        """The last line over the first, where there is something to divide by."""
        first, last = self._lines[0], self._lines[-1]
        return {
            name: rounded(last[name] / first[name])
            for name in first
            if name.endswith(("_ms", "bytes")) and first[name] and last[name] is not None
        }
