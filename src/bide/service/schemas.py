"""The JSON types of requests and answers. Decoding names the wrong field, and the OpenAPI document is made from them.
Tasks, answers and events have the same shapes over HTTP and on the command line.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Container
from contextlib import suppress
from typing import Annotated, Any, TypeAlias

import msgspec
from msgspec import UNSET, Meta, Raw, Struct, UnsetType

from bide.core.answers import Answer
from bide.core.errors import BadInput
from bide.core.events import Event
from bide.core.instants import Millis, duration_text, instant_text
from bide.core.names import error_parts, storable
from bide.core.options import decode_options, known_options
from bide.core.records import OnConflict, OutcomeKind, Pause, Record, Result, State, Topic
from bide.core.recurrence.plan import MOST, CatchUp, Overlap
from bide.core.recurrence.zones import OnGap, OnRepeat
from bide.core.retry import FOREVER, PRESETS, Exponential, Fixed, Ladder, RetryPolicy
from bide.core.tasks import occurrence_of
from bide.engine.recurring import planned

MOST_AT_ONCE = 10_000
"""Most items of one batch."""

BASE64_PATTERN = "^(?:[A-Za-z0-9+/]{4})*(?:[A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?$"
NAME_PATTERN = r"^[^\u0000-\u001f\u007f-\u009f\u2028\u2029]+$"
Base64: TypeAlias = Annotated[
    str, Meta(extra_json_schema={"contentEncoding": "base64", "pattern": BASE64_PATTERN, "example": "aGVsbG8="})
]
_WALL_PATTERN = r"^(([0-9]{4}-[0-9]{2}-[0-9]{2}|[a-z]+) )?[0-2]?[0-9]:[0-5][0-9](:[0-5][0-9])?( [A-Z]\S*)?$"
INSTANT_SCHEMA: dict[str, Any] = {
    "anyOf": [{"format": "date-time", "pattern": r"^(19[7-9][0-9]|[2-9][0-9]{3})-"}, {"pattern": _WALL_PATTERN}],
    "example": "2030-01-31T08:00:00+01:00",
}
Name: TypeAlias = Annotated[
    str,
    Meta(
        description="1 to 200 bytes of UTF-8 without control characters",
        extra_json_schema={"minLength": 1, "maxLength": 200, "pattern": NAME_PATTERN, "example": "order.close"},
    ),
]
Instant: TypeAlias = Annotated[
    str,
    Meta(
        description="ISO 8601 with an offset, or a time with its zone, as tomorrow 20:00 UTC; from 1970 to 9999",
        extra_json_schema=INSTANT_SCHEMA,
    ),
]
Span: TypeAlias = Annotated[
    str,
    Meta(
        description="A length of time such as 15m, 1h30m, 250ms, 2d or PT15M",
        extra_json_schema={"pattern": r"^[0-9]{1,6}(ms|s|m|h|d)$", "example": "15m"},
    ),
]
TokenNumber: TypeAlias = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Rungs: TypeAlias = Annotated[list[Span], Meta(min_length=1, max_length=100)]
Tries: TypeAlias = Annotated[int, Meta(ge=1, le=FOREVER)]
RetryText: TypeAlias = Annotated[str, Meta(extra_json_schema={"enum": [*PRESETS]})]


class FixedTerms(Struct, forbid_unknown_fields=True, tag_field="policy", tag="fixed"):
    """A fixed pause between tries."""

    pause: Span
    tries: Tries


class ExponentialTerms(Struct, forbid_unknown_fields=True, tag_field="policy", tag="exponential", omit_defaults=True):
    """Pauses that grow exponentially."""

    first: Span = "1s"
    factor: Annotated[float, Meta(ge=1, le=100)] = 2.0
    longest: Span = "1h"
    tries: Tries = 12
    jitter: Annotated[float, Meta(ge=0, le=1)] = 0.2


class LadderTerms(Struct, forbid_unknown_fields=True, tag_field="policy", tag="ladder"):
    """One pause per failure; the failure after the last pause makes the task dead."""

    rungs: Rungs


Terms: TypeAlias = FixedTerms | ExponentialTerms | LadderTerms
Retries: TypeAlias = RetryText | Rungs | Terms
"""When to retry: the name of a preset, a ladder as a list of durations, or a policy with its terms."""

HeaderText: TypeAlias = Annotated[
    str, Meta(description="Printable text", extra_json_schema={"minLength": 1, "maxLength": 60, "pattern": "^[ -~]+$"})
]


class Move(Struct, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    """A new time for a task: one of `at` and `delay`. `zone`: the time zone of `at` and `deadline` that name none."""

    at: Instant | None = None
    delay: Span | None = None
    deadline: Instant | Span | None = None
    if_token: TokenNumber | None = None
    zone: str | None = None


class Schedule(Move, kw_only=True):
    """A task: one of `at` and `delay`, at most one of `payload` (JSON) and `payload_base64`; `zone` as in `Move`."""

    payload: Raw | UnsetType = UNSET
    payload_base64: Base64 | UnsetType = UNSET
    group: Name | None = None
    on_conflict: Annotated[str, Meta(extra_json_schema={"enum": [*OnConflict]})] = "replace"
    retry: Retries | None = None
    headers: dict[HeaderText, HeaderText] | None = None


class ScheduleItem(Schedule, kw_only=True):
    """A task of a batch. Without a key it gets a UUIDv7."""

    topic: Name
    key: Name | None = None


class MoveItem(Move, kw_only=True):
    """A new time for a task of a batch."""

    topic: Name
    key: Name


class Ref(Struct, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    """A task, and optionally the token that it must still have."""

    topic: Name
    key: Name
    if_token: TokenNumber | None = None


class RedriveItem(Ref, kw_only=True):
    """A dead task to redrive, at once or after `delay`."""

    delay: Span | None = None


class CancelGroup(Struct, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    """Cancel every live task of a group, or only those of one topic."""

    group: Name
    topic: Name | None = None


class Shift(Struct, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    """Move every waiting task of a group by a duration, which may be negative."""

    group: Name
    by: Annotated[str, Meta(extra_json_schema={"pattern": r"^-?[0-9]{1,6}(ms|s|m|h|d)$", "example": "-2h"})]
    topic: Name | None = None
    deadlines: bool = False


_AT_MOST_A_DAY = Meta(
    description="A length of time as in `delay`, at most a day",
    extra_json_schema={"pattern": "^([0-9]{1,6}ms|[0-9]{1,4}s|[0-9]{1,3}m|1?[0-9]h|[01]d)$", "example": "5m"},
)


class Recur(Struct, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    """A recurring task. `rule`: cron text such as "0 8 * * mon-fri", "@daily", "every 15m", or an RRULE."""

    rule: Annotated[str, Meta(extra_json_schema={"minLength": 1, "maxLength": 1_000, "example": "0 8 * * mon-fri"})]
    zone: Annotated[str, Meta(extra_json_schema={"maxLength": 100, "example": "Asia/Shanghai"})] = "UTC"
    start: Instant | None = None
    until: Instant | None = None
    times: Annotated[int, Meta(ge=1, le=100_000)] | None = None
    jitter: Annotated[Span, _AT_MOST_A_DAY] | None = None
    except_on: Annotated[list[str], Meta(max_length=500, extra_json_schema={"example": ["2030-01-01"]})] | None = None
    on_gap: OnGap | None = None
    on_repeat: OnRepeat | None = None
    payload: Raw | UnsetType = UNSET
    payload_base64: Base64 | UnsetType = UNSET
    group: Name | None = None
    retry: Retries | None = None
    headers: dict[HeaderText, HeaderText] | None = None
    catch_up: Annotated[str, Meta(extra_json_schema={"enum": [*CatchUp]})] = "latest"
    window: Span | None = None
    most: Annotated[int, Meta(ge=1, le=10_000)] = MOST
    overlap: Annotated[str, Meta(extra_json_schema={"enum": [*Overlap]})] = "skip"
    deadline: Span | None = None
    end_when_dead: bool = False


STEPS = ("pause", "resume", "skip_next", "replan", "run_now", "backfill")
"""The actions on a recurring task; each is a verb of the client, and `backfill` takes a range."""


class Steer(Struct, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    """A step to take with a recurring task; `since` and `until` only with backfill."""

    do: Annotated[str, Meta(extra_json_schema={"enum": [*STEPS]})]
    since: Instant | None = None
    until: Instant | None = None


LONGEST_WAIT = 60
"""Most seconds that a lease call may wait for a due task."""
WaitSpan: TypeAlias = Annotated[str, Meta(extra_json_schema={"pattern": "^([0-9]|[1-5][0-9]|60)s$", "example": "5s"})]
LeaseSpan: TypeAlias = Annotated[
    str, Meta(extra_json_schema={"pattern": "^([1-9][0-9]{0,3}s|[1-9][0-9]{0,2}m|[1-9]h)$", "example": "30s"})
]
Room: TypeAlias = Annotated[int, Meta(ge=1, le=1_000)]


class LeaseRequest(Struct, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    """How many tasks of each topic the caller can start now. With `wait` the answer comes once a task is due."""

    topics: Annotated[dict[Name, Room], Meta(min_length=1, max_length=100)]
    wait: WaitSpan = "0s"
    lease_for: LeaseSpan | None = None


class LeaseRef(Struct, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    """A lease: a task and the token that it was leased with."""

    topic: Name
    key: Name
    token: TokenNumber


class Settle(LeaseRef, kw_only=True):
    """The outcome of a delivery. `at` or `delay`: when to try again; with `done`, when the next life begins."""

    outcome: Annotated[str, Meta(extra_json_schema={"enum": [*OutcomeKind]})]
    at: Instant | None = None
    delay: Span | None = None
    error: str | None = None
    """The reason, for retry and dead."""


class Extend(Struct, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    """Leases to extend, each by a duration from now."""

    leases: Annotated[list[LeaseRef], Meta(max_length=MOST_AT_ONCE)]
    lease_for: LeaseSpan | None = None


def retries(value: str | list[str] | Terms | None) -> RetryPolicy | None:
    """The retry policy that a request describes. Raises BadInput, whose field is within `retry`."""
    if value is None:
        return None
    if isinstance(value, str):
        if value not in PRESETS:
            raise BadInput("retry", value, f"one of {', '.join(PRESETS)}; a list of pauses; or the fields of a policy")
        return PRESETS[value]
    try:
        if isinstance(value, list):
            return Ladder(*value)
        if isinstance(value, LadderTerms):
            return Ladder(*value.rungs)
        if isinstance(value, FixedTerms):
            return Fixed(value.pause, tries=value.tries)
        return Exponential(**msgspec.structs.asdict(value))
    except BadInput as error:
        within = error.field.removeprefix("rungs") if isinstance(value, list) else f".{error.field}"
        raise BadInput(f"retry{within}", error.value, error.accepted) from None


def payload_of(ask: Schedule | Recur) -> bytes:
    """The bytes of the payload; `null` if none is given. Raises BadInput."""
    if ask.payload_base64 is UNSET:
        return b"null" if ask.payload is UNSET else bytes(ask.payload)
    if ask.payload is not UNSET:
        raise BadInput("payload, payload_base64", "both", "one of the two")
    try:
        return base64.b64decode(ask.payload_base64, validate=True)
    except (binascii.Error, ValueError):
        raise BadInput("payload_base64", ask.payload_base64, "base64 (RFC 4648, with padding)") from None


InstantText = Annotated[
    str, Meta(description="RFC 3339 in UTC, with milliseconds", extra_json_schema={"format": "date-time"})
]
Whole = Annotated[int, Meta(ge=0)]
OnlyTrue = Annotated[bool, Meta(extra_json_schema={"const": True})]

_checked = msgspec.json.Decoder(Raw).decode
"""Checks that a payload is JSON without reading its numbers: one such as 1e400 is JSON, and fits no float."""


class TaskShape(Struct, frozen=True, gc=False):
    """A task. A JSON payload appears as it is, any other payload in base64."""

    topic: str
    key: str
    id: str
    group: str | None
    state: Annotated[str, Meta(extra_json_schema={"enum": [*State]})]
    due_at: InstantText
    wake_at: InstantText
    attempt: Whole
    token: Whole
    payload: Raw | UnsetType
    payload_base64: str | UnsetType
    error: str | None
    created_at: InstantText
    finished_at: InstantText | None
    trace: (
        Annotated[str, Meta(description="the traceback; only for a single task that an exception ended")] | UnsetType
    ) = UNSET
    occurrence: InstantText | UnsetType = UNSET
    """The instant of the rule for which a recurring task's delivery stands: `due_at` without the jitter."""


