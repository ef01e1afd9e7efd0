"""Tasks, answers and events as JSON: the same shapes as over HTTP."""

from __future__ import annotations

import base64
from collections.abc import Callable
from typing import Any

import click
import msgspec

from bide.core.answers import Answer
from bide.core.events import Event
from bide.core.instants import Millis, instant_text
from bide.core.options import decode_options
from bide.core.records import Record

Shape = dict[str, Any]


def task_shape(record: Record) -> Shape:
    """A task. A payload that is JSON stands as itself, any other as base64."""
    shape: Shape = {
        "topic": record.topic,
        "key": record.key,
        "id": record.id,
        "group": record.group,
        "state": record.state.value,
        "due_at": instant_text(record.due_at),
        "wake_at": instant_text(record.wake_at),
        "attempt": record.attempt,
        "token": record.token,
    }
    try:
        msgspec.json.decode(record.payload)
        shape["payload"] = msgspec.Raw(record.payload)
    except (ValueError, RecursionError):
        shape["payload_base64"] = base64.b64encode(record.payload).decode()
    shape["error"] = record.error
    shape["created_at"] = instant_text(record.created_at)
    shape["finished_at"] = _optional(record.finished_at)
    return shape


def detail_shape(record: Record) -> Shape:
    """What `show` adds to the task: how it has fared, and what travels with it."""
    shape: Shape = {
        "failures": record.failures,
        "losses": record.losses,
        "holder": record.holder,
        "deadline": _optional(record.deadline),
        "keep_until": _optional(record.keep_until),
    }
    try:
        options = decode_options(record.options)
        shape["retry"] = msgspec.to_builtins(options.retry)
        shape["headers"] = dict(options.headers)
    except msgspec.MsgspecError as error:
        shape["options_damaged"] = str(error)
    return shape


def answer_shape(answer: Answer) -> Shape:
    """What a verb answered."""
    return {"answer": answer.result.value, "task": None if answer.record is None else task_shape(answer.record)}


def event_shape(event: Event) -> Shape:
    """One line of the event log."""
    return {
        "at": instant_text(event.at),
        "topic": event.topic,
        "key": event.key,
        "id": event.id,
        "kind": event.kind.value,
        "attempt": event.attempt,
        "who": event.who,
        "what": event.what,
        "was": _optional(event.was),
        "wake_at": _optional(event.wake_at),
    }


def print_json(shape: object, echo: Callable[[str], None] = click.echo) -> None:
    """One line of JSON. A payload with line breaks between its tokens must not break the line."""
    encoded = msgspec.json.encode(shape)
    if b"\n" in encoded or b"\r" in encoded:
        encoded = msgspec.json.format(encoded, indent=-1)
    echo(encoded.decode())


def _optional(millis: Millis | None) -> str | None:
    return None if millis is None else instant_text(millis)
