"""The operations: those that write, each a numbered call, and those that only read.

If SQL alone can decide (a new key, a move, a plain Done, an extension), a call is one statement and one round trip.
The rest is decided here, see `sql.operations`: one transaction of four round trips.
"""

from __future__ import annotations

import time
from base64 import b64decode
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from functools import partial
from math import isqrt
from typing import Any

import msgspec
from msgspec import Struct

from bide.core import lifecycle
from bide.core.answers import Answer
from bide.core.instants import LAST_INSTANT, At, Millis
from bide.core.names import storable
from bide.core.payloads import AT_ONCE
from bide.core.records import (
    Change,
    Count,
    Lease,
    Move,
    NewTask,
    OutcomeKind,
    Record,
    Ref,
    Result,
    Settlement,
    State,
    Tally,
    Token,
    Topic,
)
from bide.ports import COUNTED
from bide.stores.batches import Conflicts, Named, rounds, wakes_of
from bide.stores.postgres.connection import Call, PostgresConnection, Row
from bide.stores.sql.dialect import AlreadyApplied, KeyTaken
from bide.stores.sql.journaled_connection import OnLocked, RowLocked, Runs
from bide.stores.sql.operations import (
    CODES,
    HELD,
    PAYLOAD,
    ROW,
    WIDTH,
    Batch,
    Found,
    MessagesOf,
    Places,
    decide_added,
    decide_changes,
    decide_settlements,
    record_of,
    rest_of,
    values_of,
)
from bide.stores.sql.reading import Located, ServerReads, count_of, counts_in

_LOCKED = slice(3, 3 + WIDTH)
"""The record's part of a row of `lock_tasks`."""
_PAYLOAD_AND_OPTIONS = (PAYLOAD, PAYLOAD + 1)


# --- arrays of values


def columns(rows: Sequence[Sequence[Any]], width: int) -> list[list[Any]]:
    """Transpose rows into one array for each column, as `unnest` takes them."""
    return [nested(list(column)) for column in zip(*rows, strict=True)] if rows else [[] for _ in range(width)]


def packed(given: Iterable[list[Any]], alike: Collection[int]) -> list[list[Any]]:
    """Shorten columns of one or more rows; the statement expands them again. A column of nulls becomes empty.

    A column in `alike`, which often has equal values, becomes one element if they are all equal.
    """
    return [
        [] if column[0] is None and column.count(None) == len(column)
        else once(column) if number in alike
        else nested(column)
        for number, column in enumerate(given)
    ]  # fmt: skip


def once(column: list[Any]) -> list[Any]:
    """Reduce a column of equal values to one element; the statement expands it again."""
    same = column and column[0] == column[-1] and column.count(column[0]) == len(column)
    return column[:1] if same else nested(column)


def nested(column: list[Any]) -> list[Any]:
    """Split the column into equal parts if its length has divisors; `unnest` treats such a nested array the same.

    The driver checks whether each element is a list, which takes four times as long as encoding it. In a nested array
    it checks only the first part, since all parts must have the same shape.
    """
    size = len(column)
    parts = next((parts for parts in range(isqrt(size), 1, -1) if size % parts == 0), 1)
    width = size // parts
    return column if parts == 1 else [column[first : first + width] for first in range(0, size, width)]


# --- batches that decide


