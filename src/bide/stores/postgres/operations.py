"""The operations that write, each a numbered call.

What the statement itself can decide (a key that is new, a move, a plain Done, an extension) is one statement and one
round trip. The rest reads the rows under locks, lets `core.lifecycle` decide, and writes rows: so it means the same as
in every other store. Rows are locked in the order of (topic, key), so that two batches over the same tasks wait for
each other and never in a circle. A key that comes several times in a batch is taken in rounds, in one transaction.
"""

from __future__ import annotations

from base64 import b64decode
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from bide.core import lifecycle
from bide.core.answers import Answer
from bide.core.errors import PartlyFailed, StoreError
from bide.core.instants import LAST_INSTANT, Millis
from bide.core.records import (
    At,
    Change,
    Lease,
    Move,
    Record,
    Result,
    Settlement,
    State,
    Token,
    Topic,
    Verdict,
)
from bide.core.texts import storable
from bide.stores.batches import Named, earliest, rounds, wakes_of
from bide.stores.postgres.journaled_connection import Call, PostgresConnection
from bide.stores.postgres.rows import BYTES, columns, once, packed, record_of, values_of
from bide.stores.sql.dialect import Shut
from bide.stores.sql.journaled_connection import Runs
from bide.stores.sql.locked_rows import RowLocked

_LEASE_COLUMNS = 3

Places = list[int]
Tell = Callable[[Mapping[Topic, Millis]], list[str]]
"""From the earliest wakes of a batch to the messages that are worth sending."""

HELD = RowLocked("an open transaction of somebody else's keeps the task locked; nothing was done")
"""In the place of an answer."""
encode = msgspec.msgpack.encode
answers_of = msgspec.msgpack.Decoder(list[Answer | None])
"""None: passed over, since it was locked."""
_truths = msgspec.msgpack.Decoder(list[bool | None])


# --- change and settle


async def lock(
    call: Call,
    now: Millis | None,
    gate: tuple[Any, Any],
    asked: Sequence[Named],
    places: Places,
    query: str = "lock_tasks",
) -> list[Any]:
    """The rows of those names, with a new token each, locked. Raises Shut."""
    topics = [asked[place].topic for place in places]
    keys = [asked[place].key for place in places]
    rows = await call.timed(query, now, *gate, topics, keys)
    if not rows:
        raise Shut
    return rows


async def change(
    connection: Runs, changes: Sequence[Change], now: Millis | None, about: Millis, tell: Tell
) -> list[Any]:
    """Move, cancel, redrive: of nothing but moves those that apply are one statement, the rest is looked at first."""
    moves = [one for one in changes if type(one) is Move]
    if len(moves) < len(changes):
        return await _decide_changes(connection, changes, now, about, tell)
    answers: list[Any] = [None] * len(moves)
    locked = connection.passes
    if not locked:
        said = tell(wakes_of(moves, about))
        try:
            await move(connection, moves, answers, now, said)
        except RowLocked:  # not done: one of them was locked for longer than a lock is waited for
            locked, tell = True, lambda wakes: said  # which counts as told, and was not
    rest = [place for place, answer in enumerate(answers) if answer is None]
    if rest:
        try:
            decided = await _decide_changes(connection, [moves[place] for place in rest], now, about, tell, past=locked)
        except StoreError as error:
            if len(rest) == len(answers):
                raise
            raise PartlyFailed([error if answer is None else answer for answer in answers]) from error
        for place, answer in zip(rest, decided, strict=True):
            answers[place] = answer
    return answers


async def _decide_changes(
    connection: Runs, changes: Sequence[Change], now: Millis | None, about: Millis, tell: Tell, *, past: bool = False
) -> list[Any]:
    """The rows are read under locks, and written with what was decided."""

    def decide(asked: Change, old: Record | None, there: Millis, token: Token, writes: Writes) -> Answer:
        answer = lifecycle.change(asked, old, there, token)
        record = answer.record
        if record is not None and record.token == token:
            if type(asked) is Move:
                writes.move(record)
            else:
                writes.put_or_forget(record, there)
        return answer

    async def repeated(row: Any, call: Call) -> list[Answer | None]:
        return answers_of.decode(row["answer"])

    return await _decided(connection, changes, now, about, tell, decide, repeated, passing=past)


