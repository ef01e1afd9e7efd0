"""Operations that decide: they read rows under locks, let `core.lifecycle` decide, and write the rows.

All of it is one transaction, so an operation means the same as in every other store. Rows are locked in the order of
(topic, key), so that two batches over the same tasks wait for each other but never deadlock. A key that occurs several
times in a batch is handled in rounds, within that transaction.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache, partial
from typing import Any, NamedTuple, TypeAlias

import msgspec

from bide.core import lifecycle
from bide.core.answers import Answer
from bide.core.errors import PartlyFailed, StoreError
from bide.core.events import Event
from bide.core.instants import Millis
from bide.core.names import storable
from bide.core.payloads import AT_ONCE
from bide.core.records import Change, Move, NewTask, Record, Settlement, State, Token, Topic
from bide.stores.batches import Named, earliest, rounds
from bide.stores.sql.journaled_connection import OnLocked, Repeated, RowLocked, Runs

Places = list[int]
MessagesOf = Callable[[Mapping[Topic, Millis]], list[str]]
"""Maps the earliest wakes of a batch to the messages worth sending."""
HELD = RowLocked("another open transaction keeps the task locked; nothing was done")
"""Takes the place of an answer about a locked task."""
encode = msgspec.msgpack.encode
answers_of = msgspec.msgpack.Decoder(list[Answer | None]).decode
"""None: the task was locked, and skipped."""
_truths_of = msgspec.msgpack.Decoder(list[bool | None]).decode
pack_topics = msgspec.json.encode
_decode_topics = lru_cache(1024)(msgspec.json.Decoder(list[Topic]).decode)  # every two seconds the same


def event_of(row: Iterable[Any]) -> Event:
    """The event in the columns of its table, which are its fields. Raises ValueError for values of other types."""
    return msgspec.convert(dict(zip(Event.__struct_fields__, row, strict=True)), Event)


def unpack_topics(packed: bytes) -> list[Topic]:
    """The topics in a worker's row; none if no worker wrote it."""
    try:
        return _decode_topics(packed)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, TypeError):
        return []


async def insert_events(call: Any, events: Sequence[Event]) -> None:
    """Append to the event log."""
    for start in range(0, len(events), AT_ONCE):
        lines = [
            (one.at, one.topic, one.key, one.id, one.kind.value, one.attempt, one.who and storable(one.who),
             storable(one.what), one.was, one.wake_at)
            for one in events[start : start + AT_ONCE]
        ]  # fmt: skip
        await call.ask("insert_events", **call.lines(lines))


@contextmanager
def rest_of(answers: list[Any]) -> Iterator[None]:
    """Raise PartlyFailed if a batch fails after some of it was answered."""
    try:
        yield
    except StoreError as error:
        if all(answer is None for answer in answers):
            raise
        raise PartlyFailed([error if answer is None else answer for answer in answers]) from error


class Found(NamedTuple):
    """The result of finding a task by its name; the task is locked if it exists."""

    record: Record | None
    token: Token
    """A new token, for the record that is decided on."""
    row: Any = None
    """By which the store finds the locked row again, if not by its name."""
    held: bool = False
    """True if another transaction has it locked, so it was skipped."""


class Batch(ABC):
    """The transaction of one call: it locks rows, and gathers all writes to send them together."""

    there: Millis = 0
    """The server's time."""
    waiting: list[Record]
    """Tasks that now wait; listeners may have to be notified of them."""

    @abstractmethod
    async def lock(self, asked: Sequence[Named]) -> list[Found]:
        """Find and lock the tasks, in this order. The first call begins the transaction."""

    @abstractmethod
    def put_or_forget(self, found: Found, record: Record, *, moved: bool = False) -> None:
        """Write a transition, which keeps payload, options and group; or delete the task. `moved`: it is a move."""

    @abstractmethod
    def replace(self, found: Found, record: Record) -> None:
        """Write a new life of a task."""

    @abstractmethod
    async def insert(self, tasks: Sequence[NewTask], places: Places, answers: list[Any]) -> Places:
        """Insert the tasks at these places, whose keys were free; fill in their answers by the end of the batch.

        Returns the places of those that another caller has inserted meanwhile.
        """

    @abstractmethod
    async def flush(self) -> None:
        """Send the gathered writes."""

    @abstractmethod
    async def finish(self, answer: bytes, messages: list[str]) -> None:
        """Send the remaining writes, keep the answer in case the connection breaks now, and commit."""


