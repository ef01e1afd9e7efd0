"""The client: one process that schedules at a rate, moves, fires, cancels, shifts and redrives, and counts its calls.

Of 100 tasks, 60 are due within seconds (some of them run in a thread), 30 in an hour or two, and 10 belong to a group.
Of the tasks due soon, one in six is moved, fired or cancelled at a random moment, which may be just when it is leased.
Each far-off task is moved to within seconds, fired or cancelled some seconds later, so that the number of waiting tasks
stays the same. Most groups are shifted or cancelled as a whole. Some dead tasks are redriven; the others are left to be
forgotten. The client holds only planned changes, and nothing about ended tasks.
"""

from __future__ import annotations

import asyncio
import heapq
import random
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import NamedTuple

from bide.app import Bide
from bide.core.answers import Answer
from bide.core.errors import PartlyFailed, StoreError
from bide.core.names import new_id
from bide.core.records import NewTask, Ref, Result
from bide_proofs.soak.worker import FAILING, KEPT, PLAIN, THREADED, Ids

PAYLOAD = b"x" * 100
_SOONEST = 100
_HOUR = 3_600_000
_TICK = 0.05
_MOST = 2_000
"""The most tasks of one tick: a client that fell behind catches up, but not all at once."""
_KINDS, _KIND_WEIGHTS = ("soon", "group", "far"), (60, 1, 30)
_CHANGED = 1 / 6
_GROUP = 10
_FAR_SECONDS = 10.0
"""Seconds after which a far-off task is changed."""
_REDRIVEN = 0.004
"""Redrives, as a fraction of the rate: fewer than tasks die, so that some are left to be forgotten."""
_TOPICS, _WEIGHTS = (PLAIN, KEPT, FAILING, THREADED), (70, 5, 20, 5)
_ENDS = (Result.CANCELLED, Result.CANCELLED_WHILE_LEASED)
_BEGINS = (Result.CREATED, Result.REDRIVEN)


class _Change(NamedTuple):
    """A planned change of a task or a group."""

    at: float
    verb: str
    topic: str
    key: str
    far: bool = False