class DetailShape(Struct, frozen=True):
    """The further fields of a single task: its failures, its holder, and its options."""

    failures: int
    losses: int
    holder: str | None
    deadline: InstantText | None
    keep_until: InstantText | None
    retry: Any = UNSET
    headers: dict[str, str] | UnsetType = UNSET
    recurs: str | UnsetType = UNSET
    """The rule of a recurring task in words."""
    paused: OnlyTrue | UnsetType = UNSET
    options_damaged: str | UnsetType = UNSET


class RecurringShape(Struct, frozen=True):
    """A recurring task: its rule as data and in words, its policies, and its next instants; none while it is paused."""

    task: TaskShape
    rule: dict[str, Any]
    words: str
    paused: bool
    declared: bool
    catch_up: str
    window: str | None
    most: int
    overlap: str
    deadline: str | None
    end_when_dead: bool
    retry: Any
    """The retry policy of each occurrence, its lengths in milliseconds; null: that of its handler."""
    next: list[InstantText]


class AnswerShape(Struct, frozen=True, gc=False):
    """The answer to a verb: one word, and the task as it is now."""

    answer: Annotated[str, Meta(extra_json_schema={"enum": [*Result]})]
    task: TaskShape | None
    paused: OnlyTrue | UnsetType = UNSET
    """True if the task is live and its topic is paused: it waits until the topic is resumed."""


