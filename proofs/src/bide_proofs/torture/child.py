"""A process of a run: a client or a worker on one app, until it is asked to end, or is killed.

A worker has the handlers of all topics, one for each course that a delivery can take. A client has several callers,
which make random calls at a given rate, on keys that are used repeatedly.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import select
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from itertools import count
from pathlib import Path
from typing import Any, SupportsIndex

import msgspec

from bide.app import Bide
from bide.core.errors import PartlyFailed, StoreError, StoreMismatch
from bide.core.names import new_id
from bide.core.outcomes import Dead, Defer, Done
from bide.core.records import NewTask, Token
from bide.core.retry import Fixed
from bide.core.tasks import Task
from bide.settings import Settings
from bide.testing.history.recording import Journal, Log, RecordedClient, Recording
from bide_proofs.harness.processes import ready, spec_of, told_to_end
from bide_proofs.misuse import WAYS, misbehave
from bide_proofs.servers.server import CLOCK_FILE
from bide_proofs.torture.clock import SharedClock

STEADY, FAILING, SLOW, HANGING, DEFERRING, DYING, AGAIN, THREADED, MISBEHAVING = TOPICS = (
    "steady", "failing", "slow", "hanging", "deferring", "dying", "again", "threaded", "misbehaving",
)  # fmt: skip
WEIGHTS = (40, 12, 6, 4, 10, 8, 12, 8, 6)
"""The weights with which a client chooses the topics."""
LEASE = 2.5
"""Seconds. A dead worker's tasks are due again after this; slow handlers run for longer."""
CAP = 1.0
LOSSES = 10
KEPT = 5.0
"""The retention in seconds of all ended tasks, except those of `again`, which are not kept."""
LONGEST_WORK = 6.0
KEYS = 40
"""The number of keys of each topic that are used repeatedly."""
GROUPS = 12
CALLERS = 6
"""The number of coroutines of one client process, each of which makes one call at a time."""
NEAR = 5.0
"""Seconds: most delays are at most this, and none is longer than the client's `farthest`."""
_VERBS: Mapping[str, int] = {
    "schedule": 42, "schedule_many": 4, "reschedule": 10, "fire_now": 8, "cancel": 9, "redrive": 8, "get": 8,
    "shift": 2, "cancel_group": 1,
}  # fmt: skip
"""The verbs of a client, with their weights."""
_CONFLICTS = ("replace", "replace", "replace", "keep", "earliest", "latest", "refuse")
_HASTY, _HASTE = 0.06, 0.02
"""The fraction of calls whose caller is cancelled, and the most seconds until then."""
_FRESH = 0.4
"""The fraction of schedules with a new key."""
_AGAIN = 0.2
"""Seconds after which a process tries again to open a store that is away."""


def app_on(url: str) -> Bide:
    """The app of every process of a run; the environment only supplies a token."""
    kept = f"{KEPT:g}s"
    settings = Settings.from_env(
        lease=f"{LEASE:g}s", max_sleep=f"{CAP:g}s", losses=LOSSES, keep_done=kept, keep_cancelled=kept, keep_dead=kept,
        grace=f"{LONGEST_WORK + 2:g}s",
    )  # fmt: skip
    app = Bide(url, settings=settings)
    app.retain(AGAIN, done="0s", cancelled="0s")
    return app


def handle(app: Bide, chance: random.Random) -> None:
    """Give `app` the handlers of all topics."""

    @app.handler(STEADY, keep_done=f"{KEPT:g}s")
    async def steady(task: Task[Any]) -> None:
        await asyncio.sleep(chance.uniform(0, 0.02))

    @app.handler(FAILING, retry=Fixed("300ms", tries=4))
    async def failing(task: Task[Any]) -> None:
        await asyncio.sleep(chance.uniform(0, 0.02))
        if chance.random() < 0.5:
            raise OSError("it fails half of the time")

    @app.handler(SLOW)
    async def slow(task: Task[Any]) -> None:
        await asyncio.sleep(chance.uniform(1, LONGEST_WORK))

    @app.handler(HANGING, timeout="1s", retry=Fixed("200ms", tries=3))
    async def hanging(task: Task[Any]) -> None:
        await asyncio.sleep(chance.choice((0.01, 3600)))

    @app.handler(MISBEHAVING, retry=Fixed("200ms", tries=3))
    async def misbehaving(task: Task[Any]) -> Any:
        await asyncio.sleep(chance.uniform(0, 0.02))
        return misbehave(chance.randrange(WAYS)) if chance.random() < 0.6 else None

    @app.handler(DEFERRING)
    async def deferring(task: Task[Any]) -> Defer | None:
        return Defer(f"{chance.randint(10, 2_000)}ms") if chance.random() < 0.5 else None

    @app.handler(DYING)
    async def dying(task: Task[Any]) -> Dead | None:
        return Dead("it dies more often than not") if chance.random() < 0.7 else None

    @app.handler(AGAIN, keep_done="0s", keep_cancelled="0s")
    async def again(task: Task[Any]) -> Done | None:
        return Done(again_in=f"{chance.randint(20, 1_500)}ms") if chance.random() < 0.6 else None

    @app.handler(THREADED, concurrency=8)
    def threaded(task: Task[Any]) -> None:
        select.select([], [], [], chance.uniform(0, 0.05))  # sleeps, also where libfaketime spoils time.sleep


