"""Which delivery this coroutine belongs to, so that what a handler schedules carries on its trace."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from contextvars import ContextVar

from msgspec import DecodeError

from bide.core.errors import BadInput
from bide.core.options import decode_options, encode_options
from bide.core.records import Record
from bide.core.retry import RetryPolicy

TRACE_HEADERS = ("traceparent", "tracestate", "baggage")
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
    return {name: headers[name] for name in TRACE_HEADERS if name in headers} or None


def options_with(
    retry: RetryPolicy | None, headers: Mapping[str, str] | None, carried: Mapping[str, str] | None
) -> bytes:
    """The options of a new task that carries a trace on; what the caller's own headers say goes before that.

    A trace never has a task refused: where there is no room for it, it stays behind. Raises BadInput for `headers`.
    """
    if carried:
        with suppress(BadInput, TypeError):
            return encode_options(retry, {**carried, **(headers or {})})
    return encode_options(retry, headers)
