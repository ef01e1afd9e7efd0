"""The operations of a remote store: one table that client and service share.

Each row names the types of request and answer, the access that a caller needs, the checks of every field, and whether a
resent operation is done only once.

The library checks arguments at its public verbs and trusts the layers below. A service cannot do that: the owner of a
token can send any record that MessagePack can hold. So the service checks every field again before a store sees it. The
values of one field are checked together; only if that fails is the faulty item searched for.

The messages between bide's own client and service, under `/v1/store/{operation}`: MessagePack over POST.

    open      Hello -> Welcome            begin a session
    listen    Call  -> lines of JSON      ["topic", wake], or an empty line as a heartbeat
    any other Call  -> Success | Failure  a row of `ports.remote`

Records are encoded with field names, so a field with a default can be added within a version. A change that the other
side would not understand needs another `WIRE`, compared when a session begins. Other languages use the JSON API.

A call that writes carries the session and a number that only rises for its operation. The service keeps the last answer
of each operation, so a resent call gets the same answer and is done once. A session belongs to the instance it began
with. Any other instance refuses it before doing anything, and the client retries until a proxy routes it to the right
one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from types import NoneType
from typing import Any, Generic, NamedTuple, TypeVar

import msgspec
from msgspec import Raw, Struct

from bide.core.answers import Answer
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
from bide.core.events import Event
from bide.core.instants import LAST_INSTANT, Due, In, Millis
from bide.core.names import LONGEST_NAME, check_name, check_topic, text_of
from bide.core.options import LONGEST_HEADERS, LONGEST_OPTIONS, decode_options, recurrence_of
from bide.core.records import (
    Cancel,
    Change,
    Count,
    Filter,
    Found,
    Lease,
    Leased,
    Move,
    NewTask,
    OutcomeKind,
    Page,
    Pause,
    Record,
    Ref,
    Settlement,
    State,
    Tally,
    Topic,
)
from bide.core.retry import FOREVER

WIRE = 1
"""The version of the messages. The answer to `open` contains the service's version."""
SERVICE = "bide"
CONTENT_TYPE = "application/vnd.bide.store+msgpack"
STREAM_TYPE = "application/x-ndjson"
MOST = 10_000
"""The most items in one call, and the most tasks that one lease may request."""
LONGEST_PAGE = 1_000
"""The most tasks in one page; a client that requests more gets a shorter page with a cursor."""
HEARTBEAT = 5.0
"""The most seconds between two writes of the service to a stream."""
CALL_LASTS = 45.0
"""Seconds for which a client may resend a call; the service keeps its answer for longer."""

Item = TypeVar("Item")


class Hello(Struct, frozen=True):
    """The first message of a client."""

    wire: int
    clock: str
    """The side whose clock applies: "server", or in tests "caller"."""


class Welcome(Struct, frozen=True, kw_only=True):
    """The answering service and the new session."""

    service: str
    wire: int
    version: str = ""
    session: str = ""
    """Empty if it does not speak the client's version."""
    micros: int = 0
    most: int = MOST
    body_limit: int = 1 << 20
    """The most bytes of one call."""


class Call(Struct, frozen=True, array_like=True):
    """One operation. `now` applies only if the service uses its callers' clocks."""

    session: str
    number: int
    now: Millis | None
    request: Raw


class Failure(Struct, frozen=True, omit_defaults=True):
    """An error, which the other side raises again."""

    kind: str
    text: str
    field: str = ""
    value: str | None = None
    accepted: str = ""


class Success(Struct, frozen=True, array_like=True, omit_defaults=True):
    """An answer, the service's time in microseconds, and by index the failures of items without an answer."""

    micros: int
    answer: Raw
    failed: Mapping[int, Failure] = {}


class Batch(Struct, Generic[Item], frozen=True, array_like=True):
    """Items that are answered one by one: a refused or failed item does not affect the others."""

    items: list[Item]
    lasts: Millis = 0
    """The length by which leases are extended."""


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
    """The person or program, as named by the client."""


class FlatTally(Struct, frozen=True, array_like=True):
    """A tally in flat form, because MessagePack has no keys of two parts."""

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
"""The exceptions raised for bytes that are not a valid message."""