class Caller:
    """One coroutine of a client, which makes one call at a time."""

    def __init__(self, client: RecordedClient, clock: SharedClock, chance: random.Random, farthest: float) -> None:
        self._client = client
        self._clock = clock
        self._chance = chance
        self._farthest = farthest
        self._tokens: dict[tuple[str, str], Token] = {}

    async def run(self, rate: float, over: asyncio.Task[None]) -> None:
        """Make `rate` calls a second, fewer if the store is slow, until it is over."""
        while not (await asyncio.wait([over], timeout=self._chance.expovariate(rate)))[0]:
            [verb] = self._chance.choices(list(_VERBS), list(_VERBS.values()))
            patience = self._chance.uniform(0, _HASTE) if self._chance.random() < _HASTY else None
            # an error is in the history, and the next call follows, as it would from people
            with suppress(StoreError, TimeoutError):
                async with asyncio.timeout(patience):
                    self._remember(await self._ask(verb))

    async def _ask(self, verb: str) -> Sequence[Any]:
        """Make one random call; return its answers. Raises StoreError."""
        client, chance = self._client, self._chance
        match verb:
            case "schedule":
                return [await client.schedule(self._new())]
            case "schedule_many":
                try:
                    return await client.schedule_many([self._new() for _ in range(chance.randint(2, 10))])
                except PartlyFailed as partly:
                    return partly.answers
            case "redrive":
                topic, key = self._pair(chance.choice((DYING, DYING, FAILING)))
                delay = timedelta(milliseconds=chance.choice((0, 50, 700)))
                return [await client.redrive(topic, key, delay=delay)]
            case "get":
                return [await client.get(*self._pair())]
            case "shift":
                return await client.shift(self._group(), timedelta(seconds=chance.uniform(-4, 4)))
            case "cancel_group":
                [topic] = chance.choices(TOPICS, WEIGHTS)
                return await client.cancel_group(self._group(), topic=topic)
        (topic, key), options = self._aim()
        if verb == "reschedule":
            options |= self._when(self._delay(), 0.3)
        return [await getattr(client, verb)(topic, key, **options)]

    # arguments of calls

    def _new(self) -> NewTask:
        chance = self._chance
        topic, key = self._pair(fresh=_FRESH)
        delay = self._delay()
        return self._client.new(
            topic, key, key=key, on_conflict=chance.choice(_CONFLICTS),
            group=self._group() if chance.random() < 0.3 else None,
            deadline=self._at(delay + timedelta(seconds=chance.uniform(5, 20))) if chance.random() < 0.1 else None,
            if_token=self._tokens.get((topic, key)) if chance.random() < 0.1 else None,
            **self._when(delay, 0.2),
        )  # fmt: skip

    def _when(self, delay: timedelta, at: float) -> dict[str, Any]:
        """The delay as an option, in the fraction `at` of the cases as an instant."""
        return {"at": self._at(delay)} if self._chance.random() < at else {"delay": delay}

    def _delay(self) -> timedelta:
        chance = self._chance
        kind = chance.random()
        if kind < 0.2:
            return timedelta(0)
        return timedelta(
            milliseconds=round(1000 * chance.uniform(0, min(NEAR, self._farthest) if kind < 0.93 else self._farthest))
        )

    def _at(self, delay: timedelta) -> datetime:
        """The instant `delay` from now by the store's clock: this process's own may be wrong."""
        return datetime.fromtimestamp(self._clock.now() / 1000, UTC) + delay

    def _pair(self, topic: str | None = None, *, fresh: float = 0.0) -> tuple[str, str]:
        chance = self._chance
        if topic is None:
            [topic] = chance.choices(TOPICS, WEIGHTS)
        return topic, new_id() if chance.random() < fresh else f"k{chance.randrange(KEYS)}"

    def _group(self) -> str:
        return f"g{self._chance.randrange(GROUPS)}"

    def _aim(self) -> tuple[tuple[str, str], dict[str, Any]]:
        """Choose any key; or a key from an earlier answer, perhaps with its token, which may be old."""
        if not self._tokens or self._chance.random() < 0.5:
            return self._pair(), {}
        pair, token = self._chance.choice(list(self._tokens.items()))
        return pair, {"if_token": token} if self._chance.random() < 0.3 else {}

    def _remember(self, answers: Sequence[Any]) -> None:
        """Keep the newest tokens of 50 tasks; an answer may be an error or None."""
        for answer in answers:
            record = getattr(answer, "record", None)
            if record is not None:
                self._tokens[record.topic, record.key] = record.token
                if len(self._tokens) > 50:
                    self._tokens.pop(next(iter(self._tokens)))