class PostgresBatch(Batch):
    """See `sql.operations`."""

    def __init__(self, call: Call, now: Millis | None) -> None:
        self.call = call
        self.now = now
        self._gate: tuple[Any, Any] | None = None
        self._locked: set[tuple[Topic, str]] = set()
        self._put: list[tuple[Any, ...]] = []
        self._moved: list[tuple[Any, ...]] = []
        self._forgotten: list[tuple[str]] = []
        self.waiting: list[Record] = []

    async def lock(self, asked: Sequence[Named]) -> list[Found]:
        call = self.call
        if self._gate is None:
            await call.begin()
            self._gate = call.caller, call.number
        topics, keys = [one.topic for one in asked], [one.key for one in asked]
        query = "lock_tasks_past" if call.past else "lock_tasks"
        rows = await call.timed(query, self.now, *self._gate, topics, keys)
        if not rows:
            raise AlreadyApplied
        self._gate = None, None
        self.there = rows[0]["now"]
        found = []
        for one, row in zip(asked, rows, strict=True):
            held = call.past and (row["held"] or (one.topic, one.key) in self._locked)
            if held:  # later elements about the same task are held as well
                self._locked.add((one.topic, one.key))
            record = None if held or row["topic"] is None else record_of(row[_LOCKED])
            found.append(Found(record, row["new_token"], row["spot"], held))
        return found

    def replace(self, found: Found, record: Record) -> None:
        self._put.append((found.row, *values_of(record, record.error and storable(record.error))[2:]))
        if record.state is State.WAITING:
            self.waiting.append(record)

    def put_or_forget(self, found: Found, record: Record, *, moved: bool = False) -> None:
        if moved:
            self._moved.append((found.row, record.due_at, record.wake_at, record.token, record.deadline))
            self.waiting.append(record)
        elif record.keep_until is not None and record.keep_until <= self.there:
            self._forgotten.append((found.row,))
        else:
            self.replace(found, record)

    async def insert(self, tasks: Sequence[NewTask], places: Places, answers: list[Any]) -> Places:
        """Insert tasks whose keys have become free meanwhile."""
        await self.flush()
        [row] = await self.call.timed(
            "insert_tasks", self.now, None, None, *_insertion([tasks[place] for place in places]), []
        )
        return _inserted(tasks, places, row, answers)

    async def flush(self) -> None:
        if self._put or self._moved or self._forgotten:
            await self._write(None, None, None, [])

    async def finish(self, answer: bytes, messages: list[str]) -> None:
        await self._write(self.call.number, self.there, answer, messages)
        await self.call.commit()

    async def _write(self, number: int | None, now: Millis | None, answer: bytes | None, messages: list[str]) -> None:
        """Send the gathered writes; an `answer` ends the call."""
        await self.call.fetch(
            "write_tasks", *columns(self._put, 19), *columns(self._moved, 5), *columns(self._forgotten, 1),
            self.call.caller, number, now, answer, messages,
        )  # fmt: skip
        self._put, self._moved, self._forgotten = [], [], []


# --- change and settle


async def change(
    connection: Runs, changes: Sequence[Change], now: Millis | None, about: Millis, messages_of: MessagesOf
) -> list[Any]:
    """Move, cancel, redrive. If all are moves, those that apply are one statement; the rest is decided here."""
    begin = partial(PostgresBatch, now=now)
    moves = [one for one in changes if type(one) is Move]
    if len(moves) < len(changes):
        return await decide_changes(connection, changes, messages_of, begin, locked="pass")
    answers: list[Any] = [None] * len(moves)
    locked: OnLocked = "pass"
    if not connection.passes:
        messages = messages_of(wakes_of(moves, about))
        try:
            await move(connection, moves, answers, now, messages)
        except RowLocked:  # nothing was done: one task stayed locked for too long
            locked, messages_of = "pass at once", lambda wakes: messages  # noted as sent, but not sent yet
    rest = [place for place, answer in enumerate(answers) if answer is None]
    if rest:
        with rest_of(answers):
            left = [moves[place] for place in rest]
            decided = await decide_changes(connection, left, messages_of, begin, locked=locked)
        for place, answer in zip(rest, decided, strict=True):
            answers[place] = answer
    return answers


async def settle(
    connection: Runs, outcomes: Sequence[Settlement], now: Millis | None, about: Millis, messages_of: MessagesOf
) -> list[Any]:
    """Record how leases ended: one conditional delete for all plain Done, one transaction for all other outcomes."""
    plain = [one.outcome is OutcomeKind.DONE and one.next_at is None and one.keep_until <= about for one in outcomes]
    settled: list[Any] = [None] * len(outcomes)
    done = [place for place, yes in enumerate(plain) if yes]
    other = [place for place, yes in enumerate(plain) if not yes]
    names = {(outcomes[place].topic, outcomes[place].key) for place in done}
    if any((outcomes[place].topic, outcomes[place].key) in names for place in other):
        done, other = [], list(range(len(outcomes)))  # a task occurs in both: its first outcome counts
    if done:
        await _settle_done(connection, outcomes, done, now, settled)
    if other:
        with rest_of(settled):
            left, begin = [outcomes[place] for place in other], partial(PostgresBatch, now=now)
            decided = await decide_settlements(connection, left, messages_of, begin, locked="pass")
        for place, yes in zip(other, decided, strict=True):
            settled[place] = yes
    return settled