async def settle(
    connection: Runs, outcomes: Sequence[Settlement], now: Millis | None, about: Millis, tell: Tell
) -> list[Any]:
    """Record how leases ended. All plain Done: one conditional delete; a batch of both kinds: one of each."""
    plain = [one.verdict is Verdict.DONE and one.wake is None and one.keep_until <= about for one in outcomes]
    settled: list[Any] = [False] * len(outcomes)
    done = [place for place, yes in enumerate(plain) if yes]
    other = [place for place, yes in enumerate(plain) if not yes]
    names = {(outcomes[place].topic, outcomes[place].key) for place in done}
    if any((outcomes[place].topic, outcomes[place].key) in names for place in other):
        done, other = [], list(range(len(outcomes)))  # one task both ways: what comes first counts
    if done:
        held, missed = await _settle_done(connection, outcomes, done, now)
        for place in held:
            settled[place] = True
        for place in missed:
            settled[place] = HELD
    if not other:
        return settled

    def decide(asked: Settlement, old: Record | None, there: Millis, token: Token, writes: Writes) -> bool:
        if old is None or not lifecycle.holds(old, asked.token):
            return False
        told = msgspec.structs.replace(asked, error=asked.error and storable(asked.error))
        writes.put_or_forget(lifecycle.settle(told, old, there, token), there)
        return True

    async def repeated(row: Any, call: Call) -> list[bool | None]:
        return _truths.decode(row["answer"])

    try:
        truths = await _decided(connection, [outcomes[place] for place in other], now, about, tell, decide, repeated)
    except StoreError as error:
        if not done:
            raise
        left = set(other)
        raise PartlyFailed([error if place in left else yes for place, yes in enumerate(settled)]) from error
    for place, yes in zip(other, truths, strict=True):
        settled[place] = yes
    return settled


async def _settle_done(
    connection: Runs, outcomes: Sequence[Settlement], places: Places, now: Millis | None
) -> tuple[Places, Places]:
    """The places of those that were still held, and of those that somebody has locked."""
    leases: dict[tuple[Topic, str, Token], int] = {}
    for place in places:
        one = outcomes[place]
        leases.setdefault((one.topic, one.key, one.token), place)  # the second of two settles nothing
    asked = sorted(leases)
    arguments = columns(asked, _LEASE_COLUMNS)
    arguments[0] = once(arguments[0])

    async def delete(call: Call, query: str = "settle_done") -> Any:
        rows = await call.timed(query, now, call.caller, call.number, *arguments)
        if not rows:
            raise Shut
        passed_over = rows[0]["held"] if query == "settle_done_past" else None
        return rows[0], [asked[number - 1] for number in passed_over or ()]

    async def delete_past(call: Call) -> Any:
        return await delete(call, "settle_done_past")

    async def deleted(row: Any, call: Call) -> Any:
        return row, None  # what was passed over is forgotten: all that is left is asked for again

    row, locked = await connection.run(delete, deleted, past=delete_past)
    tokens = row["tokens"] or ()
    if len(tokens) == len(asked):
        return list(leases.values()), []
    held = set(zip(row["topics"] or (), row["keys"] or (), tokens, strict=True))
    if locked is None:
        locked = [lease for lease in asked if lease not in held]
    return [place for lease, place in leases.items() if lease in held], [leases[lease] for lease in locked]


Decision = TypeVar("Decision")
Asked = TypeVar("Asked", Change, Settlement)


