"""The records that pass through the store seam: what a task is, what is asked of it, and what the store answers.

All are immutable. They are msgspec structs: here a record of nineteen fields is made in about a third of the time
of a frozen, slotted dataclass, and `gc=False` keeps a million of them out of the collector's sight.
Times are integer milliseconds since the epoch throughout.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from typing import Literal, NamedTuple, TypeAlias

from msgspec import Struct

from bide.core.instants import Due, Millis
from bide.core.names import error_parts

Topic: TypeAlias = str
Token: TypeAlias = int


class State(StrEnum):
    """The five states. *Due* is not one: it is computed from `wake_at`."""

    WAITING = "waiting"
    LEASED = "leased"
    DONE = "done"
    CANCELLED = "cancelled"
    DEAD = "dead"

    @property
    def live(self) -> bool:
        """True while something is still to happen."""
        return self is State.WAITING or self is State.LEASED


class Ref(NamedTuple):
    """Which task: the caller's name for it."""

    topic: Topic
    key: str


class OnConflict(StrEnum):
    """The choice of `schedule` when the key is taken. A dead or cancelled task is always replaced."""

    REPLACE = "replace"
    KEEP = "keep"
    EARLIEST = "earliest"
    LATEST = "latest"
    REFUSE = "refuse"


class NewTask(Struct, frozen=True, gc=False):
    """A task as `add` is given it."""

    topic: Topic
    key: str
    id: str
    """This life of the key, a UUIDv7 that the caller made: so a resent call is recognised."""
    due: Due
    payload: bytes = b""
    group: str | None = None
    options: bytes = b""
    """The part that no store need understand: retry policy, headers, trace context. See `core.options`."""
    deadline: Millis | None = None
    """Not after. The one option that a store does look at, so that a move past it is refused in one step."""
    on_conflict: OnConflict = OnConflict.REPLACE


class Record(Struct, frozen=True, gc=False):
    """A task as it rests in a store. Field order is part of the seam: stores build it by position."""

    topic: Topic
    key: str
    id: str
    group: str | None
    state: State
    due_at: Millis
    """The instant that the caller asked for; may lie in the past."""
    wake_at: Millis
    """The next instant at which the task needs attention: due time, retry time, or the end of its lease. Of an ended
    task the last such instant, or if it was leased as it ended, when its last delivery began."""
    planned_at: Millis
    """While leased, the `wake_at` that it was leased for (lost leases: the first one); lateness counts from it."""
    attempt: int
    failures: int
    losses: int
    token: Token
    holder: str | None
    payload: bytes
    options: bytes
    deadline: Millis | None
    error: str | None
    created_at: Millis
    finished_at: Millis | None
    keep_until: Millis | None

    @property
    def ref(self) -> Ref:
        return Ref(self.topic, self.key)

    @property
    def started_at(self) -> Millis | None:
        """When the running delivery began, or the one in which the task ended; None: it is or was not leased then.

        Costs no column: a lease's token is the store's clock in microseconds.
        """
        if self.holder is None:
            return None
        return self.token // 1000 if self.state is State.LEASED else self.wake_at


class Move(Struct, frozen=True, gc=False, tag="move"):
    """Make a waiting task due at another time."""

    topic: Topic
    key: str
    due: Due
    if_token: Token | None = None
    deadline: Millis | None = None
    """A new deadline, too; None keeps the one that there is."""
    verb: Literal["reschedule", "fire_now", "shift"] = "reschedule"
    """The caller's verb, for the logs: stores ignore it."""


class Cancel(Struct, frozen=True, gc=False, tag="cancel"):
    """The task is cancelled. Kept until `keep_until`; 0 forgets it at once."""

    topic: Topic
    key: str
    keep_until: Millis = 0
    if_token: Token | None = None


class Redrive(Struct, frozen=True, gc=False, tag="redrive"):
    """Send a dead task again, as a new life with this `id`; its deadline is cleared."""

    topic: Topic
    key: str
    id: str
    due: Due
    if_token: Token | None = None


Change: TypeAlias = Move | Cancel | Redrive


