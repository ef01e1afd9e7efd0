"""The operation that moves, where a move applies: one statement, and one round trip."""

from __future__ import annotations

from base64 import b64decode
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from bide.core.answers import Answer
from bide.core.instants import LAST_INSTANT, Millis
from bide.core.records import At, Move, Result
from bide.stores.batches import rounds
from bide.stores.postgres.journaled_connection import Call
from bide.stores.postgres.rows import BYTES, packed, record_of
from bide.stores.sql.errors import Shut
from bide.stores.sql.journaled_connection import Runs

_OFTEN_ALIKE = (0, 3)
"""Topic, relative."""
_DECODE = msgspec.json.Decoder(list[list[Any]]).decode


async def move(
    lane: Runs, moves: Sequence[Move], answers: list[Answer | None], now: Millis | None, said: Sequence[str]
) -> None:
    """Fill in the answers of those that apply; of a task that comes twice the second is left to whoever looks first.

    Raises RowLocked: one of them was locked, and nothing was done.
    """
    places = rounds(moves)[0]
    arguments = _arguments(moves, places)

    def answered(rows: Iterable[Sequence[Any]], start: int = 0) -> None:
        for row in rows:
            place, was = row[start : start + 2]
            if place is not None:
                answers[places[place - 1]] = Answer(Result.MOVED, record_of(row, start + 2), was)

    async def update(call: Call) -> None:
        rows = await call.timed("move_tasks", now, call.caller, call.number, *arguments, said)
        if not rows:
            raise Shut
        answered(rows, 3)

    async def updated(row: Any, call: Call) -> None:
        answered(_kept(row["answer"]))

    await lane.run(update, updated, past=update)


def _arguments(moves: Sequence[Move], places: Sequence[int]) -> list[list[Any]]:
    rows = []
    for place in places:
        one = moves[place]
        due = min(max(one.due.millis, -LAST_INSTANT), LAST_INSTANT)
        rows.append((one.topic, one.key, due, type(one.due) is not At, one.if_token, one.deadline))
    return packed(rows, _OFTEN_ALIKE)


def _kept(answer: bytes | None) -> list[list[Any]]:
    """The rows of the answer that the statement kept; None where nothing was moved."""
    rows = _DECODE(answer) if answer is not None else []
    for row in rows:
        for column in BYTES:
            row[2 + column] = b64decode(row[2 + column])
    return rows
