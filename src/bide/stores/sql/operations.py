"""Operations that decide: rows are read under locks, `core.lifecycle` decides, and rows are written.

It is one transaction, and so an operation means the same as in every other store. Rows are locked in the order of
(topic, key), so that two batches over the same tasks wait for each other and never in a circle. A key that comes
several times in a batch is taken in rounds, within that transaction.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import msgspec

from bide.core import lifecycle
from bide.core.answers import Answer
from bide.core.instants import Millis
from bide.core.records import Change, Move, Record, Settlement, Token, Topic
from bide.stores.batches import Named, earliest, rounds
from bide.stores.sql.journaled_connection import Runs
from bide.stores.sql.locked_rows import RowLocked

Places = list[int]
Tell = Callable[[Mapping[Topic, Millis]], list[str]]
"""From the earliest wakes of a batch to the messages that are worth sending."""
NO_ANSWERS = b"\x90"
"""An empty list in MessagePack."""
HELD = RowLocked("an open transaction of somebody else's keeps the task locked; nothing was done")
"""In the place of an answer."""
encode = msgspec.msgpack.encode
answers_of = msgspec.msgpack.Decoder(list[Answer | None]).decode
"""None: passed over, since it was locked."""
_truths_of = msgspec.msgpack.Decoder(list[bool | None]).decode


class Found(NamedTuple):
    """A task that was looked up by its name, and is locked if it is there."""

    record: Record | None
    token: Token
    """A new one, for what is decided."""
    row: int = 0
    """The number of its row, where rows are written by that."""
    held: bool = False
    """True if somebody else has it locked, and it was passed over."""


class Batch(ABC):
    """The transaction of one call: it locks, and gathers what is to be written so that it goes out at once."""

    there: Millis = 0
    """What time it is there."""
    waiting: list[Record]
    """Tasks that now wait, and may have to be told."""

    @abstractmethod
    async def lock(self, asked: Sequence[Named]) -> list[Found]:
        """Look up and lock, in this order; the first time the transaction begins with it."""

    @abstractmethod
    def put_or_forget(self, found: Found, record: Record, *, moved: bool = False) -> None:
        """Write a transition, which leaves payload, options and group as they are. `moved`: it is a move."""

    @abstractmethod
    async def flush(self) -> None:
        """Write what was gathered."""

    @abstractmethod
    async def finish(self, answer: bytes, wakes: Mapping[Topic, Millis], tell: Tell) -> None:
        """Write the rest, keep the answer for a caller whose connection breaks now, and commit."""


def _change(asked: Change, found: Found, batch: Batch) -> Answer:
    """Move, cancel or redrive a task."""
    answer = lifecycle.change(asked, found.record, batch.there, found.token)
    record = answer.record
    if found.record is not None and record is not None and record.token == found.token:
        batch.put_or_forget(found, record, moved=type(asked) is Move)
    return answer


def _settle(asked: Settlement, found: Found, batch: Batch) -> bool:
    """Record how a lease ended, if it is still held."""
    if found.record is None or not lifecycle.holds(found.record, asked.token):
        return False
    batch.put_or_forget(found, lifecycle.settle(asked, found.record, batch.there, found.token))
    return True


async def _decide(
    connection: Runs,
    asked: Sequence[Any],
    tell: Tell,
    begin: Callable[..., Batch],
    *,
    decide: Callable[[Any, Found, Batch], Any],
    kept: Callable[[bytes], list[Any]],
    passes: bool = False,
    passing: bool = False,
) -> list[Any]:
    """Decide each of a batch, and write what was decided; HELD in the place of each that was passed over.

    `begin` makes the Batch of a call. `kept` reads the answers of a call that was done before. `passes`: it can pass
    over what others have locked. `passing`: it does so from the first, since that was waited for already.
    """
    parts = rounds(asked)

    async def work(call: Any, *, past: bool = False) -> list[Any]:
        decided: list[Any] = [None] * len(asked)
        batch = begin(call, past=past)
        for number, part in enumerate(parts):
            if number > 0:
                await batch.flush()
            for place, found in zip(part, await batch.lock([asked[place] for place in part]), strict=True):
                if not found.held:
                    decided[place] = decide(asked[place], found, batch)
        wakes: dict[Topic, Millis] = {}
        for record in batch.waiting:
            earliest(wakes, record.topic, record.wake_at)
        await batch.finish(encode(decided), wakes, tell)
        return decided

    async def work_past(call: Any) -> list[Any]:
        return await work(call, past=True)

    async def repeated(row: Sequence[Any], call: Any) -> list[Any]:
        return kept(row[-1] or NO_ANSWERS)

    first, past = work_past if passing else work, work_past if passes else work
    decided: list[Any] = await connection.run(first, repeated, past=past)
    return [HELD if one is None else one for one in decided]


decide_changes = partial(_decide, decide=_change, kept=answers_of)
"""Move, cancel, redrive."""
decide_settlements = partial(_decide, decide=_settle, kept=_truths_of)
"""Record how leases ended."""
