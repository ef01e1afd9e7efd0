"""The operations that write, each a call of a lane.

What the statement itself can decide (a key that is new, a plain Done, an extension) is one statement and one round
trip. The rest reads the rows under locks, lets `core.lifecycle` decide, and writes rows: so it means the same as in
every other store. Rows are locked in the order of (topic, key), so that two batches over the same tasks wait for each
other and never in a circle. A key that comes several times in a batch is taken in rounds, within one transaction.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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
    NewTask,
    Record,
    Result,
    Settlement,
    State,
    Token,
    Topic,
    Verdict,
)
from bide.stores.postgres.lane import Call, Row, Runs, Shut
from bide.stores.postgres.rows import columns, record_of, storable, values_of

AT_ONCE = 2_000
"""Tasks in one statement: beyond that it is no quicker, and others wait longer."""
_LEASE_COLUMNS = 3

Named = NewTask | Change | Settlement | Lease
One = TypeVar("One", bound=Named)
Places = list[int]
Tell = Callable[[Mapping[Topic, Millis]], list[str]]
"""From the earliest wakes of a batch to the messages that are worth sending."""

_encode = msgspec.msgpack.encode
_answers = msgspec.msgpack.Decoder(list[Answer])
_truths = msgspec.msgpack.Decoder(list[bool])


def rounds(asked: Sequence[Named]) -> list[Places]:
    """The places of a batch in parts without a key twice, each sorted by name; what comes again is in a later part."""
    parts: list[dict[tuple[str, str], int]] = [{}]
    for place, one in enumerate(asked):
        name = (one.topic, one.key)
        for part in parts:
            if name not in part:
                part[name] = place
                break
        else:
            parts.append({name: place})
    return [[part[name] for name in sorted(part)] for part in parts]


def slices(asked: Sequence[One]) -> list[Sequence[One]]:
    return [asked[first : first + AT_ONCE] for first in range(0, len(asked), AT_ONCE)]


def earliest(wakes: dict[Topic, Millis], topic: Topic, wake: Millis) -> None:
    known = wakes.get(topic)
    if known is None or wake < known:
        wakes[topic] = wake


# --- add


async def add(lane: Runs, tasks: Sequence[NewTask], now: Millis | None, about: Millis, tell: Tell) -> list[Answer]:
    """Schedule each: one statement where every key is new. `about`: what time it is there, as far as is known."""
    answers: list[Any] = [None] * len(tasks)
    first, *later = rounds(tasks)
    rest: Places = []
    wakes: dict[Topic, Millis] = {}
    for new in tasks:
        earliest(wakes, new.topic, min(max(new.due.resolve(about), about), LAST_INSTANT))
    said = tell(wakes)
    try:
        arguments = _insertion(tasks, first)

        async def insert(call: Call) -> None:
            rows = await call.timed("insert_tasks", now, call.caller, call.number, *arguments, said)
            if not rows:
                raise Shut
            rest.extend(_inserted(tasks, first, rows[0], answers))

        async def inserted(row: Row, call: Call) -> None:
            rest.extend(_inserted(tasks, first, row, answers))

        await lane.run(insert, inserted, adding=True)
        rest.extend(place for part in later for place in part)
        if rest:
            await _add_again(lane, tasks, rest, answers, now, said)
    except StoreError as error:
        if all(answer is None for answer in answers):
            raise
        raise PartlyFailed([error if answer is None else answer for answer in answers]) from error
    return answers


def _insertion(tasks: Sequence[NewTask], places: Places) -> list[list[Any]]:
    rows = []
    for place in places:
        new = tasks[place]
        due = min(max(new.due.millis, -LAST_INSTANT), LAST_INSTANT)
        rows.append(
            (new.topic, new.key, due, type(new.due) is not At, new.deadline, new.id, new.group, new.options,
             new.payload)
        )  # fmt: skip
    return columns(rows, 9)


def _inserted(tasks: Sequence[NewTask], places: Places, row: Any, answers: list[Any]) -> Places:
    """Fill in the answers of those that were new; the places of the others."""
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


async def _add_again(
    lane: Runs, tasks: Sequence[NewTask], rest: Places, answers: list[Any], now: Millis | None, said: list[str]
) -> None:
    """Some keys were taken, or come twice: take those through the lifecycle, under locks."""
    rest.sort()
    asked = [tasks[place] for place in rest]

    async def decide(call: Call) -> list[Answer]:
        decided: list[Any] = [None] * len(asked)
        await call.begin()
        there: Millis = 0
        gate: tuple[Any, Any] = (call.caller, call.number)
        for part in rounds(asked):
            left = part
            while left:
                rows = await _lock(call, now, gate, asked, left)
                gate, there = (None, None), rows[0]["now"]
                writes = _Writes()
                free = []
                for place, row in zip(left, rows, strict=True):
                    if row["topic"] is None:  # it ended meanwhile, and nothing is in the way any more
                        free.append(place)
                        continue
                    new, old = asked[place], record_of(row, 3)
                    answer = decided[place] = lifecycle.schedule(new, old, row["now"], row["new_token"])
                    if answer.result is Result.REPLACED and answer.record is not None:
                        writes.put(answer.record)
                await writes.flush(call)
                left = free
                if free:
                    [one] = await call.timed("insert_tasks", now, None, None, *_insertion(asked, free), [])
                    left = _inserted(asked, free, one, decided)
        await _Writes().flush(call, _encode(decided), said, there)
        await call.commit()
        return decided

    async def decided_before(row: Row, call: Call) -> list[Answer]:
        return _answers.decode(row["answer"])  # type: ignore[call-overload]

    for place, answer in zip(rest, await lane.run(decide, decided_before, adding=True), strict=True):
        answers[place] = answer


async def _lock(
    call: Call, now: Millis | None, gate: tuple[Any, Any], asked: Sequence[Named], places: Places
) -> list[Any]:
    topics = [asked[place].topic for place in places]
    keys = [asked[place].key for place in places]
    rows = await call.timed("lock_tasks", now, *gate, topics, keys)
    if not rows:
        raise Shut
    return rows


# --- change and settle


async def change(lane: Runs, changes: Sequence[Change], now: Millis | None, about: Millis, tell: Tell) -> list[Answer]:
    """Move, cancel, redrive: the rows are read under locks, and written with what was decided."""

    def decide(asked: Change, old: Record | None, there: Millis, token: Token, writes: _Writes) -> Answer:
        answer = lifecycle.change(asked, old, there, token)
        record = answer.record
        if record is not None and record.token == token:
            if type(asked) is Move:
                writes.move(record)
            else:
                writes.put_or_forget(record, there)
        return answer

    async def repeated(row: Any, call: Call) -> list[Answer]:
        return _answers.decode(row["answer"])

    return await _decided(lane, changes, now, about, tell, decide, repeated)


async def settle(
    lane: Runs, outcomes: Sequence[Settlement], now: Millis | None, about: Millis, tell: Tell
) -> list[bool]:
    """Record how leases ended. All plain Done: one conditional delete; a batch of both kinds: one of each."""
    plain = [one.verdict is Verdict.DONE and one.wake is None and one.keep_until <= about for one in outcomes]
    settled = [False] * len(outcomes)
    done = [place for place, yes in enumerate(plain) if yes]
    other = [place for place, yes in enumerate(plain) if not yes]
    names = {(outcomes[place].topic, outcomes[place].key) for place in done}
    if any((outcomes[place].topic, outcomes[place].key) in names for place in other):
        done, other = [], list(range(len(outcomes)))  # one task both ways: what comes first counts
    if done:
        for place in await _settle_done(lane, outcomes, done, now):
            settled[place] = True
    if not other:
        return settled

    def decide(asked: Settlement, old: Record | None, there: Millis, token: Token, writes: _Writes) -> bool:
        if old is None or not lifecycle.holds(old, asked.token):
            return False
        told = msgspec.structs.replace(asked, error=storable(asked.error))
        writes.put_or_forget(lifecycle.settle(told, old, there, token), there)
        return True

    async def repeated(row: Any, call: Call) -> list[bool]:
        return _truths.decode(row["answer"])

    try:
        truths = await _decided(lane, [outcomes[place] for place in other], now, about, tell, decide, repeated)
    except StoreError as error:
        if not done:
            raise
        left = set(other)
        raise PartlyFailed([error if place in left else yes for place, yes in enumerate(settled)]) from error
    for place, yes in zip(other, truths, strict=True):
        settled[place] = yes
    return settled


async def _settle_done(lane: Runs, outcomes: Sequence[Settlement], places: Places, now: Millis | None) -> Places:
    """The places of those that were still held."""
    leases: dict[tuple[Topic, str, Token], int] = {}
    for place in places:
        one = outcomes[place]
        leases.setdefault((one.topic, one.key, one.token), place)  # the second of two settles nothing
    asked = sorted(leases)
    arguments = columns(asked, _LEASE_COLUMNS)

    async def delete(call: Call) -> Any:
        rows = await call.timed("settle_done", now, call.caller, call.number, *arguments)
        if not rows:
            raise Shut
        return rows[0]

    async def deleted(row: Any, call: Call) -> Any:
        return row

    row = await lane.run(delete, deleted)
    tokens = row["tokens"] or ()
    if len(tokens) == len(asked):
        return list(leases.values())
    held = set(zip(row["topics"] or (), row["keys"] or (), tokens, strict=True))
    return [place for lease, place in leases.items() if lease in held]


Decision = TypeVar("Decision")
Asked = TypeVar("Asked", Change, Settlement)


async def _decided(
    lane: Runs,
    asked: Sequence[Asked],
    now: Millis | None,
    about: Millis,
    tell: Tell,
    decide: Callable[[Asked, Record | None, Millis, Token, _Writes], Decision],
    repeated: Callable[[Any, Call], Any],
) -> list[Decision]:
    """Read under locks, decide, write: one transaction of four round trips."""
    parts = rounds(asked)

    async def work(call: Call) -> list[Decision]:
        decided: list[Any] = [None] * len(asked)
        wakes: dict[Topic, Millis] = {}
        await call.begin()
        gate: tuple[Any, Any] = (call.caller, call.number)
        writes, there = _Writes(), about
        for number, part in enumerate(parts):
            rows = await _lock(call, now, gate, asked, part)
            gate = (None, None)
            there = rows[0]["now"]
            for place, row in zip(part, rows, strict=True):
                old = None if row["topic"] is None else record_of(row, 3)
                decided[place] = decide(asked[place], old, there, row["new_token"], writes)
            for record in writes.waiting:
                earliest(wakes, record.topic, record.wake_at)
            if number < len(parts) - 1:
                await writes.flush(call)
                writes = _Writes()
        await writes.flush(call, _encode(decided), tell(wakes), there)
        await call.commit()
        return decided

    decided: list[Decision] = await lane.run(work, repeated)
    return decided


class _Writes:
    """The writes of one round, gathered so that they go out as one statement."""

    __slots__ = ("_forgotten", "_moved", "_put", "waiting")

    def __init__(self) -> None:
        self._put: list[tuple[Any, ...]] = []
        self._moved: list[tuple[Any, ...]] = []
        self._forgotten: list[tuple[str, str]] = []
        self.waiting: list[Record] = []
        """What now waits, and may have to be told."""

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


async def extend(lane: Runs, leases: Sequence[Lease], now: Millis | None, lasts: Millis) -> list[bool]:
    """Keep each lease for so long from now on."""
    asked = sorted(set(leases))
    arguments = columns(asked, _LEASE_COLUMNS)

    async def work(call: Call) -> set[tuple[str, str, int]]:
        rows = await call.timed("extend_leases", now, lasts, *arguments)
        return {(row["topic"], row["key"], row["token"]) for row in rows}

    held = await lane.read(work)
    return [lease in held for lease in leases]
