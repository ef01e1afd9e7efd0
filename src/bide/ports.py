"""The seams: what the engine asks of a store, a sink, a timer and a clock, and nothing more.

A store has nine batch operations. All are plural; the answer has the length and order of the argument; none is
optional, none knows about retry policies or handlers, and no driver's type appears here. What only some stores can do
is a small protocol of its own below, found with `isinstance`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol, TypeVar, runtime_checkable

from msgspec import Struct

from bide.core.answers import Answer
from bide.core.events import Event
from bide.core.instants import Millis
from bide.core.outcomes import Outcome
from bide.core.records import (
    Change,
    Filter,
    Found,
    Lease,
    Leased,
    NewTask,
    Page,
    Record,
    Ref,
    Settlement,
    Tally,
    Topic,
)
from bide.core.retry import RetryPolicy
from bide.core.table_source import TableSource
from bide.core.tasks import Task


class Verbs(Protocol):
    """The operations that clients use; also what a joined transaction offers."""

    async def add(self, tasks: Sequence[NewTask], *, now: Millis) -> list[Answer]:
        """Schedule, each by its own `on_conflict`. Durable once answered. One key may come twice: in order."""
        ...

    async def change(self, changes: Sequence[Change], *, now: Millis) -> list[Answer]:
        """Move, cancel or redrive: each one atomic transition, or an answer that says why not."""
        ...

    async def get(self, refs: Sequence[Ref]) -> list[Record | None]:
        """The tasks as they are, also finished ones while they are kept."""
        ...

    async def find(self, where: Filter, page: Page) -> Found:
        """One page of tasks, served by an index. Tasks that stay put are neither skipped nor repeated across pages.

        Order: with a group by (topic, key); with a state or a wake range by topic, then `wake_at` (live) or
        `finished_at` (ended); otherwise by topic, and within it as the store likes. Raises BadInput for a cursor that
        is not from here.
        """
        ...

    async def settle(self, outcomes: Sequence[Settlement], *, now: Millis) -> list[bool]:
        """Record how leases ended; false where the token is not that of the live lease, and nothing changed."""
        ...


@runtime_checkable
class Store(Verbs, Protocol):
    """Where tasks rest. Errors: StoreUnavailable, StoreFull (add only), StoreCorrupt; a lost race is an answer."""

    async def open(self) -> None:
        """Connect; create or check the schema. Raises StoreMismatch, StoreUnavailable."""
        ...

    async def close(self) -> None:
        """Finish what was begun and let go of everything. A second close does nothing."""
        ...

    async def tally(self, edges: Sequence[Millis] | None = None) -> Tally:
        """Counts by (topic, state), each exact up to a limit; with `edges`, the forecast: waiting by interval."""
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


@runtime_checkable
class Notifies(Protocol):
    """A store that can tell of an earlier wake, however far off: it cannot know how long a sleep may be.

    Tidings may be late, double, or lost: every sleep is capped. A store that must pay for each may leave out those that
    lie beyond the cap that it was opened with.
    """

    async def listen(self, topics: Collection[Topic], heard: Heard) -> Listening: ...


@runtime_checkable
class Shares(Protocol):
    """A store that knows which workers live."""

    async def announce(
        self, holder: str, topics: Collection[Topic], until: Millis, *, now: Millis
    ) -> dict[str, list[Topic]]:
        """Say that `holder` works on `topics` until then (no topics: it has gone); who lives, with their topics."""
        ...


class Joined(Verbs, Protocol):
    """The verbs on one open transaction: they take part in it, and end with it."""

    @property
    def connection(self) -> Any:
        """The driver's own connection, for the handler's statements."""
        ...


@runtime_checkable
class JoinsTransaction(Protocol):
    """A store whose tasks share a database with the caller's data."""

    def transaction(self) -> AbstractAsyncContextManager[Joined]:
        """A new transaction on the store's database: committed on leaving without an error, else rolled back."""
        ...

    def using(self, connection: object) -> Joined:
        """The verbs on the caller's connection; the caller commits. They, or this, raise BadInput for a foreign one."""
        ...


@runtime_checkable
class KeepsEvents(Protocol):
    """A store with a capped log of what was out of the ordinary."""

    async def record(self, events: Sequence[Event]) -> None: ...

    async def events(self, ref: Ref | None = None, *, limit: int = 100) -> list[Event]:
        """The newest first, of one task or of all."""
        ...


@runtime_checkable
class TellsTime(Protocol):
    """A store with a clock of its own."""

    async def time(self) -> Millis: ...

    def clock(self) -> Clock | None:
        """The store's clock, for whoever has opened it; None if it was told to go by the caller's."""
        ...


@runtime_checkable
class Parted(Protocol):
    """A store of several parts, each of which may be away, or busy, while the others work."""

    def part_of(self, topic: Topic, key: str) -> int:
        """Tasks with the same number are told to it together; no others are kept waiting for them.

        One batch of each part is under way at a time, so that with several of them the caller makes the next batch
        while the store does the last.
        """
        ...


@runtime_checkable
class AnswersApart(Protocol):
    """A store in which somebody else's open transaction may hold up some tasks of a batch.

    These are the verbs of the same names for whoever can deal with a late answer: in its place is an `asyncio.Future`,
    so that nobody waits for another's task.
    """

    async def add_apart(self, tasks: Sequence[NewTask], *, now: Millis) -> list[Any]: ...

    async def change_apart(self, changes: Sequence[Change], *, now: Millis) -> list[Any]: ...

    async def settle_apart(self, outcomes: Sequence[Settlement], *, now: Millis) -> list[Any]: ...


