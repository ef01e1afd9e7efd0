"""A process's connection to the simulated store: a `Store` that loses, repeats and delays its messages.

It works like the clients of the networked stores. For each kind of operation and shard there is one call at a time,
each with a number. A call without an answer is sent again under the same number. When patience is over, its result is
`OutcomeUnknown`, or `StoreUnavailable` if it cannot have arrived. The same code as theirs (`bide.stores.server`)
estimates the server's clock from its answers.
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping, Sequence
from contextvars import copy_context
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Any, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from bide.core.answers import Answer
from bide.core.errors import OutcomeUnknown, StoreError, StoreFull, StoreUnavailable
from bide.core.instants import Millis
from bide.core.records import (
    Change,
    Count,
    Filter,
    Found,
    Lease,
    Leased,
    NewTask,
    Page,
    Record,
    Ref,
    Settlement,
    State,
    Tally,
    Topic,
)
from bide.ports import COUNTED, Features, OnTaken, OnWake
from bide.stores.batches import gathered
from bide.stores.memory import MemoryStore
from bide.stores.server import ServerTime, StoreClock
from bide_proofs.simulate.loop import Process, SimulatedLoop
from bide_proofs.simulate.server import Old, Reply, Server, Shard, WallClock, Work

_PATIENCE = 3.0
"""Seconds that a call may take in all."""
_RESEND = 0.4
"""Seconds after which a call without an answer is sent again."""
_REFUSED = 0.02
"""Seconds after which a call to a server that is down is tried again."""
_LATE = 6.0
"""Seconds that the copy of a message may arrive after it."""
_AGAIN: Millis = 1_000
_RESTARTED = 0.2
"""Seconds after which a program that could not reach its store is restarted."""
Asked = TypeVar("Asked", NewTask, Change, Lease, Settlement, Ref)
_world = copy_context()
"""The context of no process: a message in transit arrives even if its sender is dead."""
Moment = Callable[[str, str], None]
"""Called for each message with its operation and its stage ("sent", "applied", "answered")."""


class Weather(Struct):
    """The fate of messages. Times in seconds."""

    base: float = 0.0003
    delay: float = 0.0
    """The average delay beyond the base."""
    loss: float = 0.0
    twice: float = 0.0
    """The fraction of messages that arrive twice, the second time up to some seconds later."""
    deaf: bool = False
    """If true, no notification arrives."""


class _SimulatedTime(ServerTime):
    """Uses the loop's steady clock instead of the system's."""

    def __init__(self, loop: SimulatedLoop, wall: WallClock) -> None:
        super().__init__()
        self._loop = loop
        self._low = self._high = wall.seconds() - loop.time()

    def seconds(self) -> float:
        return self._loop.time() + (self._low + self._high) / 2


class _Asking:
    """One call until it is answered or given up."""

    __slots__ = ("answered", "sent", "value", "woken")

    def __init__(self) -> None:
        self.answered = False
        self.sent = False
        """True if it may have arrived."""
        self.value: Any = None
        self.woken = asyncio.Event()

    def answer(self, value: Any) -> None:
        self.answered, self.value = True, value
        self.woken.set()


@dataclass(eq=False)
class Link:
    """A `Store` with notifications, a registry of workers, and a clock unless it uses its callers'."""

    server: Server
    process: Process
    chance: Random
    weather: Weather
    wall: WallClock
    by_caller: bool
    full: Callable[[], bool]
    """True while there is no room for new work."""
    moment: Moment
    calls: int = 0
    """The number of the process's calls so far."""

    def __post_init__(self) -> None:
        self._loop = self.process.loop
        self._under_way: dict[tuple[str, int], asyncio.Lock] = defaultdict(asyncio.Lock)
        """Locks, by operation and shard."""
        self._number: Counter[tuple[str, int]] = Counter()
        """The number of the last call, by operation and shard."""
        self._time = _SimulatedTime(self._loop, self.wall)
        self._subscriptions: list[Any] = []

    @property
    def features(self) -> Features:
        return Features(wakes=self, workers=self, clock=self)

    async def open(self) -> None:
        """Ask each shard for the time."""
        await self._everywhere("time", _nothing)

    async def close(self) -> None:
        for one in self._subscriptions:
            await one.close()
        self._subscriptions = []

    async def time(self) -> Millis:
        return self.server.clock.now()

    def clock(self) -> StoreClock | None:
        return None if self.by_caller else StoreClock(self._time)

    # --- the verbs

    async def add(self, tasks: Sequence[NewTask], *, now: Millis) -> list[Answer]:
        async def full(store: MemoryStore, mine: Sequence[NewTask], there: Millis) -> Any:
            if self.full():
                raise StoreFull("no room for new work: nothing was done")
            return await store.add(mine, now=there)

        return await self._parted("add", tasks, full, now)

    async def change(self, changes: Sequence[Change], *, now: Millis) -> list[Answer]:
        return await self._parted("change", changes, lambda store, mine, there: store.change(mine, now=there), now)

    async def extend(self, leases: Sequence[Lease], *, now: Millis, until: Millis) -> list[bool]:
        length = until - now

        def extend(store: MemoryStore, mine: Sequence[Lease], there: Millis) -> Any:
            return store.extend(mine, now=there, until=there + length)

        return await self._parted("extend", leases, extend, now)

    async def settle(self, outcomes: Sequence[Settlement], *, now: Millis) -> list[bool]:
        for outcome in outcomes:
            (outcome.error or "").encode()  # raises for text that a real store could not encode
        return await self._parted("settle", outcomes, lambda store, mine, there: store.settle(mine, now=there), now)

    async def get(self, refs: Sequence[Ref]) -> list[Record | None]:
        return await self._parted("get", refs, lambda store, mine, there: store.get(mine), None)

    async def lease(self, wants: Mapping[Topic, int], *, now: Millis, until: Millis, holder: str) -> Leased:
        """Lease from shard after shard, starting at a random one, until there is no room left."""
        room, taken, heads = dict(wants), list[Record](), dict[Topic, Millis]()
        failed: StoreError | None = None
        first, number = int(self.chance.random() * len(self.server.shards)), len(self.server.shards)
        clock = 0  # the latest of the shards' times: the clock may be set between two answers
        for step in range(number):
            place = (first + step) % number
            asked = dict(room)
            reply = await self._ask("lease", place, _lease(asked, now, until, holder, by_caller=self.by_caller), now)
            if isinstance(reply, StoreError):
                failed = reply
                continue
            leased: Leased = reply
            taken += leased.tasks
            clock = max(clock, leased.now)
            for task in leased.tasks:
                room[task.topic] -= 1
            for topic, head in leased.heads.items():
                heads[topic] = min(head, heads.get(topic, head))
        if failed is not None and not taken:
            raise failed
        return Leased(taken, heads, clock, None if failed is None else clock + _AGAIN)

    async def find(self, where: Filter, page: Page) -> Found:
        """List shard after shard; the cursor names the shard and the position in it."""
        place, inner = (int(page.cursor.split("|")[0]), page.cursor.split("|")[1]) if page.cursor else (0, "")
        found = await self._told(
            "find", place, lambda s, _: s.find(where, Page(limit=page.limit, cursor=inner or None))
        )
        assert isinstance(found, Found)
        if found.cursor is not None:
            return Found(found.tasks, f"{place}|{found.cursor}")
        last = place + 1 == len(self.server.shards)
        return Found(found.tasks, None if last else f"{place + 1}|")

    async def tally(
        self, edges: Sequence[Millis] | None = None, *, upto: int = COUNTED, topics: Collection[Topic] | None = None
    ) -> Tally:
        counts: dict[tuple[Topic, State], int] = {}
        for tally in await self._everywhere("tally", lambda store, _: store.tally(edges, upto=upto, topics=topics)):
            for name, count in tally.counts.items():
                counts[name] = counts.get(name, 0) + count.number
        return Tally({name: Count(number) for name, number in counts.items()}, {})

    async def purge(self, *, now: Millis, limit: int) -> int:
        return sum(await self._everywhere("purge", lambda store, there: store.purge(now=there, limit=limit)))

    async def announce(
        self, holder: str, topics: Collection[Topic], until: Millis, *, now: Millis
    ) -> dict[str, list[Topic]]:
        length = until - now
        live = await self._told(
            "announce", 0, lambda store, there: store.announce(holder, topics, there + length, now=there)
        )
        assert isinstance(live, dict)
        return live

    async def listen(self, topics: Collection[Topic], on_wake: OnWake, on_taken: OnTaken | None = None) -> Link:
        def deliver(callback: Callable[..., None], *said: object) -> None:
            if not self.process.alive or self.weather.deaf or self.chance.random() < self.weather.loss:
                return
            self._loop.call_later(self._delay(), callback, *said, context=self.process.context)

        for shard in self.server.shards:  # what was taken of one shard says nothing of the topic's others
            taken = None if on_taken is None or len(self.server.shards) > 1 else partial(deliver, on_taken)
            self._subscriptions.append(await shard.store.listen(topics, partial(deliver, on_wake), taken))
        return self

    # --- messages

    async def _parted(
        self,
        kind: str,
        asked: Sequence[Asked],
        work: Callable[[MemoryStore, Sequence[Asked], Millis], Coroutine[Any, Any, Any]],
        now: Millis | None,
    ) -> list[Any]:
        """Send each shard its part, all at once; each may fail separately."""
        places: dict[int, list[int]] = {}
        for place, one in enumerate(asked):
            places.setdefault(self.server.shard_of(one.topic, one.key), []).append(place)
        answers: list[Any] = [None] * len(asked)

        async def of_shard(number: int, mine: list[int]) -> None:
            part = [asked[place] for place in mine]
            reply = await self._ask(kind, number, lambda store, there: work(store, part, there), now)
            told = [reply] * len(mine) if isinstance(reply, StoreError) else reply
            for place, answer in zip(mine, told, strict=True):
                answers[place] = answer

        if len(places) == 1:
            [(number, mine)] = places.items()
            await of_shard(number, mine)
        else:
            await asyncio.gather(*(of_shard(number, mine) for number, mine in sorted(places.items())))
        return gathered(answers)

    async def _everywhere(self, kind: str, work: Work) -> list[Any]:
        return [await self._told(kind, place, work) for place in range(len(self.server.shards))]

    async def _told(self, kind: str, place: int, work: Work) -> Any:
        reply = await self._ask(kind, place, work, None)
        if isinstance(reply, StoreError):
            raise reply
        return reply

    async def _ask(self, kind: str, place: int, work: Work, now: Millis | None) -> Any:
        """Make a call; return the answer, or the StoreError. `now` is None for calls that change nothing."""
        if self.by_caller and now is not None:
            done = work
            caller_now = now
            work = lambda store, _: done(store, caller_now)  # noqa: E731 - the same work at the caller's time
        async with self._under_way[kind, place]:
            self._number[kind, place] += 1
            self.calls += 1
            return await self._insist(kind, place, self._number[kind, place] if now is not None else None, work)

    async def _insist(self, kind: str, place: int, number: int | None, work: Work) -> Any:
        shard, loop = self.server.shards[place], self._loop
        ends = loop.time() + _PATIENCE
        asking = _Asking()
        while True:
            if shard.up:
                self._send(kind, shard, number, work, asking)
                pause = _RESEND
            else:
                pause = _REFUSED
            asking.woken.clear()
            timer = loop.call_later(pause * (1 + self.chance.random()), asking.woken.set)
            try:
                await asking.woken.wait()
            finally:
                timer.cancel()
            if asking.answered:
                return asking.value
            if loop.time() >= ends:
                where = f"{kind} on shard {place}"
                if asking.sent and number is not None:
                    return OutcomeUnknown(f"{where}: no answer")
                return StoreUnavailable(f"{where}: it cannot be reached")

    def _send(self, kind: str, shard: Shard, number: int | None, work: Work, asking: _Asking) -> None:
        """Send one message, which may arrive twice or never."""
        if not self.process.alive:
            return
        weather, chance, loop = self.weather, self.chance, self._loop
        sent_at, life, caller = loop.time(), shard.life, f"{self.process.who} {kind}"
        fresh = not (asking.sent and number)
        asking.sent = True
        # draw all random numbers first: a process that is killed here must have drawn as many as one that is not
        lost, twice, there = chance.random() < weather.loss, chance.random() < weather.twice, self._delay()
        lost_back, back, late = chance.random() < weather.loss, self._delay(), chance.random() * _LATE

        def arrive() -> None:
            if not shard.up or shard.life != life:
                return
            try:
                reply = self.server.handle(shard, caller, number, work) if number else self.server.read(shard, work)
            except Old:
                reply = Reply(0, OutcomeUnknown(f"{kind}: a later call came before it"))
            self.moment(kind, "applied")
            if not lost_back:
                loop.call_later(back, come_back, reply, context=self.process.context)

        def come_back(reply: Reply) -> None:
            if asking.answered or shard.life != life:
                return
            self.moment(kind, "answered")
            if not self.process.alive:
                return
            if fresh and reply.micros:
                self._time.saw(reply.micros, sent_at, loop.time())
            asking.answer(reply.value)

        if not lost:
            loop.call_later(there, arrive, context=_world)
        if twice:
            loop.call_later(there + late, arrive, context=_world)
        self.moment(kind, "sent")

    def _delay(self) -> float:
        weather, chance = self.weather, self.chance
        delay = weather.base * (1 + 4 * chance.random())
        return delay + chance.expovariate(1 / weather.delay) if weather.delay else delay


class PartedLink(Link):
    """A store whose shards are on separate servers: calls to each are sent separately."""

    @property
    def features(self) -> Features:
        return replace(super().features, parts=self)

    def part_of(self, topic: Topic, key: str) -> int:
        return self.server.shard_of(topic, key)


def _lease(wants: Mapping[Topic, int], now: Millis, until: Millis, holder: str, *, by_caller: bool) -> Work:
    async def lease(store: MemoryStore, there: Millis) -> Leased:
        clock = there if by_caller else min(now, there)
        return await store.lease(wants, now=clock, until=there + until - now, holder=holder)

    return lease


async def until_open(open_it: Callable[[], Awaitable[object]]) -> None:
    """Open an app or a worker, again and again: a supervisor restarts a program that cannot reach its store."""
    while True:
        try:
            await open_it()
            return
        except StoreError:
            await asyncio.sleep(_RESTARTED)


async def _nothing(store: MemoryStore, there: Millis) -> None:
    """Do nothing: the call only asks for the time."""