class Load:
    """The client's calls to `app`, and counts of the answers."""

    def __init__(self, app: Bide, seed: int, soon: int) -> None:
        """Most tasks are due within `soon` milliseconds."""
        self.begun = Ids()
        """Lives that began, according to answers."""
        self.cancelled = Ids()
        """Lives that were cancelled, according to answers."""
        self.answers: dict[str, Counter[str]] = defaultdict(Counter)
        """The number of answers, by verb and result."""
        self.failed = 0
        """Calls that raised, counted by task: none may, since nothing is broken here."""
        self.errors: list[str] = []
        self.far = 0
        """The number of far-off tasks."""
        self.asked = 0
        """The number of tasks scheduled so far."""
        self._app = app
        self._chance = random.Random(seed)
        self._changes: list[_Change] = []
        """A heap of the planned changes."""
        self._redriven = time.monotonic()
        self._soon = self._soon_asked = soon

    # --- rates

    async def run(self, seconds: float, rate: float) -> float:
        """Schedule tasks at `rate` for `seconds`, then those still missing; return the tasks a second."""
        began, before = time.monotonic(), self.asked
        while (passed := time.monotonic() - began) < seconds or self.asked - before < int(seconds * rate):
            await self._tick(min(_MOST, int(min(passed, seconds) * rate) - (self.asked - before)))
            if time.monotonic() - self._redriven > 1:
                self._redriven = time.monotonic()
                await self._redrive(max(1, int(rate * _REDRIVEN)))
            await asyncio.sleep(max(0.0, _TICK - (time.monotonic() - began - passed)))
        return (self.asked - before) / (time.monotonic() - began)

    async def flood(self, seconds: float, under_way: Callable[[], int], most: int) -> None:
        """Schedule as many tasks as possible for `seconds`, due almost at once, with at most `most` under way."""
        self._soon = 2 * _SOONEST
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            room = most - under_way()
            if room > 0:
                await self._tick(min(_MOST, room, 500))
            await asyncio.sleep(0 if room > 0 else 0.005)
        self._soon = self._soon_asked

    async def finish(self) -> None:
        """Make all planned changes at once."""
        while self._changes:
            some, self._changes = self._changes[:1000], self._changes[1000:]
            await asyncio.gather(*self._changed(some))

    # --- one tick

    async def _tick(self, count: int) -> None:
        now, due = time.monotonic(), []
        while self._changes and self._changes[0].at <= now:
            due.append(heapq.heappop(self._changes))
        work = self._changed(due)
        if count > 0:
            work.append(self._begin(count, now))
        await asyncio.gather(*work)

    async def _begin(self, count: int, now: float) -> None:
        """Schedule `count` tasks, or a few more, and plan their changes."""
        chance, tasks, changes = self._chance, list[NewTask](), list[_Change]()
        while len(tasks) < count:
            [kind] = chance.choices(_KINDS, _KIND_WEIGHTS)
            if kind == "soon":
                [topic] = chance.choices(_TOPICS, _WEIGHTS)
                delay = chance.randint(_SOONEST, self._soon)
                tasks.append(self._app.new(topic, PAYLOAD, delay=f"{delay}ms"))
                if chance.random() < _CHANGED:
                    # a quarter of them within 20 ms of the due time, where they race with the lease
                    moment = delay + chance.uniform(-20, 20) if chance.random() < 0.25 else chance.uniform(0, delay)
                    verb = chance.choice(("reschedule", "fire_now", "cancel"))
                    changes.append(_Change(now + moment / 1000, verb, topic, tasks[-1].key))
            elif kind == "group":
                group = new_id()
                delays = [chance.randint(self._soon // 2, self._soon) for _ in range(_GROUP)]
                tasks += [self._app.new(PLAIN, PAYLOAD, group=group, delay=f"{delay}ms") for delay in delays]
                verb, moment = chance.choice(("cancel_group", "later", "earlier", "")), chance.uniform(0, self._soon)
                if verb:
                    changes.append(_Change(now + moment / 1000, verb, PLAIN, group))
            else:
                tasks.append(self._app.new(PLAIN, PAYLOAD, delay=f"{chance.randint(_HOUR, 2 * _HOUR)}ms"))
                verb = chance.choice(("reschedule", "fire_now", "cancel", "cancel"))
                changes.append(_Change(now + _FAR_SECONDS, verb, PLAIN, tasks[-1].key, far=True))
        self.asked += len(tasks)
        await self._schedule(tasks)
        # only now that the tasks exist: an earlier change would not find its task, which would stay for an hour
        for change in changes:
            self.far += change.far
            heapq.heappush(self._changes, change)

    async def _schedule(self, tasks: Sequence[NewTask]) -> None:
        """Schedule the tasks, half of the time in one call, else in concurrent single calls."""
        if self._chance.random() < 0.5:
            await self._ask("schedule", self._app.schedule_many(tasks), len(tasks))
        else:
            await asyncio.gather(*(self._ask("schedule", self._app.schedule_new(task)) for task in tasks))

    def _changed(self, changes: Iterable[_Change]) -> list[Awaitable[None]]:
        """Start the changes: those of far-off tasks in one call for each verb, all others one by one."""
        app, work = self._app, list[Awaitable[None]]()
        together: dict[str, list[Ref]] = defaultdict(list)
        for _, verb, topic, key, far in changes:
            if far:
                together[verb].append(Ref(topic, key))
            elif verb == "cancel":
                work.append(self._ask(verb, app.cancel(topic, key)))
            elif verb == "fire_now":
                work.append(self._ask(verb, app.fire_now(topic, key)))
            elif verb == "reschedule":
                work.append(self._ask(verb, app.reschedule(topic, key, delay=self._soon_delay())))
            elif verb == "cancel_group":
                work.append(self._ask(verb, app.cancel_group(key), _GROUP))
            else:
                work.append(self._ask("shift", app.shift(key, "500ms" if verb == "later" else "-500ms"), _GROUP))
        for verb, refs in together.items():
            self.far -= len(refs)
            if verb == "cancel":
                work.append(self._ask(verb, app.cancel_many(refs), len(refs)))
            elif verb == "fire_now":
                work.append(self._ask(verb, app.fire_many(refs), len(refs)))
            else:
                moves = [(ref, self._soon_delay()) for ref in refs]
                work.append(self._ask(verb, app.reschedule_many(moves), len(refs)))
        return work

    def _soon_delay(self) -> str:
        return f"{self._chance.randint(_SOONEST, self._soon)}ms"

    async def _redrive(self, most: int) -> None:
        """Redrive up to `most` dead tasks."""
        try:
            found = []
            async for task in self._app.find(topic=FAILING, state="dead", page=most):
                found.append(Ref(task.topic, task.key))
                if len(found) == most:
                    break
        except StoreError as error:
            self._note_failure(error, 1)
            return
        await self._ask("redrive", self._app.redrive_many(found, delay="1s"), len(found))

    # --- answers

    async def _ask(self, verb: str, call: Awaitable[Answer | list[Answer]], number: int = 1) -> None:
        """Wait for one answer, or for `number` of them, and count them."""
        try:
            found = await call
            answers: Iterable[object] = found if isinstance(found, list) else [found]
        except PartlyFailed as partly:
            answers = partly.answers
        except StoreError as error:
            self._note_failure(error, number)
            return
        for answer in answers:
            if not isinstance(answer, Answer):
                self._note_failure(answer, 1)
                continue
            self.answers[verb][answer.result.value] += 1
            if answer.record is not None and answer.result in _BEGINS:
                self.begun.add(answer.record.id)
            elif answer.record is not None and answer.result in _ENDS:
                self.cancelled.add(answer.record.id)

    def _note_failure(self, error: object, number: int) -> None:
        self.failed += number
        if len(self.errors) < 10:
            self.errors.append(repr(error))