# --- errors

SESSION = "session"
"""The session began here and has ended. Nothing was done: begin another."""
ELSEWHERE = "elsewhere"
"""The session began with another instance, or before a restart. Nothing was done: retry, or begin another."""
FORGOTTEN = "forgotten"
"""The call with this number was answered or skipped, and its answer is no longer kept."""
DEFECT = "defect"
"""A defect of the service; see its log."""
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
"""The name of each error in messages; the first matching class applies."""
_STORE_ERRORS: Mapping[str, type[StoreError]] = {
    FORGOTTEN: OutcomeUnknown,
    **{name: kind for kind, name in _NAMES.items() if issubclass(kind, StoreError) and kind is not StoreError},
}


def failure_of(error: Exception) -> Failure:
    """The message that carries an error to the other side."""
    for kind, name in _NAMES.items():
        if isinstance(error, kind):
            if isinstance(error, BadInput):
                shown = text_of(error.value if isinstance(error.value, str) else repr(error.value))
                shown = shown if len(shown) <= 200 else f"{shown[:199]}…"
                return Failure(name, "", error.field, shown, error.accepted)
            return Failure(name, text_of(error))
    return Failure(DEFECT, "a defect of the service; its log says where")


def error_of(failure: Failure, where: str) -> BideError:
    """The error of a failure, to be raised for the caller. `where` is the service."""
    if failure.kind in ("bad_input", "bad_payload"):
        kind = BadPayload if failure.kind == "bad_payload" else BadInput
        return kind(failure.field, failure.value, failure.accepted)
    if failure.kind == "setup":
        return SetupError(f"{where}: {failure.text}")
    if failure.kind in _STORE_ERRORS:
        return _STORE_ERRORS[failure.kind](f"{where}: {failure.text}")
    return OutcomeUnknown(f"{where}: {failure.text} ({failure.kind})")


LAST_TOKEN = 2**63 - 1
SHORTEST_LEASE: Millis = 1_000
LONGEST_LEASE: Millis = 86_400_000
LONGEST_ERROR = 8_192
"""The most characters in the error of an outcome with its traceback, or in an event."""
MOST_MINUTES = 60
"""The most minutes of the history in one call."""

_LONGEST_CURSOR = 4_096
_DIGITS = "[0-9a-f]"
_ID = re.compile(f"{_DIGITS}{{8}}-{_DIGITS}{{4}}-{_DIGITS}{{4}}-{_DIGITS}{{4}}-{_DIGITS}{{12}}")
_IDS = re.compile(f"(?:{_ID.pattern})*")
_INSTANT = "milliseconds since the epoch, within the years 1970 to 9999"
_LENGTH = "milliseconds that end before the year 10000"

Request = TypeVar("Request")
Answered = TypeVar("Answered")
Needs = Mapping[str, Collection[Topic] | None]
"""The access that a request needs: the topics by verb. None: all topics. No topics: the verb on any topic."""


class Bounds(NamedTuple):
    payload: int
    trusting: bool = False
    """For tests of the messages alone: options may be any bytes, and a lease may have any length."""


Check = Callable[[str, Sequence[Any], Bounds], None]
"""Checks all values of a field. Raises BadInput that names it."""
Fields = Mapping[str, Check]
"""The checks by field name; "" is the item itself."""


@dataclass(frozen=True, eq=False)
class Operation(Generic[Request, Answered]):
    name: str
    request: type[Request]
    answer: type[Answered]
    needs: Callable[[Request], Needs]
    fields: Fields
    once: bool = False
    """True: the call is numbered, and done once even if resent. One call of each operation is in flight at a time."""

    def check(self, request: Request, bounds: Bounds) -> None:
        """Raise BadInput for an invalid request."""
        items: Sequence[Any] = [request]
        if isinstance(request, Batch):
            items = request.items
            _lease_lengths("lasts", [request.lasts], bounds)
        elif isinstance(request, list):
            items = request
        check_count("items", items)
        _each(self.fields, self.name, items, bounds)

    @cached_property
    def read_request(self) -> Callable[[bytes | Raw], Request]:
        return msgspec.msgpack.Decoder(self.request).decode

    @cached_property
    def read_answer(self) -> Callable[[bytes | Raw], Answered]:
        return msgspec.msgpack.Decoder(self.answer).decode


