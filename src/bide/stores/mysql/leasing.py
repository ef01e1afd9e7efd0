"""Leasing: one packet locks what is due of each topic, the next writes the leases and says when to come again.

What nobody waits for is not asked for: before anything is locked, one packet that only reads says whether something is
due, unless that is known (`Expected`). So a worker that polls costs the server a few seeks and no write.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from bide.core import lifecycle
from bide.core.instants import Millis
from bide.core.records import Leased, Record, State, Topic
from bide.stores.mysql import filing
from bide.stores.mysql.depths import LONGEST, Depth, Depths, everything
from bide.stores.mysql.dialect import Rows
from bide.stores.mysql.filing import Expired, File, Pair, close, decode_pairs, file, file_anew, look_up, read_expired
from bide.stores.mysql.journaled_connection import Call, MySqlConnection, Repeated
from bide.stores.mysql.rows import AT, CODES, ROW, STATE, TOKEN, WAKE, filled, record_of, rest_of_waiting
from bide.stores.mysql.statements import these
from bide.stores.sql.journaled_connection import Runs
from bide.stores.sql.scan_position import SLACK, ScanFloors

MOST = 1_000_000
_PAUSES = (0.001, 0.002, 0.004, 0.008)
"""Seconds between looks at what others have locked: a verb takes a few round trips."""
_LATER: Millis = 20
"""When to look again at what somebody keeps locked for longer, as an open transaction of the application's may."""

_WAITING = CODES[State.WAITING]
_encode = msgspec.msgpack.encode


Row = Sequence[Any]
"""The columns of a Record, and `row`; see `rows`."""


class Expected:
    """When something may be due next, as far as this process knows, and how far one instant has been leased.

    Thousands may be due at the same instant. The floor is that instant until the last of them is leased, and each lease
    would step over all that were taken before it. So of an instant that is over for a second the last row is noted too,
    and the next lease begins behind it.
    """

    __slots__ = ("_rows", "_wake")

    def __init__(self) -> None:
        self._wake: Millis | None = None
        self._rows: dict[Topic, tuple[Millis, int]] = {}

    def told(self, wakes: Mapping[Topic, Millis]) -> None:
        for topic, wake in wakes.items():
            if self._wake is None or wake < self._wake:
                self._wake = wake
            if topic in self._rows and wake <= self._rows[topic][0]:
                del self._rows[topic]

    def behind(self, topic: Topic, floor: Millis) -> int:
        """Behind which row of the instant `floor` to begin; 0: at its first."""
        wake, row = self._rows.get(topic, (-1, 0))
        return row if wake == floor else 0

    def reached(self, topic: Topic, wake: Millis, row: int, there: Millis) -> None:
        """Everything up to this row of that instant was taken."""
        if wake < there - SLACK:
            self._rows[topic] = (wake, row)

    def is_due(self, about: Millis) -> bool:
        return self._wake is not None and self._wake <= about

    def became(self, wake: Millis | None) -> None:
        self._wake = wake


async def lease(
    connection: Runs,
    floors: ScanFloors,
    depths: Depths,
    expected: Expected,
    wants: Mapping[Topic, int],
    now: Millis | None,
    about: Millis,
    lasts: Millis,
    holder: str,
    remember: filing.LeasedRows,
) -> Leased:
    """Take what is due: O(log n) per task taken, whatever else waits, and a few seeks per topic.

    What others have locked is passed over. If there is nothing else, it is looked for again a few times: whoever locks
    a task has decided something about it in a moment.
    """
    if not any(want > 0 for want in wants.values()):
        return (await _look(connection, floors, depths, wants, now, about))[0]
    if not expected.is_due(about):
        leased, due = await _look(connection, floors, depths, wants, now, about)
        if not due:
            expected.became(leased.next_wake)
            return leased
    skipped = True
    leased = Leased([], None, 0)
    for pause in (*_PAUSES, None):
        leased, skipped = await _lease(connection, floors, depths, expected, wants, now, about, lasts, holder, remember)
        if leased.tasks or not skipped or pause is None:
            break
        await asyncio.sleep(pause)
    full = len(leased.tasks) >= sum(max(want, 0) for want in wants.values())
    expected.became(0 if full else leased.next_wake)
    return leased


