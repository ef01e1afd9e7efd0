"""The operations that write, each a numbered call.

What can be said in advance (keys that are new, plain Done, an extension) is one packet and one round trip. The rest is
decided here, see `sql.operations`: one transaction of two round trips, in which rows are written by their primary key.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from bide.core.answers import Answer
from bide.core.instants import Millis
from bide.core.records import Change, Lease, Record, Settlement, State, Token, Topic, Verdict
from bide.stores.batches import Named
from bide.stores.mysql.journaled_connection import Call, MySqlConnection, Repeated
from bide.stores.mysql.lease_batches import BatchKey, LeasedRows, Settling, delete_batches
from bide.stores.mysql.queries import ROW, Code, held, listed, record_of, settled_values, table_of_pairs, these, tuples
from bide.stores.sql.dialect import Fewer
from bide.stores.sql.journaled_connection import Runs
from bide.stores.sql.operations import Batch, Found, Tell, decide_changes, decide_settlements

T = TypeVar("T", str, tuple[str, Token])


async def look_up(call: Call, asked: Sequence[Named]) -> list[Record]:
    """Those of these names that are there."""
    if not asked:
        return []
    return [record_of(row) for rows in await call.send(*_about(call, "tasks_by_names", asked)) for row in rows]


def _about(call: Call, query: str, asked: Sequence[Named]) -> list[bytes]:
    """A query by names, once for each topic."""
    keys = by_topic((one.topic, one.key) for one in asked)
    return [call.write(query, topic=topic, keys=listed(its, call.quote)) for topic, its in keys]


def by_topic(pairs: Iterable[tuple[Topic, T]]) -> list[tuple[Topic, list[T]]]:
    """Each topic with what comes with it, both sorted."""
    found: dict[Topic, set[T]] = {}
    for topic, one in pairs:
        found.setdefault(topic, set()).add(one)
    return [(topic, sorted(found[topic])) for topic in sorted(found)]


_WRITES: Mapping[str, Callable[..., Code]] = {
    "put_tasks": tuples,
    "replace_tasks": tuples,
    "forget_tasks": lambda rows, quote: these(sorted(rows)),
    "keep_tasks": lambda rows, quote: tuples(sorted(rows)),
    "leave_groups": lambda rows, quote: listed(sorted(rows)),
    "join_groups": tuples,
}
"""The queries that write what a batch has gathered, in the order in which they go, and how their rows are written."""


class MySqlBatch(Batch):
    """See `sql.operations`. `emptied`: batches that end with it."""

    def __init__(self, call: Call, now: Millis | None, most: int, emptied: Sequence[BatchKey] = ()) -> None:
        """`most`: how many tokens above the clock may be given out."""
        self.call = call
        self.begin = call.begin(now, most)
        """The statements that open the transaction, until it is open."""
        self._emptied = emptied
        self.highest: Token = 0
        """The highest token that was given out."""
        self._rows: dict[str, list[Any]] = defaultdict(list)
        """The rows to write, by query."""
        self.waiting: list[Record] = []

    async def lock(self, asked: Sequence[Named]) -> list[Found]:
        call = self.call
        statements = [*self.begin, call.write("clock"), *_about(call, "lock_tasks", asked)]
        self.begin = []
        [[(self.there, micros)], *answers] = await call.timed(*statements)
        rows = {}
        for row in (row for rows_of_topic in answers for row in rows_of_topic):
            record = record_of(row)
            rows[record.topic, record.key] = Found(record, max(record.token + 1, micros), row[ROW])
        found = [rows.get((one.topic, one.key)) or Found(None, micros) for one in asked]
        self.highest = max(self.highest, *(one.token for one in found))
        return found

    def replace(self, found: Found, record: Record) -> None:
        """Write a new life of a task, with a payload and a group of its own."""
        assert found.record is not None
        row = found.row
        self._rows["replace_tasks"].append((*settled_values(row, record), record.options, record.payload, record.group))
        self.waiting.append(record)
        if record.group != found.record.group:
            if found.record.group is not None:
                self._rows["leave_groups"].append(row)
            if record.group is not None:
                self._rows["join_groups"].append((row, record.group, record.topic, record.key))

    def put_or_forget(self, found: Found, record: Record, *, moved: bool = False) -> None:
        row = found.row
        if record.keep_until is not None and record.keep_until <= self.there:
            self._rows["forget_tasks"].append(row)
            if record.group is not None:
                self._rows["leave_groups"].append(row)
            return
        self._rows["put_tasks"].append((*settled_values(row, record), b"", b""))
        if record.keep_until is not None:
            self._rows["keep_tasks"].append((record.keep_until, row))
        if record.state is State.WAITING:
            self.waiting.append(record)

    def statements(self) -> list[bytes]:
        """The statements that write what was gathered, which is forgotten by that."""
        call, gathered = self.call, self._rows
        self._rows = defaultdict(list)
        written = {query: write(gathered[query], call.quote) for query, write in _WRITES.items() if query in gathered}
        return [call.write(query, rows=rows, these=rows) for query, rows in written.items()]

    async def flush(self) -> None:
        if statements := self.statements():
            await self.send(statements)

    async def finish(self, answer: bytes, wakes: Mapping[Topic, Millis], tell: Tell) -> None:
        statements = self.statements()
        tell(wakes)
        statements += [*delete_batches(self.call, self._emptied), *self.call.pass_gate(self.above(), answer)]
        await self.send(statements, commits=True)

    def above(self) -> Token | Code:
        """No token that this call has given out is higher."""
        return self.highest

    async def send(self, statements: Sequence[bytes], *, commits: bool = False) -> None:
        await self.call.send(*statements, commits=commits)


# --- change and settle


async def change(
    connection: Runs, changes: Sequence[Change], now: Millis | None, about: Millis, tell: Tell
) -> list[Answer]:
    """Move, cancel, redrive: the rows are read under locks, and written with what was decided."""
    begin = partial(MySqlBatch, now=now, most=len(changes))
    return await decide_changes(connection, changes, tell, begin)


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

    begin = partial(MySqlBatch, now=now, most=len(outcomes), emptied=known.emptied)
    answers = await decide_settlements(connection, outcomes, tell, begin)
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
        await call.timed(*statements, *delete_batches(call, known.emptied), *call.pass_gate(0), commits=True)
        return [True] * count

    async def deleted(row: Repeated, call: Call) -> list[bool]:
        return [True] * count

    answers = await connection.run(delete, deleted, locked="report")
    known.settled()
    return answers


# --- extend


async def extend(connection: MySqlConnection, leases: Sequence[Lease], now: Millis | None, lasts: Millis) -> list[bool]:
    """Keep each lease for so long from now on."""
    asked = by_topic((one.topic, (one.key, one.token)) for one in leases)

    async def work(call: Call) -> set[tuple[str, str, int]]:
        statements = [call.write("begin"), *call.read_clock(now), call.write("clock")]
        for topic, holds in asked:
            keys, pairs = listed([key for key, _ in holds], call.quote), tuples(holds, call.quote)
            named = {"topic": topic, "keys": keys, "holds": pairs}
            statements.append(call.write("insert_shortened", **named, lasts=lasts, me=call.caller))
            statements.append(call.write("extend_leases", **named, lasts=lasts))
            statements.append(call.write("held", **named))
        [_, *answers] = await call.timed(*statements, *call.ending())
        return {
            (topic.decode("utf-8", "surrogateescape"), key.decode("utf-8", "surrogateescape"), token)
            for rows in answers
            for topic, key, token in rows
        }

    held = await connection.repeat(work, locked="report")
    return [tuple(lease) in held for lease in leases]


# --- forgetting
#
# What ends with a time to be kept until leaves a line in `kept`. If the task lives again meanwhile, the line stays and
# is found out when its time has come.

_AT_ONCE = 1_000


async def purge(connection: MySqlConnection, now: Millis | None, limit: int) -> int:
    """Forget up to `limit` ended tasks, by their primary keys; how many it was."""
    purged = 0
    most = _AT_ONCE

    async def work(call: Call) -> tuple[int, int]:
        """How many tasks were forgotten, and how many lines of `kept`."""
        opened = [call.write("begin"), *call.read_clock(now), call.write("kept_until_now", most=most)]
        [lines] = await call.send(*opened)
        if not lines:
            await call.send(*call.ending())
            return 0, 0
        rows = these(sorted({row for _, row in lines}))
        [found, there] = await call.send(call.write("purgeable", these=rows), call.write("still_there", these=rows))
        forgotten = sorted(row for row, _ in found)
        grouped = sorted(row for row, has_group in found if has_group)
        locked = {row for (row,) in there}.difference(forgotten)
        over = [(until, row) for until, row in lines if row not in locked]
        statements = []
        if forgotten:
            statements.append(call.write("forget_tasks", these=these(forgotten)))
        if grouped:
            statements.append(call.write("leave_groups", rows=listed(grouped)))
        if over:
            statements.append(call.write("forget_kept", lines=table_of_pairs(over)))
        await call.send(*statements, *call.ending())
        return len(forgotten), len(over)

    while purged < limit:
        most = min(limit - purged, _AT_ONCE)
        forgotten, over = await connection.repeat(work)
        purged += forgotten
        if over < most:
            break
    return purged


async def forget_callers(connection: MySqlConnection, ours: list[str]) -> None:
    """Their highest token stays known."""

    async def work(call: Call) -> None:
        values = {"ours": listed(ours, call.quote), "there": call.there}
        [rows] = await call.send(call.write("forgotten_callers", **values))
        gone = [(name, micros) for name, micros in rows if name]
        if gone:
            await call.send(
                call.write("begin"),
                call.write("keep_highest", micros=max(micros for _, micros in gone)),
                call.write("forget_callers", names=listed([name for name, _ in gone], call.quote), there=call.there),
                *call.ending(),
            )

    await connection.repeat(work)