async def _settle_done(
    connection: Runs, outcomes: Sequence[Settlement], places: Places, now: Millis | None, settled: list[Any]
) -> None:
    """Set in `settled` whether each lease was still held, or HELD if another transaction has locked the task."""
    leases: dict[tuple[Topic, str, Token], int] = {}
    for place in places:
        one = outcomes[place]
        settled[place] = False
        leases.setdefault((one.topic, one.key, one.token), place)  # a second settlement of one lease has no effect
    asked = sorted(leases)
    arguments = packed(map(list, zip(*asked, strict=True)), alike=(0,))  # topic

    async def delete(call: Call) -> Any:
        [row] = await call.numbered("settle_done_past" if call.past else "settle_done", now, *arguments)
        passed_over = row["held"] if call.past else None
        return row, [asked[number - 1] for number in passed_over or ()]

    async def deleted(row: Any, call: Call) -> Any:
        return row, None  # the skipped ones were not kept: retry all that were not settled

    row, locked = await connection.run(delete, deleted, locked="pass")
    tokens = row["tokens"] or ()
    held: Collection[Any] = leases
    if len(tokens) < len(asked):
        held = set(zip(row["topics"] or (), row["keys"] or (), tokens, strict=True))
    for lease in held:
        settled[leases[lease]] = True
    for lease in [lease for lease in asked if lease not in held] if locked is None else locked:
        settled[leases[lease]] = HELD


# --- extend


async def extend(
    connection: PostgresConnection, leases: Sequence[Lease], now: Millis | None, *_: object, lasts: Millis
) -> list[Any]:
    """Let each lease last for `lasts` from now."""
    asked = sorted(set(leases))
    arguments = columns(asked, 3)

    async def work(call: Call) -> dict[Lease, Any]:
        rows = await call.timed("extend_leases_past" if call.past else "extend_leases", now, lasts, *arguments)
        return {
            Lease(row["topic"], row["key"], row["token"]): HELD if call.past and row["held"] else True for row in rows
        }

    extended = await connection.repeat(work, locked="pass")
    return [extended.get(lease, False) for lease in leases]


_decode_moves = msgspec.json.Decoder(list[list[Any]]).decode


async def move(
    connection: Runs, moves: Sequence[Move], answers: list[Answer | None], now: Millis | None, messages: Sequence[str]
) -> None:
    """Fill in the answers of the moves that apply. A second move of the same task stays unanswered.

    Raises RowLocked: one of the tasks was locked, and nothing was done.
    """
    places = rounds(moves)[0]
    asked = [
        (one.topic, one.key, min(max(one.due.millis, -LAST_INSTANT), LAST_INSTANT), type(one.due) is not At,
         one.if_token, one.deadline)
        for one in (moves[place] for place in places)
    ]  # fmt: skip
    arguments = packed(map(list, zip(*asked, strict=True)), alike=(0, 3))  # topic and relative

    def answered(rows: Iterable[Sequence[Any]], start: int = 0) -> None:
        for row in rows:
            place, was = row[start : start + 2]
            if place is not None:
                answers[places[place - 1]] = Answer(Result.MOVED, record_of(row[start + 2 : start + 2 + WIDTH]), was)

    async def update(call: Call) -> None:
        answered(await call.numbered("move_tasks", now, *arguments, messages), 3)

    async def updated(row: Any, call: Call) -> None:
        kept = _decode_moves(row["answer"] or b"[]")
        for one in kept:
            for place in _PAYLOAD_AND_OPTIONS:
                one[2 + place] = b64decode(one[2 + place])
        answered(kept)

    await connection.run(update, updated, locked="report")


# --- forgetting

_WHOLE = 600.0
"""Seconds between purges from the start of the index, which find tasks that were locked or committed late."""
_SLACK: Millis = 60_000
"""How long a transaction may be open so that the next purge still finds the tasks that it ended."""