async def _lease(
    connection: Runs,
    floors: ScanFloors,
    depths: Depths,
    expected: Expected,
    wants: Mapping[Topic, int],
    now: Millis | None,
    about: Millis,
    lasts: Millis,
    holder: str,
    remember: filing.LeasedRows,
) -> tuple[Leased, bool]:
    topics = sorted(wants)
    counts = {topic: min(wants[topic], MOST) for topic in topics}

    async def take(call: Call) -> tuple[Leased, bool]:
        depth, began = _depth(call, floors, depths, topics, about), time.monotonic()
        try:
            behind = (
                {}
                if depth.thorough
                else {topic: expected.behind(topic, floor) for topic, floor in depth.waiting.items()}
            )
            there, micros, found, expired, filing_anew = await _locked(call, counts, depth, behind, now)
            took = time.monotonic() - began
            dues = [row for rows in found.values() for row in rows]
            if len(found) > 1:
                dues.sort(key=_wake)
            numbers = [row[ROW] for row in dues]
            tokens = [max(row[TOKEN] + 1, micros) for row in dues]
            pairs = list(zip(numbers, tokens, strict=True))
            filing_new, files = file(call, _by_topic(found, pairs), there + lasts)
            over = remember.over(there + SLACK) if dues else []
            statements = [
                *_statements(call, numbers, micros, there + lasts, holder),
                *filing_anew, *close(call, over), *filing_new,
            ]  # fmt: skip
            room = [topic for topic, count in counts.items() if count <= 0 or len(found[topic]) < count]
            heads = _heads(call, room, depth)
            end = call.ending()
            if dues or call.again:
                end = call.pass_gate(max(tokens, default=0), _encode(pairs))
            tasks: list[Record] = []

            def make_records() -> None:
                until = there + lasts
                for row, token in zip(dues, tokens, strict=True):
                    tasks.append(lifecycle.lease(record_of(row), there, until, holder, token))
                remember.leased(numbers, tasks, _files(numbers, files))  # if it comes to nothing, nobody settles them

            answers = await call.send(
                *statements, *heads, *end, commits=bool(dues) or call.again, meanwhile=make_records
            )
        except BaseException:
            floors.failed(topics)
            depths.failed(depth, time.monotonic() - began)
            raise
        wake, ends, skipped = _next_wake(room, counts, answers, there, thorough=depth.thorough)
        if any(found.get(topic) for topic in room):
            wake = there + lasts if wake is None else min(wake, there + lasts)
        if depth.thorough:
            floors.ends(ends)
            depths.looked(depth, took, there)
            _tell_left(depths, room, answers, there)
            for topic in counts.keys() - set(room):
                depths.left(topic, found[topic][-1][AT], expired.get(topic))
        wake = floors.sleep(wake, there, thorough=depth.thorough)
        _note(floors, expected, counts, room, found, there, skipped=skipped)
        return Leased(tasks, wake, there), skipped

    async def taken(row: Repeated, call: Call) -> tuple[Leased, bool]:
        return await _again(row, call), False

    return await connection.run(take, taken)


class Locked(NamedTuple):
    """What is due, locked."""

    there: Millis
    micros: int
    found: dict[Topic, list[Row]]
    """Of each topic, oldest first."""
    expired: dict[Topic, Millis]
    """Where files of a topic were looked at, the time of the earliest."""
    filing_anew: list[bytes]
    """The statements that write down what is left of them."""


