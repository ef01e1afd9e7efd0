"""Leasing: one statement takes what is due of each topic, and says when to come again."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Any

from bide.core.instants import Millis
from bide.core.records import Leased, Record, Topic
from bide.stores.postgres.bounds import LONGEST, SOON, Asked, Bounds, Reach
from bide.stores.postgres.journaled_connection import Call, PostgresConnection, Row
from bide.stores.postgres.queries import MOST
from bide.stores.postgres.rows import WOKE, record_of
from bide.stores.sql.dialect import Shut
from bide.stores.sql.scan_position import ScanFloors

_BEFORE = 5
"""Columns in front of the record's: now, micros, wake, ends, skipped."""
_BEFORE_MORE = 2
"""The same of `lease_more`: now, micros."""
_PAUSES = (0.001, 0.002, 0.004, 0.008)
"""Seconds between looks at what others have locked: a verb takes a few round trips."""
_LATER: Millis = 20
"""When to look again at what somebody keeps locked for longer, as an open transaction of the application's may."""


async def lease(
    connection: PostgresConnection,
    floors: ScanFloors,
    bounds: Bounds,
    wants: Mapping[Topic, int],
    now: Millis | None,
    about: Millis,
    lasts: Millis,
    holder: str,
) -> Leased:
    """Take what is due: O(log n) per task taken, whatever else waits, and a few seeks per topic.

    `about`: what time it is there, as far as is known.

    What others have locked is passed over. If there is nothing else, it is looked for again a few times: whoever locks
    a task has decided something about it in a moment.
    """
    if not any(want > 0 for want in wants.values()):
        return await look(connection, floors, bounds, wants, now, about)
    for pause in _PAUSES:
        leased, skipped = await _lease(connection, floors, bounds, wants, now, about, lasts, holder)
        if leased.tasks or not skipped:
            return leased
        await asyncio.sleep(pause)
    leased, _ = await _lease(connection, floors, bounds, wants, now, about, lasts, holder)
    return leased


async def _lease(
    connection: PostgresConnection,
    floors: ScanFloors,
    bounds: Bounds,
    wants: Mapping[Topic, int],
    now: Millis | None,
    about: Millis,
    lasts: Millis,
    holder: str,
) -> tuple[Leased, bool]:
    topics = sorted(wants)
    counts = [min(wants[topic], MOST[-1]) for topic in topics]
    form = f"lease_{next(most for most in MOST if most >= max(counts))}"

    async def take(call: Call) -> tuple[Leased, bool]:
        since, thorough = floors.ask(topics, about)
        began, reach = time.monotonic(), None
        try:
            if not thorough and len(topics) == 1 and floors.plenty(topics[0]):
                more = f"lease_more_{form.removeprefix('lease_')}"
                rows = await call.timed(
                    more, now, call.caller, call.number, topics[0], counts[0], lasts, holder, since[0]
                )
                if not rows:
                    raise Shut
                return _taken_more(rows, floors, topics[0], counts[0]), False
            reach = await _reach(call, floors, bounds, topics, since, thorough=thorough)
            began = time.monotonic()
            rows = await call.timed(
                form, now, call.caller, call.number, topics, counts, lasts, holder, reach.waiting, thorough,
                reach.lost, reach.ends, SOON,
            )  # fmt: skip
        except BaseException:
            floors.failed(topics)
            if reach is not None:
                bounds.failed(time.monotonic() - began, reach)
            raise
        if not rows:
            floors.failed(topics)
            raise Shut
        looked = None
        if thorough:
            bounds.looked(topics, time.monotonic() - began, rows[0]["now"], reach, lasts)
            looked = bounds
        return _taken(rows, floors, looked, dict(zip(topics, counts, strict=True)))

    async def taken(row: Row, call: Call) -> tuple[Leased, bool]:
        return await _again(row, call, lasts, holder), False

    return await connection.run(take, taken)


async def _reach(
    call: Call, floors: ScanFloors, bounds: Bounds, topics: list[Topic], since: list[Millis], *, thorough: bool
) -> Reach:
    """From where on a look that is to be thorough, or not, is to look."""
    if not thorough:
        return Reach(since, since, since, False)
    bounds.on(call.connection)
    if bounds.watching:
        [row] = await call.fetch("writers")
        bounds.read(row["now"], row["writers"])
    reach = bounds.reach(topics, [floors.floor(topic) for topic in topics])
    if reach.whole and bounds.patience:
        call.allow(bounds.patience)
    return reach


