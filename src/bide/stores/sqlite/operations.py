"""The operations that write, on one open transaction, and the unit of work that they share.

Each operation reads rows, lets `core.lifecycle` decide, and writes rows, so it has the same meaning as in every other
store. If the write itself can decide the common case (a new key, a plain Done), one optimistic statement for the whole
batch comes first, and its row count shows whether it applied to all.

The log of events and the register of workers, at the end, have separate tables.
"""

from __future__ import annotations

import logging
import sqlite3
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from itertools import chain
from operator import itemgetter
from typing import Any, TypeAlias, TypeVar, TypeVarTuple

from msgspec import Struct, structs

from bide.core import lifecycle
from bide.core.answers import Answer
from bide.core.events import Event
from bide.core.instants import NEVER, Millis
from bide.core.lifecycle import clamp, next_token
from bide.core.payloads import TOGETHER, fitting
from bide.core.records import (
    Change,
    Filter,
    Found,
    Lease,
    Leased,
    Move,
    NewTask,
    OutcomeKind,
    Page,
    Record,
    Ref,
    Settlement,
    State,
    Token,
    Topic,
)
from bide.stores.batches import Drained, drained
from bide.stores.sql.operations import AT, ROW, Row, event_of, pack_topics, record_of, unpack_topics, values_of
from bide.stores.sqlite.connection import lost_part
from bide.stores.sqlite.rows import (
    FEW,
    QUERIES,
    ByName,
    by_name,
    by_names,
    find_tasks,
    flaw_in,
    get_tasks,
    heads,
    mended,
    read_rows,
    sizes_of,
)

A = TypeVar("A")
T = TypeVar("T")
Ts = TypeVarTuple("Ts")
Write: TypeAlias = Callable[["UnitOfWork", Sequence[A], Millis], list[T]]
"""A verb for a batch, at a given time, in an open transaction."""
Fault: TypeAlias = Callable[[str], None]
"""Called with the name of a point between two statements; a test kills the process there.

The points: add:begun, add:inserted, add:decided (a key was taken); change:decided, change:written; lease:begun,
lease:selected, lease:updated; settle:begun, settle:done, or settle:decided and settle:written; and for every
transaction token:written (if one was given out), "before commit", "after commit".
"""

_MOST_WAKES = 64
"""The most topics whose heads one transaction reads and notes; of more it only notes that there were some."""
_KEPT_WAKES = 512
"""The least number of notes that are kept for the watchers of other processes."""
_ANY_TOPIC: Topic = ""
KEEP_DAMAGED: Millis = 14 * 86_400_000
"""How long a task that was set aside is kept: the default retention of dead tasks."""

_by_at, _topic, _payload = itemgetter(AT), itemgetter(0), itemgetter(-1)


