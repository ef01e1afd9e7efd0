"""The store port: the operations that the engine needs of a store.

A store has nine operations on batches; the answer has the length and order of the argument. None is optional, none
knows about retry policies or handlers, and no driver's type appears here. An answer of `add`, `change` or `settle` may
be pending, see `verbs.Pending`. `Store.features` holds the objects for abilities that only some stores have.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Protocol, runtime_checkable

from msgspec import Struct

from bide.core.events import Event
from bide.core.instants import Millis
from bide.core.records import Lease, Leased, Pause, Ref, Tally, Topic
from bide.ports.diagnosis import Diagnoses, HasSchema
from bide.ports.tables import WatchesTables
from bide.ports.time import Clock
from bide.ports.verbs import Joined, Verbs

COUNTED = 10_000
"""The default limit of a count: the index entries that take about a millisecond to count."""


@runtime_checkable
class Store(Verbs, Protocol):
    """The storage of tasks. Raises StoreUnavailable, StoreFull (add only), StoreCorrupt; a lost race is an answer."""

    @property
    def features(self) -> Features:
        """The abilities beyond the operations; the same while the store is open or closed."""
        ...

    async def open(self) -> None:
        """Connect; create or check the schema. Raises StoreMismatch, StoreUnavailable."""
        ...

    async def close(self) -> None:
        """Finish calls in progress and release everything. A second close does nothing."""
        ...

    async def tally(
        self, edges: Sequence[Millis] | None = None, *, upto: int = COUNTED, topics: Collection[Topic] | None = None
    ) -> Tally:
        """Count by (topic, state), each exact up to a limit; with `edges`, also the waiting tasks by interval.

        `upto`: the number at which the count of an interval may stop. A store that counts by walking an index reads at
        most that many entries, some ten million a second. Other stores are always exact, and a remote one may stop at
        `COUNTED`. `topics`: the topics to count; None: all.
        """
        ...

    async def lease(self, wants: Mapping[Topic, int], *, now: Millis, until: Millis, holder: str) -> Leased:
        """Lease up to the wanted number of due tasks of each topic until `until`, oldest first within a topic.

        A store with several shards may take a younger task of one shard before the oldest of another. A store that
        copies payloads may take fewer tasks than are due once it has about 1 MiB of them.

        `heads` says when to ask again about the topics that got fewer tasks than wanted, and about those with 0 wanted,
        which are only queried; it lies in the past if more is due. The backlog of a topic that got all it wanted is
        left out, so that the caller does not spin.
        """
        ...

    async def extend(self, leases: Sequence[Lease], *, now: Millis, until: Millis) -> list[bool]:
        """Extend leases to `until`; False for a token that is not that of the live lease."""
        ...

    async def purge(self, *, now: Millis, limit: int) -> int:
        """Delete up to `limit` ended tasks whose `keep_until` has passed. Returns their number."""
        ...


OnWake = Callable[[Topic, Millis], None]
"""Called on the event loop when a task of this topic now wakes at this time, possibly earlier than known."""

OnTaken = Callable[[Topic, Millis, Millis, str], None]
"""Called when `holder` has leased all that woke by a time, and still has room: `(topic, by, head, holder)`.

`head` is the topic's next wake after that; NEVER: there is none. `by` is NEVER if the store itself knows when this
process should ask next: at `head`.
"""


class Listening(Protocol):
    """A subscription; no more calls follow after `close`."""

    async def close(self) -> None: ...


class Notifies(Protocol):
    """Notifications of earlier wake times, however far ahead, since the store does not know how long a worker sleeps.

    They may come late, twice, or not at all, because every sleep is capped. If notifications are expensive, a store may
    leave out those beyond the cap that it was opened with.

    A store may also notify of what other workers took, so that of many idle workers few lease for the same task. Such
    a message may cross that of a new task: it says nothing of tasks that wake after `by`.
    """

    async def listen(
        self, topics: Collection[Topic], on_wake: OnWake, on_taken: OnTaken | None = None
    ) -> Listening: ...


class WorkerRegistry(Protocol):
    """The live workers of a store."""

    async def announce(
        self, holder: str, topics: Collection[Topic], until: Millis, *, now: Millis
    ) -> dict[str, list[Topic]]:
        """Register that `holder` works on `topics` until `until` (no topics: it has left). Returns the live workers."""
        ...


class JoinsTransaction(Protocol):
    """Transactions of a store that shares a database with the caller's data."""

    def transaction(self) -> AbstractAsyncContextManager[Joined]:
        """A new transaction on the store's database, committed on leaving without an error, else rolled back."""
        ...

    def using(self, connection: object) -> Joined:
        """The verbs on the caller's connection; the caller commits. This call or its verbs raise BadInput for a
        connection to another database."""
        ...


class KeepsEvents(Protocol):
    """A capped log of unusual events."""

    async def record(self, events: Sequence[Event]) -> None: ...

    async def events(self, ref: Ref | None = None, *, limit: int = 100) -> list[Event]:
        """The events of one task or of all, newest first."""
        ...


class HasClock(Protocol):
    """A clock of the store's own."""

    async def time(self) -> Millis: ...

    def clock(self) -> Clock | None:
        """The clock of the open store; None if it uses its caller's."""
        ...


class Remote(Protocol):
    """A service in front of a store. It holds back paused topics and writes the history; its clients query both."""

    async def pause(self, topic: Topic, who: str | None) -> bool:
        """Hold back the topic; False if it was already paused. `who`: the person behind the authenticated caller."""
        ...

    async def resume(self, topic: Topic, who: str | None) -> bool:
        """Deliver the topic's tasks again; False if it was not paused."""
        ...

    async def paused(self) -> list[Pause]:
        """The paused topics to which the caller has any access."""
        ...

    async def minutes(self, first: int, last: int) -> bytes:
        """The rows of the history by minute, in the form that `engine.history` reads; at most an hour of them.

        Raises SetupError unless the caller may read every topic.
        """
        ...


class Partitioned(Protocol):
    """The parts of a store; each may be unavailable or busy while the others work."""

    def part_of(self, topic: Topic, key: str) -> int:
        """The number of a task's part. Tasks of one part are sent in one batch, and no other tasks wait for them.

        One batch of each part is in flight at a time. So the caller prepares one while the store processes another.
        """
        ...


class Features(Struct, frozen=True, kw_only=True):
    """The objects for abilities that only some stores have; None for a missing one. Most are the store itself."""

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