class Spec(msgspec.Struct, frozen=True, kw_only=True):
    """The spec of a process: the first line of its standard input."""

    url: str
    name: str
    journal: str
    clock: str
    first_call: int
    seed: str
    rate: float = 0.0
    """For a client, the calls a second; 0 for a worker."""
    farthest: float = 0.0
    """For a client, the longest delay that it asks for, in seconds."""
    shares_clock: bool = False
    """True if its time of day is the store's, as with a file, which only has its callers' clocks."""


class Actor:
    """One process, with an app on the store that records its calls and deliveries."""

    def __init__(self, spec: Spec) -> None:
        self.spec = spec
        self.chance = random.Random(spec.seed)
        self.clock = SharedClock(Path(spec.clock))
        if spec.shares_clock:
            self.clock.become_ours()
        self.journal = Journal(
            Log(Path(spec.journal)).say, time_ns=time.monotonic_ns, clock=self.clock.now, calls=count(spec.first_call)
        )
        self.app = app_on(spec.url)
        self.app.instruments.append(Recording(self.journal, spec.name))

    async def until_open(self, open_: Callable[[], Awaitable[object]], over: asyncio.Task[None]) -> bool:
        """Open the store, with retries while it is away; return True if it is open before all is over."""
        while not over.done():
            try:
                await open_()
            except StoreMismatch:
                raise
            except StoreError:
                await asyncio.sleep(_AGAIN)
            else:
                return True
        return False


async def _ask(actor: Actor, over: asyncio.Task[None]) -> None:
    spec = actor.spec
    if not await actor.until_open(actor.app.open, over):
        return
    ready()
    callers = [
        Caller(
            RecordedClient(actor.app, actor.journal, f"{spec.name}/{number}"), actor.clock,
            random.Random(f"{spec.seed}/{number}"), spec.farthest,
        )
        for number in range(CALLERS)
    ]  # fmt: skip
    await asyncio.gather(*(caller.run(spec.rate / CALLERS, over) for caller in callers))
    await actor.app.close()


async def _work(actor: Actor, over: asyncio.Task[None]) -> None:
    handle(actor.app, actor.chance)
    worker = actor.app.worker()
    if await actor.until_open(worker.__aenter__, over):
        try:
            ready()
            await over
        finally:
            await worker.__aexit__()


def main(act: Callable[[Actor, asyncio.Task[None]], Awaitable[None]]) -> None:
    """Read the spec, and act until the parent asks this process to end."""
    spec = spec_of(Spec)
    if CLOCK_FILE in os.environ:
        # libfaketime refuses the system call of time.sleep, a sleep until an instant of the monotonic clock
        time.sleep = _sleep
    logging.basicConfig(level=logging.ERROR, format="%(name)s: %(message)s")
    logging.getLogger().handlers[0].addFilter(_is_a_defect)

    async def acted() -> None:
        await act(Actor(spec), asyncio.create_task(told_to_end()))

    asyncio.run(acted())


def _sleep(seconds: SupportsIndex | float, /) -> None:
    select.select([], [], [], float(seconds))


def _is_a_defect(record: logging.LogRecord) -> bool:
    """True unless the line reports a dead task, or a failed settle while the store was away: both are expected."""
    return record.exc_info is not None or record.name not in ("bide.worker", "bide.settler")


if __name__ == "__main__":
    main(lambda actor, over: (_ask if actor.spec.rate else _work)(actor, over))
