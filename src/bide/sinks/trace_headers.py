"""What a sink sends along, so that the trace goes on at the receiver's."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from msgspec import DecodeError

from bide.core.tasks import Task

_NAMES = ("traceparent", "tracestate", "baggage")


def trace_headers(task: Task[Any]) -> Mapping[str, str]:
    """The W3C trace headers for a request that delivers `task`; none where there is no trace.

    The running delivery's span, where this program traces; else what the task carries, passed on as it is.
    """
    traced = sys.modules.get("bide.sinks.traced")
    if traced is not None:
        headers: Mapping[str, str] = traced.current_headers()
        if "traceparent" in headers:
            return headers
    if not task.record.options:
        return {}
    try:
        carried = task.headers
    except DecodeError:
        return {}
    return {name: carried[name] for name in _NAMES if name in carried}
