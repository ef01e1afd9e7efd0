"""The operations: those that write, each a numbered call, and those that only read.

If a call needs no reading first (new keys, plain Done, an extension), it is one packet and one round trip. The rest is
decided here, see `sql.operations`: one transaction of two round trips, which reads rows under locks and writes them by
primary key.
"""

from __future__ import annotations

import asyncio
from bisect import bisect
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property, partial
from typing import Any, TypeVar

from asyncmy.errors import MySQLError

from bide.core import lifecycle
from bide.core.answers import Answer
from bide.core.errors import BadInput
from bide.core.instants import LAST_INSTANT, At, Due, Millis
from bide.core.records import (
    Change,
    Count,
    Lease,
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
from bide.stores.mysql.connection import BEGIN, Call, MySqlConnection, Repeated, Rows, meaning
from bide.stores.mysql.lease_batches import BatchKey, LeasedRows, Settling, delete_batches, under_way
from bide.stores.mysql.queries import (
    ROW,
    Code,
    held,
    listed,
    record_of,
    returns_tokens,
    settled_values,
    table_of_pairs,
    these,
    tuples,
)
from bide.stores.sql.dialect import KeyTaken, RowsMissing, TransactionConflict
from bide.stores.sql.journaled_connection import Runs
from bide.stores.sql.operations import (
    CODES,
    STATES,
    Batch,
    Found,
    MessagesOf,
    Places,
    answers_of,
    decide_added,
    decide_changes,
    decide_settlements,
)
from bide.stores.sql.reading import LATEST, Located, ServerReads, by_wake_at, count_of

T = TypeVar("T", str, tuple[str, Token])


async def read_tasks(call: Call, asked: Sequence[Named]) -> list[Record]:
    """Read the existing tasks of these names."""
    if not asked:
        return []
    return [record_of(row) for rows in await call.send(*_about(call, "tasks_by_names", asked)) for row in rows]


def _about(call: Call, query: str, asked: Sequence[Named]) -> list[bytes]:
    """Write a query by names, once for each topic."""
    keys = by_topic((one.topic, one.key) for one in asked)
    return [call.write(query, topic=topic, keys=listed(its, call.quote)) for topic, its in keys]


def by_topic(pairs: Iterable[tuple[Topic, T]]) -> list[tuple[Topic, list[T]]]:
    """Group the pairs by topic; sort the topics and their elements."""
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
    "join_groups": lambda rows, quote: tuples(sorted(rows), quote),
}
"""The queries for a batch's gathered writes, in the order of sending, with the functions that write their rows."""


_KEPT = Code(b"'', '', NULL")
"""The options, payload and group in `put_tasks`, which does not write them."""