def _schedule(asked: NewTask, found: Found, batch: Batch) -> Answer:
    """Schedule a task whose key exists."""
    answer = lifecycle.schedule(asked, found.record, batch.there, found.token)
    if answer.result in lifecycle.ADDED and answer.record is not None:
        batch.replace(found, answer.record)
    return answer


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
    messages_of: MessagesOf,
    begin: Callable[..., Batch],
    *,
    decide: Callable[[Any, Found, Batch], Any],
    kept: Callable[[bytes], list[Any]],
    kept_of: Repeated[list[Any]] | None = None,
    locked: OnLocked = "report",
    adding: bool = False,
) -> list[Any]:
    """Decide each element of a batch, and write the decisions; the answer for each skipped one is HELD.

    `begin` makes the Batch of a call. `kept` decodes the answers of a call that was done before; `kept_of` replaces it
    if those answers are incomplete. `adding`: missing tasks are inserted.
    """
    parts = rounds(asked)

    async def work(call: Any) -> list[Any]:
        decided: list[Any] = [None] * len(asked)
        batch = begin(call)
        for left in parts:
            while left:
                await batch.flush()
                free: Places = []
                for place, found in zip(left, await batch.lock([asked[place] for place in left]), strict=True):
                    if adding and found.record is None and not found.held:
                        free.append(place)
                    elif not found.held:
                        decided[place] = decide(asked[place], found, batch)
                left = await batch.insert(asked, free, decided) if free else []
        wakes: dict[Topic, Millis] = {}
        for record in batch.waiting:
            earliest(wakes, record.topic, record.wake_at)
        await batch.finish(encode(decided), messages_of(wakes))
        return decided

    async def repeated(row: Sequence[Any], call: Any) -> list[Any]:
        return kept(row[-1])

    decided: list[Any] = await connection.run(work, kept_of or repeated, locked=locked, adding=adding)
    return [HELD if one is None else one for one in decided]


decide_added = partial(_decide, decide=_schedule, kept=answers_of, adding=True)
"""Schedule tasks; some keys may be taken, or occur twice."""
decide_changes = partial(_decide, decide=_change, kept=answers_of)
"""Move, cancel and redrive tasks."""
decide_settlements = partial(_decide, decide=_settle, kept=_truths_of)
"""Record how leases ended."""


# --- a Record and its row in SQLite and PostgreSQL; MySQL has the same codes, but its own order of columns

COLUMNS = (
    "topic, key, id, group_name, state, due_at, at, planned_at, attempt, failures, losses, token, holder, "
    "payload, options, deadline, error, created_at, woke_at, keep_until, row"
)
"""The order of `Record`'s fields, with `at` and `woke_at` in place of `wake_at` and `finished_at`; then `row`."""
WIDTH = 21
STATE, AT, PAYLOAD, WOKE, ROW = 4, 6, 13, 18, 20
"""Positions in a row. While a task is leased, `woke_at` is the wake time that it was leased for."""
Row: TypeAlias = Sequence[Any]
"""A row of `COLUMNS`, with the state as its code."""

STATES = (State.WAITING, State.LEASED, State.DONE, State.CANCELLED, State.DEAD)
"""The states, indexed by their code in the table."""
CODES = {state: code for code, state in enumerate(STATES)}
ENDED = 2
"""The lowest code of a final state."""


def record_of(row: Row) -> Record:
    """The record in `row`."""
    (topic, key, identity, group, state, due_at, at, planned_at, attempt, failures, losses, token, holder,
     payload, options, deadline, error, created_at, woke_at, keep_until, _) = row  # fmt: skip
    ended = state >= ENDED
    wake_at = woke_at if ended and woke_at is not None else at  # a row with a damaged state may have no woke_at
    return Record(
        topic, key, identity, group, STATES[state], due_at, wake_at, planned_at, attempt, failures,
        losses, token, holder, payload, options, deadline, error, created_at, at if ended else None, keep_until,
    )  # fmt: skip


def values_of(record: Record, error: str | None) -> tuple[Any, ...]:
    """The row of `record` without the row number, and with `error` as its error text."""
    at, woke_at = record.wake_at, None
    if record.finished_at is not None:
        at, woke_at = record.finished_at, record.wake_at
    return (
        record.topic, record.key, record.id, record.group, CODES[record.state], record.due_at, at, record.planned_at,
        record.attempt, record.failures, record.losses, record.token, record.holder, record.payload, record.options,
        record.deadline, error, record.created_at, woke_at, record.keep_until,
    )  # fmt: skip
