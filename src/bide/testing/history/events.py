"""The events of a history: questions, answers and deliveries, as lines that any program can write.

One JSON object a line, its kind under `type`. A history may come in several files, one of each process: they are merged
by `at`, nanoseconds of one clock that all of them see and that never jumps (CLOCK_MONOTONIC of one machine; the loop's
time of a simulation). `clock` is the store's clock in milliseconds, as well as the writer knows it: see `Header.slack`.

A caller records a question *before* it asks, and the answer *after* it came: what was really done lies between the two.
A question without an answer (`Failed` with `unknown`, or its process died) may have been done at any time after it was
asked, once, or never. A question with `Failed` and not `unknown` was not done.

`who` names a process, or a part of one: "worker-1.3/x" belongs to the process "worker-1.3". A process that comes back
after it died has another name.
"""

from __future__ import annotations

from enum import StrEnum
from typing import TypeAlias

import msgspec
from msgspec import Struct

from bide.core.instants import Due, Millis
from bide.core.records import OnConflict, OutcomeKind, Record, Result, State, Token, Topic


class Seen(Struct, frozen=True, gc=False, omit_defaults=True):
    """A task as a caller was shown it: the fields of a record that the promises speak of."""

    id: str
    state: State
    due_at: Millis
    wake_at: Millis
    planned_at: Millis
    attempt: int
    failures: int
    losses: int
    token: Token
    created_at: Millis
    group: str | None = None
    deadline: Millis | None = None
    finished_at: Millis | None = None
    keep_until: Millis | None = None
    error: str | None = None


def seen(record: Record) -> Seen:
    """`record`, without what it carries."""
    return Seen(
        record.id, record.state, record.due_at, record.wake_at, record.planned_at, record.attempt, record.failures,
        record.losses, record.token, record.created_at, record.group, record.deadline, record.finished_at,
        record.keep_until, record.error,
    )  # fmt: skip


class Asks(StrEnum):
    """The verbs of a client."""

    SCHEDULE = "schedule"
    MOVE = "move"
    """Reschedule, shift, and fire now, which is a move to In(0)."""
    CANCEL = "cancel"
    REDRIVE = "redrive"
    GET = "get"


class Header(Struct, frozen=True, tag="header", gc=False, omit_defaults=True):
    """Of a whole history; it may be left out."""

    store: str = ""
    slack: Millis = 0
    """By how much `clock` may differ from the store's own, either way."""
    cap: Millis | None = None
    """The longest sleep of the workers."""
    losses: int = 10
    """Leases in a row that may end unsettled before a task is dead."""
    at: int = 0
    room: int | None = None
    """How many deliveries a worker may have at once; None: as many as it ever asked for."""
    own_clock: bool | None = None
    """True if the store goes by a clock of its own and counts leases from that; None: judged by the leases' ends."""
    gives_back: bool = False
    """True if the store itself may end a lease that no worker was told of: the task is due again at once."""


class Asked(Struct, frozen=True, tag="asked", gc=False, omit_defaults=True):
    """A client is about to ask. `call` is a number of its own in the whole history."""

    call: int
    who: str
    at: int
    clock: Millis
    asks: Asks
    topic: Topic
    key: str
    id: str = ""
    """The life that a schedule or redrive would begin."""
    due: Due | None = None
    """Of a schedule, move or redrive: when; `In` counts by the store's clock, `grain` may be in it already."""
    grain: Millis = 0
    """An `In` may be resolved to so much later: what the caller's clock rounds off."""
    on_conflict: OnConflict = OnConflict.REPLACE
    deadline: Millis | None = None
    if_token: Token | None = None
    keeps: bool | None = None
    """Of a cancel: whether the cancelled task is kept for a while; None: not known."""


class Answered(Struct, frozen=True, tag="answered", gc=False, omit_defaults=True):
    """The answer, with the task as it was then. A get answers without `result`; without `task`: there was none."""

    call: int
    at: int
    clock: Millis
    result: Result | None = None
    task: Seen | None = None
    was: Millis | None = None


class Failed(Struct, frozen=True, tag="failed", gc=False, omit_defaults=True):
    """The question was not answered."""

    call: int
    at: int
    unknown: bool
    """True if it may have been done, or may still be done later."""
    error: str = ""


class Leasing(Struct, frozen=True, tag="leasing", gc=False):
    """A worker is about to ask for so many tasks of each topic."""

    call: int
    who: str
    at: int
    clock: Millis
    wants: dict[Topic, int]
    until: Millis


class Held(Struct, frozen=True, gc=False):
    """One of the tasks that were leased."""

    topic: Topic
    key: str
    task: Seen


class Leased(Struct, frozen=True, tag="leased", gc=False):
    """The tasks that the worker was given. `clock` is the time by which the store leased them, as it told it."""

    call: int
    at: int
    clock: Millis
    tasks: list[Held]
    next_wake: Millis | None


class Extending(Struct, frozen=True, tag="extending", gc=False, omit_defaults=True):
    """A holder is about to ask for more time."""

    call: int
    who: str
    at: int
    clock: Millis
    topic: Topic
    key: str
    token: Token
    until: Millis
    now: Millis | None = None
    """The holder's clock, from which `until` is counted; None: not known."""


class Settling(Struct, frozen=True, tag="settling", gc=False, omit_defaults=True):
    """A holder is about to say how a delivery ended."""

    call: int
    who: str
    at: int
    clock: Millis
    topic: Topic
    key: str
    token: Token
    verdict: OutcomeKind
    wake: Due | None = None
    keep_until: Millis = 0
    error: str | None = None
    next_id: str = ""


class Told(Struct, frozen=True, tag="told", gc=False):
    """The answer to an `Extending` or a `Settling`: whether it was accepted."""

    call: int
    at: int
    clock: Millis
    ok: bool


class Began(Struct, frozen=True, tag="began", gc=False):
    """The first line of a handler."""

    who: str
    at: int
    clock: Millis
    topic: Topic
    key: str
    id: str
    token: Token
    attempt: int
    planned_at: Millis


class Ended(Struct, frozen=True, tag="ended", gc=False):
    """The last line of a handler; `how` it ended, in the handler's own words."""

    who: str
    at: int
    topic: Topic
    key: str
    token: Token
    how: str


class Died(Struct, frozen=True, tag="died", gc=False):
    """This process is no more: what it had asked and not heard may have been done, and it asks nothing further."""

    who: str
    at: int


class Fault(Struct, frozen=True, tag="fault", gc=False, omit_defaults=True):
    """Something was broken, or mended, here. It excuses nothing; it is told with what went wrong."""

    at: int
    what: str
    clock: Millis | None = None
    """Where the store's clock is set: what it was before. What it had done by then may be seen after it."""


class Left(Struct, frozen=True, tag="left", gc=False):
    """At the end this was still in the store."""

    at: int
    clock: Millis
    topic: Topic
    key: str
    task: Seen


class End(Struct, frozen=True, tag="end", gc=False):
    """The last line. `drained`: everything had time to be done, and what was left was looked for and told."""

    at: int
    clock: Millis
    drained: bool


Event: TypeAlias = (
    Header | Asked | Answered | Failed | Leasing | Leased | Extending | Settling | Told | Began | Ended | Died | Fault
    | Left | End
)  # fmt: skip

_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(Event)


def encode(event: Event) -> bytes:
    """One line, its end included."""
    return _encoder.encode(event) + b"\n"


def decode(line: bytes) -> Event:
    """The reverse of `encode`. Raises msgspec.ValidationError, msgspec.DecodeError."""
    event: Event = _decoder.decode(line)
    return event