class MySqlBatch(Batch):
    """See `sql.operations`."""

    def __init__(
        self, call: Call, now: Millis | None, most: int, *, adding: bool = False, emptied: Sequence[BatchKey] = ()
    ) -> None:
        """`most`: the maximum of tokens above the clock. `emptied`: the batches of leases to delete with this call."""
        self.call = call
        self.now = now
        self.begin = call.begin(now, most)
        """The statements that begin the transaction; empty once it has begun."""
        self._adding = adding
        if adding and now is None:
            self.begin.append(call.write("first_token"))
        self._emptied = emptied
        self._highest: Token = 0
        """The highest token given to existing tasks."""
        self._rows: dict[str, list[Any]] = defaultdict(list)
        """The rows to write, by query."""
        self._new: tuple[Sequence[NewTask], Places, list[Any]] = (), [], []
        """The tasks to insert, see `insert`."""
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
        self._highest = max(self._highest, *(one.token for one in found))
        return found

    def replace(self, found: Found, record: Record) -> None:
        """Write a new life of a task, with its own payload and group."""
        assert found.record is not None
        row = found.row
        self._rows["replace_tasks"].append((*settled_values(row, record), record.options, record.payload, record.group))
        self.waiting.append(record)
        if record.group != found.record.group and found.record.group is not None:
            self._rows["leave_groups"].append(row)
        if record.group is not None:
            self._join(found, record)

    def put_or_forget(self, found: Found, record: Record, *, moved: bool = False) -> None:
        row = found.row
        if record.keep_until is not None and record.keep_until <= self.there:
            self._rows["forget_tasks"].append(row)
            if record.group is not None:
                self._rows["leave_groups"].append(row)
            return
        self._rows["put_tasks"].append((*settled_values(row, record), _KEPT))
        if record.group is not None:
            self._join(found, record)
        if record.keep_until is not None:
            self._rows["keep_tasks"].append((record.keep_until, row))
        if record.state is State.WAITING:
            self.waiting.append(record)

    def _join(self, found: Found, record: Record) -> None:
        """Write which group the task belongs to, which is not None, and whether it lives, if that has changed."""
        old, group, live = found.record, record.group, record.state.live
        if old is None or (old.group, old.state.live) != (group, live):
            self._rows["join_groups"].append((found.row, group, record.topic, record.key, int(not live)))

    async def insert(self, tasks: Sequence[NewTask], places: Places, answers: list[Any]) -> Places:
        """Leave the insertion to the packet with the other writes."""
        self._new = tasks, places, answers
        return []

    def _written(self) -> list[bytes]:
        """The statements for the gathered writes, which are then forgotten, and for the insertion of new tasks."""
        call, gathered = self.call, self._rows
        self._rows = defaultdict(list)
        written = {query: write(gathered[query], call.quote) for query, write in _WRITES.items() if query in gathered}
        statements = [call.write(query, rows=rows, these=rows) for query, rows in written.items()]
        tasks, places, _ = self._new
        return statements + (_insertion(call, [tasks[place] for place in places], self.now) if places else [])

    async def flush(self) -> None:
        if statements := self._written():
            await self._send(statements)

    async def finish(self, answer: bytes, messages: list[str]) -> None:
        call, above = self.call, Code(b"%d" % self._highest)
        if self._adding:
            above = Code(b"GREATEST(%b, %b)" % (above, _highest(call, self.now)))
        statements = [*self._written(), *delete_batches(call, self._emptied), *call.pass_gate(above, answer)]
        await self._send(statements, commits=True)

    async def _send(self, statements: Sequence[bytes], *, commits: bool = False) -> None:
        """Send the statements. If another caller has inserted one of the keys meanwhile, the batch is tried again."""
        tasks, places, answers = self._new
        try:
            answered = await self.call.send(*statements, commits=commits)
        except (MySQLError, KeyTaken) as error:
            if places and isinstance(meaning(error, ""), KeyTaken):
                raise TransactionConflict("a key was taken meanwhile") from error
            raise
        if places:
            _created(answers, tasks, places, self.there, answered[0])
            self._new = (), [], []


# --- change and settle


async def change(
    connection: Runs, changes: Sequence[Change], now: Millis | None, about: Millis, messages_of: MessagesOf
) -> list[Answer]:
    """Move, cancel, redrive: read the rows under locks, and write the decisions."""
    begin = partial(MySqlBatch, now=now, most=len(changes))
    return await decide_changes(connection, changes, messages_of, begin)


async def settle(
    connection: Runs,
    outcomes: Sequence[Settlement],
    now: Millis | None,
    about: Millis,
    messages_of: MessagesOf,
    leased: LeasedRows | None = None,
) -> list[bool]:
    """Record how leases ended. If all are plain Done, leased here and still ours: one conditional delete."""
    known = _NOTHING if leased is None else leased.of(outcomes)
    if known.complete and all(
        one.outcome is OutcomeKind.DONE and one.next_at is None and one.keep_until <= about for one in outcomes
    ):
        try:
            return await _settle_done(connection, known, now)
        except RowsMissing:
            pass  # one of them is held by another caller, or was settled: determine which

    begin = partial(MySqlBatch, now=now, most=len(outcomes), emptied=known.emptied)
    answers = await decide_settlements(connection, outcomes, messages_of, begin)
    known.settled()
    return answers


_NOTHING = Settling([], False, {}, [])


async def _settle_done(connection: Runs, known: Settling, now: Millis | None) -> list[bool]:
    """Settle all, if all are held with these tokens. Otherwise raises RowsMissing, and settles none."""

    count = len(known.rows)
    holds = held((row, token) for row, token, _, _ in known.rows)
    grouped = [row for row, _, grouped, _ in known.rows if grouped]

    async def delete(call: Call) -> list[bool]:
        statements = [BEGIN, *call.read_clock(now), call.write("clock")]
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