class PausedShape(Struct, frozen=True):
    """A pause: its beginning, and the caller who made it."""

    since: InstantText
    who: str | None


class CountShape(Struct, frozen=True):
    """A count; if `exact` is false, there are at least this many."""

    number: Whole
    exact: bool


class TopicShape(Struct, frozen=True):
    """A topic: its tasks by state, how many of the waiting are due, and whether it is paused."""

    topic: str
    waiting: CountShape
    leased: CountShape
    done: CountShape
    cancelled: CountShape
    dead: CountShape
    due: CountShape
    paused: PausedShape | None


class EventShape(Struct, frozen=True):
    """One line of the event log."""

    at: InstantText
    topic: str
    key: str
    id: str
    kind: str
    attempt: int
    who: str | None
    what: str
    was: InstantText | None
    wake_at: InstantText | None


class ProblemShape(Struct, frozen=True, kw_only=True):
    """An error, as problem details."""

    type: str
    title: str
    status: int
    detail: str
    field: str | UnsetType = UNSET
    value: Any = UNSET
    accepted: str | UnsetType = UNSET


class ItemShape(Struct, frozen=True, gc=False):
    """The answer to one item of a batch; `problem` instead, if its part of the store was unavailable."""

    answer: str | UnsetType = UNSET
    task: TaskShape | UnsetType | None = UNSET
    paused: OnlyTrue | UnsetType = UNSET
    problem: ProblemShape | UnsetType = UNSET