class Purging:
    """Deletes tasks whose retention has passed: one page at a time, each from where the previous page ended.

    A purged task leaves a dead entry in the index until vacuum. While an old transaction blocks vacuum, a page from the
    start of the index would visit every entry purged since. `used` false: each call begins at the start, because the
    store uses the caller's clock.
    """

    def __init__(self, *, used: bool) -> None:
        self._used = used
        self._floor: Millis = 0
        self._whole_at = 0.0

    async def purge(self, connection: PostgresConnection, now: Millis | None, limit: int) -> int:
        """Delete at most `limit` tasks whose retention has passed; return their number."""
        if not self._used or time.monotonic() >= self._whole_at:
            self._floor, self._whole_at = 0, time.monotonic() + _WHOLE
        purged = 0

        async def work(call: Call) -> int:
            most = min(limit - purged, AT_ONCE)
            [(count, last, there)] = await call.fetch("purge", now, most, self._floor)
            if count == most:
                self._floor = max(last, self._floor)
            else:
                self._floor = max(there - _SLACK, 0)
            return int(count)

        while purged < limit:
            forgotten = await connection.repeat(work)
            purged += forgotten
            if forgotten < AT_ONCE:
                break
        return purged


async def forget_callers(call: Call, ours: list[str]) -> None:
    """Delete the rows of long inactive callers, except `ours`."""
    await call.fetch("forget_callers", ours)


# --- add

_TRIES = 16
"""The number of lock timeouts after which the rest of a batch counts as locked: half a second in all."""


async def add(
    connection: Runs,
    tasks: Sequence[NewTask],
    now: Millis | None,
    about: Millis,
    messages_of: MessagesOf,
    conflicts: Conflicts | None = None,
) -> list[Answer]:
    """Schedule tasks: one statement if every key is new. `about`: the server's time, as far as it is known.

    With `conflicts` the statement may fail on a taken key, since nothing else depends on its transaction.
    """
    answers: list[Any] = [None] * len(tasks)
    rest: Places = []
    adding = _Adding(connection, tasks, now, messages_of(wakes_of(tasks, about)), conflicts, answers, rest)
    first, *later = rounds(tasks)
    with rest_of(answers):
        await adding.in_halves(adding.insert, first)
        rest += [place for part in later for place in part]
        locked = {(tasks[place].topic, tasks[place].key) for place, one in enumerate(answers) if one is HELD}
        for place in [place for place in rest if (tasks[place].topic, tasks[place].key) in locked]:
            answers[place] = HELD  # later elements about a locked task have to wait
            rest.remove(place)
        if rest:
            await adding.in_halves(adding.decide, rest)
    return answers


