"""The answers of the calls: status, body and headers; errors are `application/problem+json` (RFC 9457), which names the
field and what would be accepted.
"""

from __future__ import annotations

import re
from collections.abc import Container, Mapping
from difflib import get_close_matches
from typing import Any, NamedTuple, get_args

import msgspec
from msgspec import UNSET, Struct, UnsetType

from bide.core.answers import Answer
from bide.core.errors import (
    BadInput,
    BideError,
    OutcomeUnknown,
    SetupError,
    StoreCorrupt,
    StoreError,
    StoreFull,
    StoreMismatch,
)
from bide.core.records import Result, Topic
from bide.service.authz import AccessRefused, Caller
from bide.service.schemas import AnswerShape, answer_shape

CONTENT_TYPE = "application/problem+json"


class ProblemShape(Struct, frozen=True, kw_only=True):
    """An error, as problem details."""

    type: str
    title: str
    status: int
    detail: str
    field: str | UnsetType = UNSET
    value: Any = UNSET
    accepted: str | UnsetType = UNSET


class Problem(Exception):
    """An answer that says what went wrong, and what to do."""

    def __init__(
        self,
        status: int,
        kind: str,
        title: str,
        detail: str,
        *,
        headers: dict[str, str] | None = None,
        **more: Any,
    ) -> None:
        super().__init__(detail)
        self.status = status
        self.headers = headers or {}
        self.shape = ProblemShape(type=f"urn:bide:{kind}", title=title, status=status, detail=detail, **more)

    @property
    def body(self) -> bytes:
        return msgspec.json.encode(self.shape)


def bad_input(error: BadInput, prefix: str = "") -> Problem:
    """A value that is not accepted."""
    field = f"{prefix}{error.field}"
    shown = shown_value(error.value)
    return Problem(
        422, "bad-input", "A value is not accepted", f"{field}: {error.accepted}",
        field=field, value=shown, accepted=error.accepted,
    )  # fmt: skip


def shown_value(value: object) -> str | int | float | bool | None:
    """A value as an answer may repeat it."""
    if value is None or isinstance(value, bool | int | float):
        return value
    try:
        text = value if isinstance(value, str) else repr(value)
    except Exception:  # noqa: BLE001 - what cannot show itself is named by its type
        text = f"a {type(value).__name__}"
    text = text.encode(errors="replace").decode()
    return text if len(text) <= 200 else f"{text[:199]}…"


_LENGTHS = frozenset({"by", "deadline", "delay", "lease_for", "wait"})
_PLACE = re.compile(r" - at `(?:key in )?\$(.*)`$", re.DOTALL)


_UNKNOWN_FIELD = re.compile(r"Object contains unknown field `(.*)`", re.DOTALL)
_LONE_SURROGATE = re.compile(rb"\\u[dD][89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F])")


def bad_body(error: Exception, accepted: str, kind: Any, body: bytes) -> Problem:
    """A body that is no JSON, or has a field that is wrong. `kind`: what it was to be."""
    if not isinstance(error, msgspec.ValidationError):
        why = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        cut = _LONE_SURROGATE.search(body)
        if cut is not None:
            why = f"{cut[0].decode()} is half of a character, whose other half is missing: a text was cut within it"
        return Problem(400, "bad-json", "The body is not JSON", f"the body is not JSON: {why}", accepted=accepted)
    text = str(error)
    found = _PLACE.search(text)
    field = found[1].removeprefix(".") if found else "body"
    said = text[: found.start()] if found else text
    unknown = _UNKNOWN_FIELD.fullmatch(said)
    if unknown is not None:
        names = sorted(_fields_of(kind))
        near = get_close_matches(unknown[1], names, n=1)
        said = f"no such field; did you mean {near[0]}?" if near else f"no such field; there are {', '.join(names)}"
        field = unknown[1] if field in ("body", "") else f"{field}.{unknown[1]}"
    if field in _LENGTHS and said.endswith(("got `int`", "got `float`")):
        said = 'a length of time as text, such as "15m", "1h30m" or "1.5s"'
    return Problem(
        422, "bad-input", "A value is not accepted", f"{field or 'body'}: {said}", field=field or "body", accepted=said
    )


