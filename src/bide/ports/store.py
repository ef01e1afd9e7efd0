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
"""The default limit of a count: about a millisecond's worth of index entries."""


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

        `upto`: where the count of an interval may stop. A store that counts by walking an index reads that many entries
        at most, some ten million a second; others are exact anyway, and a remote one may stop at `COUNTED`.
        `topics`: the topics that are counted; None: all.
        """
        ...

    async def lease(self, wants: Mapping[Topic, int], *, now: Millis, until: Millis, holder: str) -> Leased:
        """Lease up to the wanted number of due tasks of each topic, oldest first within it, until `until`.

        A store of several shards may take a younger task of one shard before the oldest of another.

        `next_wake` is not later than the earliest wake of the topics that got fewer than they wanted and of those that
        want 0 (which only ask); for these it may lie in the past. A full topic's backlog is left out, so that it cannot
        spin the caller.
        """
        ...

    async def extend(self, leases: Sequence[Lease], *, now: Millis, until: Millis) -> list[bool]:
        """Keep leases until `until`; false where the token is not that of the live lease."""
        ...

    async def purge(self, *, now: Millis, limit: int) -> int:
        """Forget up to `limit` ended tasks whose `keep_until` has passed; their number."""
        ...


OnWake = Callable[[Topic, Millis], None]
"""Called on the event loop: a task of this topic now wakes at this time, maybe earlier than was known."""


class Listening(Protocol):
    """A subscription; closing it ends the calls."""

    async def close(self) -> None: ...


class Notifies(Protocol):
    """Notifications of earlier wakes, however far off: the store cannot know how long a worker may sleep.

    They may come late, twice, or not at all: every sleep is capped. A store for which each is expensive may leave out
    those beyond the cap that it was opened with.
    """

    async def listen(self, topics: Collection[Topic], on_wake: OnWake) -> Listening: ...


class WorkerRegistry(Protocol):
    """The live workers of a store."""

    async def announce(
        self, holder: str, topics: Collection[Topic], until: Millis, *, now: Millis
    ) -> dict[str, list[Topic]]:
        """Register that `holder` works on `topics` until then (none: it has left). Returns the live workers."""
        ...


class JoinsTransaction(Protocol):
    """Transactions of a store whose tasks share a database with the caller's data."""

    def transaction(self) -> AbstractAsyncContextManager[Joined]:
        """A new transaction on the store's database: committed on leaving without an error, else rolled back."""
        ...

    def using(self, connection: object) -> Joined:
        """The verbs on the caller's connection; the caller commits. This, or they, raise BadInput for a foreign one."""
        ...


class KeepsEvents(Protocol):
    """A capped log of what was out of the ordinary."""

    async def record(self, events: Sequence[Event]) -> None: ...

    async def events(self, ref: Ref | None = None, *, limit: int = 100) -> list[Event]:
        """The newest first, of one task or of all."""
        ...


class HasClock(Protocol):
    """A clock of the store's own."""

    async def time(self) -> Millis: ...

    def clock(self) -> Clock | None:
        """The clock of the open store; None if it goes by its caller's."""
        ...


class Remote(Protocol):
    """A service in front of a store. It holds back paused topics and writes the history for its clients, which ask it
    about both."""

    async def pause(self, topic: Topic, who: str | None) -> bool:
        """Hold its tasks back; False if it was paused before. `who`: the person behind the authenticated caller."""
        ...

    async def resume(self, topic: Topic, who: str | None) -> bool:
        """Let them go out; False if it was not paused."""
        ...

    async def paused(self) -> list[Pause]:
        """The paused topics among those that the caller has any access to."""
        ...

    async def minutes(self, first: int, last: int) -> bytes:
        """The rows of the history by minute, as `engine.history` reads them; an hour of them at most.

        Raises SetupError unless the caller may read every topic.
        """
        ...


class Partitioned(Protocol):
    """The parts of a store, each of which may be away, or busy, while the others work."""

    def part_of(self, topic: Topic, key: str) -> int:
        """The number of a task's part. Tasks of one part are sent in one batch; no others wait for them.

        One batch of each part is under way at a time, so that with several parts the caller makes the next batch while
        the store does the last.
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
