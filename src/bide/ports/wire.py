"""The store seam as bytes: what bide's own client and service say to each other under `/v1/store/{operation}`.

MessagePack over POST. The records of the seam travel as they are, by the names of their fields, so that a field with a
default can be added within a version; what would not be understood needs another `WIRE`. The two sides find that out
when the client opens. Other languages use the JSON calls.

    POST /v1/store/open      Hello -> Welcome          a session begins
    POST /v1/store/add       Call  -> Told | Failure   likewise change, settle, extend, lease, purge, record: once each
                                                       and pause and resume
    POST /v1/store/get       Call  -> Told | Failure   likewise find, tally, announce, events, time, paused, minutes:
                                                       as often as needed
    POST /v1/store/listen    Call  -> lines of JSON    ["topic", wake], or nothing: still there

A call that writes carries the session and a number that only rises for its operation. The service keeps the last answer
of each, so a call that is sent again is answered again, and done once. A session belongs to the instance that it began
with: any other refuses it before anything is done, and the client asks again until a proxy leads it to the right one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
from msgspec import Raw, Struct

from bide.core.answers import Answer
from bide.core.errors import (
    BadInput,
    BadPayload,
    BideError,
    OutcomeUnknown,
    PartlyFailed,
    SetupError,
    StoreCorrupt,
    StoreError,
    StoreFull,
    StoreMismatch,
    StoreUnavailable,
)
from bide.core.events import Event
from bide.core.instants import Millis
from bide.core.pause import Pause
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
from bide.core.texts import text_of

WIRE = 1
"""The version of all this. The service's answer to `open` says which one it speaks."""
SERVICE = "bide"
CONTENT_TYPE = "application/vnd.bide.store+msgpack"
STREAM_TYPE = "application/x-ndjson"
MOST = 10_000
"""Items in one call, and tasks that one lease may ask for."""
LONGEST_PAGE = 1_000
"""Tasks in one page; a client that asks for more gets a shorter page and its cursor."""
HEARTBEAT = 5.0
"""Seconds after which the service says at the latest, to whoever listens, that it is still there."""
CALL_LASTS = 45.0
"""Seconds for which a client may send a call again; the service remembers its answer for longer."""

ONCE = frozenset({"add", "change", "settle", "extend", "lease", "purge", "record", "pause", "resume"})
"""The operations that are numbered, each by itself. One call of each is under way at a time."""


class Hello(Struct, frozen=True):
    """How a client begins."""

    wire: int
    clock: str
    """Whose time counts: "server", or in tests "caller"."""


class Welcome(Struct, frozen=True, kw_only=True):
    """Who answers, and in which session."""

    service: str
    wire: int
    version: str = ""
    session: str = ""
    """Empty if it does not speak the client's version."""
    micros: int = 0
    most: int = MOST
    body_limit: int = 1 << 20
    """Bytes of one call."""


class Call(Struct, frozen=True, array_like=True):
    """One operation. `now` counts only where the service goes by its callers' clocks."""

    session: str
    number: int
    now: Millis | None
    asked: Raw


class Failure(Struct, frozen=True, omit_defaults=True):
    """An error, as the other side raises it again."""

    kind: str
    text: str
    field: str = ""
    value: str | None = None
    accepted: str = ""


class Told(Struct, frozen=True, array_like=True, omit_defaults=True):
    """An answer, the service's time in microseconds, and what befell the items that have no answer, by place."""

    micros: int
    answer: Raw
    failed: Mapping[int, Failure] = {}


class LeaseAsk(Struct, frozen=True, array_like=True):
    wants: dict[Topic, int]
    lasts: Millis
    holder: str


class ExtendAsk(Struct, frozen=True, array_like=True):
    leases: list[Lease]
    lasts: Millis


class FindAsk(Struct, frozen=True, array_like=True):
    where: Filter
    page: Page


class TallyAsk(Struct, frozen=True, array_like=True):
    edges: Sequence[Millis] | None
    topics: list[Topic] | None


class AnnounceAsk(Struct, frozen=True, array_like=True):
    holder: str
    topics: list[Topic]
    lasts: Millis


class EventsAsk(Struct, frozen=True, array_like=True):
    ref: Ref | None
    limit: int


class PauseAsk(Struct, frozen=True, array_like=True):
    topic: Topic
    who: str | None
    """Who asks for it, as the client calls them."""


class FlatTally(Struct, frozen=True, array_like=True):
    """A tally: keys of two parts have no name on the wire."""

    counts: list[tuple[Topic, State, int, bool]]
    forecast: dict[Topic, list[Count]]


encode = msgspec.msgpack.Encoder().encode

read_hello = msgspec.msgpack.Decoder(Hello).decode
read_welcome = msgspec.msgpack.Decoder(Welcome).decode
read_call = msgspec.msgpack.Decoder(Call).decode
read_told = msgspec.msgpack.Decoder(Told).decode
read_failure = msgspec.msgpack.Decoder(Failure).decode