class UnitOfWork(Struct, eq=False):
    """One open transaction as the operations see it: its cursor, its tokens, and the heads that it brings forward.

    The token counter is read at its first use, because other processes write it too between transactions. It is written
    once, at the end, because one row per transaction costs less than one per task.
    """

    cursor: sqlite3.Cursor
    fault: Fault | None = None
    writer: int = 0
    """The number of the process's `Notifier`, which notifies its own listeners; 0: nobody does."""
    others: bool = False
    """True if other workers may be live: then note what is taken."""
    wakes: dict[Topic, Millis] = {}
    """Once it is finished: the wakes before all others of their topic, or 0 if many topics have one."""
    payload_bytes: int = 0
    """The bytes of payloads written, as far as they matter for the size of the WAL."""
    _taken: dict[Topic, Drained] = {}
    _waiting: set[Topic] = set()
    _head: tuple[Topic | None, Millis] = (None, NEVER)
    _last: Token = -1
    _stored: Token = -1

    def one(self, query: str, arguments: tuple[Any, ...] = ()) -> Any:
        """The first row, or None."""
        return self.cursor.execute(query, arguments).fetchone()

    def last_token(self, topic: Topic | None = None) -> Token:
        """The last token given out. The first call also reads the head of `topic`."""
        if self._last < 0:
            found = self.one(QUERIES["last_token"], (topic,))
            if found is None or type(found[0]) is not int:
                raise lost_part(self.cursor, "the last token is gone")
            self._last = self._stored = found[0]
            self._head = (topic, NEVER if found[1] is None else found[1])
        return self._last

    def used_token(self, token: Token) -> None:
        """Note that `token` was given out, so that the next one is higher."""
        self._last = token

    def waits(self, topics: Iterable[Topic]) -> None:
        """Note that tasks of these topics now wait."""
        self._waiting.update(topics)

    def head_before(self, topic: Topic) -> Millis:
        """The head of `topic`, which all workers know, if `last_token` read it and nothing was leased since."""
        return self._head[1] if self._head[0] == topic else NEVER

    def leased(self, wants: Mapping[Topic, int], leased: Leased) -> None:
        """Note what a lease took, if there may be other workers."""
        self._head = (None, NEVER)
        if self.others:
            self._taken |= drained(wants, leased)

    def point(self, name: str) -> None:
        """Pass a point at which a test may kill the process."""
        if self.fault is not None:
            self.fault(name)

    def finish(self) -> None:
        """Write the heads that were brought forward, and the token counter. The last step before the commit."""
        for topic, (by, head) in self._taken.items():
            self._note(topic, by, head)
        if self._waiting:
            self._note_wakes()
        if self._last != self._stored:
            self.cursor.execute(QUERIES["put_token"], (self._last,))
            self._stored = self._last
            self.point("token:written")

    def _note_wakes(self) -> None:
        """Note the heads that have a token of this transaction. One seek for each topic, up to `_MOST_WAKES`."""
        if len(self._waiting) > _MOST_WAKES:
            self.wakes, notes = dict.fromkeys(self._waiting, 0), {_ANY_TOPIC: 0}
        else:
            heads = ((topic, self.one(QUERIES["waiting_head"], (topic,))) for topic in self._waiting)
            self.wakes = notes = {
                topic: head[0] for topic, head in heads if head is not None and head[1] > self._stored
            }
        for topic, wake in notes.items():
            self._note(topic, wake)

    def _note(self, topic: Topic, wake: Millis, head: Millis | None = None) -> None:
        line = self.cursor.execute(QUERIES["insert_wake"], (self.writer, topic, wake, head)).lastrowid or 0
        if line % _KEPT_WAKES == 0:
            self.cursor.execute(QUERIES["trim_wakes"], (line - _KEPT_WAKES,))


# --- the operations


def add(work: UnitOfWork, tasks: Sequence[NewTask], now: Millis) -> list[Answer]:
    """Schedule each task. O(log n) per task; one pass of inserts if every key is new."""
    work.point("add:begun")
    alone = tasks[0].topic if len(tasks) == 1 else None
    token = work.last_token(alone)
    answers = []
    rows = []
    schedule = lifecycle.schedule
    for new in tasks:
        token = next_token(token, now)
        answer = schedule(new, None, now, token)
        born = answer.record
        assert born is not None
        answers.append(answer)
        rows.append(
            (born.topic, born.key, born.wake_at, born.due_at, token, born.created_at, born.deadline, born.id,
             born.group, born.options, born.payload)
        )  # fmt: skip
    work.used_token(token)
    inserted = work.cursor.executemany(QUERIES["insert_task"], rows).rowcount
    work.payload_bytes += sum(map(len, map(_payload, rows)))
    work.point("add:inserted")
    if inserted != len(rows):
        _add_again(work, tasks, answers, now)
        work.point("add:decided")
    elif alone is not None and work.head_before(alone) <= rows[0][2]:
        return answers
    work.waits(map(_topic, rows))
    return answers


