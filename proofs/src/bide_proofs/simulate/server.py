"""The server of a simulated store: shards in memory, a clock of its own, and a journal of answers.

Each shard is a `bide.stores.memory`, so the lifecycle's own functions decide. In addition the server behaves as the
networked stores promise: each call carries its caller and a number that only rises, the last answer to each caller is
kept and repeated, and an older call that arrives late is refused. The server is durable: answered changes survive its
restart.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any, NamedTuple, TypeVar

from bide.core.errors import StoreError
from bide.core.instants import Millis
from bide.core.records import Filter, Leased, Page, Record
from bide.stores.memory import MemoryStore
from bide.stores.sql.reading import at_once
from bide.testing.clock import FIRST_INSTANT
from bide_proofs.simulate.loop import SimulatedLoop

R = TypeVar("R")
Work = Callable[[MemoryStore, Millis], Coroutine[Any, Any, Any]]
"""The effect of a call on a shard, at the server's time."""


class WallClock:
    """A clock that runs slightly too fast or too slow, and that can jump forward and back."""

    grain: Millis = 1

    def __init__(self, loop: SimulatedLoop, drift: float = 0.0) -> None:
        self._loop = loop
        self._rate = 1 + drift
        self._set = 0.0

    def seconds(self) -> float:
        return FIRST_INSTANT / 1000 + self._loop.time() * self._rate + self._set

    def now(self) -> Millis:
        return int(self.seconds() * 1000 + 1e-5)

    def seconds_until(self, at: Millis) -> float:
        return (at / 1000 - self.seconds()) / self._rate

    def span(self, length: Millis) -> Millis:
        return length

    def jump(self, seconds: float) -> None:
        self._set += seconds


class Reply(NamedTuple):
    """A reply: the server's time in microseconds, and the answer."""

    micros: int
    value: Any


class Old(Exception):
    """A call that arrives after a later one of the same caller; it has no effect."""


class _Kept(NamedTuple):
    number: int
    reply: Reply


class Shard:
    """A part of the store, on a separate machine."""

    def __init__(self) -> None:
        self.store = MemoryStore()
        self.up = True
        self.life = 1
        """Rises with each restart: messages to an earlier life are lost."""
        self.kept: dict[str, _Kept] = {}

    def stop(self) -> None:
        self.up = False
        self.life += 1

    def start(self) -> None:
        self.up = True


class Server:
    """All shards, under one clock."""

    def __init__(self, clock: WallClock, shards: int) -> None:
        self.clock = clock
        self.shards = [Shard() for _ in range(shards)]
        for shard in self.shards:
            at_once(shard.store.open())

    def shard_of(self, topic: str, key: str) -> int:
        return sum(f"{topic}/{key}".encode()) % len(self.shards)

    def handle(self, shard: Shard, caller: str, number: int, work: Work) -> Reply:
        """Carry out a call once; a call that was answered before gets the same answer. Raises Old."""
        last = shard.kept.get(caller)
        if last is not None and number <= last.number:
            if number < last.number:
                raise Old
            return Reply(last.reply.micros, _as_still_held(shard, last.reply.value))
        reply = self.read(shard, work)
        shard.kept[caller] = _Kept(number, reply)
        return reply

    def read(self, shard: Shard, work: Work) -> Reply:
        """Carry out a call that changes nothing or may be repeated."""
        micros = int(self.clock.seconds() * 1e6)
        try:
            value = at_once(work(shard.store, self.clock.now()))
        except StoreError as error:
            value = error
        return Reply(micros, value)

    def records(self) -> list[Record]:
        """All records in the store."""
        page = Page(limit=10**9)
        return [record for shard in self.shards for record in at_once(shard.store.find(Filter(), page)).tasks]


def _as_still_held(shard: Shard, value: Any) -> Any:
    """A repeated answer without the tasks that have changed hands since."""
    if not isinstance(value, Leased):
        return value
    now = at_once(shard.store.get([task.ref for task in value.tasks]))
    held = [task for task, there in zip(value.tasks, now, strict=True) if there and there.token == task.token]
    return Leased(held, value.heads, value.now, value.again_by)