async def _locked(
    call: Call, counts: Mapping[Topic, int], depth: Depth, behind: Mapping[Topic, int], now: Millis | None
) -> Locked:
    statements = [*call.begin(now, sum(max(count, 0) for count in counts.values())), call.write("clock")]
    wanted = [topic for topic, count in counts.items() if count > 0]
    for topic in wanted:
        values = {"topic": topic, "floor": depth.waiting[topic], "row": behind.get(topic, 0), "most": counts[topic]}
        statements.append(call.write("take_waiting", **values))
        if depth.thorough:
            statements.append(call.write("expired_leases", topic=topic, floor=depth.lost[topic], most=filing.AT_ONCE))
    [[(there, micros)], *answers] = await call.timed(*statements)
    locked = Locked(there, micros, {}, {}, [])
    expired: dict[Topic, Expired] = {}
    each = 1 + depth.thorough
    for place, topic in enumerate(wanted):
        rest = rest_of_waiting(topic)
        locked.found[topic] = [(*row, *rest) for row in answers[each * place]]
        if depth.thorough and answers[each * place + 1]:
            expired[topic] = read_expired(topic, answers[each * place + 1])
    if expired:
        for topic, what in (await look_up(call, expired, counts)).items():
            dues = locked.found[topic]
            dues += what.lost
            dues.sort(key=_wake)
            del dues[counts[topic] :]
            leased = {row[ROW] for row in dues}
            left = [one for one in what.held if one.row not in leased]
            locked.expired[topic] = expired[topic].names[0].until
            locked.filing_anew.extend(file_anew(call, expired[topic], left, there))
    return locked


def _by_topic(found: Mapping[Topic, list[Row]], pairs: list[Pair]) -> dict[Topic, list[Pair]]:
    """The row and new token of each, topic by topic."""
    if len(found) == 1:
        return dict.fromkeys(found, pairs)
    tokens = dict(pairs)
    return {topic: [(row[ROW], tokens[row[ROW]]) for row in rows] for topic, rows in found.items()}


def _files(numbers: list[int], files: list[tuple[File, Sequence[Pair]]]) -> list[File]:
    """On which each of these rows is."""
    if len(files) == 1:
        return [files[0][0]] * len(numbers)
    file_of = {row: one for one, pairs in files for row, _ in pairs}
    return [file_of[row] for row in numbers]


def _wake(row: Row) -> Millis:
    """Since when it is due."""
    at: Millis = row[WAKE] if row[STATE] else row[AT]
    return at


def _statements(call: Call, numbers: list[int], micros: int, until: Millis, holder: str) -> list[bytes]:
    if not numbers:
        return []
    rows = these(sorted(numbers))
    return [call.write("lease_tasks", these=rows, micros=micros, until=until, holder=filled(holder))]


def _depth(call: Call, floors: ScanFloors, depths: Depths, topics: list[Topic], about: Millis) -> Depth:
    """From where on to look."""
    since, thorough = floors.ask(topics, about)
    if thorough:
        depths.on(call.connection)
        since = [floors.floor(topic) for topic in topics]
    depth = depths.reach(topics, since, thorough=thorough)
    if depth.whole and depths.patience:
        call.allow(depths.patience)
    return depth


def _heads(call: Call, topics: list[Topic], depth: Depth) -> list[bytes]:
    statements = []
    for topic in topics:
        statements.append(call.write("waiting_head", topic=topic, floor=depth.head[topic]))
        if depth.thorough:
            statements.append(call.write("leased_head", topic=topic, floor=depth.lost[topic]))
    return statements


def _tell_left(depths: Depths, topics: list[Topic], answers: list[Rows], there: Millis) -> None:
    """What a thorough look has left of those whose next wake was asked for."""
    first = [rows[0][0] if rows and rows[0][0] <= there else None for rows in answers]
    for place, topic in enumerate(topics):
        depths.left(topic, first[2 * place], first[2 * place + 1])