async def extend(
    connection: MySqlConnection, leases: Sequence[Lease], now: Millis | None, *_: object, lasts: Millis
) -> list[bool]:
    """Let each lease last for `lasts` from now."""
    asked = by_topic((one.topic, (one.key, one.token)) for one in leases)

    async def work(call: Call) -> set[tuple[str, str, int]]:
        statements = [BEGIN, *call.read_clock(now), call.write("clock")]
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
# A task that ends with a retention adds a line to `kept`. If the task begins a new life meanwhile, the line stays, and
# the purge at its time discovers that it is obsolete.

_AT_ONCE = 1_000


async def purge(connection: MySqlConnection, now: Millis | None, limit: int) -> int:
    """Delete up to `limit` ended tasks, by their primary keys; return their number."""
    purged = 0
    most = _AT_ONCE

    async def work(call: Call) -> tuple[int, int]:
        """Delete some tasks; return their number, and the number of deleted lines of `kept`."""
        opened = [BEGIN, *call.read_clock(now), call.write("kept_until_now", most=most)]
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


async def forget_callers(call: Call, ours: list[str]) -> None:
    """Delete the rows of long inactive callers, except `ours`; keep the highest token of those deleted."""
    values = {"ours": listed(ours, call.quote), "there": call.there}
    [rows] = await call.send(call.write("forgotten_callers", **values))
    gone = [(name, micros) for name, micros in rows if name]
    if gone:
        await call.send(
            BEGIN,
            call.write("keep_highest", micros=max(micros for _, micros in gone)),
            call.write("forget_callers", names=listed([name for name, _ in gone], call.quote), there=call.there),
            *call.ending(),
        )


# --- add

_MANY = 32
"""The number of tasks from which reading the clock first is worth its round trip: it saves parsing expressions."""
_FIRST_PART, _PART = 64, 512
_COLUMNS = "topic, `key`, id, payload, at, due_at, created_at"


class _NewTasks:
    """The tasks to add, and facts about them that are computed once, if possible while the server works."""

    def __init__(self, tasks: Sequence[NewTask], note_wakes: Callable[[], object]) -> None:
        self.tasks = tasks
        self.note_wakes = note_wakes
        """Notes the earliest wake of each topic; one call is enough."""
        self.plain = _check_names(tasks)
        """True if all names are ASCII and need no escaping."""

    @cached_property
    def parts(self) -> list[Places]:
        """The result of `rounds`."""
        return rounds(self.tasks)

    @property
    def places(self) -> Places:
        """The places of all tasks. Raises KeyTaken if a key occurs twice."""
        if len(self.parts) > 1:
            raise KeyTaken("a key comes twice in a batch")
        return self.parts[0]


async def add(
    connection: Runs,
    tasks: Sequence[NewTask],
    now: Millis | None,
    about: Millis,
    messages_of: MessagesOf,
    conflicts: Conflicts | None = None,
) -> list[Answer]:
    """Schedule tasks: one packet if every key is new. `about`: the server's time, as far as it is known."""
    batch = _NewTasks(tasks, lambda: messages_of(wakes_of(tasks, about)))
    wary = conflicts is not None and conflicts.likely(tasks)
    many = now is None and len(tasks) >= _MANY  # then whether a key occurs twice is determined while the server works
    if not wary and (many or len(batch.parts) == 1):
        with suppress(KeyTaken):
            return await _add_new(connection, batch, now)
    batch.note_wakes()

    async def decided_before(row: Repeated, call: Call) -> list[Answer]:
        return await _complete(call, tasks, answers_of(row.answer or b""), row)

    begin = partial(MySqlBatch, now=now, most=len(tasks), adding=True)
    answers: list[Answer] = await decide_added(connection, tasks, messages_of, begin, kept_of=decided_before)
    if conflicts is not None:
        taken = [new for new, answer in zip(tasks, answers, strict=True) if answer.result is not Result.CREATED]
        conflicts.met(tasks, taken)
    return answers


def _check_names(tasks: Sequence[NewTask]) -> bool:
    """True if all names are ASCII and need no escaping. Usually checks all at once. Raises BadInput."""
    text = "".join([f"{new.topic}{new.key}{new.id}{new.group or ''}" for new in tasks])
    if text.isascii() and "\0" not in text:
        return "'" not in text and "\\" not in text
    for new in tasks:
        text = f"{new.topic}{new.key}{new.id}{new.group or ''}"
        if "\0" in text:
            raise BadInput("task", (new.topic, new.key, new.group), "names without NUL")
        try:
            text.encode()
        except UnicodeEncodeError:
            raise BadInput("task", (new.topic, new.key, new.group), "text without lone surrogates") from None
    return False