# --- checks


def check_count(field: str, items: Collection[Any]) -> None:
    if len(items) > MOST:
        raise BadInput(field, f"{len(items)} items", f"at most {MOST} in one call")


def _each(fields: Fields, _: str, items: Sequence[Any], bounds: Bounds) -> None:
    """Check each item's fields, skipping those that are missing or None."""
    for field, check in fields.items():
        values = [value for item in items if (value := getattr(item, field, None) if field else item) is not None]
        if values:
            check(field, values, bounds)


def _collections(check: Check, field: str, collections: Sequence[Collection[Any]], bounds: Bounds) -> None:
    for values in collections:
        check_count(field, values)
        if values:
            check(field, list(values), bounds)


def _topics(field: str, topics: Sequence[Topic], _: Bounds) -> None:
    """Check each distinct topic once. Also refuses the topics that hold bide's own settings."""
    for topic in set(topics):
        check_topic(topic)


def _names(field: str, names: Sequence[str], _: Bounds) -> None:
    text = "".join(names)
    if text.isascii() and text.isprintable() and all(names) and len(max(names, key=len)) <= LONGEST_NAME:
        return
    for name in names:
        check_name(field, name)


def _ids(field: str, ids: Sequence[str], _: Bounds) -> None:
    if {*map(len, ids)} <= {36} and _IDS.fullmatch("".join(ids)):
        return
    for one in ids:
        if not _ID.fullmatch(one):
            raise BadInput(field, one, "a UUID in canonical text, 36 characters in lower case")


def _ids_if_any(field: str, ids: Sequence[str], bounds: Bounds) -> None:
    _ids(field, [one for one in ids if one], bounds)


def _dues(field: str, dues: Sequence[Due], _: Bounds) -> None:
    """Accept any time. Stores treat a time before 1970 as due at once, and cap the others at the last instant."""
    for due in dues:
        if not -LAST_INSTANT <= due.millis <= LAST_INSTANT:
            raise BadInput(field, due.millis, _LENGTH if isinstance(due, In) else _INSTANT)


def _within(low: int, high: int, accepted: str, field: str, numbers: Sequence[int], _: Bounds) -> None:
    if min(numbers) < low or max(numbers) > high:
        raise BadInput(field, next(one for one in numbers if not low <= one <= high), accepted)


def _lengths_of(longest: int, unit: str, field: str, values: Sequence[str | bytes], _: Bounds) -> None:
    if max(map(len, values)) > longest:
        size = next(len(one) for one in values if len(one) > longest)
        raise BadInput(field, f"{size} {unit}", f"at most {longest} {unit}")


_instants = partial(_within, 0, LAST_INSTANT, _INSTANT)
_edges = partial(_within, -LAST_INSTANT, LAST_INSTANT, _INSTANT)
"""The check of edges, which may lie before 1970, since no task has to be due at them."""
_lengths = partial(_within, 0, LAST_INSTANT, _LENGTH)
_tokens = partial(_within, 0, LAST_TOKEN, f"a token: a number from 0 to {LAST_TOKEN}")
_attempts = partial(_within, 0, FOREVER, f"a number from 0 to {FOREVER}")
_texts = partial(_lengths_of, LONGEST_ERROR, "characters")
_persons = partial(_lengths_of, LONGEST_NAME, "characters")


def _lease_lengths(field: str, lengths: Sequence[Millis], bounds: Bounds) -> None:
    _lengths(field, lengths, bounds)
    if max(lengths) > LONGEST_LEASE and not bounds.trusting:
        raise BadInput(field, max(lengths), f"milliseconds: at most {LONGEST_LEASE}, which are 24 hours")


def _payloads(field: str, payloads: Sequence[bytes], bounds: Bounds) -> None:
    _lengths_of(bounds.payload, "bytes", field, payloads, bounds)


