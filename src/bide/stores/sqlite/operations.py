"""The operations that write, on one open transaction.

Each reads rows, lets `core.lifecycle` decide, and writes rows: so it means the same as in every other store. Where the
common case can be decided by the write itself (a new key, a plain Done), one optimistic statement for the whole batch
comes first, and its count of rows says whether it was right.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from operator import itemgetter
from typing import Any

from bide.core import lifecycle
from bide.core.answers import Answer
from bide.core.instants import Millis
from bide.core.lifecycle import next_token
from bide.core.records import (
    Change,
    Lease,
    Leased,
    Move,
    NewTask,
    Record,
    Settlement,
    State,
    Topic,
    Verdict,
)
from bide.stores.sqlite import damage
from bide.stores.sqlite.errors import lost_part
from bide.stores.sqlite.finding import FEW, Found, by_name, by_names
from bide.stores.sqlite.queries import QUERIES
from bide.stores.sqlite.rows import AT, ROW, Row, record_of, values_of
from bide.stores.sqlite.rows import check as check_row
from bide.stores.sqlite.work import Work

_INSERT = QUERIES["insert_task"]
_PUT = QUERIES["put_task"]
_MOVE = QUERIES["move_task"]
_DELETE = QUERIES["delete_task"]
_WAITING_DUE = QUERIES["waiting_due"]
_LEASED_DUE = QUERIES["leased_due"]
_LEASE = QUERIES["lease_task"]
_NEXT_WAKE = QUERIES["next_wake"]
_EXTEND = QUERIES["extend_task"]
_SETTLE_DONE = QUERIES["settle_done"]
_PURGE = QUERIES["purge"]

_by_at = itemgetter(AT)


def add(work: Work, tasks: Sequence[NewTask], now: Millis) -> list[Answer]:
    """Schedule each. O(log n) per task; one pass of inserts when every key is new."""
    _point(work, "add:begun")
    token = work.last_token()
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
    inserted = work.cursor.executemany(_INSERT, rows).rowcount
    _point(work, "add:inserted")
    if inserted != len(rows):
        _add_again(work, tasks, answers, now)
        _point(work, "add:decided")
    if work.wakes is not None:
        for answer in answers:
            if answer.result in lifecycle.ADDED and answer.record is not None:
                work.wake(answer.record.topic, answer.record.wake_at)
    return answers


def _add_again(work: Work, tasks: Sequence[NewTask], answers: list[Answer], now: Millis) -> None:
    """Some keys were taken, or come twice: take those through the lifecycle, in order.

    A row that carries the very token that its task was given is the one that was just inserted for it.
    """
    writes = _Writes(work, tasks)
    for position, new in enumerate(tasks):
        born = answers[position].record
        found = writes.read(new.topic, new.key)
        if found is None or born is None:
            raise lost_part(work.cursor, "a key is taken in one index, and in no row")
        row, old = found
        if old.token == born.token:
            continue
        token = next_token(work.last_token(), now)
        answer = answers[position] = lifecycle.schedule(new, old, now, token)
        if answer.result in lifecycle.ADDED and answer.record is not None:
            work.used_token(token)
            writes.put(row, answer.record)
    writes.flush()


def change(work: Work, changes: Sequence[Change], now: Millis) -> list[Answer]:
    """Move, cancel, redrive: each one read and one write."""
    answers = []
    writes = _Writes(work, changes)
    decide = lifecycle.change
    for asked in changes:
        found = writes.read(asked.topic, asked.key)
        row, old = (0, None) if found is None else found
        token = next_token(work.last_token(), now)
        answer = decide(asked, old, now, token)
        answers.append(answer)
        record = answer.record
        if record is None or record.token != token:
            continue
        work.used_token(token)
        if type(asked) is Move:
            writes.move(row, record)
        else:
            writes.put_or_forget(row, record, now)
        if record.state is State.WAITING:
            work.wake(record.topic, record.wake_at)
    _point(work, "change:decided")
    writes.flush()
    _point(work, "change:written")
    return answers


def lease(work: Work, wants: Mapping[Topic, int], now: Millis, until: Millis, holder: str) -> Leased:
    """Take what is due: O(log n) per task taken, whatever else waits, and two seeks per topic with room."""
    tasks: list[Record] = []
    updates: list[tuple[Any, ...]] = []
    asking: list[Topic] = []
    _point(work, "lease:begun")
    for topic, want in wants.items():
        rows = _due(work, topic, want, now) if want > 0 else []
        if len(rows) < want or want <= 0:
            asking.append(topic)
        token = work.last_token() if rows else 0
        for row in rows:
            token = next_token(token, now)
            record = lifecycle.lease(record_of(row), now, until, holder, token)
            tasks.append(record)
            updates.append((until, record.planned_at, record.attempt, record.losses, token, holder, row[ROW]))
        if rows:
            work.used_token(token)
    _point(work, "lease:selected")
    if updates:
        work.cursor.executemany(_LEASE, updates)
        _point(work, "lease:updated")
    return Leased(tasks, next_wake(work, asking), now)


def _due(work: Work, topic: Topic, want: int, now: Millis) -> list[Row]:
    """The rows of `topic` that are due, oldest first; what waits and what a lost holder left are merged."""
    try:
        waiting = work.cursor.execute(_WAITING_DUE, (topic, now, want)).fetchall()
        lost = work.cursor.execute(_LEASED_DUE, (topic, now, want)).fetchall()
        for row in chain(waiting, lost):
            check_row(row)
    except damage.UNREADABLE as error:
        damage.check(error)
        waiting, lost = damage.readable_due(work, topic, want, now)
    if not lost:
        return waiting
    return sorted(waiting + lost, key=_by_at)[:want]


def next_wake(work: Work, topics: Iterable[Topic]) -> Millis | None:
    """The earliest `wake_at` of these topics."""
    wakes = [wake for topic in topics for wake in work.one(_NEXT_WAKE, (topic,)) if wake is not None]
    return min(wakes, default=None)


def extend(work: Work, leases: Sequence[Lease], now: Millis, until: Millis) -> list[bool]:
    """Keep each lease until then; one pass where all are still ours."""
    rows = [(until, topic, key, token) for topic, key, token in leases]
    if work.cursor.executemany(_EXTEND, rows).rowcount == len(rows):
        return [True] * len(rows)
    return [work.cursor.execute(_EXTEND, row).rowcount == 1 for row in rows]


def settle(work: Work, outcomes: Sequence[Settlement], now: Millis) -> list[bool]:
    """Record how leases ended. When all are plain Done with nothing to remember: one pass of conditional deletes."""
    _point(work, "settle:begun")
    if all(one.verdict is Verdict.DONE and one.wake is None and one.keep_until <= now for one in outcomes):
        rows = [(one.topic, one.key, one.token) for one in outcomes]
        work.cursor.execute("SAVEPOINT bide_settle")
        deleted = work.cursor.executemany(_SETTLE_DONE, rows).rowcount
        _point(work, "settle:deleted")
        if deleted == len(rows):
            work.cursor.execute("RELEASE bide_settle")
            return [True] * len(rows)
        work.cursor.execute("ROLLBACK TO bide_settle")
        work.cursor.execute("RELEASE bide_settle")
        return [work.cursor.execute(_SETTLE_DONE, row).rowcount == 1 for row in rows]
    settled = []
    writes = _Writes(work, outcomes)
    for asked in outcomes:
        found = writes.read(asked.topic, asked.key)
        row, old = (0, None) if found is None else found
        held = lifecycle.holds(old, asked.token)
        settled.append(held)
        if not held or old is None:
            continue
        token = next_token(work.last_token(), now)
        record = lifecycle.settle(asked, old, now, token)
        work.used_token(token)
        writes.put_or_forget(row, record, now)
        if record.state is State.WAITING:
            work.wake(record.topic, record.wake_at)
    _point(work, "settle:decided")
    writes.flush()
    _point(work, "settle:written")
    return settled


def purge(work: Work, now: Millis, limit: int) -> int:
    """Forget what has been kept long enough."""
    return work.cursor.execute(_PURGE, (now, limit)).rowcount if limit > 0 else 0


class _Writes:
    """The writes of one operation, gathered so that each kind goes out as one pass.

    A task that is read again after it was written (a key that comes twice in a batch) is written out first.
    """

    __slots__ = ("_forgotten", "_found", "_moved", "_put", "_touched", "_work")

    def __init__(self, work: Work, asked: Sequence[Change] | Sequence[Settlement] | Sequence[NewTask]) -> None:
        self._work = work
        self._found: Found = {}
        if len(asked) > FEW:
            self._found = by_names(work.cursor, [(one.topic, one.key) for one in asked])
        self._moved: list[tuple[Any, ...]] = []
        self._put: list[tuple[Any, ...]] = []
        self._forgotten: list[tuple[int]] = []
        self._touched: set[tuple[str, str]] = set()

    def read(self, topic: Topic, key: str) -> tuple[int, Record] | None:
        """A task and its row's number."""
        name = (topic, key)
        if name in self._touched:
            self.flush()
        self._touched.add(name)
        found = self._found.pop(name, None)
        return by_name(self._work.cursor, topic, key) if found is None else found

    def move(self, row: int, record: Record) -> None:
        self._moved.append((record.due_at, record.wake_at, record.token, record.deadline, row))

    def put(self, row: int, record: Record) -> None:
        self._put.append(values_of(record, row))

    def put_or_forget(self, row: int, record: Record, now: Millis) -> None:
        if record.keep_until is not None and record.keep_until <= now:
            self._forgotten.append((row,))
        else:
            self.put(row, record)

    def flush(self) -> None:
        for query, rows in ((_MOVE, self._moved), (_PUT, self._put), (_DELETE, self._forgotten)):
            if rows:
                self._work.cursor.executemany(query, rows)
        self._moved, self._put, self._forgotten = [], [], []
        self._touched.clear()


def _point(work: Work, name: str) -> None:
    if work.fault is not None:
        work.fault(name)