def _taken(
    rows: list[Any], floors: ScanFloors, looked: Bounds | None, wants: Mapping[Topic, int]
) -> tuple[Leased, bool]:
    """The tasks, oldest first, and whether some were passed over; `floors` is told how far it was looked.

    `looked`: after a thorough look, who is told that too.
    """
    there, _, wake, ends, skipped = rows[0][:_BEFORE]
    heads = [at for at in (wake, ends) if at is not None]
    if skipped:
        wake = there + _LATER if wake is None else min(wake, there + _LATER)
    tasks: list[Record] = []
    numbers: dict[Topic, int] = {}
    reached: dict[Topic, Millis] = {}
    if rows[0]["topic"] is not None:
        rows.sort(key=lambda row: row[_BEFORE + WOKE])
        for row in rows:
            record = record_of(row, _BEFORE)
            tasks.append(record)
            numbers[record.topic] = numbers.get(record.topic, 0) + 1
            if record.planned_at == row[_BEFORE + WOKE]:  # it waited, and was no lost lease
                reached[record.topic] = record.planned_at
    emptied = [topic for topic, want in wants.items() if not skipped and 0 <= numbers.get(topic, 0) < want]
    if not skipped:
        floors.emptied(emptied, there)
        floors.reached({topic: at for topic, at in reached.items() if numbers[topic] >= wants[topic]})
    if looked is not None:
        floors.ends(ends)
        looked.ended([topic for topic, want in wants.items() if numbers.get(topic, 0) < max(want, 1)], ends, there)
        looked.emptied(emptied)
        looked.emptied([topic for topic, want in wants.items() if want <= 0], min(heads, default=None))
    return Leased(tasks, floors.sleep(wake, there, thorough=looked is not None), there), skipped


def _taken_more(rows: list[Any], floors: ScanFloors, topic: Topic, want: int) -> Leased:
    """The tasks, oldest first. If there are fewer than wanted, why is for the next look, at once, to see."""
    there = rows[0]["now"]
    if rows[0]["topic"] is None:
        rows = []
    rows.sort(key=lambda row: row[_BEFORE_MORE + WOKE])
    tasks = [record_of(row, _BEFORE_MORE) for row in rows]
    if len(tasks) < want:
        floors.ran_short(topic)
        return Leased(tasks, there, there)
    floors.reached({topic: tasks[-1].planned_at})
    return Leased(tasks, floors.sleep(None, there, thorough=False), there)


async def _again(row: Any, call: Call, lasts: Millis, holder: str) -> Leased:
    """What an earlier sending took, as far as it is still held: a late answer gives out nothing of others'."""
    there = row["now"]
    rows = await call.fetch("leased_then", list(row["topics"]), there + lasts, row["tokens"][0], holder)
    rows.sort(key=lambda one: one[WOKE])
    return Leased([record_of(one) for one in rows], there, there)


async def look_whole(connection: PostgresConnection, bounds: Bounds, asked: Asked) -> None:
    """From the very start, where that takes long: only reads, and says what comes first."""
    nothing = [0] * len(asked.topics)

    async def work(call: Call) -> None:
        call.allow(LONGEST)
        began = time.monotonic()
        [row] = await call.fetch("look_for_wake", None, asked.topics, nothing, True, nothing, nothing, SOON)
        heads = [at for at in (row["wake"], row["ends"]) if at is not None]
        bounds.found(asked, min(heads, default=None), time.monotonic() - began)

    try:
        await connection.read(work)
    finally:
        bounds.lost_sight(asked)


async def look(
    connection: PostgresConnection,
    floors: ScanFloors,
    bounds: Bounds,
    wants: Mapping[Topic, int],
    now: Millis | None,
    about: Millis,
) -> Leased:
    """Only the next wake."""
    topics = sorted(wants)

    async def work(call: Call) -> Leased:
        since, thorough = floors.ask(topics, about)
        reach = await _reach(call, floors, bounds, topics, since, thorough=thorough)
        began = time.monotonic()
        asked = (now, topics, reach.waiting, thorough, reach.lost, reach.ends, SOON)
        try:
            [row] = await call.timed("look_for_wake", *asked)
        except BaseException:
            floors.failed(topics)
            bounds.failed(time.monotonic() - began, reach)
            raise
        if thorough:
            bounds.looked(topics, time.monotonic() - began, row["now"], reach)
            floors.ends(row["ends"])
            bounds.ended(topics, row["ends"], row["now"])
            heads = [at for at in (row["wake"], row["ends"]) if at is not None]
            bounds.emptied(topics, min(heads, default=None))
        return Leased([], floors.sleep(row["wake"], row["now"], thorough=thorough), row["now"])

    return await connection.read(work)