class _Adding(Struct):
    """A batch of tasks being added."""

    connection: Runs
    tasks: Sequence[NewTask]
    now: Millis | None
    messages: list[str]
    conflicts: Conflicts | None
    answers: list[Any]
    rest: Places
    """The places of those whose keys are taken."""
    tries: int = _TRIES
    """The remaining number of lock timeouts, since everything may be locked."""

    async def in_halves(self, attempt: Callable[[Places], Awaitable[None]], places: Places) -> None:
        """Call `attempt` for these places; if a key is locked, for each half, since the server does not say which.

        An INSERT cannot skip a key that an open transaction is inserting.
        """
        try:
            await attempt(places)
        except RowLocked:
            self.tries -= 1
            names: dict[tuple[Topic, str], Places] = {}
            for place in places:
                names.setdefault((self.tasks[place].topic, self.tasks[place].key), []).append(place)
            if len(names) == 1 or self.tries <= 0:
                for place in places:
                    self.answers[place] = HELD
                return
            parts = list(names.values())
            for half in (parts[: len(parts) // 2], parts[len(parts) // 2 :]):
                await self.in_halves(attempt, [place for part in half for place in part])

    async def insert(self, places: Places) -> None:
        """Insert the tasks at these places; leave those with taken keys to `decide`."""
        tasks, conflicts = self.tasks, self.conflicts
        news = [tasks[place] for place in places]
        arguments = _insertion(news)
        form = "insert_tasks" if conflicts is None or conflicts.likely(news) else "insert_tasks_all_new"

        async def insert(call: Call) -> None:
            [row] = await call.numbered(form, self.now, *arguments, self.messages)
            self.rest += _inserted(tasks, places, row, self.answers)

        async def inserted(row: Row, call: Call) -> None:
            self.rest += _inserted(tasks, places, row, self.answers)

        try:
            await self.connection.run(insert, inserted, locked="report", adding=True)
        except KeyTaken:
            form = "insert_tasks"
            await self.connection.run(insert, inserted, locked="report", adding=True)
        if conflicts is not None:
            conflicts.met(news, [tasks[place] for place in self.rest])

    async def decide(self, places: Places) -> None:
        """Decide under locks about tasks whose keys are taken, or occur twice."""
        places.sort()
        asked = [self.tasks[place] for place in places]

        decided = await decide_added(
            self.connection, asked, lambda wakes: self.messages, partial(PostgresBatch, now=self.now), locked="pass"
        )
        for place, answer in zip(places, decided, strict=True):
            self.answers[place] = answer


def _insertion(news: Sequence[NewTask]) -> list[list[Any]]:
    dues = [new.due for new in news]
    if dues.count(dues[0]) == len(dues):
        dues = dues[:1]
    given = (
        [new.topic for new in news], [new.key for new in news],
        [min(max(due.millis, -LAST_INSTANT), LAST_INSTANT) for due in dues], [type(due) is not At for due in dues],
        [new.deadline for new in news], [new.id for new in news], [new.group for new in news],
        [new.options for new in news], [new.payload for new in news],
    )  # fmt: skip
    return packed(given, alike=(0, 2, 3, 7))  # topic, due, relative, options


def _inserted(tasks: Sequence[NewTask], places: Places, row: Any, answers: list[Any]) -> Places:
    """Fill in the answers of the tasks that were inserted; return the places of the others."""
    now, tokens, keys = row["now"], row["tokens"] or [], row["keys"]
    schedule = lifecycle.schedule
    if keys is None and len(tokens) == len(places):
        for place, token in zip(places, tokens, strict=True):
            answers[place] = schedule(tasks[place], None, now, token)
        return []
    given = dict(zip(zip(row["topics"] or (), keys or (), strict=True), tokens, strict=True))
    taken = []
    for place in places:
        new = tasks[place]
        token = given.get((new.topic, new.key))
        if token is None:
            taken.append(place)
        else:
            answers[place] = schedule(new, None, now, token)
    return taken


# --- reads


class PostgresReads(ServerReads):
    _record_of, _row = record_of, ROW

    async def get(self, refs: Sequence[Ref]) -> list[Record | None]:
        found: list[Record | None] = [None] * len(refs)
        asked = [ref.topic for ref in refs], [ref.key for ref in refs]
        for row in await self._call.fetch("tasks_by_names", *asked):
            found[row[0] - 1] = record_of(row[1 : 1 + WIDTH])
        return found

    async def tally(
        self, spans: Sequence[tuple[Millis, Millis]], upto: int, only: Collection[Topic] | None, after: Topic, most: int
    ) -> tuple[Tally, Topic | None]:
        """Count tasks. O(topics x COUNTED) at worst, however many wait."""
        forecast: dict[Topic, list[Count]] = {}
        rows = await self._call.fetch(
            "counts", COUNTED + 1, after, most if only is None else None, None if only is None else list(only)
        )
        counts = counts_in(rows)
        waiting = [topic for topic, state in counts if state is State.WAITING]
        if spans and waiting:
            asked = [(topic, low, high) for topic in waiting for low, high in spans]
            for topic, number in await self._call.fetch(
                "forecast", upto + 1, *(list(one) for one in zip(*asked, strict=True))
            ):
                forecast.setdefault(topic, []).append(count_of(number, upto))
        return Tally(counts, forecast), rows[-1][0] if rows and only is None else None

    async def by_time(
        self, topic: Topic, state: State, after: tuple[Millis, int], before: Millis, most: int
    ) -> list[Located]:
        return self._located(await self._call.fetch(f"page_of_state_{CODES[state]}", topic, *after, before, most))
