"""The table of HTTP calls, and the OpenAPI document made from it."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from bide._version import __version__
from bide.core.records import State
from bide.engine.recurring import LONGEST_KEY
from bide.service import schemas
from bide.service.requests import CONTENT_TYPE
from bide.service.schemas import MOST_AT_ONCE, AnswerShape, ItemShape, ProblemShape, TaskShape

TASK_PATH = "/v1/topics/{topic}/tasks/{key}"
RECURRING_PATH = "/v1/topics/{topic}/recurring/{key}"
PAUSE_PATH = "/v1/topics/{topic}/pause"


class Call(Struct, frozen=True, kw_only=True):
    name: str
    method: str
    path: str
    summary: str
    ask: Any = None
    """The type of the body; None: no body."""
    answers: Mapping[int, tuple[str, Any]]
    """By status: a sentence, and the type of the body."""
    query: Mapping[str, tuple[str, dict[str, Any]]] = {}
    """The parameters after the question mark: a sentence and the schema."""
    headers: Mapping[str, str] = {}


def _batch(item: Any) -> Any:
    return Annotated[list[item], Meta(max_length=MOST_AT_ONCE)]


_ITEMS = {200: ("The answers, in the order of the request", list[ItemShape])}
_ANSWERED = {200: ("Done as asked", AnswerShape)}
_NOT_NOW = ("Not done; `answer` says why", AnswerShape)
_NOT_FOUND = ("There is no such task: it never existed, or it finished and was forgotten", AnswerShape)
_CHANGED = {**_ANSWERED, 404: _NOT_FOUND, 409: _NOT_NOW, 412: ("`If-Match` is not its current ETag", AnswerShape)}
_IF_MATCH = {"If-Match": "Change the task only if this is its current ETag; else answer 412"}
_NAME = {"type": "string", "minLength": 1, "maxLength": 200, "pattern": schemas.NAME_PATTERN}
_INSTANT = {"type": "string", **schemas.INSTANT_SCHEMA}

_LENGTHS = {(RECURRING_PATH, "key"): {"maxLength": LONGEST_KEY}}
_NEXT = {"n": ("How many instants; 5 by default", {"type": "integer", "minimum": 0, "maximum": 100})}

CALLS: tuple[Call, ...] = (
    Call(
        name="schedule", method="PUT", path=TASK_PATH, summary="Schedule a task",
        ask=schemas.Schedule,
        answers={201: ("A new task was created", AnswerShape), **_ANSWERED, 409: _NOT_NOW,
                 412: ("`If-None-Match: *` was sent, and the task exists", AnswerShape)},
        headers={"If-None-Match": "`*`: schedule only if there is no such task, as on_conflict=refuse does"},
    ),
    Call(
        name="get", method="GET", path=TASK_PATH, summary="Get a task",
        answers={200: ("The task", TaskShape), 304: ("The task still has the ETag of `If-None-Match`", None),
                 404: _NOT_FOUND},
        headers={"If-None-Match": "The ETag of an earlier answer"},
    ),
    Call(
        name="reschedule", method="PATCH", path=TASK_PATH, summary="Reschedule a waiting task",
        ask=schemas.Move, answers=_CHANGED, headers=_IF_MATCH,
    ),
    Call(
        name="cancel", method="DELETE", path=TASK_PATH, summary="Cancel a task", answers=_CHANGED, headers=_IF_MATCH,
    ),
    Call(
        name="schedule_many", method="POST", path="/v1/schedule", summary="Schedule tasks",
        ask=_batch(schemas.ScheduleItem), answers=_ITEMS,
    ),
    Call(
        name="reschedule_many", method="POST", path="/v1/reschedule", summary="Reschedule tasks",
        ask=_batch(schemas.MoveItem), answers=_ITEMS,
    ),
    Call(
        name="fire_many", method="POST", path="/v1/fire", summary="Fire tasks now",
        ask=_batch(schemas.Ref), answers=_ITEMS,
    ),
    Call(
        name="cancel_many", method="POST", path="/v1/cancel", summary="Cancel tasks, listed or by group",
        ask=_batch(schemas.Ref) | schemas.CancelGroup, answers=_ITEMS,
    ),
    Call(
        name="redrive_many", method="POST", path="/v1/redrive", summary="Redrive dead tasks, as new lives",
        ask=_batch(schemas.RedriveItem), answers=_ITEMS,
    ),
    Call(
        name="shift", method="POST", path="/v1/shift", summary="Shift the waiting tasks of a group by a duration",
        ask=schemas.Shift, answers={200: ("One answer for each live task of the group", list[ItemShape])},
    ),
    Call(
        name="find", method="GET", path="/v1/tasks", summary="List tasks, page by page",
        answers={200: ("A page; if `cursor` is not null, more tasks follow", schemas.FoundShape)},
        query={
            "topic": ("Only tasks of this topic", _NAME),
            "state": ("Only tasks in this state", {"type": "string", "enum": [*State]}),
            "group": ("Only tasks of this group", _NAME),
            "wake_from": ("Only live tasks that wake at this instant or later", _INSTANT),
            "wake_before": ("Only live tasks that wake before this instant", _INSTANT),
            "cursor": ("The `cursor` of the previous page", {"type": "string"}),
            "limit": ("At most this many tasks; 100 by default", {"type": "integer", "minimum": 1, "maximum": 1000}),
        },
    ),
    Call(
        name="recur", method="PUT", path=RECURRING_PATH, summary="Make a task recur by a rule, or change the rule",
        ask=schemas.Recur, answers={201: ("A new recurring task was created", AnswerShape), **_ANSWERED, 409: _NOT_NOW},
    ),
    Call(
        name="recurring", method="GET", path=RECURRING_PATH, summary="Get a recurring task and its next instants",
        answers={200: ("The task with its rule", schemas.RecurringShape), 404: _NOT_FOUND}, query=_NEXT,
    ),
    Call(
        name="steer", method="POST", path=RECURRING_PATH, ask=schemas.Steer,
        summary="Pause, resume, skip the next occurrence, replan it, run one now, or backfill",
        answers={200: ("One answer; for backfill one for each occurrence", list[ItemShape])},
    ),
    Call(
        name="remove", method="DELETE", path=RECURRING_PATH, summary="End a recurring task", answers=_CHANGED,
    ),
    Call(
        name="find_recurring", method="GET", path="/v1/recurring", summary="List recurring tasks, page by page",
        answers={200: ("A page; if `cursor` is not null, more tasks follow", schemas.RecurringFoundShape)},
        query={
            "topic": ("Only tasks of this topic", _NAME), "group": ("Only tasks of this group", _NAME),
            "cursor": ("The `cursor` of the previous page", {"type": "string"}), **_NEXT,
        },
    ),
    Call(
        name="topics", method="GET", path="/v1/topics", summary="List topics with their counts and pauses",
        answers={200: ("Every topic that has tasks or is paused and that the caller may read", schemas.TopicsShape)},
        query={"topic": ("Only this topic", _NAME)},
    ),
    Call(
        name="pause", method="PUT", path=PAUSE_PATH, summary="Pause a topic: hold its tasks back, accept new ones",
        answers={200: ("The topic is paused", schemas.PauseShape)},
    ),
    Call(
        name="resume", method="DELETE", path=PAUSE_PATH, summary="Resume a topic: deliver its tasks again",
        answers={200: ("The topic is not paused", schemas.PauseShape)},
    ),
    Call(
        name="lease", method="POST", path="/v1/lease", summary="Lease due tasks; with `wait`, wait until one is due",
        ask=schemas.LeaseRequest, answers={200: ("The leased tasks; there may be none", schemas.LeasedShape)},
    ),
    Call(
        name="settle", method="POST", path="/v1/settle", summary="Settle deliveries: report their outcomes",
        ask=_batch(schemas.Settle), answers={200: ("For each outcome, whether it was recorded", schemas.SettledShape)},
    ),
    Call(
        name="extend", method="POST", path="/v1/extend", summary="Extend leases",
        ask=schemas.Extend, answers={200: ("For each lease, whether it was extended", schemas.ExtendedShape)},
    ),
    Call(
        name="events", method="GET", path="/v1/events", summary="Follow the event log as server-sent events",
        answers={200: ("A stream; see docs/http.md", "text/event-stream")},
        query={"topic": ("Only events of this topic", _NAME)},
        headers={"Last-Event-ID": "Resume after this event"},
    ),
)  # fmt: skip
"""Every call of version 1 but those about the service itself."""

_REF = "#/components/schemas/{name}"
_PROBLEMS = {
    400: "The request cannot be read",
    401: "The token is missing, unknown, revoked or expired",
    403: "The token does not allow this",
    405: "The path does not take this method",
    408: "The body arrived too slowly",
    413: "The body is too large",
    415: "The body has to be application/json",
    422: "A value is not accepted: `field` names it, `accepted` says what would be",
    501: "The service's store does not support this",
    503: "The store is unavailable; nothing was done",
    504: "The store's answer was lost; the call was done once or not at all",
    507: "The store is full; nothing was done",
}
_ONE_DUE = {"oneOf": [{"required": [name], "properties": {name: {"type": "string"}}} for name in ("at", "delay")]}
_NO = {"type": "null"}
_SETTLED = {
    "anyOf": [
        {"properties": {"outcome": {"enum": ["done", "retry"]}, "at": _NO}},
        {"properties": {"outcome": {"enum": ["done", "retry"]}, "delay": _NO}},
        {"properties": {"outcome": {"const": "defer"}, "at": _NO, "delay": {"type": "string"}},
         "required": ["delay"]},
        {"properties": {"outcome": {"const": "defer"}, "delay": _NO, "at": {"type": "string"}}, "required": ["at"]},
        {"properties": {"outcome": {"const": "dead"}, "at": _NO, "delay": _NO}},
    ]
}  # fmt: skip
_STEPS = {
    "oneOf": [
        {"properties": {
            "do": {"enum": [step for step in schemas.STEPS if step != "backfill"]}, "since": _NO, "until": _NO,
        }},
        {"properties": {"do": {"const": "backfill"}, "since": {"type": "string"}, "until": {"type": "string"}},
         "required": ["since", "until"]},
    ]
}  # fmt: skip
_NOT_BOTH_PAYLOADS = {"not": {"required": ["payload", "payload_base64"]}}
_EITHER = {"oneOf": [{"required": ["payload"]}, {"required": ["payload_base64"]}]}


@cache
def document() -> bytes:
    return msgspec.json.encode(contents())


def contents() -> dict[str, Any]:
    bodies = [call.ask for call in CALLS if call.ask is not None]
    shapes = [shape for call in CALLS for _, shape in call.answers.values() if shape not in (None, "text/event-stream")]
    schemas, components = msgspec.json.schema_components([*bodies, *shapes, ProblemShape], ref_template=_REF)
    by_type = dict(zip([id(one) for one in (*bodies, *shapes)], schemas, strict=False))
    _refine(components)
    paths: dict[str, dict[str, Any]] = {}
    for call in CALLS:
        paths.setdefault(call.path, {})[call.method.lower()] = _operation(call, by_type)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "bide",
            "version": __version__,
            "summary": "Schedule something to happen at a time; until then fire it now, move it, or cancel it.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "security": [{"token": []}, {}],
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer", "description": "From `bide token add`"}},
        },
    }


def _refine(components: dict[str, Any]) -> None:
    """Add the rules on which fields go together, which the types cannot express."""
    for name in (schemas.Schedule.__name__, schemas.ScheduleItem.__name__):
        components[name] |= {**_ONE_DUE, **_NOT_BOTH_PAYLOADS}
    for name in (schemas.Move.__name__, schemas.MoveItem.__name__):
        components[name] |= _ONE_DUE
    components[schemas.Settle.__name__] |= _SETTLED
    components[schemas.Recur.__name__] |= _NOT_BOTH_PAYLOADS
    components[schemas.Steer.__name__] |= _STEPS
    components[TaskShape.__name__] |= _EITHER
    components[ItemShape.__name__] |= {"oneOf": [{"required": ["answer", "task"]}, {"required": ["problem"]}]}
    task = components[TaskShape.__name__]
    task["required"] = [name for name in task["required"] if not name.startswith("payload")]


def _operation(call: Call, by_type: dict[int, Any]) -> dict[str, Any]:
    operation: dict[str, Any] = {"operationId": call.name, "summary": call.summary, "responses": {}}
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": _NAME | _LENGTHS.get((call.path, name), {})}
        for name in ("topic", "key")
        if f"{{{name}}}" in call.path
    ]
    for name, (sentence, schema) in call.query.items():
        parameters.append({"name": name, "in": "query", "description": sentence, "schema": schema})
    for name, sentence in call.headers.items():
        only = {"enum": ["*"]} if name == "If-None-Match" and call.method == "PUT" else {}
        parameters.append({"name": name, "in": "header", "description": sentence, "schema": {"type": "string", **only}})
    if parameters:
        operation["parameters"] = parameters
    if call.ask is not None:
        content = {"application/json": {"schema": by_type[id(call.ask)]}}
        operation["requestBody"] = {"required": True, "content": content}
    for status, (sentence, shape) in call.answers.items():
        answer: dict[str, Any] = {"description": sentence}
        if shape == "text/event-stream":
            answer["content"] = {"text/event-stream": {"schema": {"type": "string"}}}
        elif shape is not None:
            answer["content"] = {"application/json": {"schema": by_type[id(shape)]}}
        if status in (200, 201, 304) and call.path.endswith("{key}"):
            answer["headers"] = {"ETag": {"description": "The task's token", "schema": {"type": "string"}}}
        operation["responses"][str(status)] = answer
    for status, sentence in _PROBLEMS.items():
        problem = {CONTENT_TYPE: {"schema": {"$ref": _REF.format(name="ProblemShape")}}}
        answer = operation["responses"].setdefault(str(status), {"description": sentence, "content": {}})
        answer["content"] |= problem
    return operation