read_tasks = msgspec.msgpack.Decoder(list[NewTask]).decode
read_changes = msgspec.msgpack.Decoder(list[Change]).decode
read_settlements = msgspec.msgpack.Decoder(list[Settlement]).decode
read_extend = msgspec.msgpack.Decoder(ExtendAsk).decode
read_lease = msgspec.msgpack.Decoder(LeaseAsk).decode
read_number = msgspec.msgpack.Decoder(int).decode
read_refs = msgspec.msgpack.Decoder(list[Ref]).decode
read_find = msgspec.msgpack.Decoder(FindAsk).decode
read_tally_ask = msgspec.msgpack.Decoder(TallyAsk).decode
read_announce = msgspec.msgpack.Decoder(AnnounceAsk).decode
read_events_ask = msgspec.msgpack.Decoder(EventsAsk).decode
read_pause_ask = msgspec.msgpack.Decoder(PauseAsk).decode
read_minutes = msgspec.msgpack.Decoder(tuple[int, int]).decode
read_topics = msgspec.msgpack.Decoder(list[Topic]).decode

read_answers = msgspec.msgpack.Decoder(list[Answer | None]).decode
read_truths = msgspec.msgpack.Decoder(list[bool | None]).decode
read_records = msgspec.msgpack.Decoder(list[Record | None]).decode
read_found = msgspec.msgpack.Decoder(Found).decode
read_leased = msgspec.msgpack.Decoder(Leased).decode
read_live = msgspec.msgpack.Decoder(dict[str, list[Topic]]).decode
read_events = msgspec.msgpack.Decoder(list[Event]).decode
read_truth = msgspec.msgpack.Decoder(bool).decode
read_pauses = msgspec.msgpack.Decoder(list[Pause]).decode
_read_tally = msgspec.msgpack.Decoder(FlatTally).decode

tiding = msgspec.json.Encoder().encode
read_tiding = msgspec.json.Decoder(tuple[Topic, Millis]).decode


UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""What reading raises on bytes that nobody on the other side wrote."""


def flat(tally: Tally) -> FlatTally:
    return FlatTally(
        [(topic, state, count.number, count.exact) for (topic, state), count in tally.counts.items()],
        {topic: list(counts) for topic, counts in tally.forecast.items()},
    )


def read_tally(data: bytes | Raw) -> Tally:
    found = _read_tally(data)
    counts = {(topic, state): Count(number, exact) for topic, state, number, exact in found.counts}
    return Tally(counts, found.forecast)


# --- errors

SESSION = "session"
"""The session began here and has ended, and nothing was done: begin another."""
ELSEWHERE = "elsewhere"
"""The session began with another instance, or before a restart, and nothing was done: ask again, or begin another."""
FORGOTTEN = "forgotten"
"""This number was answered, or passed over, and the answer is no longer kept."""
DEFECT = "defect"
"""A defect of the service; its log says where."""
REFUSED = "refused"
"""Whoever calls may not do this; nothing was done."""

_KINDS: Mapping[type[BideError], tuple[str, int]] = {
    BadPayload: ("bad_payload", 422),
    BadInput: ("bad_input", 422),
    StoreFull: ("full", 507),
    StoreCorrupt: ("corrupt", 503),
    StoreMismatch: ("mismatch", 503),
    OutcomeUnknown: ("unknown", 504),
    StoreUnavailable: ("unavailable", 503),
    StoreError: ("unavailable", 503),
    SetupError: ("setup", 501),
}
"""Each error's name on the wire and its HTTP status; of several the first that it is an instance of."""
_STORE_ERRORS: Mapping[str, type[StoreError]] = {
    "full": StoreFull,
    "corrupt": StoreCorrupt,
    "mismatch": StoreMismatch,
    "unknown": OutcomeUnknown,
    "unavailable": StoreUnavailable,
    FORGOTTEN: OutcomeUnknown,
}


def failure_of(error: Exception) -> tuple[int, Failure]:
    """The HTTP status of an error, and what the other side is told of it."""
    for kind, (name, status) in _KINDS.items():
        if isinstance(error, kind):
            if isinstance(error, BadInput):
                shown = text_of(error.value if isinstance(error.value, str) else repr(error.value))
                shown = shown if len(shown) <= 200 else f"{shown[:199]}…"
                return status, Failure(name, "", error.field, shown, error.accepted)
            return status, Failure(name, text_of(error))
    return 500, Failure(DEFECT, "a defect of the service; its log says where")


def error_of(failure: Failure, where: str) -> BideError:
    """The error that a failure was, for whoever called. `where` is the service."""
    if failure.kind in ("bad_input", "bad_payload"):
        kind = BadPayload if failure.kind == "bad_payload" else BadInput
        return kind(failure.field, failure.value, failure.accepted)
    if failure.kind == "setup":
        return SetupError(f"{where}: {failure.text}")
    if failure.kind in _STORE_ERRORS:
        return _STORE_ERRORS[failure.kind](f"{where}: {failure.text}")
    return OutcomeUnknown(f"{where}: {failure.text} ({failure.kind})")


def split(answers: Sequence[object]) -> tuple[list[object], dict[int, Failure]]:
    """What a batch that partly failed says: None in place of each error, and the errors by place."""
    failed = {place: failure_of(one)[1] for place, one in enumerate(answers) if isinstance(one, Exception)}
    return [None if place in failed else one for place, one in enumerate(answers)], failed


def joined(answers: Sequence[object], failed: Mapping[int, Failure], where: str) -> PartlyFailed:
    """The other way round."""
    return PartlyFailed(
        [error_of(failed[place], where) if place in failed else one for place, one in enumerate(answers)]
    )
