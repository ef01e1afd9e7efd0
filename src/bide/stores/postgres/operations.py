"""The operations that write, each a numbered call.

What the statement itself can decide (a key that is new, a move, a plain Done, an extension) is one statement and one
round trip. The rest is decided here, see `sql.operations`: one transaction of four round trips.
"""

from __future__ import annotations

import time
from base64 import b64decode
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec

from bide.core.answers import Answer
from bide.core.instants import LAST_INSTANT, Millis
from bide.core.records import At, Change, Lease, Move, Record, Result, Settlement, State, Token, Topic, Verdict
from bide.stores.batches import AT_ONCE, Named, rounds, wakes_of
from bide.stores.postgres.journaled_connection import Call, PostgresConnection
from bide.stores.postgres.queries import BYTES, columns, once, packed, record_of, values_of
from bide.stores.sql.dialect import Shut
from bide.stores.sql.journaled_connection import OnLocked, Runs
from bide.stores.sql.locked_rows import RowLocked
from bide.stores.sql.operations import HELD, Batch, Found, Places, Tell, decide_changes, decide_settlements, rest_of

_LEASE_COLUMNS = 3


class PostgresBatch(Batch):
    """See `sql.operations`."""

    def __init__(self, call: Call, now: Millis | None) -> None:
        self.call = call
        self.now = now
        self._gate: tuple[Any, Any] | None = None
        self._locked: set[tuple[Topic, str]] = set()
        self._put: list[tuple[Any, ...]] = []
        self._moved: list[tuple[Any, ...]] = []
        self._forgotten: list[tuple[str, str]] = []
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
            raise Shut
        self._gate = None, None
        self.there = rows[0]["now"]
        found = []
        for one, row in zip(asked, rows, strict=True):
            held = call.past and (row["held"] or (one.topic, one.key) in self._locked)
            if held:  # nor what comes later of the same task
                self._locked.add((one.topic, one.key))
            there = not held and row["topic"] is not None
            found.append(Found(record_of(row, 3) if there else None, row["new_token"], held=held))
        return found

    def replace(self, found: Found, record: Record) -> None:
        self._write_whole(record)

    def _write_whole(self, record: Record) -> None:
        self._put.append(values_of(record))
        if record.state is State.WAITING:
            self.waiting.append(record)

    def put_or_forget(self, found: Found, record: Record, *, moved: bool = False) -> None:
        if moved:
            values = record.topic, record.key, record.due_at, record.wake_at, record.token, record.deadline
            self._moved.append(values)
            self.waiting.append(record)
        elif record.keep_until is not None and record.keep_until <= self.there:
            self._forgotten.append((record.topic, record.key))
        else:
            self._write_whole(record)

    async def flush(self) -> None:
        if self._put or self._moved or self._forgotten:
            await self._write(None, None, None, [])

    async def finish(self, answer: bytes, wakes: Mapping[Topic, Millis], tell: Tell) -> None:
        await self._write(self.call.number, self.there, answer, tell(wakes))
        await self.call.commit()

    async def _write(self, number: int | None, now: Millis | None, answer: bytes | None, said: list[str]) -> None:
        """Write what was gathered; with an `answer`, the call is over."""
        await self.call.fetch(
            "write_tasks", *columns(self._put, 20), *columns(self._moved, 6), *columns(self._forgotten, 2),
            self.call.caller, number, now, answer, said,
        )  # fmt: skip
        self._put, self._moved, self._forgotten = [], [], []


# --- change and settle


async def change(
    connection: Runs, changes: Sequence[Change], now: Millis | None, about: Millis, tell: Tell
) -> list[Any]:
    """Move, cancel, redrive: of nothing but moves those that apply are one statement, the rest is looked at first."""
    begin = partial(PostgresBatch, now=now)
    moves = [one for one in changes if type(one) is Move]
    if len(moves) < len(changes):
        return await decide_changes(connection, changes, tell, begin, locked="pass")
    answers: list[Any] = [None] * len(moves)
    locked: OnLocked = "pass"
    if not connection.passes:
        said = tell(wakes_of(moves, about))
        try:
            await move(connection, moves, answers, now, said)
        except RowLocked:  # not done: one of them was locked for longer than a lock is waited for
            locked, tell = "pass at once", lambda wakes: said  # which counts as told, and was not
    rest = [place for place, answer in enumerate(answers) if answer is None]
    if rest:
        with rest_of(answers):
            left = [moves[place] for place in rest]
            decided = await decide_changes(connection, left, tell, begin, locked=locked)
        for place, answer in zip(rest, decided, strict=True):
            answers[place] = answer
    return answers


