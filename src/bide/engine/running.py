"""Which delivery this coroutine belongs to, so that what a handler schedules carries on its trace."""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar

from msgspec import DecodeError

from bide.core.options import decode_options
from bide.core.records import Record

_TRACE = ("traceparent", "tracestate", "baggage")
_running: ContextVar[Record | None] = ContextVar("bide_running", default=None)

set_running = _running.set


def inherited_headers() -> Mapping[str, str] | None:
    """The W3C trace headers of the running delivery's task, if there are any."""
    record = _running.get()
    if record is None or not record.options:
        return None
    try:
        headers = decode_options(record.options).headers
    except DecodeError:
        return None
    return {name: headers[name] for name in _TRACE if name in headers} or None