def _add_again(work: UnitOfWork, tasks: Sequence[NewTask], answers: list[Answer], now: Millis) -> None:
    """Decide the tasks whose keys were taken, or occur twice, by the lifecycle, in order.

    A row with its task's new token is the row that was just inserted for it.
    """
    writes = _Writes(work, tasks, now)
    for position, new in enumerate(tasks):
        born = answers[position].record
        row, old = writes.read(new.topic, new.key)
        if old is None or born is None:
            raise lost_part(work.cursor, "a key is taken in one index, and in no row")
        if old.token == born.token:
            continue
        token = next_token(work.last_token(), now)
        answer = answers[position] = lifecycle.schedule(new, old, now, token)
        if answer.result in lifecycle.ADDED and answer.record is not None:
            writes.put(row, answer.record)
    writes.flush()


def change(work: UnitOfWork, changes: Sequence[Change], now: Millis) -> list[Answer]:
    """Move, cancel, redrive: one read and one write for each."""
    answers = []
    writes = _Writes(work, changes, now)
    decide = lifecycle.change
    for asked in changes:
        row, old = writes.read(asked.topic, asked.key)
        token = next_token(work.last_token(), now)
        answer = decide(asked, old, now, token)
        answers.append(answer)
        record = answer.record
        if record is not None and record.token == token:
            writes.put(row, record, moved=type(asked) is Move)
    work.point("change:decided")
    writes.flush()
    work.point("change:written")
    return answers


def lease(work: UnitOfWork, wants: Mapping[Topic, int], now: Millis, until: Millis, holder: str) -> Leased:
    """Lease due tasks: O(log n) per task, however many wait, and two seeks per topic with room left.

    At most `TOGETHER` bytes of payloads, and one task of each further topic. The head of a topic cut short is due.
    """
    room = TOGETHER
    tasks: list[Record] = []
    updates: list[tuple[Any, ...]] = []
    asking: list[Topic] = []
    work.point("lease:begun")
    for topic, want in wants.items():
        rows = _due(work, topic, want, now, room) if want > 0 else []
        if len(rows) < want or want <= 0:
            asking.append(topic)
        token = work.last_token() if rows else 0
        for row in rows:
            token = next_token(token, now)
            record = lifecycle.lease(record_of(row), now, until, holder, token)
            tasks.append(record)
            updates.append((until, record.planned_at, record.attempt, record.losses, token, holder, row[ROW]))
        if rows:
            room -= sum(sizes_of(rows))
            work.used_token(token)
    work.point("lease:selected")
    if updates:
        work.cursor.executemany(QUERIES["lease_task"], updates)
        work.point("lease:updated")
    leased = Leased(tasks, heads(work.cursor, asking), now)
    work.leased(wants, leased)
    return leased


def _due(work: UnitOfWork, topic: Topic, want: int, now: Millis, room: int) -> list[Row]:
    """The due rows of `topic`, oldest first: waiting tasks and tasks with an expired lease, merged. See `read_rows`."""
    while True:
        waiting, lost = (read_rows(work.cursor, QUERIES["due"], (topic, state, now, want), room) for state in (0, 1))
        damaged = [(row, flaw) for row in chain(waiting, lost) if (flaw := flaw_in(row))]
        if not damaged:
            if not lost:
                return waiting
            due = sorted(waiting + lost, key=_by_at)[:want]
            return due[: fitting(sizes_of(due), room)]
        for row, flaw in damaged:
            _set_aside(work, row, flaw, now)


def _set_aside(work: UnitOfWork, row: Row, flaw: str, now: Millis) -> None:
    """Make a damaged task dead, so that an operator sees it and other tasks do not wait."""
    old = mended(row)
    token = next_token(work.last_token(), now)
    work.used_token(token)
    dead = structs.replace(
        old, state=State.DEAD, token=token, error=f"damaged row: {flaw}", finished_at=now, keep_until=now + KEEP_DAMAGED
    )
    work.cursor.execute(QUERIES["put_task"], _put_values(dead, row[ROW]))
    work.cursor.execute(QUERIES["rename_task"], (old.key, row[ROW]))


def _put_values(record: Record, row: int) -> tuple[Any, ...]:
    """The values for the query `put_task`: everything except topic and key."""
    return (*values_of(record, record.error)[2:], row)


