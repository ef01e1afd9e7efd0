"""The events of a history: calls, answers and deliveries, as lines that any program can write.

Each line is one JSON object with its kind under `type`. A history may consist of several files, one for each process.
They are merged by `at`: nanoseconds of one clock that all processes share and that never jumps (CLOCK_MONOTONIC of one
machine; the loop's time in a simulation). `clock` is the store's clock in milliseconds, as accurately as the writer
knows it: see `Header.slack`.

A caller records a call *before* it sends it, and the answer *after* it arrives: the call took effect between the two.
A call without an answer (`Failed` with `unknown`, or its process died) may have taken effect once, at any later time,
or never. A call with `Failed` and not `unknown` had no effect.

`who` names a process, or a part of one: "worker-1.3/x" belongs to the process "worker-1.3". A process that is restarted
after it died has another name.
"""

from __future__ import annotations

from enum import StrEnum
from operator import attrgetter
from typing import TypeAlias

import msgspec
from msgspec import Struct

from bide.core.instants import Due, Millis
from bide.core.records import OnConflict, OutcomeKind, Record, Result, State, Token, Topic


class Seen(Struct, frozen=True, gc=False, omit_defaults=True):
    """A task as the store showed it to a caller: the fields of a record that the promises concern."""

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


_fields_of = attrgetter(*Seen.__struct_fields__)


def seen(record: Record) -> Seen:
    """`record` without its payload and other contents."""
    return Seen(*_fields_of(record))


class Asks(StrEnum):
    """The verbs of a client."""

    SCHEDULE = "schedule"
    MOVE = "move"
    """Reschedule, shift, and fire now, which is a move to In(0)."""
    CANCEL = "cancel"
    REDRIVE = "redrive"
    GET = "get"


class Header(Struct, frozen=True, tag="header", gc=False, omit_defaults=True):
    """The properties of a whole history. It is optional."""

    store: str = ""
    slack: Millis = 0
    """The most that `clock` may differ from the store's clock, in either direction."""
    cap: Millis | None = None
    """The longest sleep of the workers."""
    losses: int = 10
    """Leases in a row that may end unsettled before a task is dead."""
    at: int = 0
    room: int | None = None
    """The number of deliveries that a worker may have at once; None: as many as it ever asked for."""
    own_clock: bool | None = None
    """True if the store counts leases from a clock of its own; None: the check infers it from the ends of leases."""
    gives_back: bool = False
    """True if the store may itself end a lease that it reported to no worker: the task is due again at once."""


class _Question(Struct, frozen=True, gc=False):
    """A call that is about to be made. `call` is a number that is unique in the whole history."""

    call: int
    who: str
    at: int
    clock: Millis


class _OfLease(_Question, frozen=True, gc=False):
    """A call for one lease."""

    topic: Topic
    key: str
    token: Token


class _Reply(Struct, frozen=True, gc=False):
    """The answer to a call."""

    call: int
    at: int
    clock: Millis


class Asked(_Question, frozen=True, tag="asked", gc=False, omit_defaults=True):
    """A client is about to make a call."""

    asks: Asks
    topic: Topic
    key: str
    id: str = ""
    """The life that a schedule or redrive would begin."""
    due: Due | None = None
    """The due time of a schedule, move or redrive. `In` counts by the store's clock and may include `grain`."""
    grain: Millis = 0
    """The rounding of the caller's clock: an `In` may be resolved to at most this much later."""
    on_conflict: OnConflict = OnConflict.REPLACE
    deadline: Millis | None = None
    if_token: Token | None = None
    keeps: bool | None = None
    """For a cancel, true if the cancelled task is kept for a while; None: not known."""


class Answered(_Reply, frozen=True, tag="answered", gc=False, omit_defaults=True):
    """The answer, with the task as it was then. A get has no `result`. Without `task` there was no task."""

    result: Result | None = None
    task: Seen | None = None
    was: Millis | None = None


class Failed(Struct, frozen=True, tag="failed", gc=False, omit_defaults=True):
    """The call failed."""

    call: int
    at: int
    unknown: bool
    """True if the call may have taken effect, or may still do so."""
    error: str = ""


class Leasing(_Question, frozen=True, tag="leasing", gc=False):
    """A worker is about to ask for tasks: the number of each topic is in `wants`."""

    wants: dict[Topic, int]
    until: Millis


class Held(Struct, frozen=True, gc=False):
    """One leased task."""

    topic: Topic
    key: str
    task: Seen


class Leased(_Reply, frozen=True, tag="leased", gc=False):
    """The tasks that the worker was given. `clock` is the time at which the store says it leased them."""

    tasks: list[Held]
    next_wake: Millis | None


class Extending(_OfLease, frozen=True, tag="extending", gc=False, omit_defaults=True):
    """A holder is about to ask for more time."""

    until: Millis
    now: Millis | None = None
    """The holder's clock, from which `until` is counted; None: not known."""


class Settling(_OfLease, frozen=True, tag="settling", gc=False, omit_defaults=True):
    """A holder is about to report how a delivery ended."""

    verdict: OutcomeKind
    wake: Due | None = None
    keep_until: Millis = 0
    error: str | None = None
    next_id: str = ""


class Told(_Reply, frozen=True, tag="told", gc=False):
    """The answer to an `Extending` or a `Settling`; `ok` if it was accepted."""

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
    """The process died: its open calls may have taken effect, and it makes no further call."""

    who: str
    at: int


class Fault(Struct, frozen=True, tag="fault", gc=False, omit_defaults=True):
    """Something was broken or repaired here. It excuses no violation; it is reported with the violations."""

    at: int
    what: str
    clock: Millis | None = None
    """If the store's clock was set, its time before that. Effects of that time may be seen only afterwards."""


class Left(Struct, frozen=True, tag="left", gc=False):
    """A task that was still in the store at the end."""

    at: int
    clock: Millis
    topic: Topic
    key: str
    task: Seen


class End(Struct, frozen=True, tag="end", gc=False):
    """The last line. `drained`: every task had time to run, and each task left in the store is recorded as `Left`."""

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
    """Encode an event as one line, including the line end."""
    return _encoder.encode(event) + b"\n"


def decode(line: bytes) -> Event:
    """Decode a line of `encode`. Raises msgspec.ValidationError, msgspec.DecodeError."""
    event: Event = _decoder.decode(line)
    return event