class FoundShape(Struct, frozen=True):
    """A page of tasks; `cursor` leads to the next one."""

    tasks: list[TaskShape]
    cursor: str | None


class RecurringFoundShape(Struct, frozen=True):
    """The recurring tasks among one page of tasks; `cursor` leads to the next page, also if this one has none."""

    recurring: list[RecurringShape]
    cursor: str | None


class LeasedShape(Struct, frozen=True):
    """The leased tasks. `paused` lists the requested topics that are paused: none of their tasks are leased."""

    tasks: list[TaskShape]
    paused: list[str] | UnsetType = UNSET


class PauseShape(Struct, frozen=True):
    """The pause of a topic as it is now; `changed` says if this call made it so."""

    topic: str
    paused: bool
    changed: bool
    since: InstantText | None
    who: str | None


class TopicsShape(Struct, frozen=True):
    """The topics that have tasks or are paused."""

    topics: list[TopicShape]


class SettledShape(Struct, frozen=True):
    """One value for each outcome, in the order sent; false: the lease was no longer held, and nothing changed."""

    settled: list[bool]


class ExtendedShape(Struct, frozen=True):
    """One value for each lease, in the order sent; false: it was no longer held."""

    extended: list[bool]


def task_shape(record: Record, *, withheld: bool = False, alone: bool = False) -> TaskShape:
    """A task as JSON: without its payload if that is `withheld`, with its traceback if it is shown `alone`."""
    raw: Raw | UnsetType = UNSET
    encoded: str | UnsetType = UNSET
    try:
        if not withheld:
            record.payload.decode()
            _checked(record.payload)
            raw = Raw(record.payload)
    except (ValueError, RecursionError):
        encoded = base64.b64encode(record.payload).decode()
    due = instant_text(record.due_at)
    wake = due if record.wake_at == record.due_at else instant_text(record.wake_at)
    error, trace = error_parts(record.error)
    occurrence = None
    if record.options:
        with suppress(BadInput):  # a zone that is not known here
            occurrence = occurrence_of(record)
    return TaskShape(
        storable(record.topic), storable(record.key), record.id, record.group, record.state.value, due, wake,
        record.attempt, record.token,
        raw, encoded, None if record.error is None else error, instant_text(record.created_at),
        _optional(record.finished_at), trace if trace and alone else UNSET,
        UNSET if occurrence is None else instant_text(occurrence),
    )  # fmt: skip


