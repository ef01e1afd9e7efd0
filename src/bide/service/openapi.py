"""The OpenAPI 3.1 document, made from the table of calls and the types of what is sent and answered."""

from __future__ import annotations

from typing import Any

import msgspec

from bide._version import __version__
from bide.service import asks
from bide.service.contract import CALLS, Call, ItemShape
from bide.service.problems import CONTENT_TYPE, ProblemShape
from bide.service.shapes import TaskShape

_REF = "#/components/schemas/{name}"
_PROBLEMS = {
    400: "The request cannot be read",
    401: "It is not known who calls",
    403: "The token does not allow this",
    405: "Not with this method",
    408: "The body came too slowly",
    413: "The body is too large",
    415: "Only JSON is taken",
    422: "A value is not accepted: `field` names it, `accepted` says what would be",
    501: "The store that the service rests on cannot do this",
    503: "The store is away; nothing was done",
    504: "The answer of the store was lost; it was done once or not at all",
    507: "The store is full; nothing was done",
}
_ONE_DUE = {
    "oneOf": [
        {"required": [name], "properties": {name: {"type": kinds}}}
        for name, kinds in (("at", ["string"]), ("delay", ["string", "number"]))
    ]
}
_NO = {"type": "null"}
_AT, _DELAY = {"at": {"type": "string"}}, {"delay": {"type": ["string", "number"]}}
_SETTLED = {
    "anyOf": [
        {"properties": {"outcome": {"enum": ["done", "retry"]}, "at": _NO}},
        {"properties": {"outcome": {"enum": ["done", "retry"]}, "delay": _NO}},
        {"properties": {"outcome": {"const": "defer"}, "at": _NO, **_DELAY}, "required": ["delay"]},
        {"properties": {"outcome": {"const": "defer"}, "delay": _NO, **_AT}, "required": ["at"]},
        {"properties": {"outcome": {"const": "dead"}, "at": _NO, "delay": _NO}},
    ]
}
_NOT_BOTH_PAYLOADS = {"not": {"required": ["payload", "payload_base64"]}}
_EITHER = {"oneOf": [{"required": ["payload"]}, {"required": ["payload_base64"]}]}


def document() -> bytes:
    """The document as JSON."""
    return msgspec.json.encode(contents())


def contents() -> dict[str, Any]:
    """The document."""
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
            "summary": "Register something to happen at a time; until then fire it now, move it, or cancel it.",
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
    """What types cannot say: which fields go together."""
    for name in (asks.Schedule.__name__, asks.ScheduleItem.__name__):
        components[name] |= {**_ONE_DUE, **_NOT_BOTH_PAYLOADS}
    for name in (asks.Move.__name__, asks.MoveItem.__name__):
        components[name] |= _ONE_DUE
    components[asks.Settle.__name__] |= _SETTLED
    components[TaskShape.__name__] |= _EITHER
    components[ItemShape.__name__] |= {
        "oneOf": [{"required": ["answer", "task"]}, {"required": ["problem"]}],
    }
    for component in components.values():
        for name in component.get("properties", {}):
            if name in ("payload", "payload_base64") and "required" in component:
                component["required"] = [one for one in component["required"] if not one.startswith("payload")]


def _operation(call: Call, by_type: dict[int, Any]) -> dict[str, Any]:
    operation: dict[str, Any] = {"operationId": call.name, "summary": call.summary, "responses": {}}
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": _path_schema()}
        for name in ("topic", "key")
        if f"{{{name}}}" in call.path
    ]
    for name, (sentence, schema) in call.query.items():
        parameters.append({"name": name, "in": "query", "description": sentence, "schema": schema})
    for name, sentence in call.headers.items():
        parameters.append(
            {"name": name, "in": "header", "description": sentence, "schema": {"type": "string", **_header(call, name)}}
        )
    if parameters:
        operation["parameters"] = parameters
    if call.ask is not None:
        operation["requestBody"] = {
            "required": True, "description": call.accepted,
            "content": {"application/json": {"schema": by_type[id(call.ask)]}},
        }  # fmt: skip
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


def _path_schema() -> dict[str, Any]:
    return {"type": "string", "minLength": 1, "maxLength": 200, "pattern": asks.NAME_PATTERN}


def _header(call: Call, name: str) -> dict[str, Any]:
    if name == "If-None-Match" and call.method == "PUT":
        return {"enum": ["*"]}
    return {}
