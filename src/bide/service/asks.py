"""What callers send: typed, so that a wrong field is named, and the OpenAPI document is made from the same types."""

from __future__ import annotations

import base64
import binascii
from datetime import timedelta
from typing import Annotated, Any, TypeAlias

from msgspec import UNSET, Meta, Raw, Struct, UnsetType

from bide.core.errors import BadInput
from bide.core.instants import Length, When
from bide.core.retry import Exponential, Fixed, Ladder, RetryPolicy, policy

MOST_AT_ONCE = 10_000
"""Items that one batch may have."""

NAME_PATTERN = r"^[^\u0000-\u001f\u007f-\u009f\u2028\u2029]+$"
INSTANT_PATTERN = r"^(19[7-9][0-9]|[2-9][0-9]{3})-"
Name: TypeAlias = Annotated[
    str,
    Meta(
        description="1 to 200 bytes of UTF-8 without control characters",
        extra_json_schema={"minLength": 1, "maxLength": 200, "pattern": NAME_PATTERN, "example": "order.close"},
    ),
]
Instant: TypeAlias = Annotated[
    str,
    Meta(
        description="ISO 8601 with an offset, in the years 1970 to 9999",
        extra_json_schema={
            "format": "date-time",
            "pattern": INSTANT_PATTERN,
            "example": "2030-01-31T08:00:00+01:00",
        },
    ),
]
LengthText: TypeAlias = Annotated[
    str,
    Meta(
        description="A length of time such as 15m, 1h30m, 250ms, 2d or PT15M",
        extra_json_schema={"pattern": r"^[0-9]{1,6}(ms|s|m|h|d)$", "example": "15m"},
    ),
]
Seconds: TypeAlias = Annotated[float, Meta(extra_json_schema={"minimum": 0, "maximum": 31_536_000_000})]
Span: TypeAlias = LengthText | Seconds
"""A length of time as text, or as a number of seconds."""
TokenNumber: TypeAlias = Annotated[int, Meta(ge=0, le=2**63 - 1)]
RetryText: TypeAlias = Annotated[
    str,
    Meta(extra_json_schema={"enum": ["default", "never", "quick", "patient", "merchant-notify"]}),
]


class RetryTerms(Struct, forbid_unknown_fields=True, omit_defaults=True):
    """A retry policy in words; see docs/handlers.md. A list of lengths is a ladder."""

    policy: Annotated[str, Meta(extra_json_schema={"enum": ["fixed", "exponential", "ladder"]})]
    pause: Span | None = None
    first: Span | None = None
    factor: float | None = None
    longest: Span | None = None
    tries: int | None = None
    jitter: float | None = None
    rungs: list[Span] | None = None


Retries: TypeAlias = RetryText | list[Span] | RetryTerms