def detail_shape(record: Record) -> DetailShape:
    """The fields that `bide show` adds to a task."""
    shape = DetailShape(
        record.failures, record.losses, record.holder, _optional(record.deadline), _optional(record.keep_until)
    )
    try:
        options = decode_options(record.options)
    except msgspec.MsgspecError as error:
        return msgspec.structs.replace(shape, options_damaged=str(error))
    rule = options.recurrence
    return msgspec.structs.replace(
        shape, retry=options.retry, headers=dict(options.headers), recurs=UNSET if rule is None else rule.rule.words,
        paused=True if rule is not None and rule.paused else UNSET,
    )  # fmt: skip


def recurring_shape(record: Record, now: Millis, most: int) -> RecurringShape | None:
    """A recurring task as JSON, with its next instants, at most `most`; None: the task does not recur."""
    options = known_options(record.options)
    recurrence = options.recurrence
    if recurrence is None:
        return None
    window, deadline = (None if one is None else duration_text(one) for one in (recurrence.window, recurrence.deadline))
    return RecurringShape(
        task_shape(record), msgspec.to_builtins(recurrence.rule), recurrence.rule.words,
        recurrence.paused, recurrence.declared, recurrence.catch_up.value, window, recurrence.most,
        recurrence.overlap.value, deadline, recurrence.end_when_dead, options.retry,
        [instant_text(one) for one in planned(record, now, most)],
    )  # fmt: skip


def answer_shape(answer: Answer, *, paused: Container[Topic] = (), withheld: bool = False) -> AnswerShape:
    """The answer to a verb. `paused`: the paused topics, whose live tasks wait; the answer says so."""
    record = answer.record
    if record is None:
        return AnswerShape(answer.result.value, None)
    held = record.topic in paused and record.state.live
    return AnswerShape(answer.result.value, task_shape(record, withheld=withheld), True if held else UNSET)


def paused_shape(pause: Pause) -> PausedShape:
    """A pause as JSON."""
    return PausedShape(instant_text(pause.since), pause.who)


def event_shape(event: Event) -> EventShape:
    """A line of the event log as JSON."""
    return EventShape(
        instant_text(event.at), event.topic, event.key, event.id, event.kind.value, event.attempt, event.who,
        event.what, _optional(event.was), _optional(event.wake_at),
    )  # fmt: skip


def one_line(shape: object) -> bytes:
    """One line of JSON, also where a payload has line breaks between its tokens."""
    encoded = msgspec.json.encode(shape)
    if b"\n" in encoded or b"\r" in encoded:
        encoded = msgspec.json.format(encoded, indent=-1)
    return encoded


def _optional(millis: Millis | None) -> str | None:
    return None if millis is None else instant_text(millis)
