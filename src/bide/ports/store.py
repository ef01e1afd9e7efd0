"""The store seam: the operations that the engine asks of a store.

A store has nine batch operations. All are plural; the answer has the length and order of the argument; none is
optional, none knows about retry policies or handlers, and no driver's type appears here. An answer of `add`,
`change` or `settle` may be pending, see `verbs.Pending`. `Store.features` holds the objects for what only some stores
can do.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Protocol, runtime_checkable

from msgspec import Struct

from bide.core.events import Event
from bide.core.instants import Millis
from bide.core.records import (
    Lease,
    Leased,
    Pause,
    Ref,
    Tally,
    Topic,
)
from bide.ports.diagnosis import Diagnoses, HasSchema
from bide.ports.tables import WatchesTables
from bide.ports.time import Clock
from bide.ports.verbs import Joined, Verbs

COUNTED = 10_000
"""Up to so many are counted, unless somebody asks for more: about a millisecond's worth of index entries."""


@runtime_checkable
class Store(Verbs, Protocol):
    """Where tasks rest. Errors: StoreUnavailable, StoreFull (add only), StoreCorrupt; a lost race is an answer."""

    @property
    def features(self) -> Features:
        """The abilities beyond the operations: the same whether it is open or closed."""
        ...

    async def open(self) -> None:
        """Connect; create or check the schema. Raises StoreMismatch, StoreUnavailable."""
        ...

    async def close(self) -> None:
        """Finish what was begun and let go of everything. A second close does nothing."""
        ...

    async def tally(
        self, edges: Sequence[Millis] | None = None, *, upto: int = COUNTED, topics: Collection[Topic] | None = None
    ) -> Tally:
        """Counts by (topic, state), each exact up to a limit; with `edges`, the forecast: waiting by interval.

        `upto`: where the count of an interval may stop. Stores that count by walking an index look at so many entries
        of it at most, some ten million a second; others are exact anyhow, and one far away may stop at `COUNTED`.
        `topics`: only these are counted; None: all.
        """
        ...

    async def lease(self, wants: Mapping[Topic, int], *, now: Millis, until: Millis, holder: str) -> Leased:
        """Take up to so many due tasks of each topic, oldest first within it, held until `until`.

        A store of several shards may take somewhat younger ones of one shard before the oldest of another.

        `next_wake` is not later than the earliest wake of the topics that got fewer than they wanted and of those that
        want 0 (which only ask); for these it may lie in the past. A full topic's backlog is left out, so that it cannot
        spin the caller.
        """
        ...

    async def extend(self, leases: Sequence[Lease], *, now: Millis, until: Millis) -> list[bool]:
        """Keep leases until `until`; false where the token is not that of the live lease."""
        ...

    async def purge(self, *, now: Millis, limit: int) -> int:
        """Forget up to `limit` ended tasks whose `keep_until` has passed; how many it was."""
        ...


Heard = Callable[[Topic, Millis], None]
"""Called on the event loop: something of this topic now wakes at this time, maybe earlier than you know."""


class Listening(Protocol):
    """A subscription; closing it ends the calls."""

    async def close(self) -> None: ...


class Notifies(Protocol):
    """A store that can tell of an earlier wake, however far off: it cannot know how long a sleep may be.

    Tidings may be late, double, or lost: every sleep is capped. A store that must pay for each may leave out those that
    lie beyond the cap that it was opened with.
    """

    async def listen(self, topics: Collection[Topic], heard: Heard) -> Listening: ...


class WorkerRegistry(Protocol):
    """A store that knows which workers live."""

    async def announce(
        self, holder: str, topics: Collection[Topic], until: Millis, *, now: Millis
    ) -> dict[str, list[Topic]]:
        """Say that `holder` works on `topics` until then (no topics: it has gone); who lives, with their topics."""
        ...


class JoinsTransaction(Protocol):
    """A store whose tasks share a database with the caller's data."""

    def transaction(self) -> AbstractAsyncContextManager[Joined]:
        """A new transaction on the store's database: committed on leaving without an error, else rolled back."""
        ...

    def using(self, connection: object) -> Joined:
        """The verbs on the caller's connection; the caller commits. They, or this, raise BadInput for a foreign one."""
        ...


class KeepsEvents(Protocol):
    """A store with a capped log of what was out of the ordinary."""

    async def record(self, events: Sequence[Event]) -> None: ...

    async def events(self, ref: Ref | None = None, *, limit: int = 100) -> list[Event]:
        """The newest first, of one task or of all."""
        ...


class HasClock(Protocol):
    """A store with a clock of its own."""

    async def time(self) -> Millis: ...

    def clock(self) -> Clock | None:
        """The store's clock, for whoever has opened it; None if it was told to go by the caller's."""
        ...


class Remote(Protocol):
    """A store behind a service, which does for those who lease from it what they would else have to do themselves: it
    holds back what is paused, and tells the history. What is paused it keeps itself, so that is asked of it."""

    async def pause(self, topic: Topic, who: str | None) -> bool:
        """Hold its tasks back; whether it was not paused before. `who` asks for it, besides who is known to call."""
        ...

    async def resume(self, topic: Topic, who: str | None) -> bool:
        """Let them go out; whether it was paused."""
        ...

    async def paused(self) -> list[Pause]:
        """The paused topics among those that the caller may do anything with."""
        ...

    async def minutes(self, first: int, last: int) -> bytes:
        """The rows of the history by minute, as `engine.history` reads them; an hour of them at most.

        Raises SetupError unless the caller may read every topic.
        """
        ...


class Partitioned(Protocol):
    """A store of several parts, each of which may be away, or busy, while the others work."""

    def part_of(self, topic: Topic, key: str) -> int:
        """Tasks with the same number are told to it together; no others are kept waiting for them.

        One batch of each part is under way at a time, so that with several of them the caller makes the next batch
        while the store does the last.
        """
        ...


class Features(Struct, frozen=True, kw_only=True):
    """The objects for what only some stores can do; None where one cannot. Mostly each is the store itself."""

    wakes: Notifies | None = None
    workers: WorkerRegistry | None = None
    transactions: JoinsTransaction | None = None
    events: KeepsEvents | None = None
    clock: HasClock | None = None
    parts: Partitioned | None = None
    schema: HasSchema | None = None
    diagnosis: Diagnoses | None = None
    tables: WatchesTables | None = None
    remote: Remote | None = None