async def settle(
    connection: Runs, outcomes: Sequence[Settlement], now: Millis | None, about: Millis, tell: Tell
) -> list[Any]:
    """Record how leases ended. All plain Done: one conditional delete; a batch of both kinds: one of each."""
    plain = [one.verdict is Verdict.DONE and one.wake is None and one.keep_until <= about for one in outcomes]
    settled: list[Any] = [None] * len(outcomes)
    done = [place for place, yes in enumerate(plain) if yes]
    other = [place for place, yes in enumerate(plain) if not yes]
    names = {(outcomes[place].topic, outcomes[place].key) for place in done}
    if any((outcomes[place].topic, outcomes[place].key) in names for place in other):
        done, other = [], list(range(len(outcomes)))  # one task both ways: what comes first counts
    if done:
        await _settle_done(connection, outcomes, done, now, settled)
    if other:
        with rest_of(settled):
            left, begin = [outcomes[place] for place in other], partial(PostgresBatch, now=now)
            decided = await decide_settlements(connection, left, tell, begin, locked="pass")
        for place, yes in zip(other, decided, strict=True):
            settled[place] = yes
    return settled


async def _settle_done(
    connection: Runs, outcomes: Sequence[Settlement], places: Places, now: Millis | None, settled: list[Any]
) -> None:
    """Note in `settled` whether each was still held, and HELD for those that another transaction has locked."""
    leases: dict[tuple[Topic, str, Token], int] = {}
    for place in places:
        one = outcomes[place]
        settled[place] = False
        leases.setdefault((one.topic, one.key, one.token), place)  # the second of two settles nothing
    asked = sorted(leases)
    arguments = columns(asked, _LEASE_COLUMNS)
    arguments[0] = once(arguments[0])

    async def delete(call: Call) -> Any:
        [row] = await call.numbered("settle_done_past" if call.past else "settle_done", now, *arguments)
        passed_over = row["held"] if call.past else None
        return row, [asked[number - 1] for number in passed_over or ()]

    async def deleted(row: Any, call: Call) -> Any:
        return row, None  # what was passed over is forgotten: all that is left is asked for again

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
    connection: PostgresConnection, leases: Sequence[Lease], now: Millis | None, lasts: Millis
) -> list[Any]:
    """Keep each lease for so long from now on."""
    asked = sorted(set(leases))
    arguments = columns(asked, _LEASE_COLUMNS)

    async def work(call: Call) -> dict[Lease, Any]:
        rows = await call.timed("extend_leases_past" if call.past else "extend_leases", now, lasts, *arguments)
        return {
            Lease(row["topic"], row["key"], row["token"]): HELD if call.past and row["held"] else True for row in rows
        }

    extended = await connection.repeat(work, locked="pass")
    return [extended.get(lease, False) for lease in leases]


_OFTEN_ALIKE = (0, 3)
"""Topic, relative."""
_DECODE = msgspec.json.Decoder(list[list[Any]]).decode


async def move(
    connection: Runs, moves: Sequence[Move], answers: list[Answer | None], now: Millis | None, said: Sequence[str]
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
        answered(await call.numbered("move_tasks", now, *arguments, said), 3)

    async def updated(row: Any, call: Call) -> None:
        answered(_moves_kept(row["answer"]))

    await connection.run(update, updated, locked="report")


def _arguments(moves: Sequence[Move], places: Sequence[int]) -> list[list[Any]]:
    rows = []
    for place in places:
        one = moves[place]
        due = min(max(one.due.millis, -LAST_INSTANT), LAST_INSTANT)
        rows.append((one.topic, one.key, due, type(one.due) is not At, one.if_token, one.deadline))
    return packed(rows, _OFTEN_ALIKE)


def _moves_kept(answer: bytes | None) -> list[list[Any]]:
    """The rows of the answer that the statement kept; None where nothing was moved."""
    rows = _DECODE(answer) if answer is not None else []
    for row in rows:
        for column in BYTES:
            row[2 + column] = b64decode(row[2 + column])
    return rows


# --- forgetting

_WHOLE = 600.0
"""Seconds between purges that begin at the start, for what was locked, or committed late."""
_SLACK: Millis = 60_000
"""How long a transaction may be open, so that what it has ended is not too far back when it appears."""


class Purging:
    """Forgets what was kept long enough: a page at a time, and from where the page before it ended.

    What was purged leaves an entry in its index until vacuum comes; while somebody holds an old snapshot, each page
    that began at the start would step over all that was purged since. `used` false: each call begins at the start, for
    a clock that is the caller's.
    """

    __slots__ = ("_floor", "_used", "_whole_at")

    def __init__(self, *, used: bool) -> None:
        self._used = used
        self._floor: Millis = 0
        self._whole_at = 0.0

    async def purge(self, connection: PostgresConnection, now: Millis | None, limit: int) -> int:
        """Forget at most `limit` of what is kept until no later than now; how many that were."""
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


async def forget_callers(connection: PostgresConnection, ours: list[str]) -> None:
    """Forget callers that nobody has heard of for long, `ours` excepted."""

    async def forget(call: Call) -> None:
        await call.fetch("forget_callers", ours)

    await connection.repeat(forget)