def extend(work: UnitOfWork, leases: Sequence[Lease], until: Millis) -> list[bool]:
    """Extend each lease to `until`; one pass if all are still held."""
    rows = [(until, topic, key, token) for topic, key, token in leases]
    if work.cursor.executemany(QUERIES["extend_task"], rows).rowcount == len(rows):
        return [True] * len(rows)
    return [work.cursor.execute(QUERIES["extend_task"], row).rowcount == 1 for row in rows]


def settle(work: UnitOfWork, outcomes: Sequence[Settlement], now: Millis) -> list[bool]:
    """Record how leases ended. If all are Done and all leases are held: a pass of conditional writes for each kind."""
    work.point("settle:begun")
    if {one.outcome for one in outcomes} == {OutcomeKind.DONE} and _settle_done(work, outcomes, now):
        return [True] * len(outcomes)
    settled = []
    writes = _Writes(work, outcomes, now)
    for asked in outcomes:
        row, old = writes.read(asked.topic, asked.key)
        held = lifecycle.holds(old, asked.token)
        settled.append(held)
        if held and old is not None:
            writes.put(row, lifecycle.settle(asked, old, now, next_token(work.last_token(), now)))
    work.point("settle:decided")
    writes.flush()
    work.point("settle:written")
    return settled


def _settle_done(work: UnitOfWork, outcomes: Sequence[Settlement], now: Millis) -> bool:
    """Write these Done outcomes, as `lifecycle.settle` decides them, if all their leases are held; else nothing."""
    token = first = next_token(work.last_token(), now)
    rows: dict[str, list[tuple[Any, ...]]] = {"settle_done": [], "settle_kept": [], "settle_again": []}
    for token, one in enumerate(outcomes, first):
        lease = one.topic, one.key, one.token
        if one.next_at is not None:
            due_at = clamp(one.next_at.resolve(now))
            rows["settle_again"].append((*lease, one.next_id, due_at, due_at if due_at > now else now, token, now))
        elif one.keep_until > now:
            woke_at = min(one.token // 1000, now)
            rows["settle_kept"].append((now, woke_at, token, one.error, one.keep_until, *lease))
        else:
            rows["settle_done"].append(lease)
    work.cursor.execute("SAVEPOINT bide_settle")
    matched = sum(work.cursor.executemany(QUERIES[query], some).rowcount for query, some in rows.items() if some)
    work.point("settle:done")
    if matched != len(outcomes):
        work.cursor.execute("ROLLBACK TO bide_settle")
    work.cursor.execute("RELEASE bide_settle")
    if matched != len(outcomes):
        return False
    if len(rows["settle_done"]) < len(outcomes):
        work.used_token(token)
    work.waits(map(_topic, rows["settle_again"]))
    return True


def purge(work: UnitOfWork, now: Millis, limit: int) -> int:
    """Forget ended tasks whose retention has passed."""
    return work.cursor.execute(QUERIES["purge"], (now, limit)).rowcount if limit > 0 else 0


class Verbs(ABC):
    """The verbs that a store and a transaction on its file have in common."""

    _events_kept: int

    @abstractmethod
    async def _write(self, call: Write[A, T], asked: Sequence[A], now: Millis, *, adding: bool = False) -> list[T]:
        """Run a verb unless `asked` is empty. `adding`: check first that there is room for these tasks."""

    @abstractmethod
    async def _read(self, call: Callable[[sqlite3.Cursor, *Ts], T], *arguments: *Ts) -> T: ...

    async def add(self, tasks: Sequence[NewTask], *, now: Millis) -> list[Answer]:
        return await self._write(add, tasks, now, adding=True)

    async def change(self, changes: Sequence[Change], *, now: Millis) -> list[Answer]:
        return await self._write(change, changes, now)

    async def settle(self, outcomes: Sequence[Settlement], *, now: Millis) -> list[bool]:
        return await self._write(settle, outcomes, now)

    async def record(self, events: Sequence[Event]) -> None:
        await self._write(partial(record, kept=self._events_kept), events, 0)

    async def get(self, refs: Sequence[Ref]) -> list[Record | None]:
        return await self._read(get_tasks, refs)

    async def find(self, where: Filter, page: Page) -> Found:
        return await self._read(find_tasks, where, page)


class _Writes:
    """The writes of one operation, gathered so that each kind is one pass.

    A second read of the same task (a key that occurs twice in a batch) flushes the writes first.
    """

    __slots__ = ("_forgotten", "_found", "_moved", "_now", "_put", "_touched", "_work")

    def __init__(
        self, work: UnitOfWork, asked: Sequence[Change] | Sequence[Settlement] | Sequence[NewTask], now: Millis
    ) -> None:
        self._work = work
        self._now = now
        self._found: ByName = {}
        if len(asked) > FEW:
            self._found = by_names(work.cursor, [(one.topic, one.key) for one in asked])
        self._moved: list[tuple[Any, ...]] = []
        self._put: list[tuple[Any, ...]] = []
        self._forgotten: list[tuple[int]] = []
        self._touched: set[tuple[str, str]] = set()

    def read(self, topic: Topic, key: str) -> tuple[int, Record | None]:
        """The row number and the task; 0 and None if there is none."""
        name = (topic, key)
        if name in self._touched:
            self.flush()
        self._touched.add(name)
        return self._found.pop(name, None) or by_name(self._work.cursor, topic, key) or (0, None)

    def put(self, row: int, record: Record, *, moved: bool = False) -> None:
        """Write a task that has a new token; `moved`: that, and its times, are all that has changed."""
        self._work.used_token(record.token)
        if record.state is State.WAITING:
            self._work.waits((record.topic,))
        if moved:
            self._moved.append((record.due_at, record.wake_at, record.token, record.deadline, row))
        elif record.keep_until is not None and record.keep_until <= self._now:
            self._forgotten.append((row,))
        else:
            self._put.append(_put_values(record, row))

    def flush(self) -> None:
        for query, rows in (("move_task", self._moved), ("put_task", self._put), ("delete_task", self._forgotten)):
            if rows:
                self._work.cursor.executemany(QUERIES[query], rows)
        self._moved, self._put, self._forgotten = [], [], []
        self._touched.clear()


# --- events and workers

_log = logging.getLogger("bide.sqlite")


def record(work: UnitOfWork, events: Sequence[Event], now: Millis, kept: int) -> list[None]:
    """Append to the log. It is trimmed to `kept` lines once it is a tenth longer, so most calls only append."""
    work.cursor.executemany(QUERIES["insert_event"], map(structs.astuple, events))
    first, last = work.one(QUERIES["event_span"])
    if last - first >= kept + kept // 10:
        work.cursor.execute(QUERIES["trim_events"], (last - kept,))
    return []


def events(cursor: sqlite3.Cursor, ref: Ref | None, limit: int, kept: int) -> list[Event]:
    """The events, newest first; at most as many as the log should keep."""
    limit = max(0, min(limit, kept))
    query, arguments = ("events", (limit,)) if ref is None else ("events_by_name", (*ref, limit))
    found: list[Event] = []
    for row in read_rows(cursor, QUERIES[query], arguments):
        try:
            found.append(event_of(row))
        except ValueError as error:
            _log.warning("an entry of the event log cannot be read and is skipped: %s", error)
    return found


def announce(
    work: UnitOfWork, holder: str, topics: Collection[Topic], until: Millis, now: Millis
) -> dict[str, list[Topic]]:
    """Register that `holder` works on `topics` until then (none: it has left); return the live workers' topics."""
    if topics:
        work.cursor.execute(QUERIES["announce"], (holder, pack_topics(sorted(topics)), until))
    else:
        work.cursor.execute(QUERIES["leave"], (holder,))
    work.cursor.execute(QUERIES["forget_workers"], (now,))
    return {name: unpack_topics(packed) for name, packed in work.cursor.execute(QUERIES["workers"])}
