"""Tasks, answers and events as JSON: the same shapes over HTTP and on the command line."""

from __future__ import annotations

import base64
from collections.abc import Container
from typing import Annotated, Any

import msgspec
from msgspec import UNSET, Meta, Raw, Struct, UnsetType

from bide.core.answers import Answer
from bide.core.events import Event
from bide.core.instants import Millis, instant_text
from bide.core.options import decode_options
from bide.core.pause import Pause
from bide.core.records import Record, Topic
from bide.core.texts import error_parts, storable

InstantText = Annotated[
    str, Meta(description="RFC 3339 in UTC, with milliseconds", extra_json_schema={"format": "date-time"})
]
Whole = Annotated[int, Meta(ge=0)]
OnlyTrue = Annotated[bool, Meta(extra_json_schema={"const": True})]

_checked = msgspec.json.Decoder(Raw).decode
"""Says whether it is JSON, and reads no number: any that JSON can write may be in a payload, such as 1e400."""


class TaskShape(Struct, frozen=True, gc=False):
    """A task. A payload that is JSON stands as itself, any other as base64."""

    topic: str
    key: str
    id: str
    group: str | None
    state: Annotated[str, Meta(extra_json_schema={"enum": ["waiting", "leased", "done", "cancelled", "dead"]})]
    due_at: InstantText
    wake_at: InstantText
    attempt: Whole
    token: Whole
    payload: Raw | UnsetType
    payload_base64: str | UnsetType
    error: str | None
    created_at: InstantText
    finished_at: InstantText | None
    trace: Annotated[str, Meta(description="there only for one task alone that an exception has ended")] | UnsetType = (
        UNSET
    )


class DetailShape(Struct, frozen=True):
    """What is added for one task alone: how it has fared, and what travels with it."""

    failures: int
    losses: int
    holder: str | None
    deadline: InstantText | None
    keep_until: InstantText | None
    retry: Any = UNSET
    headers: dict[str, str] | UnsetType = UNSET
    options_damaged: str | UnsetType = UNSET


class AnswerShape(Struct, frozen=True, gc=False):
    """What a verb answered: one word, and the task as it now is."""

    answer: Annotated[
        str,
        Meta(
            extra_json_schema={
                "enum": [
                    "created", "replaced", "kept", "refused", "moved", "under_way", "cancelled",
                    "cancelled_while_leased", "redriven", "not_found", "finished", "stale_token",
                ]
            }
        ),
    ]  # fmt: skip
    task: TaskShape | None
    paused: OnlyTrue | UnsetType = UNSET
    """There only where the task is live and its topic is paused: it waits until that is resumed."""


class PausedShape(Struct, frozen=True):
    """A pause: since when, and by whom."""

    since: InstantText
    who: str | None


class CountShape(Struct, frozen=True):
    """So many; where `exact` is false, at least so many."""

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


def task_shape(record: Record, *, withheld: bool = False, alone: bool = False) -> TaskShape:
    """A task; without its payload where that is `withheld`, and with its trace where it is shown `alone`."""
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
    return TaskShape(
        storable(record.topic), storable(record.key), record.id, record.group, record.state.value, due, wake,
        record.attempt, record.token,
        raw, encoded, None if record.error is None else error, instant_text(record.created_at),
        _optional(record.finished_at), trace if trace and alone else UNSET,
    )  # fmt: skip


def detail_shape(record: Record) -> DetailShape:
    """What `show` adds to the task."""
    shape = DetailShape(
        record.failures, record.losses, record.holder, _optional(record.deadline), _optional(record.keep_until)
    )
    try:
        options = decode_options(record.options)
    except msgspec.MsgspecError as error:
        return msgspec.structs.replace(shape, options_damaged=str(error))
    return msgspec.structs.replace(shape, retry=options.retry, headers=dict(options.headers))


def answer_shape(answer: Answer, *, paused: Container[Topic] = (), withheld: bool = False) -> AnswerShape:
    """What a verb answered. `paused`: topics whose live tasks wait, whatever their time; the answer says so."""
    record = answer.record
    if record is None:
        return AnswerShape(answer.result.value, None)
    held = record.topic in paused and record.state.live
    return AnswerShape(answer.result.value, task_shape(record, withheld=withheld), True if held else UNSET)


def paused_shape(pause: Pause) -> PausedShape:
    """A pause."""
    return PausedShape(instant_text(pause.since), pause.who)


def event_shape(event: Event) -> EventShape:
    """One line of the event log."""
    return EventShape(
        instant_text(event.at), event.topic, event.key, event.id, event.kind.value, event.attempt, event.who,
        event.what, _optional(event.was), _optional(event.wake_at),
    )  # fmt: skip


def one_line(shape: object) -> bytes:
    """One line of JSON. A payload with line breaks between its tokens must not break the line."""
    encoded = msgspec.json.encode(shape)
    if b"\n" in encoded or b"\r" in encoded:
        encoded = msgspec.json.format(encoded, indent=-1)
    return encoded


def _optional(millis: Millis | None) -> str | None:
    return None if millis is None else instant_text(millis)
