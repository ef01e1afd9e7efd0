"""The messages between bide's own client and service, under `/v1/store/{operation}`: MessagePack over POST.

    open      Hello -> Welcome            begin a session
    listen    Call  -> lines of JSON      ["topic", wake], or an empty line as a heartbeat
    any other Call  -> Success | Failure  a row of `ports.remote`

Records travel by the names of their fields, so a field with a default can be added within a version. Anything that the
other side would not understand needs another `WIRE`, which the two sides compare when a session begins. Other languages
use the JSON API.

A call that writes carries the session and a number that only rises for its operation. The service keeps the last answer
of each, so a call that is sent again is answered again, and done once. A session belongs to the instance that it began
with: any other refuses it before anything is done, and the client asks again until a proxy leads it to the right one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Generic, TypeVar

import msgspec
from msgspec import Raw, Struct

from bide.core.errors import (
    BadInput,
    BadPayload,
    BideError,
    OutcomeUnknown,
    SetupError,
    StoreCorrupt,
    StoreError,
    StoreFull,
    StoreMismatch,
    StoreUnavailable,
)
from bide.core.instants import Millis
from bide.core.records import Count, Filter, Page, Ref, State, Tally, Topic
from bide.core.texts import text_of

WIRE = 1
"""The version of the messages. The answer to `open` says which one the service speaks."""
SERVICE = "bide"
CONTENT_TYPE = "application/vnd.bide.store+msgpack"
STREAM_TYPE = "application/x-ndjson"
MOST = 10_000
"""Items in one call, and tasks that one lease may ask for."""
LONGEST_PAGE = 1_000
"""Tasks in one page; a client that asks for more gets a shorter page and its cursor."""
HEARTBEAT = 5.0
"""Seconds after which the service writes to a stream at the latest."""
CALL_LASTS = 45.0
"""Seconds for which a client may send a call again; the service keeps its answer for longer."""

Item = TypeVar("Item")


class Hello(Struct, frozen=True):
    """The first message of a client."""

    wire: int
    clock: str
    """The side whose time counts: "server", or in tests "caller"."""


class Welcome(Struct, frozen=True, kw_only=True):
    """The service that answers, and the session that begins."""

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
    request: Raw


class Failure(Struct, frozen=True, omit_defaults=True):
    """An error, as the other side raises it again."""

    kind: str
    text: str
    field: str = ""
    value: str | None = None
    accepted: str = ""


class Success(Struct, frozen=True, array_like=True, omit_defaults=True):
    """An answer, the service's time in microseconds, and by place the failures of items that have no answer."""

    micros: int
    answer: Raw
    failed: Mapping[int, Failure] = {}


class Batch(Struct, Generic[Item], frozen=True, array_like=True):
    """Items that are answered one by one: one that is refused or fails takes no other along."""

    items: list[Item]
    lasts: Millis = 0
    """How long the leases are extended."""


class LeaseRequest(Struct, frozen=True, array_like=True):
    wants: dict[Topic, int]
    lasts: Millis
    holder: str


class FindRequest(Struct, frozen=True, array_like=True):
    where: Filter
    page: Page


class TallyRequest(Struct, frozen=True, array_like=True):
    edges: Sequence[Millis] | None
    topics: list[Topic] | None


class AnnounceRequest(Struct, frozen=True, array_like=True):
    holder: str
    topics: list[Topic]
    lasts: Millis


class EventsRequest(Struct, frozen=True, array_like=True):
    ref: Ref | None
    limit: int


class PauseRequest(Struct, frozen=True, array_like=True):
    topic: Topic
    who: str | None
    """The person or program, as the client names them."""


class FlatTally(Struct, frozen=True, array_like=True):
    """A tally: MessagePack has no keys of two parts."""

    counts: list[tuple[Topic, State, int, bool]]
    forecast: dict[Topic, list[Count]]

    @classmethod
    def of(cls, tally: Tally) -> FlatTally:
        return cls(
            [(topic, state, count.number, count.exact) for (topic, state), count in tally.counts.items()],
            {topic: list(counts) for topic, counts in tally.forecast.items()},
        )

    def tally(self) -> Tally:
        counts = {(topic, state): Count(number, exact) for topic, state, number, exact in self.counts}
        return Tally(counts, self.forecast)


encode = msgspec.msgpack.Encoder().encode
read_hello = msgspec.msgpack.Decoder(Hello).decode
read_welcome = msgspec.msgpack.Decoder(Welcome).decode
read_call = msgspec.msgpack.Decoder(Call).decode
read_success = msgspec.msgpack.Decoder(Success).decode
read_failure = msgspec.msgpack.Decoder(Failure).decode
encode_wake = msgspec.json.Encoder().encode
read_wake = msgspec.json.Decoder(tuple[Topic, Millis]).decode

UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""The exceptions of reading bytes that nobody on the other side wrote."""

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
"""The caller may not do this; nothing was done."""

_NAMES: Mapping[type[BideError], str] = {
    BadPayload: "bad_payload",
    BadInput: "bad_input",
    StoreFull: "full",
    StoreCorrupt: "corrupt",
    StoreMismatch: "mismatch",
    OutcomeUnknown: "unknown",
    StoreUnavailable: "unavailable",
    StoreError: "unavailable",
    SetupError: "setup",
}
"""Each error's name on the wire; of several the first that it is an instance of."""
_STORE_ERRORS: Mapping[str, type[StoreError]] = {
    FORGOTTEN: OutcomeUnknown,
    **{name: kind for kind, name in _NAMES.items() if issubclass(kind, StoreError) and kind is not StoreError},
}


def failure_of(error: Exception) -> Failure:
    """The message of an error to the other side."""
    for kind, name in _NAMES.items():
        if isinstance(error, kind):
            if isinstance(error, BadInput):
                shown = text_of(error.value if isinstance(error.value, str) else repr(error.value))
                shown = shown if len(shown) <= 200 else f"{shown[:199]}…"
                return Failure(name, "", error.field, shown, error.accepted)
            return Failure(name, text_of(error))
    return Failure(DEFECT, "a defect of the service; its log says where")


def error_of(failure: Failure, where: str) -> BideError:
    """The error that a failure was, for the caller. `where` is the service."""
    if failure.kind in ("bad_input", "bad_payload"):
        kind = BadPayload if failure.kind == "bad_payload" else BadInput
        return kind(failure.field, failure.value, failure.accepted)
    if failure.kind == "setup":
        return SetupError(f"{where}: {failure.text}")
    if failure.kind in _STORE_ERRORS:
        return _STORE_ERRORS[failure.kind](f"{where}: {failure.text}")
    return OutcomeUnknown(f"{where}: {failure.text} ({failure.kind})")
