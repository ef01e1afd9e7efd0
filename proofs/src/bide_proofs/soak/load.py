"""The client: one process that schedules at a rate, moves, fires, cancels, shifts and redrives, and counts what it did.

Of a hundred tasks sixty are due within seconds, some of them in a thread, thirty in an hour or two, and ten belong
to a group. Of those due soon one in six is moved, fired or cancelled at a moment of its own, which may be just when it
is leased; of those far off as many are moved to within seconds, fired or cancelled as come in, so that always the same
number waits; of the groups most are shifted or cancelled as a whole; and of the dead some are redriven, the others
left to be forgotten. It holds what waits to be changed, and nothing of what is over.
"""

from __future__ import annotations

import asyncio
import heapq
import random
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Iterable, Sequence

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
"""Tasks of one tick: what could not be done in time is made up for, but not all at once."""
_CHANGED = 1 / 6
_GROUP = 10
_FAR_SECONDS = 10
"""So many seconds' worth of far-off tasks wait all along."""
_REDRIVEN = 0.004
"""Of the rate: fewer than die, so that some are left to be forgotten."""
_TOPICS = (PLAIN, KEPT, FAILING, THREADED)
_WEIGHTS = (70, 5, 20, 5)
_ENDS = (Result.CANCELLED, Result.CANCELLED_WHILE_LEASED)
_BEGINS = (Result.CREATED, Result.REDRIVEN)


