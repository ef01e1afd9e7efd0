"""The trace headers that a sink sends, so that the receiver continues the trace."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from bide.core.options import carried_trace
from bide.core.tasks import Task


def trace_headers(task: Task[Any]) -> Mapping[str, str]:
    """The W3C trace headers for a request that delivers `task`; empty without a trace.

    They name the running delivery's span if this program traces; else they are the task's own, unchanged.
    """
    traced = sys.modules.get("bide.sinks.traced")
    if traced is not None:
        headers: Mapping[str, str] = traced.current_headers()
        if "traceparent" in headers:
            return headers
    return carried_trace(task.record.options)