class Schedule(Struct, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    """A task to be registered. One of `at` and `delay`; at most one of `payload` (any JSON) and `payload_base64`."""

    payload: Raw | UnsetType = UNSET
    payload_base64: Annotated[str, Meta(extra_json_schema={"contentEncoding": "base64"})] | UnsetType = UNSET
    at: Instant | None = None
    delay: Span | None = None
    group: Name | None = None
    on_conflict: Annotated[
        str, Meta(extra_json_schema={"enum": ["replace", "keep", "earliest", "latest", "refuse"]})
    ] = "replace"
    retry: Retries | None = None
    deadline: Instant | Span | None = None
    headers: dict[str, str] | None = None


class ScheduleItem(Schedule, kw_only=True):
    """A task of a batch. Without a key it gets a UUIDv7."""

    topic: Name
    key: Name | None = None


class Move(Struct, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    """Another time for a task. One of `at` and `delay`."""

    at: Instant | None = None
    delay: Span | None = None
    deadline: Instant | Span | None = None
    if_token: TokenNumber | None = None


class MoveItem(Move, kw_only=True):
    """Another time for a task of a batch."""

    topic: Name
    key: Name


class Ref(Struct, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    """Which task, and on which condition."""

    topic: Name
    key: Name
    if_token: TokenNumber | None = None


class RedriveItem(Ref, kw_only=True):
    """A dead task to be sent again, at once or after `delay`."""

    delay: Span | None = None


class CancelGroup(Struct, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    """Every live task of a group, or of one topic of it."""

    group: Name
    topic: Name | None = None


class Shift(Struct, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    """Move every waiting task of a group by a length, which may be negative."""

    group: Name
    by: (
        Annotated[str, Meta(extra_json_schema={"pattern": r"^-?[0-9]{1,6}(ms|s|m|h|d)$", "example": "-2h"})]
        | Annotated[float, Meta(extra_json_schema={"minimum": -31_536_000_000, "maximum": 31_536_000_000})]
    )
    topic: Name | None = None
    deadlines: bool = False


Room: TypeAlias = Annotated[int, Meta(ge=1, le=1_000)]


class LeaseAsk(Struct, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    """So many tasks of each topic as can be started now. With `wait` the answer comes when something is due."""

    topics: Annotated[dict[Name, Room], Meta(min_length=1, max_length=100)]
    wait: Span = 0.0
    lease_for: Span | None = None


class Settle(Struct, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    """How a delivery ended. `at` or `delay`: when to try again; with done, when the next life begins."""

    topic: Name
    key: Name
    token: TokenNumber
    outcome: Annotated[str, Meta(extra_json_schema={"enum": ["done", "retry", "defer", "dead"]})]
    at: Instant | None = None
    delay: Span | None = None
    error: str | None = None


class Held(Struct, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    """A lease: a task and the token that it was leased with."""

    topic: Name
    key: Name
    token: TokenNumber


class Extend(Struct, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    """Leases to be kept for a length from now."""

    leases: Annotated[list[Held], Meta(max_length=MOST_AT_ONCE)]
    lease_for: Span | None = None


def length(value: str | float | None, field: str) -> Length | None:
    """What the verbs take for a length: text as it is, a number as so many seconds. Raises BadInput."""
    if value is None or isinstance(value, str):
        return value
    try:
        return timedelta(seconds=value)
    except (OverflowError, ValueError):
        raise BadInput(field, value, "a number of seconds that ends before the year 10000") from None


def when(value: str | float | None, field: str) -> When | Length | None:
    """An instant, or a length from now."""
    return length(value, field)


def payload(ask: Schedule) -> bytes:
    """The bytes of the payload; null where none is given. Raises BadInput."""
    if ask.payload_base64 is UNSET:
        return b"null" if ask.payload is UNSET else bytes(ask.payload)
    if ask.payload is not UNSET:
        raise BadInput("payload, payload_base64", "both", "one of the two")
    try:
        return base64.b64decode(ask.payload_base64, validate=True)
    except (binascii.Error, ValueError):
        raise BadInput("payload_base64", ask.payload_base64, "base64 (RFC 4648, with padding)") from None


def retries(value: str | list[str | float] | RetryTerms | None, field: str = "retry") -> RetryPolicy | None:
    """The policy that is meant. Raises BadInput."""
    if value is None or isinstance(value, str):
        return None if value is None else policy(value)
    if isinstance(value, list):
        return Ladder(*[_given(rung, f"{field}[{place}]") for place, rung in enumerate(value)])
    given: dict[str, Any] = {
        name: found
        for name in value.__struct_fields__
        if name != "policy" and (found := getattr(value, name)) is not None
    }
    for name in ("pause", "first", "longest"):
        if name in given:
            given[name] = _given(given[name], f"{field}.{name}")
    if value.policy == "ladder" and set(given) == {"rungs"}:
        return Ladder(*[_given(rung, f"{field}.rungs[{place}]") for place, rung in enumerate(given["rungs"])])
    make: Any = {"fixed": Fixed, "exponential": Exponential}.get(value.policy)
    try:
        made: RetryPolicy = make(**given)
    except TypeError:
        known = value.policy in ("fixed", "exponential", "ladder")
        accepted = "the terms of that policy; see docs/handlers.md" if known else "fixed, exponential or ladder"
        raise BadInput(field if known else f"{field}.policy", value.policy, accepted) from None
    return made


def _given(value: str | float, field: str) -> Length:
    found = length(value, field)
    assert found is not None
    return found