@runtime_checkable
class HasSchema(Protocol):
    """A store with a schema that has versions."""

    async def schema_version(self) -> tuple[int, int]:
        """What was found (0: nothing), and what this code wants. Works before `open` where that checks the schema."""
        ...

    async def plan(self) -> list[str] | None:
        """What `migrate` would run now, statement by statement; None: opening alone brings it up to date."""
        ...

    async def migrate(self) -> None:
        """Bring the schema to what this code wants; nothing to do is no error. Works before `open`."""
        ...


class Finding(Struct, frozen=True):
    """One thing that `doctor` looked at."""

    ok: bool
    what: str
    advice: str = ""
    severe: bool = False
    """When not ok: tasks are lost or may be; else it is worth a warning."""


@runtime_checkable
class Diagnoses(Protocol):
    """A store that can examine itself and its surroundings."""

    async def diagnose(self) -> list[Finding]: ...


class DueRow(Struct, frozen=True):
    """One row of a watched table, as it was when it came due."""

    id: Any
    due: Millis
    columns: Mapping[str, Any]
    """What the source asks for, the id among them."""


class Head(Struct, frozen=True):
    """The earliest row of a watched table."""

    due: Millis | None
    """None: there is none."""
    now: Millis
    """What time it was there: what is due by then can be taken."""


class Taken(Struct, frozen=True):
    """Rows that are ours, and changed, in an open transaction."""

    rows: Sequence[DueRow]
    connection: Any
    """The driver's own, for the handler's statements."""
    joined: Joined | None
    """The verbs on that transaction, where the table `joins`."""


class RowRefused(Exception):
    """The changes could not be made, or left the row due: rolled back. `ids`: those that may be to blame."""

    def __init__(self, ids: Sequence[Any], why: str) -> None:
        self.ids = ids
        super().__init__(why)


class Table(Protocol):
    """A table that is watched. `skip`: ids of rows that are left out, a thousand at most. Raises StoreError."""

    async def open(self) -> list[Finding]:
        """Connect, and look whether table, columns and index are there. Raises SetupError."""
        ...

    async def close(self) -> None: ...

    def clock(self) -> Clock | None:
        """The clock of its database; None where that goes by the caller's."""
        ...

    async def head(self, *, now: Millis, skip: Collection[Any], beyond: bool = False) -> Head:
        """The earliest row that fulfils the condition; with `beyond`, the earliest that is not due yet. O(log n)."""
        ...

    @property
    def joins(self) -> bool:
        """Whether the app's tasks are in the same database, so that `fire` can add one for each row."""
        ...

    async def fire(
        self, *, now: Millis, limit: int, skip: Collection[Any], new_task: Callable[[DueRow], NewTask] | None
    ) -> list[Any]:
        """In one transaction take up to `limit` due rows, the earliest first, that nobody else holds, change them as
        the source says, and add a task for each if so asked; their ids. Raises RowRefused.
        """
        ...

    def take(self, *, now: Millis, limit: int, skip: Collection[Any]) -> AbstractAsyncContextManager[Taken]:
        """The same for a handler, which is called in between: the rows are locked and changed while it is open.

        Committed on leaving without an error, else rolled back. Raises RowRefused.
        """
        ...

    def listen(self, heard: Callable[[], None]) -> Callable[[], None] | None:
        """Call `heard`, on the running loop, when the table may have changed; what ends that. None: nobody tells."""
        ...


@runtime_checkable
class WatchesTables(Protocol):
    """A store in whose database there may be tables of the caller's own."""

    def table(self, source: TableSource, *, connections: int) -> Table:
        """A table of that database, not opened yet, of which so many transactions may be open at once."""
        ...


class Sink(Protocol):
    """Where a delivery goes. Whatever it raises is a failed delivery; an Outcome raised or returned is itself."""

    async def deliver(self, task: Task[Any]) -> Outcome | None: ...


class Route(Struct, frozen=True, kw_only=True):
    """How one topic is worked on."""

    topic: Topic
    sink: Sink
    retry: RetryPolicy
    concurrency: int
    """Deliveries of this topic at once in one worker process."""
    timeout: Millis | None = None
    losses: int = 10
    """Leases in a row that may end unsettled before the task is dead ("holder lost")."""
    on_dead: Sequence[Callable[[Task[Any]], Any]] = ()


@runtime_checkable
class Clock(Protocol):
    """What time it is."""

    @property
    def grain(self) -> Millis:
        """What `now` may have rounded off. A length from now begins so much later, lest it be cut short."""
        ...

    def now(self) -> Millis:
        """Whole milliseconds since the epoch, rounded down."""
        ...

    def seconds_until(self, at: Millis) -> float:
        """How long to sleep until `at`, not rounded; negative once it has passed."""
        ...

    def span(self, length: Millis) -> Millis:
        """How far this clock goes while `length` of real time passes: `length`, unless it runs at a pace of its own."""
        ...


Item = TypeVar("Item", bound=Hashable)


class Timer(Protocol[Item]):
    """When, in one process: a pure data structure. Never early; not later than its tick."""

    def add(self, item: Item, at: Millis) -> None:
        """Remember `item` for `at`; one that is there already is moved."""
        ...

    def cancel(self, item: Item) -> bool:
        """Forget it; false: it was not there."""
        ...

    def move(self, item: Item, at: Millis) -> bool:
        """Another time for it; false: it was not there, and is not added."""
        ...

    def advance(self, now: Millis) -> list[Item]:
        """Take out every item with `at <= now`, in order of `at`."""
        ...

    def next_deadline(self) -> Millis | None:
        """Never later than the earliest `at`; None when empty."""
        ...

    def __len__(self) -> int: ...

    def __contains__(self, item: object) -> bool: ...
