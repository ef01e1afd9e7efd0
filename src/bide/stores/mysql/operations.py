"""The operations that write, each a numbered call.

What can be said in advance (keys that are new, plain Done, an extension) is one packet and one round trip. The rest
reads the rows under locks, lets `core.lifecycle` decide, and writes rows: so it means the same as in every other store.
Rows are locked in the order of (topic, key), so that two batches over the same tasks wait for each other and never in a
circle, and are written by their primary key. A key that comes several times in a batch is taken in rounds, within one
transaction.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import msgspec

from bide.core import lifecycle
from bide.core.answers import Answer
from bide.core.instants import Millis
from bide.core.records import (
    Change,
    Lease,
    Record,
    Settlement,
    State,
    Token,
    Topic,
    Verdict,
)
from bide.stores.batches import Named, earliest, rounds
from bide.stores.mysql.filing import FileName, LeasedRows, Settling, close
from bide.stores.mysql.journaled_connection import Call, MySqlConnection, Repeated
from bide.stores.mysql.rows import ROW, record_of, settled_values
from bide.stores.mysql.statements import held, listed, these
from bide.stores.mysql.statements import rows as tuples
from bide.stores.sql.dialect import Fewer
from bide.stores.sql.journaled_connection import Runs

Places = list[int]
Tell = Callable[[Mapping[Topic, Millis]], None]
"""Takes note of the earliest wakes of a batch."""

_encode = msgspec.msgpack.encode
_answers = msgspec.msgpack.Decoder(list[Answer | None])
_truths = msgspec.msgpack.Decoder(list[bool])


class Old(NamedTuple):
    """A task that is there, and locked."""

    row: int
    record: Record


async def look_up(call: Call, asked: Sequence[Named]) -> list[Old]:
    """Those of these names that are there."""
    if not asked:
        return []
    answers = await call.send(*_about(call, "tasks_by_names", asked))
    return [Old(row[ROW], record_of(row)) for rows in answers for row in rows]


def _about(call: Call, query: str, asked: Sequence[Named]) -> list[bytes]:
    """A query by names, once for each topic."""
    return [call.write(query, topic=topic, keys=listed(keys, call.quote)) for topic, keys in by_topic(asked)]


def by_topic(asked: Sequence[Named]) -> list[tuple[Topic, list[str]]]:
    """Each topic with its keys, both sorted."""
    names: dict[Topic, set[str]] = {}
    for one in asked:
        names.setdefault(one.topic, set()).add(one.key)
    return [(topic, sorted(names[topic])) for topic in sorted(names)]


async def lock(
    call: Call, asked: Sequence[Named], begin: Sequence[bytes]
) -> tuple[Millis, int, dict[tuple[Topic, str], Old]]:
    """The time there, in both units, and those of the names that are there, locked."""
    statements = [*begin, call.write("clock"), *_about(call, "lock_tasks", asked)]
    [[(there, micros)], *answers] = await call.timed(*statements)
    olds: dict[tuple[Topic, str], Old] = {}
    for rows in answers:
        for row in rows:
            old = Old(row[ROW], record_of(row))
            olds[old.record.topic, old.record.key] = old
    return there, micros, olds


# --- change and settle


async def change(
    connection: Runs, changes: Sequence[Change], now: Millis | None, about: Millis, tell: Tell
) -> list[Answer]:
    """Move, cancel, redrive: the rows are read under locks, and written with what was decided."""

    def decide(asked: Change, old: Old | None, there: Millis, token: Token, writes: Writes) -> Answer:
        answer = lifecycle.change(asked, None if old is None else old.record, there, token)
        record = answer.record
        if old is not None and record is not None and record.token == token:
            writes.put_or_forget(old.row, record, there)
        return answer

    async def repeated(row: Repeated, call: Call) -> list[Answer]:
        return [answer for answer in _answers.decode(row.answer or b"\x90") if answer is not None]

    return await _decided(connection, changes, now, tell, decide, repeated)


async def settle(
    connection: Runs,
    outcomes: Sequence[Settlement],
    now: Millis | None,
    about: Millis,
    tell: Tell,
    leased: LeasedRows | None = None,
) -> list[bool]:
    """Record how leases ended. All plain Done, leased here and still ours: one conditional delete."""
    known = _NOTHING if leased is None else leased.of(outcomes)
    if known.complete and all(
        one.verdict is Verdict.DONE and one.wake is None and one.keep_until <= about for one in outcomes
    ):
        try:
            return await _settle_done(connection, known, now)
        except Fewer:
            pass  # somebody else has one of them, or it has been settled: see which

    def decide(asked: Settlement, old: Old | None, there: Millis, token: Token, writes: Writes) -> bool:
        if old is None or not lifecycle.holds(old.record, asked.token):
            return False
        writes.put_or_forget(old.row, lifecycle.settle(asked, old.record, there, token), there)
        return True

    async def repeated(row: Repeated, call: Call) -> list[bool]:
        return _truths.decode(row.answer or b"\x90")

    answers = await _decided(connection, outcomes, now, tell, decide, repeated, known.emptied)
    known.settled()
    return answers


_NOTHING = Settling([], False, {}, [])


async def _settle_done(connection: Runs, known: Settling, now: Millis | None) -> list[bool]:
    """Raises Fewer, and settles none, unless all are held by these tokens."""

    count = len(known.rows)
    holds = held((row, token) for row, token, _, _ in known.rows)
    grouped = [row for row, _, grouped, _ in known.rows if grouped]

    async def delete(call: Call) -> list[bool]:
        statements = [call.write("begin"), *call.read_clock(now), call.write("clock")]
        statements.append(call.write("settle_done", held=holds))
        statements.append(call.write("all_of_them", count=count))
        if grouped:
            statements.append(call.write("leave_groups", rows=listed(grouped)))
        await call.timed(*statements, *close(call, known.emptied), *call.pass_gate(0), commits=True)
        return [True] * count

    async def deleted(row: Repeated, call: Call) -> list[bool]:
        return [True] * count

    answers = await connection.run(delete, deleted, past=delete)
    known.settled()
    return answers


def _holds(leases: Sequence[Lease]) -> list[tuple[Topic, list[tuple[str, Token]]]]:
    """Each topic with its (key, token), both sorted."""
    holds: dict[Topic, set[tuple[str, Token]]] = {}
    for one in leases:
        holds.setdefault(one.topic, set()).add((one.key, one.token))
    return [(topic, sorted(holds[topic])) for topic in sorted(holds)]


Decision = TypeVar("Decision")
Asked = TypeVar("Asked", Change, Settlement)


async def _decided(
    connection: Runs,
    asked: Sequence[Asked],
    now: Millis | None,
    tell: Tell,
    decide: Callable[[Asked, Old | None, Millis, Token, Writes], Decision],
    repeated: Callable[[Repeated, Call], Any],
    emptied: Sequence[FileName] = (),
) -> list[Decision]:
    """Read under locks, decide, write: one transaction of two round trips. `emptied`: files that end with that."""
    parts = rounds(asked)

    async def work(call: Call) -> list[Decision]:
        decided: list[Any] = [None] * len(asked)
        wakes: dict[Topic, Millis] = {}
        begin = call.begin(now, len(asked))
        highest: Token = 0
        for number, part in enumerate(parts):
            there, micros, olds = await lock(call, [asked[place] for place in part], begin)
            begin = []
            writes = Writes()
            for place in part:
                old = olds.get((asked[place].topic, asked[place].key))
                token = micros if old is None else max(old.record.token + 1, micros)
                highest = max(highest, token)
                decided[place] = decide(asked[place], old, there, token, writes)
            for record in writes.waiting:
                earliest(wakes, record.topic, record.wake_at)
            statements = writes.statements(call)
            if number == len(parts) - 1:
                tell(wakes)
                statements += close(call, emptied)
                await call.send(*statements, *call.pass_gate(highest, _encode(decided)), commits=True)
            elif statements:
                await call.send(*statements)
        return decided

    decided: list[Decision] = await connection.run(work, repeated, past=work)
    return decided


class Writes:
    """The writes of one round, gathered so that they go out as one packet."""

    __slots__ = ("_forgotten", "_joining", "_kept", "_leaving", "_put", "_replaced", "waiting")

    def __init__(self) -> None:
        self._put: list[tuple[Any, ...]] = []
        self._replaced: list[tuple[Any, ...]] = []
        self._forgotten: list[int] = []
        self._kept: list[tuple[Millis, int]] = []
        self._leaving: list[int] = []
        self._joining: list[tuple[int, str, str, str]] = []
        self.waiting: list[Record] = []
        """Tasks that now wait, and may have to be told."""

    def replace(self, old: Old, record: Record) -> None:
        """A new life, with a payload and a group of its own."""
        self._replaced.append((*settled_values(old.row, record), record.options, record.payload, record.group))
        self.waiting.append(record)
        if record.group != old.record.group:
            if old.record.group is not None:
                self._leaving.append(old.row)
            if record.group is not None:
                self._joining.append((old.row, record.group, record.topic, record.key))

    def put_or_forget(self, row: int, record: Record, now: Millis) -> None:
        """A transition, which leaves payload, options and group as they are."""
        if record.keep_until is not None and record.keep_until <= now:
            self._forgotten.append(row)
            if record.group is not None:
                self._leaving.append(row)
            return
        self._put.append((*settled_values(row, record), b"", b""))
        if record.keep_until is not None:
            self._kept.append((record.keep_until, row))
        if record.state is State.WAITING:
            self.waiting.append(record)

    def statements(self, call: Call) -> list[bytes]:
        written = []
        if self._put:
            written.append(call.write("put_tasks", rows=tuples(self._put, call.quote)))
        if self._replaced:
            written.append(call.write("replace_tasks", rows=tuples(self._replaced, call.quote)))
        if self._forgotten:
            written.append(call.write("forget_tasks", these=these(sorted(self._forgotten))))
        if self._kept:
            written.append(call.write("keep_tasks", rows=tuples(sorted(self._kept))))
        if self._leaving:
            written.append(call.write("leave_groups", rows=listed(sorted(self._leaving))))
        if self._joining:
            written.append(call.write("join_groups", rows=tuples(self._joining, call.quote)))
        return written


# --- extend


async def extend(connection: MySqlConnection, leases: Sequence[Lease], now: Millis | None, lasts: Millis) -> list[bool]:
    """Keep each lease for so long from now on."""
    asked = _holds(leases)

    async def work(call: Call) -> set[tuple[str, str, int]]:
        statements = [call.write("begin"), *call.read_clock(now), call.write("clock")]
        for topic, holds in asked:
            keys, pairs = listed([key for key, _ in holds], call.quote), tuples(holds, call.quote)
            named = {"topic": topic, "keys": keys, "holds": pairs}
            statements.append(call.write("file_shortened", **named, lasts=lasts, me=call.caller))
            statements.append(call.write("extend_leases", **named, lasts=lasts))
            statements.append(call.write("held", **named))
        [_, *answers] = await call.timed(*statements, *call.ending())
        return {
            (topic.decode("utf-8", "surrogateescape"), key.decode("utf-8", "surrogateescape"), token)
            for rows in answers
            for topic, key, token in rows
        }

    held = await connection.repeat(work, past=work)
    return [tuple(lease) in held for lease in leases]
