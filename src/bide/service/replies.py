"""What the calls answer, and as which status."""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any

import msgspec

from bide.core.answers import Answer
from bide.core.records import Result, Topic
from bide.service.callers import Caller
from bide.service.shapes import AnswerShape, answer_shape

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