async def _add_new(connection: Runs, batch: _NewTasks, now: Millis | None) -> list[Answer]:
    """Insert all, or raise KeyTaken and insert none. One packet; for many tasks, one more to read the clock first."""
    tasks = batch.tasks

    async def insert(call: Call) -> list[Answer]:
        opened = [*call.begin(now, len(tasks)), *([call.write("first_token")] if now is None else [])]
        if now is None and len(tasks) >= _MANY and call.utc:
            asked = call.write("clock_and_token")
            [[(there, micros, first)]] = await call.timed(*opened, asked, meanwhile=lambda: batch.parts)
            if first <= micros:
                return await _insert_many(call, batch, there)
            opened = []  # the clock was set back: tokens continue from the last one
        places = batch.places
        statements = [*opened, call.write("clock"), *_insertion(call, [tasks[place] for place in places], now)]
        statements += call.pass_gate(_highest(call, now))
        [[(there, _)], tokens] = await call.timed(*statements, commits=True, meanwhile=batch.note_wakes)
        return _created([None] * len(tasks), tasks, places, there, tokens)

    async def inserted(row: Repeated, call: Call) -> list[Answer]:
        return await _complete(call, tasks, [None] * len(tasks), row)

    return await connection.run(insert, inserted, locked="report", adding=True)


async def _insert_many(call: Call, batch: _NewTasks, there: Millis) -> list[Answer]:
    """Insert in parts. While the server writes one, make the answers to the previous one, and prepare the next."""
    tasks, places = batch.tasks, batch.places
    answers: list[Any] = [None] * len(tasks)
    sending: asyncio.Task[list[Any]] | None = None
    sent: Places = []
    first, size = 0, _FIRST_PART

    async def answered(sending: asyncio.Task[list[Any]] | None) -> Rows:
        return () if sending is None else (await sending)[0]

    try:
        while first < len(places):
            part, first, size = places[first : first + size], first + size, min(4 * size, _PART)
            last = first >= len(places)
            statements = _insertion(call, [tasks[place] for place in part], None, there=there, plain=batch.plain)
            if last:
                statements += call.pass_gate(_highest(call, None))
            tokens = await answered(sending)
            note_wakes = None if sent else batch.note_wakes
            sending = asyncio.ensure_future(call.send(*statements, commits=last, meanwhile=note_wakes))
            await asyncio.sleep(0)  # let the packet go out before anything else is done
            _created(answers, tasks, sent, there, tokens)
            sent = part
        return _created(answers, tasks, sent, there, await answered(sending))
    except BaseException:
        if sending is not None and not sending.done():
            sending.cancel()
            await asyncio.wait([sending])
        raise


def _highest(call: Call, now: Millis | None) -> Code:
    """An upper bound of this call's tokens: an inserted row's token is the time of its insertion."""
    return Code(b"@bide_token") if now is not None else Code(b"GREATEST(@bide_token, " + call.there + b")")


def _insertion(
    call: Call, tasks: Sequence[NewTask], now: Millis | None, *, there: Millis | None = None, plain: bool = False
) -> list[bytes]:
    """The statements that insert these tasks, and return their tokens.

    `there`: the server's time, if it is known; then each row gets its default token. `plain`: true if the names need no
    escaping. Rows are built as text with one character per byte (Latin-1), which takes a fifth of the time for values
    that need no escaping.
    """
    quote = call.quote

    def text(data: bytes) -> str:
        return quote(data).decode("latin-1")

    plain = plain and call.utc
    payloads = b"".join([new.payload for new in tasks])
    whole = call.utc and b"'" not in payloads and b"\\" not in payloads
    token = ""
    if there is None:
        token = ", @bide_token" if now is not None else f", GREATEST(@bide_token, {call.there.decode()})"
    options = {new.options for new in tasks} != {b""}
    deadlines, groups = {new.deadline for new in tasks} != {None}, {new.group for new in tasks} != {None}
    topics = {topic: text(topic.encode()) for topic in {new.topic for new in tasks}}
    times: dict[Due, str] = {}  # many tasks have the same due time
    written = []
    for new in tasks:
        when = new.due
        if when not in times:
            times[when] = _times(when, there)
        names = f"'{new.key}', '{new.id}'" if plain else f"{text(new.key.encode())}, {text(new.id.encode())}"
        payload = f"'{new.payload.decode('latin-1')}'" if whole else text(new.payload)
        more = f", {text(new.options)}" if options else ""
        if deadlines:
            more += ", NULL" if new.deadline is None else f", {new.deadline}"
        if groups:
            more += ", NULL" if new.group is None else f", {text(new.group.encode())}"
        written.append(f"({topics[new.topic]}, {names}, {payload}, {times[when]}{token}{more})")
    several = (", token", bool(token)), (", options", options), (", deadline", deadlines), (", group_name", groups)
    columns = _COLUMNS + "".join(column for column, some in several if some)
    rows = Code(", ".join(written).encode("latin-1"))
    statements = [call.write("insert_tasks", columns=Code(columns.encode()), rows=rows)]
    grouped = [
        (Code(b"@bide_row + %d * @@auto_increment_increment" % number), new.group, new.topic, new.key, 0)
        for number, new in enumerate(tasks)
        if new.group is not None
    ]
    apart = not returns_tokens(call.queries["insert_tasks"])
    if apart or grouped:
        statements.append(call.write("first_row"))
    if apart:
        statements.append(call.write("inserted_tokens", count=len(tasks)))
    if grouped:
        statements.append(call.write("join_groups", rows=tuples(grouped, call.quote)))
    return statements