def _next_wake(
    topics: list[Topic], counts: Mapping[Topic, int], answers: list[Rows], there: Millis, *, thorough: bool
) -> tuple[Millis | None, Millis | None, bool]:
    """The earliest of what waits, and of what is leased; and whether one is due that somebody else has locked."""
    wakes: list[Millis] = []
    ends: list[Millis] = []
    skipped = False
    each = 1 + thorough
    for place, rows in enumerate(answers):
        for (at,) in rows:
            if at > there or counts[topics[place // each]] <= 0:
                (ends if place % each else wakes).append(at)
            else:
                skipped = True
    if skipped:
        wakes.append(there + _LATER)
    return min(wakes, default=None), min(ends, default=None), skipped


def _note(
    floors: ScanFloors,
    expected: Expected,
    counts: Mapping[Topic, int],
    room: list[Topic],
    found: Mapping[Topic, list[Row]],
    there: Millis,
    *,
    skipped: bool,
) -> None:
    """Tell `floors` how far it was looked."""
    if skipped:
        return
    floors.emptied([topic for topic in room if counts[topic] > 0], there)
    reached: dict[Topic, tuple[Millis, int]] = {}
    for topic in counts.keys() - set(room):
        last = next((row for row in reversed(found[topic]) if row[STATE] == _WAITING), None)
        if last is not None:
            reached[topic] = (last[AT], last[ROW])
    floors.reached({topic: wake for topic, (wake, _) in reached.items()})
    for topic, (wake, row) in reached.items():
        expected.reached(topic, wake, row, there)


async def _again(row: Repeated, call: Call) -> Leased:
    """What an earlier sending took, as far as it is still held: a late answer gives out nothing of others'."""
    tokens = dict(decode_pairs(row.answer or b"\x90"))
    held: dict[int, Record] = {}
    if tokens:
        [rows] = await call.send(call.write("tasks_by_rows", these=these(sorted(tokens))))
        for one in rows:
            record = record_of(one)
            if record.state is State.LEASED and record.token == tokens[one[ROW]]:
                held[one[ROW]] = record
    return Leased([held[number] for number in tokens if number in held], row.now, row.now)


async def look_whole(connection: MySqlConnection, depths: Depths, topics: Sequence[Topic]) -> None:
    """From the very start, where that takes long: only reads, and says what comes first."""

    async def work(call: Call) -> None:
        call.allow(LONGEST)
        began = time.monotonic()
        answers = await call.send(*_heads(call, list(topics), everything(topics)))
        first = [rows[0][0] if rows else None for rows in answers]
        heads = {topic: (first[2 * place], first[2 * place + 1]) for place, topic in enumerate(topics)}
        depths.found(heads, time.monotonic() - began)

    await connection.read(work)


async def _look(
    connection: Runs, floors: ScanFloors, depths: Depths, wants: Mapping[Topic, int], now: Millis | None, about: Millis
) -> tuple[Leased, bool]:
    """Only the next wake, and whether something is due of a topic that is wanted."""
    topics = sorted(wants)

    async def work(call: Call) -> tuple[Leased, bool]:
        depth, began = _depth(call, floors, depths, topics, about), time.monotonic()
        heads = _heads(call, topics, depth._replace(head=depth.waiting))  # nothing else looks there
        try:
            answers = await call.timed(call.look_at_clock(now), *heads)
        except BaseException:
            floors.failed(topics)
            depths.failed(depth, time.monotonic() - began)
            raise
        [[(there, _)], *found] = answers
        counts = dict(wants)
        wake, ends, due = _next_wake(topics, counts, found, there, thorough=depth.thorough)
        if depth.thorough:
            floors.ends(ends)
            depths.looked(depth, time.monotonic() - began, there)
            _tell_left(depths, topics, found, there)
        wake = floors.sleep(wake, there, thorough=depth.thorough)
        if due:
            floors.failed(topics)  # the look that follows is to be as thorough
        else:
            floors.emptied([topic for topic in topics if counts[topic] > 0], there)
        return Leased([], wake, there), due

    return await connection.read(work)