class Load:
    """The calls to `app`, and its answers."""

    def __init__(self, app: Bide, seed: int, rate: float, soon: int) -> None:
        """`soon`: milliseconds within which most are due."""
        self.begun = Ids()
        """Lives that an answer said had begun."""
        self.cancelled = Ids()
        """Those that an answer said are cancelled."""
        self.answers: dict[str, Counter[str]] = defaultdict(Counter)
        """By verb."""
        self.failed = 0
        """Calls for a task that raised: none may, since nothing is broken here."""
        self.errors: list[str] = []
        self.far: list[Ref] = []
        self.asked = 0
        """Tasks that were asked for."""
        self._app = app
        self._chance = random.Random(seed)
        self._rate = rate
        self._later: list[tuple[float, str, str, str]] = []
        """A heap of changes to come: when, verb, topic, and key or group."""
        self._redriven = time.monotonic()
        self._soon = self._soon_asked = soon

    # --- how fast

    async def run(self, seconds: float) -> float:
        """At the rate, for so long; how many tasks a second that came to. What is then missing is asked for."""
        began, before = time.monotonic(), self.asked
        while (passed := time.monotonic() - began) < seconds or self.asked - before < int(seconds * self._rate):
            await self._tick(min(_MOST, int(min(passed, seconds) * self._rate) - (self.asked - before)))
            await asyncio.sleep(max(0.0, _TICK - (time.monotonic() - began - passed)))
        return (self.asked - before) / (time.monotonic() - began)

    async def flood(self, seconds: float, under_way: Callable[[], int], most: int) -> None:
        """As many as can be done, for so long: more only while fewer than `most` are under way. All due at once."""
        self._soon = 2 * _SOONEST
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            room = most - under_way()
            if room > 0:
                await self._tick(min(_MOST, room, 500))
            await asyncio.sleep(0 if room > 0 else 0.005)
        self._soon = self._soon_asked

    def at(self, rate: float) -> None:
        """From now on."""
        self._rate = rate

    async def finish(self) -> None:
        """Ask for what is still to be asked for, and cancel what is far off."""
        while self._later:
            await self._tick(0)
            await asyncio.sleep(_TICK)
        while self.far:
            some, self.far = self.far[:1000], self.far[1000:]
            await self._ask("cancel", self._app.cancel_many(some), len(some))

    # --- a moment

    async def _tick(self, count: int) -> None:
        now = time.monotonic()
        work: list[Awaitable[None]] = []
        if count > 0:
            self.asked += count
            work.append(self._begin(*self._new(count, now)))
            work += self._changes_of_far()
        while self._later and self._later[0][0] <= now:
            _, verb, topic, key = heapq.heappop(self._later)
            work.append(self._change(verb, topic, key))
        if now - self._redriven > 1:
            self._redriven = now
            work.append(self._redrive())
        await asyncio.gather(*work)

    def _new(self, count: int, now: float) -> tuple[list[NewTask], list[NewTask]]:
        """Some tasks due soon, of which it is noted what is to become of them, and some far off."""
        chance, tasks = self._chance, []
        for _ in range(self._share(count * 0.6)):
            [topic] = chance.choices(_TOPICS, _WEIGHTS)
            delay = chance.randint(_SOONEST, self._soon)
            task = self._app.new(topic, PAYLOAD, delay=f"{delay}ms")
            tasks.append(task)
            if chance.random() < _CHANGED:
                # a quarter of them within 20 ms of the due time, where they race with the lease
                moment = delay + chance.uniform(-20, 20) if chance.random() < 0.25 else chance.uniform(0, delay)
                verb = chance.choice(("reschedule", "fire_now", "cancel"))
                heapq.heappush(self._later, (now + max(0.0, moment) / 1000, verb, topic, task.key))
        for _ in range(self._share(count * 0.1 / _GROUP)):
            group = new_id()
            delays = [chance.randint(self._soon // 2, self._soon) for _ in range(_GROUP)]
            tasks += [self._app.new(PLAIN, PAYLOAD, group=group, delay=f"{delay}ms") for delay in delays]
            verb = chance.choice(("cancel_group", "later", "earlier", ""))
            if verb:
                heapq.heappush(self._later, (now + chance.uniform(0, self._soon / 1000), verb, PLAIN, group))
        hours = (chance.randint(_HOUR, 2 * _HOUR) for _ in range(count - len(tasks)))
        return tasks, [self._app.new(PLAIN, PAYLOAD, delay=f"{delay}ms") for delay in hours]

    async def _begin(self, soon: list[NewTask], far: list[NewTask]) -> None:
        await self._schedule(soon + far)
        # now that they are there: what is taken before would not be found, and would stay
        self.far += [Ref(task.topic, task.key) for task in far]

    def _share(self, wanted: float) -> int:
        """So many on average."""
        return int(wanted) + (self._chance.random() < wanted % 1)

    async def _schedule(self, tasks: Sequence[NewTask]) -> None:
        """Half of the time in one call, else one by one at once, as many coroutines do it."""
        if self._chance.random() < 0.5:
            await self._ask("schedule", self._app.schedule_many(tasks), len(tasks))
        else:
            await asyncio.gather(*(self._ask("schedule", self._app.schedule_new(task)) for task in tasks))

    def _changes_of_far(self) -> list[Awaitable[None]]:
        """Of what is far off, so much that the same number stays."""
        app, too_many = self._app, len(self.far) - int(self._rate * 0.3 * _FAR_SECONDS)
        by_verb: dict[int, list[Ref]] = {0: [], 1: [], 2: []}
        for _ in range(max(0, too_many)):
            by_verb[min(2, self._chance.randrange(4))].append(self._taken())
        moved, fired, cancelled = by_verb.values()
        moves = [(ref, self._soon_delay()) for ref in moved]
        return [
            self._ask(verb, call, len(some))
            for verb, call, some in (
                ("reschedule", app.reschedule_many(moves), moved),
                ("fire_now", app.fire_many(fired), fired),
                ("cancel", app.cancel_many(cancelled), cancelled),
            )
        ]

    def _taken(self) -> Ref:
        """One of what is far off, any of them."""
        far, place = self.far, self._chance.randrange(len(self.far))
        far[place], far[-1] = far[-1], far[place]
        return far.pop()

    async def _change(self, verb: str, topic: str, key: str) -> None:
        app = self._app
        if verb == "cancel":
            await self._ask(verb, app.cancel(topic, key))
        elif verb == "fire_now":
            await self._ask(verb, app.fire_now(topic, key))
        elif verb == "reschedule":
            await self._ask(verb, app.reschedule(topic, key, delay=self._soon_delay()))
        elif verb == "cancel_group":
            await self._ask(verb, app.cancel_group(key), _GROUP)
        else:
            await self._ask("shift", app.shift(key, "500ms" if verb == "later" else "-500ms"), _GROUP)

    def _soon_delay(self) -> str:
        return f"{self._chance.randint(_SOONEST, self._soon)}ms"

    async def _redrive(self) -> None:
        """Some of what is dead."""
        try:
            most, found = max(1, int(self._rate * _REDRIVEN)), []
            async for task in self._app.find(topic=FAILING, state="dead", page=most):
                found.append(Ref(task.topic, task.key))
                if len(found) == most:
                    break
        except StoreError as error:
            self._note_failure(error, 1)
            return
        await self._ask("redrive", self._app.redrive_many(found, delay="1s"), len(found))

    # --- what was answered

    async def _ask(self, verb: str, call: Awaitable[Answer | list[Answer]], number: int = 1) -> None:
        """Wait for one answer, or for `number` of them, and count what they say."""
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