def _options(field: str, options: Sequence[bytes], bounds: Bounds) -> None:
    for one in () if bounds.trusting else set(options):
        if one:
            _check_options(one)


@lru_cache(maxsize=1024)
def _check_options(options: bytes) -> None:
    """Check options. Cached, since tasks of a topic mostly have equal ones. Raises BadInput, which is not cached."""
    if len(options) > LONGEST_OPTIONS:
        raise BadInput("options", f"{len(options)} bytes", f"at most {LONGEST_OPTIONS} bytes")
    try:
        read = decode_options(options)
        if read.recurrence is not None:
            read.recurrence.rule.after(0)
    except (msgspec.DecodeError, BadInput) as error:
        raise BadInput("options", options[:60], f"what bide encodes ({error})") from None
    if sum(map(len, read.headers)) + sum(map(len, read.headers.values())) > LONGEST_HEADERS:
        raise BadInput("headers", f"{len(read.headers)} headers", f"at most {LONGEST_HEADERS} bytes in all")
    for name, value in read.headers.items():
        if not name or not name.isprintable() or not value.isprintable():
            raise BadInput("headers", {name: value}, "printable text for both name and value")


def _next_wakes(_: str, outcomes: Sequence[Settlement], bounds: Bounds) -> None:
    for one in outcomes:
        if one.next_at is None:
            if one.outcome is OutcomeKind.RETRY or one.outcome is OutcomeKind.DEFER:
                raise BadInput("next_at", None, f"an instant or a length: {one.outcome.value} needs one")
        elif one.outcome is OutcomeKind.DONE:
            _ids("next_id", [one.next_id], bounds)


def _wants(field: str, all_wants: Sequence[Mapping[Topic, int]], bounds: Bounds) -> None:
    for wants in all_wants:
        for topic, want in wants.items():
            if not 0 <= want <= MOST:
                raise BadInput(f"{field}[{topic!r}]", want, f"a number from 0 to {MOST}")
        if sum(wants.values()) > MOST:
            raise BadInput(field, sum(wants.values()), f"at most {MOST} in all")
    _collections(_topics, field, all_wants, bounds)


def _pages(field: str, pages: Sequence[Page], _: Bounds) -> None:
    for page in pages:
        if page.limit < 0 or (page.cursor is not None and len(page.cursor) > _LONGEST_CURSOR):
            raise BadInput(field, page.limit, "a limit of at least 0, and the cursor of the page before")


def _minutes(_: str, ranges: Sequence[tuple[int, int]], bounds: Bounds) -> None:
    for first, last in ranges:
        if not 0 <= first <= last < first + MOST_MINUTES or last > LAST_INSTANT // 60_000:
            raise BadInput("minutes", (first, last), f"minutes since the epoch, at most {MOST_MINUTES} of them")


_REF: Fields = {"topic": _topics, "key": _names}
_LEASE: Fields = {**_REF, "token": _tokens}
_TASK: Fields = {
    **_REF, "group": _names, "id": _ids, "due": _dues, "deadline": _instants, "payload": _payloads, "options": _options,
    "if_token": _tokens,
}  # fmt: skip
_CHANGE: Fields = {
    **_REF, "id": _ids, "due": _dues, "if_token": _tokens, "keep_until": _instants, "deadline": _instants
}  # fmt: skip
_SETTLEMENT: Fields = {**_LEASE, "wake": _dues, "keep_until": _instants, "error": _texts, "": _next_wakes}
_EVENT: Fields = {
    **_REF, "id": _ids_if_any, "at": _instants, "what": _texts, "who": _persons, "attempt": _attempts,
    "was": _edges, "wake_at": _edges,
}  # fmt: skip
_FILTER: Fields = {"topic": _topics, "group": _names, "wake_from": _edges, "wake_before": _edges}
_WANTS: Fields = {"wants": _wants, "holder": _names, "lasts": _lease_lengths}
_EDGES: Fields = {"edges": partial(_collections, _edges), "topics": partial(_collections, _topics)}
_PRESENCE: Fields = {"holder": _names, "topics": partial(_collections, _topics), "lasts": _lengths}
_PAUSE: Fields = {"topic": _topics, "who": _persons}