def _fields_of(kind: Any) -> set[str]:
    """The names of all fields of a type of `schemas`, also of those within."""
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        fields = msgspec.structs.fields(kind)
        return {one.encode_name for one in fields}.union(*(_fields_of(one.type) for one in fields))
    return set[str]().union(*map(_fields_of, get_args(kind)))


class _Meaning(NamedTuple):
    status: int
    kind: str
    title: str
    detail: str = ""
    """Empty: the error's own text, which is for callers too."""
    retry_after: str = ""
    """Seconds after which it is worth trying again."""


_DAMAGED = _Meaning(503, "store-damaged", "The store is damaged", "the log of the service says what is wrong", "5")
_MEANINGS: Mapping[type[Exception], _Meaning] = {
    StoreFull: _Meaning(507, "store-full", "The store is full", "nothing was done; what is there still drains", "5"),
    OutcomeUnknown: _Meaning(
        504, "outcome-unknown", "The answer was lost", "it was done once or not at all; look before you try again"
    ),
    StoreCorrupt: _DAMAGED,
    StoreMismatch: _DAMAGED,
    StoreError: _Meaning(503, "store-away", "The store is away", "nothing was done; try again", "1"),
    SetupError: _Meaning(501, "not-here", "Not with this store"),
    BideError: _Meaning(409, "conflict", "Not possible now"),
    Exception: _Meaning(500, "defect", "A defect", "a defect of the service; its log says where"),
}
"""The answer to each error of the engine or the store; of several the first that it is an instance of. The address of
the store and the text of its driver are for the log, and not for callers."""


def of_error(error: Exception) -> Problem:
    """Turn any error of the service, the engine or the store into an answer."""
    if isinstance(error, Problem):
        return error
    if isinstance(error, BadInput):
        return bad_input(error)
    if isinstance(error, AccessRefused):
        challenge = {"www-authenticate": error.challenge}
        return Problem(error.status, error.title.lower(), error.title, error.detail, headers=challenge)
    meaning = next(meaning for kind, meaning in _MEANINGS.items() if isinstance(error, kind))
    return Problem(
        meaning.status, meaning.kind, meaning.title, meaning.detail or str(error),
        headers={"retry-after": meaning.retry_after} if meaning.retry_after else {},
    )  # fmt: skip


def too_large(limit: int) -> Problem:
    return Problem(
        413, "too-large", "The body is too large", f"the body is larger than {limit} bytes; send several smaller ones",
        field="body", accepted=f"at most {limit} bytes",
    )  # fmt: skip


JSON = "application/json"
STATUS: Mapping[Result, int] = {
    Result.CREATED: 201,
    Result.NOT_FOUND: 404,
    Result.REFUSED: 409,
    Result.UNDER_WAY: 409,
    Result.FINISHED: 409,
    Result.STALE_TOKEN: 409,
}
"""200 for what is not listed: done as asked."""

encode = msgspec.json.Encoder().encode


class Reply:
    """A status, a body, and the headers that go with it."""

    __slots__ = ("body", "content_type", "headers", "status")

    def __init__(
        self, status: int, body: bytes, content_type: str = JSON, headers: Mapping[str, str] | None = None
    ) -> None:
        self.status = status
        self.body = body
        self.content_type = content_type
        self.headers = headers or {}


def reply(shape: Any) -> Reply:
    """200 with that."""
    return Reply(200, encode(shape))


def reply_to(
    answer: Answer, caller: Caller, *, condition: Container[Result] = (), paused: Container[Topic] = ()
) -> Reply:
    """A verb's answer, as the caller may see it. `condition`: the results that mean that a condition in the headers was
    not met. `paused`: see `answer_shape`."""
    status = 412 if answer.result in condition else STATUS.get(answer.result, 200)
    return Reply(status, encode(shape_for(caller, answer, paused)), headers=etag(answer))


def shape_for(caller: Caller, answer: Answer, paused: Container[Topic]) -> AnswerShape:
    """A verb's answer, as the caller may see it."""
    seen = caller.seen(answer)
    return answer_shape(seen, paused=paused, withheld=seen is not answer)


def etag(answer: Answer) -> dict[str, str]:
    record = answer.record
    return {} if record is None or answer.result is Result.NOT_FOUND else {"etag": f'"{record.token}"'}
