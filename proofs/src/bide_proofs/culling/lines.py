"""What callers and workers say in their logs, a line each, so that what was said outlives who said it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TypeAlias

import msgspec

from bide.core.records import Verdict


class Asked(msgspec.Struct, frozen=True, tag="asked", gc=False):
    """A caller is about to ask; `id` is the life that a schedule begins."""

    verb: str
    key: str
    at: int
    """Nanoseconds since the epoch, here and below."""
    id: str = ""


class Answered(msgspec.Struct, frozen=True, tag="answered", gc=False):
    """The answer has come, with the task as it was then, if there was one. An error is the answer `failed`."""

    verb: str
    key: str
    at: int
    result: str
    id: str = ""
    token: int = 0
    wake_at: int = 0
    error: str = ""


class Delivered(msgspec.Struct, frozen=True, tag="delivered", gc=False):
    """A handler was started, by a worker of this number."""

    key: str
    id: str
    token: int
    attempt: int
    planned_at: int
    at: int
    worker: int


class Settled(msgspec.Struct, frozen=True, tag="settled", gc=False):
    """The store has acknowledged an outcome."""

    key: str
    id: str
    token: int
    at: int
    verdict: Verdict = Verdict.DONE


class Killed(msgspec.Struct, frozen=True, tag="killed", gc=False):
    """This worker is about to be killed."""

    worker: int
    at: int


class Ended(msgspec.Struct, frozen=True, tag="ended", gc=False):
    """This worker has ended by itself, or not as it should when it was told to."""

    worker: int
    code: int


class Left(msgspec.Struct, frozen=True, tag="left", gc=False):
    """At the end this was still in the store."""

    key: str
    state: str


Line: TypeAlias = Asked | Answered | Delivered | Settled | Killed | Ended | Left


class Journal:
    """Lines that survive the death of who wrote them: one unbuffered append each."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._encode = msgspec.json.Encoder().encode

    def say(self, line: Line) -> None:
        os.write(self._file, self._encode(line) + b"\n")


def read(path: Path) -> Iterator[Line]:
    """What was said there. A last line that a kill cut off was not said."""
    decode = msgspec.json.Decoder(Line).decode
    with path.open("rb") as file:
        for line in file:
            if line.endswith(b"\n"):
                yield decode(line)