# --- access


def _on(verb: str) -> Callable[[Any], Needs]:
    """Require the verb on the topic of each item."""
    return lambda request: {verb: {item.topic for item in (request.items if isinstance(request, Batch) else request)}}


def _on_one(verb: str, topic: Topic | None) -> Needs:
    """Require the verb on this topic, or on all."""
    return {verb: None if topic is None else [topic]}


def _for_add(batch: Batch[NewTask]) -> Needs:
    """Require "read" too for recurring tasks: a client that cannot see the rule of one would undo its pause."""
    needs, recurring = _on("schedule")(batch), {one.topic for one in batch.items if recurrence_of(one.options)}
    return {**needs, "read": recurring} if recurring else needs


def _for_change(batch: Batch[Change]) -> Needs:
    """Require the verb of each change. A move to another time needs "reschedule", even if it claims to be a fire."""
    needs: dict[str, set[Topic]] = {}
    for change in batch.items:
        if isinstance(change, Move):
            fires = change.verb == "fire_now" and change.due == In(0) and change.deadline is None
            verb = "fire" if fires else "reschedule"
        else:
            verb = "cancel" if isinstance(change, Cancel) else "redrive"
        needs.setdefault(verb, set()).add(change.topic)
    return needs


def _nothing(_: object) -> Needs:
    """Require nothing: every caller may ask, and the answer contains only what that caller may see."""
    return {}


# --- the table

ADD = Operation("add", Batch[NewTask], list[Answer | None], _for_add, _TASK, once=True)
CHANGE = Operation("change", Batch[Change], list[Answer | None], _for_change, _CHANGE, once=True)
SETTLE = Operation("settle", Batch[Settlement], list[bool | None], _on("work"), _SETTLEMENT, once=True)
EXTEND = Operation("extend", Batch[Lease], list[bool | None], _on("work"), _LEASE, once=True)
LEASE = Operation("lease", LeaseRequest, Leased, lambda request: {"work": request.wants}, _WANTS, once=True)
PURGE = Operation("purge", int, int, _nothing, {}, once=True)
RECORD = Operation("record", list[Event], NoneType, _on("work"), _EVENT, once=True)
PAUSE = Operation("pause", PauseRequest, bool, lambda request: _on_one("admin", request.topic), _PAUSE, once=True)
RESUME = Operation("resume", PauseRequest, bool, PAUSE.needs, _PAUSE, once=True)
GET = Operation("get", list[Ref], list[Record | None], _on("read"), _REF)
FIND = Operation(
    "find", FindRequest, Found, lambda request: _on_one("read", request.where.topic),
    {"where": partial(_each, _FILTER), "page": _pages},
)  # fmt: skip
TALLY = Operation("tally", TallyRequest, FlatTally, lambda request: {"read": ()}, _EDGES)
MINUTES = Operation("minutes", tuple[int, int], Raw, lambda _: {"read": None}, {"": _minutes})
ANNOUNCE = Operation(
    "announce", AnnounceRequest, dict[str, list[Topic]], lambda request: {"work": request.topics}, _PRESENCE
)
EVENTS = Operation(
    "events", EventsRequest, list[Event], lambda request: _on_one("events", request.ref and request.ref.topic),
    {"ref": partial(_each, _REF)},
)  # fmt: skip
PAUSED = Operation("paused", NoneType, list[Pause], _nothing, {})
TIME = Operation("time", NoneType, NoneType, _nothing, {})

OPERATIONS: Mapping[str, Operation[Any, Any]] = {
    operation.name: operation
    for operation in (
        ADD, CHANGE, SETTLE, EXTEND, LEASE, PURGE, RECORD, PAUSE, RESUME,
        GET, FIND, TALLY, MINUTES, ANNOUNCE, EVENTS, PAUSED, TIME,
    )
}  # fmt: skip
LISTEN = Operation("listen", list[Topic], NoneType, lambda topics: {"work": topics}, {"": _topics})
"""Answered by a stream of wakes, and therefore not in the table."""