def _times(when: Due, there: Millis | None) -> str:
    """The values of `at`, `due_at` and `created_at`; expressions if the server's time is not known."""
    millis = min(max(when.millis, -LAST_INSTANT), LAST_INSTANT)
    if there is not None:
        due = min(max(millis if type(when) is At else there + millis, 0), LAST_INSTANT)
        return f"{max(due, there)}, {due}, {there}"
    if type(when) is At:
        return f"GREATEST({max(millis, 0)}, @bide_now), {max(millis, 0)}, @bide_now"
    if 0 <= millis < LAST_INSTANT // 2:
        return f"@bide_now+{millis}, @bide_now+{millis}, @bide_now"
    reckoned = f"LEAST(GREATEST(@bide_now{millis:+d}, 0), {LAST_INSTANT})"
    return f"{reckoned if millis >= 0 else '@bide_now'}, {reckoned}, @bide_now"


def _created(answers: list[Any], tasks: Sequence[NewTask], places: Places, there: Millis, tokens: Rows) -> list[Answer]:
    """Fill in the answers of the tasks at these places, which were inserted; return `answers`."""
    schedule = lifecycle.schedule
    for place, (token,) in zip(places, tokens, strict=True):
        answers[place] = schedule(tasks[place], None, there, token)
    return answers


async def _complete(
    call: Call, tasks: Sequence[NewTask], answers: Sequence[Answer | None], row: Repeated
) -> list[Answer]:
    """The answers of a call that was done before; reads the tasks that it created.

    If such a task is gone, or was leased or moved, its first token is useless by now: any token that is old enough will
    do. Its present token belongs to another caller, and must not be revealed.
    """
    missing = [place for place, answer in enumerate(answers) if answer is None]
    there = {(old.topic, old.key): old for old in await read_tasks(call, [tasks[place] for place in missing])}
    completed: list[Any] = list(answers)
    for place in missing:
        new = tasks[place]
        old = there.get((new.topic, new.key))
        token = row.micros  # the highest token that the call gave out
        if old is not None and old.id == new.id:
            untouched = old.state is State.WAITING and old.token <= token
            token = old.token if untouched else min(token, old.token - 1)
        completed[place] = lifecycle.schedule(new, None, row.now, token)
    return completed


# --- reads

_ENDED = [state for state in STATES if not state.live]
_FIRST = 1_000
"""The most tasks that are counted one by one."""


