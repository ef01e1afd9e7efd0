"""The options of a task that stores do not interpret: retry policy, headers (trace context), recurrence."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from functools import lru_cache

import msgspec

from bide.core.errors import BadInput
from bide.core.instants import Millis
from bide.core.recurrence.plan import Recurrence
from bide.core.retry import RetryPolicy

LONGEST_HEADERS = 4096
"""The most bytes of all headers of a task, encoded."""
LONGEST_OPTIONS = 2 * LONGEST_HEADERS
"""The most bytes of all options of a task, encoded."""
_OF_PAUSE = 8
"""The bytes that a pause adds, so that each task that recurs can be paused."""
TRACE_HEADERS = ("traceparent", "tracestate", "baggage")
"""W3C Trace Context and Baggage."""


class Options(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """Options, encoded as MessagePack; empty options take no bytes. Fields from a newer version are ignored."""

    retry: RetryPolicy | None = None
    headers: Mapping[str, str] = msgspec.field(default_factory=dict)
    recurrence: Recurrence | None = None
    occurrence: Millis | None = None
    """For an occurrence that is a separate task: its nominal instant."""


NO_OPTIONS = Options()
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Options)


def encode_options(
    retry: RetryPolicy | None, headers: Mapping[str, str] | None, trace: Mapping[str, str] | None = None
) -> bytes:
    """The bytes for `NewTask.options`. Raises BadInput for headers or a policy that are not short.

    The trace headers in `trace` are added; the caller's own headers take precedence. A trace without room is dropped.
    """
    if trace:
        with suppress(BadInput, TypeError):
            return encode_options(retry, {**trace, **(headers or {})})
    if not headers and retry is None:
        return b""
    if headers and not isinstance(headers, Mapping):
        raise BadInput("headers", headers, "a mapping of names to values")
    headers = headers or {}
    for name, value in headers.items():
        if not name or not _is_printable(name) or not _is_printable(value):
            raise BadInput("headers", {name: value}, "printable text for both name and value")
    plain = {str.__str__(name): str.__str__(value) for name, value in headers.items()}
    encoded = _encoder.encode(Options(retry=retry, headers=plain))
    if len(encoded) > LONGEST_HEADERS:
        field = "headers" if headers else "retry"
        raise BadInput(field, f"{len(encoded)} bytes", f"at most {LONGEST_HEADERS} bytes in all")
    return encoded


def _is_printable(value: object) -> bool:
    return isinstance(value, str) and value.isprintable()


def decode_options(options: bytes) -> Options:
    """The options of a stored task. Raises msgspec.DecodeError if they are damaged or out of bounds."""
    try:
        return _decoder.decode(options) if options else NO_OPTIONS
    except (UnicodeDecodeError, RecursionError) as error:
        raise msgspec.DecodeError(str(error)) from error


@lru_cache(maxsize=1024)
def known_options(options: bytes) -> Options:
    """The options of a stored task, or none if they are damaged. Cached, since recurring tasks share theirs."""
    try:
        return decode_options(options)
    except msgspec.DecodeError:
        return NO_OPTIONS


def recurrence_of(options: bytes) -> Recurrence | None:
    """The rule and the policies of a recurring task; None: the task does not recur, or its options are damaged."""
    return known_options(options).recurrence if options else None


def with_recurrence(options: bytes, recurrence: Recurrence | None, occurrence: Millis | None = None) -> bytes:
    """`options` with another recurrence; with an `occurrence` it is a separate task.

    Raises BadInput if they are too large, or would not be the same when they are read back.
    """
    changed = msgspec.structs.replace(decode_options(options), recurrence=recurrence, occurrence=occurrence)
    encoded = b"" if changed == NO_OPTIONS else _encoder.encode(changed)
    if len(encoded) > LONGEST_OPTIONS - (0 if recurrence is None or recurrence.paused else _OF_PAUSE):
        accepted = f"at most {LONGEST_OPTIONS} bytes, encoded: fewer instants or excepted dates"
        raise BadInput("rule", f"{len(encoded)} bytes", accepted)
    if known_options(encoded) != changed:
        raise BadInput("rule", recurrence, "a rule and policies whose fields have the right types and bounds")
    return encoded


def carried_trace(options: bytes) -> Mapping[str, str]:
    """The trace headers of a stored task; empty if its options are damaged."""
    headers = known_options(options).headers
    return {name: headers[name] for name in TRACE_HEADERS if name in headers}
