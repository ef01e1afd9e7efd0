"""The records that pass through the store interface: tasks, requests, and the store's answers.

All are immutable msgspec structs. A record of nineteen fields is made in about a third of the time of a frozen, slotted
dataclass, and `gc=False` saves the garbage collector from tracking a million of them. All times are integer
milliseconds since the epoch.
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
        """True while the task is waiting or leased."""
        return self is State.WAITING or self is State.LEASED


class Ref(NamedTuple):
    """The caller's name for a task: a pair of topic and key."""

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
    """A new task, checked and encoded, as `app.new` makes it for `app.schedule_many`."""

    topic: Topic
    key: str
    id: str
    """The id of this life of the key, a UUIDv7 made by the caller, so that a resent call is recognised."""
    due: Due
    payload: bytes = b""
    group: str | None = None
    options: bytes = b""
    """Options that stores do not interpret: retry policy, headers, trace context. See `core.options`."""
    deadline: Millis | None = None
    """The last instant for a delivery. The only option that stores interpret: they refuse a move past it atomically."""
    on_conflict: OnConflict = OnConflict.REPLACE
    if_token: Token | None = None
    """Where a task exists under the key, it must have this token; a free key meets every condition."""


class Record(Struct, frozen=True, gc=False):
    """A stored task. Field order is part of the interface: stores build records by position."""

    topic: Topic
    key: str
    id: str
    group: str | None
    state: State
    due_at: Millis
    """The instant that the caller asked for; may lie in the past."""
    wake_at: Millis
    """The next instant at which the task needs attention: due time, retry time, or the end of its lease. For an ended
    task the last such instant or, if it was leased when it ended, the start of its last delivery."""
    planned_at: Millis
    """While leased, the `wake_at` for which it was leased (after lost leases, the first). Lateness counts from it."""
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
        """When the current delivery began, or the one that ended the task; None: it is or was not leased then.

        Needs no column: a lease's token is the store's clock in microseconds.
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
    """A new deadline; None keeps the existing one."""
    verb: Literal["reschedule", "fire_now", "shift"] = "reschedule"
    """The caller's verb, for the logs; stores ignore it."""


class Cancel(Struct, frozen=True, gc=False, tag="cancel"):
    """Cancel a task. It is kept until `keep_until`; 0 deletes it at once."""

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
    """The kind of a delivery's outcome, as it is settled."""

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
    """When to wake again. Required for RETRY and DEFER; with DONE it starts the next life (with `next_id`)."""
    keep_until: Millis = 0
    """How long to keep a task that ends here; 0 deletes it in the same transition."""
    error: str | None = None
    next_id: str = ""
    failed: bool = False
    """For DEAD: count a failure, since the last delivery failed. A task can die without one, as by its deadline."""
    counts_as: OutcomeKind | None = None
    """The kind that an outcome of a recurring task counts as, if not as `outcome`: DEAD for an occurrence that died,
    DEFER for one that was too old to run. The store records DONE with a next life, and ignores this."""
    dropped: int = 0
    """The occurrences that did not run before `next_at`, for the log; stores ignore it."""
    dropped_why: str | None = None
    """The reason, and their number in words."""

    @property
    def kind(self) -> OutcomeKind:
        """The outcome that people are told."""
        return self.counts_as or self.outcome

    @property
    def why(self) -> str:
        """The text of the error without its traceback; empty if there is none."""
        return error_parts(self.error)[0]


class Lease(NamedTuple):
    """A lease: the task, and the token it was leased with."""

    topic: Topic
    key: str
    token: Token


class Leased(Struct, frozen=True):
    """The answer of `lease`."""

    tasks: list[Record]
    heads: Mapping[Topic, Millis]
    """A time not after the earliest `wake_at` of each requested topic that has room left and where a task waits."""
    now: Millis
    """The time of the lease, by the store's own clock if it has one."""
    again_by: Millis | None = None
    """If nothing notifies of other processes' schedules: lease again by then, whatever `next_wake` is."""

    @property
    def next_wake(self) -> Millis | None:
        """The earliest of the heads; None: nothing waits."""
        return min(self.heads.values(), default=None)

    @property
    def wake(self) -> Millis | None:
        """When to lease again at the latest; None: not before a notification."""
        return min((one for one in (self.next_wake, self.again_by) if one is not None), default=None)


class Filter(Struct, frozen=True, kw_only=True):
    """The selection of tasks for `find` and the group verbs; every field narrows it."""

    topic: Topic | None = None
    state: State | None = None
    group: str | None = None
    wake_from: Millis | None = None
    """Only live tasks with wake_at >= this."""
    wake_before: Millis | None = None
    """Only live tasks with wake_at < this."""

    @property
    def live(self) -> bool:
        """True if only live tasks match."""
        return self.wake_from is not None or self.wake_before is not None or bool(self.state and self.state.live)

    def admits(self, record: Record) -> bool:
        return (
            (self.topic is None or record.topic == self.topic)
            and (self.group is None or record.group == self.group)
            and (self.state is None or record.state is self.state)
            and (record.state.live or not self.live)
            and (self.wake_from is None or record.wake_at >= self.wake_from)
            and (self.wake_before is None or record.wake_at < self.wake_before)
        )


class Page(Struct, frozen=True, kw_only=True):
    """A request for at most `limit` tasks after `cursor`, which is opaque and comes from the previous page."""

    limit: int = 100
    cursor: str | None = None


class Found(Struct, frozen=True):
    """One page; `cursor` is None on the last."""

    tasks: list[Record]
    cursor: str | None


class Count(NamedTuple):
    """A number of tasks. If counting stopped at the limit, `exact` is False and the number is a lower bound."""

    number: int
    exact: bool = True


def summed(counts: Iterable[Count]) -> Count:
    """The sum of `counts`; exact if all are."""
    each = list(counts)
    return Count(sum(count.number for count in each), all(count.exact for count in each))


class Tally(Struct, frozen=True):
    """The counts of tasks."""

    counts: Mapping[tuple[Topic, State], Count]
    forecast: Mapping[Topic, Sequence[Count]]
    """Waiting tasks with edges[i] <= wake_at < edges[i + 1], one count per interval; empty without edges."""

    def number(self, topic: Topic | None = None, state: State | None = None) -> int:
        """The number of tasks of a topic, in a state, of both, or in total; a lower bound if a count is not exact."""
        return sum(
            count.number
            for (one, its), count in self.counts.items()
            if (topic is None or one == topic) and (state is None or its == state)
        )


class Pause(Struct, frozen=True, kw_only=True):
    """The start of a topic's pause, in milliseconds since the epoch, and who paused it."""

    topic: Topic
    since: Millis
    who: str | None = None
