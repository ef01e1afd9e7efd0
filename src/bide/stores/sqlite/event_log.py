"""The log of events, and the register of workers: tables beside the tasks."""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Collection, Sequence

import msgspec

from bide.core.events import Event, EventKind
from bide.core.instants import Millis
from bide.core.records import Ref, Topic
from bide.stores.sqlite.operations import UnitOfWork
from bide.stores.sqlite.rows import QUERIES, Row, read_rows

_log = logging.getLogger("bide.sqlite")
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(list[str])


def record(work: UnitOfWork, events: Sequence[Event], kept: int) -> None:
    """Append to the log; it is cut back to `kept` lines once it is a tenth over, so that most calls only append."""
    rows = [
        (one.topic, one.key, one.at, one.id, one.kind.value, one.attempt, one.who, one.what, one.was, one.wake_at)
        for one in events
    ]
    work.cursor.executemany(QUERIES["insert_event"], rows)
    first, last = work.one(QUERIES["event_span"])
    if last - first >= kept + kept // 10:
        work.cursor.execute(QUERIES["trim_events"], (last - kept,))


def events(cursor: sqlite3.Cursor, ref: Ref | None, limit: int, kept: int) -> list[Event]:
    """The newest first; never more than the log is said to keep."""
    limit = max(0, min(limit, kept))
    query, arguments = ("events", (limit,)) if ref is None else ("events_by_name", (*ref, limit))
    found: list[Event] = []
    for row in read_rows(cursor, QUERIES[query], arguments):
        try:
            found.append(_event(row))
        except ValueError as error:
            _log.warning("an entry of the log of events cannot be read, and is passed over: %s", error)
    return found


def _event(row: Row) -> Event:
    """Raises ValueError for a row whose values are of other types than its columns declare."""
    at, topic, key, life, kind, attempt, who, what, was, wake_at = row
    if not tuple(map(type, (at, topic, key, life, attempt, what))) == (int, str, str, str, int, str):
        raise ValueError("values of other types than the columns declare")
    return Event(
        at=at, topic=topic, key=key, id=life, kind=EventKind(kind), attempt=attempt, who=who, what=what, was=was,
        wake_at=wake_at,
    )  # fmt: skip


def announce(
    work: UnitOfWork, holder: str, topics: Collection[Topic], until: Millis, now: Millis
) -> dict[str, list[Topic]]:
    """Register that `holder` works on `topics` until then (none: it has gone); the live workers with their topics."""
    if topics:
        work.cursor.execute(QUERIES["announce"], (holder, _encoder.encode(sorted(topics)), until))
    else:
        work.cursor.execute(QUERIES["leave"], (holder,))
    work.cursor.execute(QUERIES["forget_workers"], (now,))
    return {name: _topics_of(packed) for name, packed in work.cursor.execute(QUERIES["workers"])}


def _topics_of(packed: bytes) -> list[Topic]:
    """None of a row that no worker wrote."""
    try:
        return _decoder.decode(packed)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, TypeError):
        return []
