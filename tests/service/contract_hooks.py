"""What schemathesis is told of the contract that a schema cannot say, so that each case is judged rightly."""

from __future__ import annotations

import re
from typing import Any

import schemathesis

WAITS = [f"{seconds}s" for seconds in range(61)]
"""As text."""
WALL_CLOCK = re.compile(r"(?:(?:\d{4}-\d\d-\d\d|[a-z]+) )?\d?\d:\d\d(?::\d\d)?(?: [A-Z]\S*)?", re.ASCII)
"""Of any day and zone."""


@schemathesis.hook
def before_call(context: Any, case: Any, kwargs: Any) -> None:
    """A deadline lies after the due time, a rule fires within its bounds, a backfill ends where it begins, and a cursor
    comes from a page; nobody waits for long.

    Headers are as short and plain as the document says: the service asks less of each, and bounds all together.
    Wall-clock times are of a day and in a zone that there are, and `zone` is such a zone, or the one that they name.
    3.0 is sent as the whole number that it is.
    """
    if isinstance(case.body, dict | list):
        case.body = _said(case.body)
    if isinstance(case.body, dict) and "topics" in case.body and isinstance(case.body.get("wait"), int | float):
        case.body["wait"] = min(case.body["wait"], 0.05)
    elif isinstance(case.body, dict) and "topics" in case.body and case.body.get("wait") in WAITS:
        case.body["wait"] = "0s"
    if case.query:
        case.query.pop("cursor", None)
        case.query = {name: _said(value) for name, value in case.query.items()}


BOUNDS = ("start", "until", "times", "except_on", "zone")


def _plain(text: Any) -> Any:
    return re.sub("[^ -~]", "-", text)[:60] or "-" if isinstance(text, str) else text


def _said(body: Any) -> Any:
    if isinstance(body, dict) and isinstance(body.get("rule"), str):
        body = {name: value for name, value in body.items() if name not in BOUNDS} | {"rule": "@daily"}
    if isinstance(body, dict) and body.get("do") == "backfill" and {"since", "until"} <= body.keys():
        body |= {"until": body["since"]}
    if isinstance(body, dict) and isinstance(body.get("headers"), dict):
        body = body | {"headers": {_plain(name): _plain(value) for name, value in body["headers"].items()}}
    if isinstance(body, dict):
        left_out = {"deadline": str | float, "zone": str}
        kept = {name: value for name, value in body.items() if not isinstance(value, left_out.get(name, ()))}
        return {name: _said(value) for name, value in kept.items()}
    if isinstance(body, list):
        return [_said(value) for value in body]
    if isinstance(body, str) and WALL_CLOCK.fullmatch(body):
        return "tomorrow 08:00 UTC"
    return int(body) if isinstance(body, float) and body.is_integer() else body