class MySqlReads(ServerReads):
    _record_of, _row = record_of, ROW

    async def _of_state(self, state: State, after: Topic) -> Any:
        if state is State.LEASED:
            return await self._call.ask("next_topic_leased", topic=after)
        return await self._call.ask("next_topic_of_state", state=CODES[state], topic=after)

    async def get(self, refs: Sequence[Ref]) -> list[Record | None]:
        found = {record.ref: record for record in await read_tasks(self._call, refs)}
        return [found.get(Ref(*ref)) for ref in refs]

    async def tally(
        self, spans: Sequence[tuple[Millis, Millis]], upto: int, only: Collection[Topic] | None, after: Topic, most: int
    ) -> tuple[Tally, Topic | None]:
        """Count the first tasks after the topic, and its last topic by the indexes: O(COUNTED + leased tasks)."""
        counts: dict[tuple[Topic, State], Count] = {}
        forecast: dict[Topic, list[Count]] = {}
        last: Topic | None = None
        if only is None:
            last = await self._count_first(after, spans, upto, counts, forecast)
        for topic in only or ([] if last is None else [last]):
            states, intervals = await self._counted(topic, spans, upto)
            counts.update({(topic, state): count for state, count in states.items() if count.number})
            if spans and states[State.WAITING].number:
                forecast[topic] = intervals
        return Tally(counts, forecast), last

    async def _count_first(
        self, after: Topic, spans: Sequence[tuple[Millis, Millis]], upto: int, counts: dict[tuple[Topic, State], Count],
        forecast: dict[Topic, list[Count]],
    ) -> Topic | None:  # fmt: skip
        """Count the first tasks after a topic; return the last of their topics, which may have more, left out."""
        edges = sorted({edge for span in spans for edge in span})
        interval = Code(f"INTERVAL(at, {', '.join(map(str, edges))})".encode()) if edges else 0
        rows = await self._call.ask("count_first", topic=after, most=_FIRST, interval=interval)
        full = sum(number for *_, number in rows) == _FIRST
        end = max(rows)[0] if full else None
        numbers: Counter[tuple[Topic, State]] = Counter()
        for name, code, part, number in rows:
            if name == end:
                continue
            topic, state = self._call.name(name), STATES[code]
            numbers[topic, state] += number
            if state is State.WAITING and spans:
                found = forecast.setdefault(topic, [Count(0)] * len(spans))
                for place, (low, high) in enumerate(spans):
                    if bisect(edges, low) <= part < bisect(edges, high):
                        found[place] = count_of(found[place].number + number, upto)
        counts.update({of: count_of(number, COUNTED) for of, number in numbers.items()})
        return None if end is None else self._call.name(end)

    async def _counted(
        self, topic: Topic, spans: Sequence[tuple[Millis, Millis]], upto: int
    ) -> tuple[dict[State, Count], list[Count]]:
        """Count the tasks in each state, and the waiting ones in each interval.

        Leased tasks are counted one by one, and subtracted from the waiting ones, which share their index range.
        """
        call = self._call
        held = await under_way(call, topic)
        intervals = [(0, LATEST, COUNTED), *[(low, high, upto) for low, high in spans]]
        asked, among = [], []
        for low, high, most in intervals:
            among.append(sum(low <= one.at < high for one in held))
            asked.append(call.write("count", topic=topic, ended=0, low=low, high=high, most=among[-1] + most + 1))
        everything = {"topic": topic, "low": 0, "high": LATEST, "most": COUNTED + 1}
        asked += [call.write("count", ended=CODES[state], **everything) for state in _ENDED]
        numbers = [number for ((number,),) in await call.send(*asked)]
        waiting = [
            count_of(number - leased, most)
            for number, leased, (_, _, most) in zip(numbers, among, intervals, strict=False)
        ]
        ended = [count_of(number, COUNTED) for number in numbers[len(intervals) :]]
        states = {State.WAITING: waiting[0], State.LEASED: count_of(len(held), COUNTED)}
        return {**states, **dict(zip(_ENDED, ended, strict=True))}, waiting[1:]

    async def by_time(
        self, topic: Topic, state: State, after: tuple[Millis, int], before: Millis, most: int
    ) -> list[Located]:
        if state is State.LEASED:
            return await self._leased(topic, after, before, most)
        instant, row = after
        values = {"topic": topic, "state": CODES[state], "instant": instant, "most": most}
        statements = [self._call.write("page_after_instant", before=before, **values)]
        if instant < before:
            statements.insert(0, self._call.write("page_at_instant", row=max(row, 0), **values))
        found: list[Located] = []
        for rows in await self._call.send(*statements):
            found += self._located(rows)
        return found[:most]

    async def _leased(self, topic: Topic, after: tuple[Millis, int], before: Millis, most: int) -> list[Located]:
        held = [one for one in await under_way(self._call, topic) if (one.wake, one.row) > after and one.wake < before]
        if not held:
            return []
        rows = sorted(one.row for one in held[:most])
        [found] = await self._call.send(self._call.write("tasks_by_rows", these=these(rows)))
        return sorted(self._located(found), key=by_wake_at)