class Result(StrEnum):
    """The answer of a verb, in one word: the same in Python, HTTP, the command line and the console."""

    CREATED = "created"
    REPLACED = "replaced"
    KEPT = "kept"
    REFUSED = "refused"
    MOVED = "moved"
    UNDER_WAY = "under_way"
    CANCELLED = "cancelled"
    CANCELLED_WHILE_LEASED = "cancelled_while_leased"
    REDRIVEN = "redriven"
    NOT_FOUND = "not_found"
    FINISHED = "finished"
    STALE_TOKEN = "stale_token"


class OutcomeKind(StrEnum):
    """How a delivery ended, as it is settled."""

    DONE = "done"
    RETRY = "retry"
    DEFER = "defer"
    DEAD = "dead"


class Settlement(Struct, frozen=True, gc=False):
    """The outcome of one lease; refused unless `token` is that of the live lease."""

    topic: Topic
    key: str
    token: Token
    outcome: OutcomeKind
    next_at: Due | None = None
    """When to wake again: required for RETRY and DEFER; with DONE it starts the next life (with `next_id`)."""
    keep_until: Millis = 0
    """How long to remember a task that ends here; 0 forgets it in the same transition."""
    error: str | None = None
    next_id: str = ""
    failed: bool = False
    """For DEAD: count a failure, since the last delivery failed. A task also dies without one, as by its deadline."""

    @property
    def why(self) -> str:
        """The text of the error, without a trace; empty where there is none."""
        return error_parts(self.error)[0]


class Lease(NamedTuple):
    """One hold: the task and the token it was leased with."""

    topic: Topic
    key: str
    token: Token


class Leased(Struct, frozen=True):
    """The answer of `lease`."""

    tasks: list[Record]
    next_wake: Millis | None
    """Not later than the earliest `wake_at` among the asked topics that still have room; None: nothing waits there."""
    now: Millis
    """The clock that the lease went by: the store's own where it has one."""
    again_by: Millis | None = None
    """Where nothing notifies of what others schedule: lease again by then, whatever `next_wake` is."""

    @property
    def wake(self) -> Millis | None:
        """When to lease again, at the latest; None: not before a notification."""
        return min((one for one in (self.next_wake, self.again_by) if one is not None), default=None)


class Filter(Struct, frozen=True, kw_only=True):
    """The tasks that `find` and the group verbs mean; every field narrows it."""

    topic: Topic | None = None
    state: State | None = None
    group: str | None = None
    wake_from: Millis | None = None
    """Only live tasks with wake_at >= this."""
    wake_before: Millis | None = None
    """Only live tasks with wake_at < this."""

    def admits(self, record: Record) -> bool:
        """True if a task is among those that are asked for."""
        if (
            (self.topic is not None and record.topic != self.topic)
            or (self.group is not None and record.group != self.group)
            or (self.state is not None and record.state is not self.state)
        ):
            return False
        if self.wake_from is None and self.wake_before is None:
            return True
        return (
            record.state.live
            and (self.wake_from is None or record.wake_at >= self.wake_from)
            and (self.wake_before is None or record.wake_at < self.wake_before)
        )


class Page(Struct, frozen=True, kw_only=True):
    """At most `limit` tasks after `cursor`, which is opaque and comes from the page before."""

    limit: int = 100
    cursor: str | None = None


class Found(Struct, frozen=True):
    """One page; `cursor` is None on the last."""

    tasks: list[Record]
    cursor: str | None


class Count(NamedTuple):
    """A number of tasks; `exact` is False when counting stopped at the limit (there are at least so many)."""

    number: int
    exact: bool = True


def summed(counts: Iterable[Count]) -> Count:
    """All of them together: exact where each is."""
    number, exact = 0, True
    for count in counts:
        number += count.number
        exact = exact and count.exact
    return Count(number, exact)


class Tally(Struct, frozen=True):
    """How many tasks there are."""

    counts: Mapping[tuple[Topic, State], Count]
    forecast: Mapping[Topic, Sequence[Count]]
    """Waiting tasks with edges[i] <= wake_at < edges[i + 1], one count per interval; empty without edges."""

    def number(self, topic: Topic | None = None, state: State | None = None) -> int:
        """How many of a topic, in a state, of both, or in all; at least so many where a count is not exact."""
        return sum(
            count.number
            for (one, its), count in self.counts.items()
            if (topic is None or one == topic) and (state is None or its is state)
        )


class Pause(Struct, frozen=True, kw_only=True):
    """Since when a topic is paused, and by whom."""

    topic: Topic
    since: Millis
    who: str | None = None