async def _decided(
    connection: Runs,
    asked: Sequence[Asked],
    now: Millis | None,
    about: Millis,
    tell: Tell,
    decide: Callable[[Asked, Record | None, Millis, Token, Writes], Decision],
    repeated: Callable[[Any, Call], Any],
    *,
    passing: bool = False,
) -> list[Any]:
    """Read under locks, decide, write: one transaction of four round trips.

    `passing`: what others have locked is passed over from the first, since it was waited for already.
    """
    parts = rounds(asked)

    async def work(call: Call, query: str = "lock_tasks") -> list[Decision | None]:
        decided: list[Any] = [None] * len(asked)
        past = query == "lock_tasks_past"
        locked: set[tuple[Topic, str]] = set()
        wakes: dict[Topic, Millis] = {}
        await call.begin()
        gate: tuple[Any, Any] = (call.caller, call.number)
        writes, there = Writes(), about
        for number, part in enumerate(parts):
            rows = await lock(call, now, gate, asked, part, query)
            gate = (None, None)
            there = rows[0]["now"]
            for place, row in zip(part, rows, strict=True):
                one = asked[place]
                if past and (row["held"] or (one.topic, one.key) in locked):  # nor what comes later of the same task
                    locked.add((one.topic, one.key))
                    continue
                old = None if row["topic"] is None else record_of(row, 3)
                decided[place] = decide(asked[place], old, there, row["new_token"], writes)
            for record in writes.waiting:
                earliest(wakes, record.topic, record.wake_at)
            if number < len(parts) - 1:
                await writes.flush(call)
                writes = Writes()
        await writes.flush(call, encode(decided), tell(wakes), there)
        await call.commit()
        return decided

    async def work_past(call: Call) -> list[Decision | None]:
        return await work(call, "lock_tasks_past")

    decided: list[Decision | None] = await connection.run(work_past if passing else work, repeated, past=work_past)
    return [HELD if one is None else one for one in decided]


class Writes:
    """The writes of one round, gathered so that they go out as one statement."""

    __slots__ = ("_forgotten", "_moved", "_put", "waiting")

    def __init__(self) -> None:
        self._put: list[tuple[Any, ...]] = []
        self._moved: list[tuple[Any, ...]] = []
        self._forgotten: list[tuple[str, str]] = []
        self.waiting: list[Record] = []
        """Tasks that now wait, and may have to be told."""

    def put(self, record: Record) -> None:
        self._put.append(values_of(record))
        if record.state is State.WAITING:
            self.waiting.append(record)

    def move(self, record: Record) -> None:
        self._moved.append((record.topic, record.key, record.due_at, record.wake_at, record.token, record.deadline))
        self.waiting.append(record)

    def put_or_forget(self, record: Record, now: Millis) -> None:
        if record.keep_until is not None and record.keep_until <= now:
            self._forgotten.append((record.topic, record.key))
        else:
            self.put(record)

    async def flush(
        self, call: Call, answer: bytes | None = None, said: Sequence[str] = (), now: Millis | None = None
    ) -> None:
        """Write; with an `answer`, the call is over."""
        if answer is None and not (self._put or self._moved or self._forgotten):
            return
        number = None if answer is None else call.number
        await call.fetch(
            "write_tasks", *columns(self._put, 20), *columns(self._moved, 6), *columns(self._forgotten, 2),
            call.caller, number, now, answer, list(said),
        )  # fmt: skip


# --- extend


async def extend(
    connection: PostgresConnection, leases: Sequence[Lease], now: Millis | None, lasts: Millis
) -> list[Any]:
    """Keep each lease for so long from now on."""
    asked = sorted(set(leases))
    arguments = columns(asked, _LEASE_COLUMNS)
    locked: set[Lease] = set()

    async def work(call: Call) -> set[Lease]:
        rows = await call.timed("extend_leases", now, lasts, *arguments)
        return {Lease(row["topic"], row["key"], row["token"]) for row in rows}

    async def work_past(call: Call) -> set[Lease]:
        rows = await call.timed("extend_leases_past", now, lasts, *arguments)
        found = {(Lease(row["topic"], row["key"], row["token"]), row["held"]) for row in rows}
        locked.update(lease for lease, held in found if held)
        return {lease for lease, held in found if not held}

    held = await connection.repeat(work, past=work_past)
    return [HELD if lease in locked else lease in held for lease in leases]


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
        rows = await call.timed("move_tasks", now, call.caller, call.number, *arguments, said)
        if not rows:
            raise Shut
        answered(rows, 3)

    async def updated(row: Any, call: Call) -> None:
        answered(_moves_kept(row["answer"]))

    await connection.run(update, updated, past=update)


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
