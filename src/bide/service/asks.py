"""What callers send: typed, so that a wrong field is named, and the OpenAPI document is made from the same types."""

from __future__ import annotations

import base64
import binascii
from typing import Annotated, TypeAlias

from msgspec import UNSET, Meta, Raw, Struct, UnsetType

from bide.core.errors import BadInput
from bide.core.retry import FOREVER, Exponential, Fixed, Ladder, RetryPolicy, policy

MOST_AT_ONCE = 10_000
"""Items that one batch may have."""

BASE64_PATTERN = "^(?:[A-Za-z0-9+/]{4})*(?:[A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?$"
NAME_PATTERN = r"^[^\u0000-\u001f\u007f-\u009f\u2028\u2029]+$"
Base64: TypeAlias = Annotated[
    str, Meta(extra_json_schema={"contentEncoding": "base64", "pattern": BASE64_PATTERN, "example": "aGVsbG8="})
]
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
Span: TypeAlias = Annotated[
    str,
    Meta(
        description="A length of time such as 15m, 1h30m, 250ms, 2d or PT15M",
        extra_json_schema={"pattern": r"^[0-9]{1,6}(ms|s|m|h|d)$", "example": "15m"},
    ),
]
TokenNumber: TypeAlias = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Rungs: TypeAlias = Annotated[list[Span], Meta(min_length=1, max_length=100)]
Tries: TypeAlias = Annotated[int, Meta(ge=1, le=FOREVER)]
RetryText: TypeAlias = Annotated[
    str,
    Meta(extra_json_schema={"enum": ["default", "never", "quick", "patient", "merchant-notify"]}),
]


class FixedTerms(Struct, forbid_unknown_fields=True, tag_field="policy", tag="fixed"):
    """The same pause each time."""

    pause: Span
    tries: Tries


class ExponentialTerms(Struct, forbid_unknown_fields=True, tag_field="policy", tag="exponential", omit_defaults=True):
    """Pauses that grow."""

    first: Span = "1s"
    factor: Annotated[float, Meta(ge=1, le=100)] = 2.0
    longest: Span = "1h"
    tries: Tries = 12
    jitter: Annotated[float, Meta(ge=0, le=1)] = 0.2


class LadderTerms(Struct, forbid_unknown_fields=True, tag_field="policy", tag="ladder"):
    """One pause per failure; after the last it is dead."""

    rungs: Rungs


Terms: TypeAlias = FixedTerms | ExponentialTerms | LadderTerms
Retries: TypeAlias = RetryText | Rungs | Terms
"""When to try again: a preset, a ladder as a list of lengths, or a policy with its terms."""


HeaderText: TypeAlias = Annotated[
    str, Meta(description="Printable text", extra_json_schema={"minLength": 1, "maxLength": 60, "pattern": "^[ -~]+$"})
]


class Schedule(Struct, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    """A task to be registered. One of `at` and `delay`; at most one of `payload` (any JSON) and `payload_base64`."""

    payload: Raw | UnsetType = UNSET
    payload_base64: Base64 | UnsetType = UNSET
    at: Instant | None = None
    delay: Span | None = None
    group: Name | None = None
    on_conflict: Annotated[
        str, Meta(extra_json_schema={"enum": ["replace", "keep", "earliest", "latest", "refuse"]})
    ] = "replace"
    retry: Retries | None = None
    deadline: Instant | Span | None = None
    headers: dict[HeaderText, HeaderText] | None = None


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
    by: Annotated[str, Meta(extra_json_schema={"pattern": r"^-?[0-9]{1,6}(ms|s|m|h|d)$", "example": "-2h"})]
    topic: Name | None = None
    deadlines: bool = False


LONGEST_WAIT = 60
"""Seconds that a lease may wait."""
SHORTEST_LEASE, LONGEST_LEASE = 1, 86_400
"""Seconds."""
WaitSpan: TypeAlias = Annotated[str, Meta(extra_json_schema={"pattern": "^([0-9]|[1-5][0-9]|60)s$", "example": "5s"})]
LeaseSpan: TypeAlias = Annotated[
    str, Meta(extra_json_schema={"pattern": "^([1-9][0-9]{0,3}s|[1-9][0-9]{0,2}m|[1-9]h)$", "example": "30s"})
]
Room: TypeAlias = Annotated[int, Meta(ge=1, le=1_000)]


class LeaseAsk(Struct, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    """So many tasks of each topic as can be started now. With `wait` the answer comes when something is due."""

    topics: Annotated[dict[Name, Room], Meta(min_length=1, max_length=100)]
    wait: WaitSpan = "0s"
    lease_for: LeaseSpan | None = None


class Settle(Struct, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    """How a delivery ended. `at` or `delay`: when to try again; with done, when the next life begins."""

    topic: Name
    key: Name
    token: TokenNumber
    outcome: Annotated[str, Meta(extra_json_schema={"enum": ["done", "retry", "defer", "dead"]})]
    at: Instant | None = None
    delay: Span | None = None
    error: str | None = None
    """Why, for retry and dead."""


class Held(Struct, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    """A lease: a task and the token that it was leased with."""

    topic: Name
    key: Name
    token: TokenNumber


class Extend(Struct, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    """Leases to be kept for a length from now."""

    leases: Annotated[list[Held], Meta(max_length=MOST_AT_ONCE)]
    lease_for: LeaseSpan | None = None


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


def retries(value: str | list[str] | Terms | None) -> RetryPolicy | None:
    """The policy that is meant. Raises BadInput."""
    if value is None or isinstance(value, str):
        return None if value is None else policy(value)
    if isinstance(value, list):
        return Ladder(*value)
    if isinstance(value, LadderTerms):
        return Ladder(*value.rungs)
    if isinstance(value, FixedTerms):
        return Fixed(value.pause, tries=value.tries)
    return Exponential(value.first, factor=value.factor, longest=value.longest, tries=value.tries, jitter=value.jitter)
