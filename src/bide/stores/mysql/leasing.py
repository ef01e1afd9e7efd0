"""Leasing: one packet locks the due tasks of each topic, the next writes the leases and returns when to lease again.

Before locking anything, a read-only packet determines whether something is due, unless that is known (`NextDue`). So a
polling worker costs the server a few seeks and no write.

While full scans are expensive (see `sql.leasing`), a thorough scan begins

- for waiting tasks, five seconds before the last thorough scan, or at the first due task that this one left. No task
  wakes before the time at which it is written. So until the next full scan, thorough scans miss only tasks that were
  written or kept locked by a transaction that was open for longer;
- for expired leases, a second before the last thorough scan. A lease lasts longer than the statement that gives or
  extends it may take.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import msgspec
from msgspec.structs import replace

from bide.core import lifecycle
from bide.core.instants import NEVER, Millis
from bide.core.records import Leased, Record, State, Token, Topic
from bide.stores.batches import merge_earliest
from bide.stores.mysql import lease_batches
from bide.stores.mysql.connection import Call, Repeated, Rows
from bide.stores.mysql.queries import AT, ROW, STATE, TOKEN, WAKE, filled, record_of, rest_of_waiting, these
from bide.stores.sql.leasing import LATER, POLL, SLACK, Leasing, ScanBounds, ScanPositions
from bide.stores.sql.operations import CODES

# --- where scans begin

EXPENSIVE = 0.005
"""Seconds above which a full scan of one topic counts as expensive."""
PER_TOPIC = 0.0002
"""Seconds for each topic by which it may take longer: the statements for each topic that a bound needs take as long."""
LONGEST_TRANSACTION: Millis = 5_000
"""How long a transaction may stay open so that the next thorough scan still finds its tasks."""


class ScanStart(NamedTuple):
    """The start of a scan in each topic."""

    waiting: dict[Topic, Millis]
    """The start for waiting tasks."""
    head: dict[Topic, Millis]
    """The start for the next wake time, and for due tasks that were skipped."""
    lost: dict[Topic, Millis]
    """The start for expired leases."""
    full: bool
    thorough: bool
    cheap: bool
    """True if scans from the very start are cheap, so that one statement can read the heads of many topics."""


def from_the_start(topics: Sequence[Topic]) -> ScanStart:
    nothing = dict.fromkeys(topics, 0)
    return ScanStart(nothing, nothing, nothing, True, True, True)


class MySqlScanBounds(ScanBounds):
    def _forget(self) -> None:
        super()._forget()
        self._there: Millis = 0
        self._lost: dict[Topic, Millis] = {}

    @property
    def cheap(self) -> bool:
        """True while each thorough scan is full, which needs no bounds."""
        return self._full_at is None

    def start(self, topics: Sequence[Topic], positions: Sequence[Millis], *, thorough: bool) -> ScanStart:
        """The start of a scan; `positions`: that of an ordinary one."""
        floor = dict(zip(topics, positions, strict=True))
        if not thorough:
            return ScanStart(floor, floor, {}, False, False, self.cheap)
        if self.cheap:
            return from_the_start(topics)
        waiting = {topic: self._bounds.get(topic, 0) for topic in topics}
        head = {topic: max(waiting[topic], floor[topic]) for topic in topics}
        return ScanStart(waiting, head, {topic: self._lost.get(topic, 0) for topic in topics}, False, True, False)

    def scanned(self, start: ScanStart, took: float, there: Millis) -> None:
        """Note a thorough scan at `there` that took `took` seconds. A call of `left` follows."""
        if there < self._there:  # the clock was set back
            self._forget()
        elif start.full:
            self.patience = 0.0
            if self._used and took > EXPENSIVE + len(start.waiting) * PER_TOPIC:
                self._full_at = self._clock()
                self._background(list(start.waiting))  # at once: a busy machine may have made this one slow
        elif self._full_at is not None and self._clock() >= self._full_at:
            self._background(list(start.waiting))
        self._there = there

    def found(self, first: Mapping[Topic, Heads], took: float) -> None:
        """Note the result of a background full scan: each topic's earliest wake time and earliest expiry."""
        if self.cheap:
            return
        if took <= EXPENSIVE + len(first) * PER_TOPIC:
            self._forget()
            return
        self._wait(took)
        for topic, heads in first.items():
            for known, at in zip((self._bounds, self._lost), heads, strict=True):
                if at is not None and at < known.get(topic, 0):
                    known[topic] = at

    def left(self, heads: Mapping[Topic, Heads]) -> None:
        """Note the earliest wake time and the earliest expiry that a thorough scan has left in each topic."""
        if self.cheap:
            return
        before, expired = self._there - LONGEST_TRANSACTION, self._there - SLACK
        for topic, (waiting, lost) in heads.items():
            self._bounds[topic] = before if waiting is None else min(before, waiting)
            self._lost[topic] = expired if lost is None else min(expired, lost)


# --- leasing

_MOST = 1_000_000
_FEW = 8
"""The most topics whose heads are read by a statement for each."""
_WAITING = CODES[State.WAITING]
_encode = msgspec.msgpack.encode

Row = Sequence[Any]
"""The columns of a Record, and `row`; see `queries`."""


class NextDue:
    """By topic, the next time at which something may be due, as far as this process knows, and the last leased row.

    Thousands of tasks may be due at the same instant. That instant remains the position until the last of them is
    leased, and each lease would visit all those leased before. So once an instant has been over for a second, the last
    leased row is noted too, and the next lease begins after it.
    """

    def __init__(self) -> None:
        self._wakes: dict[Topic, Millis] = {}
        self._rows: dict[Topic, tuple[Millis, int]] = {}

    def note_wakes(self, wakes: Mapping[Topic, Millis]) -> None:
        merge_earliest(self._wakes, wakes)
        for topic, wake in wakes.items():
            if topic in self._rows and wake <= self._rows[topic][0]:
                del self._rows[topic]

    def behind(self, topic: Topic, floor: Millis) -> int:
        """The row of the instant `floor` after which to begin; 0: at its first row."""
        wake, row = self._rows.get(topic, (-1, 0))
        return row if wake == floor else 0

    def reached(self, topic: Topic, wake: Millis, row: int, there: Millis) -> None:
        """Note that everything up to this row of the instant `wake` was leased."""
        if wake < there - SLACK:
            self._rows[topic] = (wake, row)

    def is_due(self, topic: Topic, about: Millis) -> bool:
        return self._wakes.get(topic, NEVER) <= about

    def became(self, wants: Mapping[Topic, int], leased: Leased) -> None:
        """Note the answer of a lease. A topic that got all that it wanted may have more."""
        got = Counter([task.topic for task in leased.tasks])
        for topic, want in wants.items():
            self._wakes[topic] = 0 if 0 < want <= got[topic] else leased.heads.get(topic, NEVER)


class MySqlLeasing(Leasing):
    """See `sql.leasing`."""

    def __init__(self, runtime: Any) -> None:
        super().__init__(runtime, ScanPositions(used=runtime.by_server, slack=POLL))
        self.bounds = MySqlScanBounds(used=runtime.by_server, background=self.scan_in_background)
        self.leased = lease_batches.LeasedRows()
        self.next_due = NextDue()

    def note_wakes(self, wakes: Mapping[Topic, Millis]) -> None:
        super().note_wakes(wakes)
        self.next_due.note_wakes(wakes)

    async def lease(
        self, wants: Mapping[Topic, int], now: Millis | None, about: Millis, lasts: Millis, holder: str
    ) -> Leased:
        wants = dict(sorted(wants.items()))
        asked = {topic: want for topic, want in wants.items() if want > 0 and self.next_due.is_due(topic, about)}
        others = {topic: want for topic, want in wants.items() if topic not in asked}
        known: Mapping[Topic, Millis] = {}
        leased: Leased | None = None
        if others:
            leased, due = await self._read_wake(others, now, about)
            asked |= {topic: others[topic] for topic in due}
            known = {topic: head for topic, head in leased.heads.items() if topic not in asked}
        if asked or leased is None:
            leased = await super().lease(asked, now, about, lasts, holder)
            leased = replace(leased, heads={**known, **leased.heads})
        self.next_due.became(wants, leased)
        return leased

    async def _take(
        self, wants: Mapping[Topic, int], now: Millis | None, about: Millis, lasts: Millis, holder: str
    ) -> tuple[Leased, bool]:
        positions, bounds = self.positions, self.bounds
        topics = list(wants)
        counts = {topic: min(want, _MOST) for topic, want in wants.items()}

        async def take(call: Call) -> tuple[Leased, bool]:
            start = self._scan_start(call, counts, about)
            with bounds.timed(full=start.full) as so_far:
                locked = await self._locked(call, counts, start, now)
                there, found, took = locked.there, locked.found, so_far()
                given = self._give(call, locked, there + lasts, holder)
                room = [topic for topic, count in counts.items() if count <= 0 or len(found[topic]) < count]
                end = call.ending()
                commits = bool(given.dues) or call.may_be_done  # an earlier sending may have leased tasks
                if commits:
                    end = call.pass_gate(max(given.tokens.values(), default=0), _encode(list(given.tokens.items())))
                tasks: list[Record] = []

                def make_records() -> None:
                    for row, token in zip(given.dues, given.tokens.values(), strict=True):
                        tasks.append(lifecycle.lease(record_of(row), there, there + lasts, holder, token))
                    # if the call fails, these entries are never used
                    self.leased.leased(given.tokens, tasks, map(given.batch_of.__getitem__, given.tokens))

                statements = (*given.statements, *_ask_heads(call, room, start), *end)
                answers = await call.send(*statements, commits=commits, meanwhile=make_records)
            heads = _read_heads(room, answers, start)
            wakes, ends, skipped = _next_wakes(heads, counts, there)
            for topic in room:
                if found.get(topic):
                    wakes[topic] = min(wakes.get(topic, there + lasts), there + lasts)
            if start.thorough:
                positions.scanned(topics, ends)
                bounds.scanned(start, took, there)
                full = counts.keys() - set(room)
                bounds.left({**heads, **{one: (found[one][-1][AT], locked.expired.get(one)) for one in full}})
            next_scans = positions.heads(counts, wakes, there, thorough=start.thorough)
            if not skipped:
                self._note(counts, room, found, there)
            return Leased(tasks, next_scans, there), bool(skipped)

        return await self._connection.run(take, partial(_still_held, topics))

    def _give(self, call: Call, locked: LockedTasks, until: Millis, holder: str) -> Given:
        """The leases of the locked tasks, each until `until`, and the statements that write them."""
        dues = [row for rows in locked.found.values() for row in rows]
        if len(locked.found) > 1:
            dues.sort(key=_wake)
        tokens = {row[ROW]: max(row[TOKEN] + 1, locked.micros) for row in dues}
        if not dues:
            return Given(dues, tokens, {}, locked.rewritten)
        pairs = {topic: [(row[ROW], tokens[row[ROW]]) for row in rows] for topic, rows in locked.found.items()}
        written, batch_of = lease_batches.write_batches(call, pairs, until)
        rows = these(sorted(tokens))
        lease = call.write("lease_tasks", these=rows, micros=locked.micros, until=until, holder=filled(holder))
        over = lease_batches.delete_batches(call, self.leased.over(locked.there + SLACK))
        return Given(dues, tokens, batch_of, [lease, *locked.rewritten, *over, *written])

    async def _locked(
        self, call: Call, counts: Mapping[Topic, int], start: ScanStart, now: Millis | None
    ) -> LockedTasks:
        statements = [*call.begin(now, sum(max(count, 0) for count in counts.values())), call.write("clock")]
        wanted = [topic for topic, count in counts.items() if count > 0]
        for topic in wanted:
            floor = start.waiting[topic]
            behind = 0 if start.thorough else self.next_due.behind(topic, floor)
            statements.append(call.write("take_waiting", topic=topic, floor=floor, row=behind, most=counts[topic]))
            if start.thorough:
                values = {"topic": topic, "floor": start.lost[topic], "most": lease_batches.AT_ONCE}
                statements.append(call.write("expired_leases", **values))
        [[(there, micros)], *answers] = await call.timed(*statements)
        locked = LockedTasks(there, micros, {}, {}, [])
        expired: dict[Topic, lease_batches.Expired] = {}
        each = 1 + start.thorough
        for place, topic in enumerate(wanted):
            rest = rest_of_waiting(topic)
            locked.found[topic] = [(*row, *rest) for row in answers[each * place]]
            if start.thorough and answers[each * place + 1]:
                expired[topic] = lease_batches.read_expired(topic, answers[each * place + 1])
        if expired:
            for topic, (held, lost) in (await lease_batches.read_remains(call, expired, counts)).items():
                dues = locked.found[topic]
                dues += lost
                dues.sort(key=_wake)
                del dues[counts[topic] :]
                leased = {row[ROW] for row in dues}
                left = [one for one in held if one.row not in leased]
                locked.expired[topic] = expired[topic].names[0].until
                locked.rewritten.extend(lease_batches.rewrite_batches(call, expired[topic], left, there))
        return locked

    def _scan_start(self, call: Call, wants: Mapping[Topic, int], about: Millis) -> ScanStart:
        """Determine the start of the scan, and allow the call the time for it."""
        bounds = self.bounds
        since, thorough = self.positions.begin(wants, about)
        if thorough:
            bounds.on_connection(call.connection)
        start: ScanStart = bounds.start(list(wants), since, thorough=thorough)
        if start.full and bounds.patience:
            call.allow(bounds.patience)
        return start

    def _note(
        self, counts: Mapping[Topic, int], room: list[Topic], found: Mapping[Topic, list[Row]], there: Millis
    ) -> None:
        """Note how far the scan came."""
        self.positions.emptied([topic for topic in room if counts[topic] > 0], there)
        for topic in counts.keys() - set(room):
            last = next((row for row in reversed(found[topic]) if row[STATE] == _WAITING), None)
            if last is not None:
                self.positions.reached({topic: last[AT]})
                self.next_due.reached(topic, last[AT], last[ROW], there)

    async def _read_wake(
        self, wants: Mapping[Topic, int], now: Millis | None, about: Millis
    ) -> tuple[Leased, Collection[Topic]]:
        positions, bounds = self.positions, self.bounds
        topics = list(wants)

        async def work(call: Call) -> tuple[Leased, set[Topic]]:
            start = self._scan_start(call, wants, about)
            asked = _ask_heads(call, topics, start._replace(head=start.waiting))  # no other statement scans from there
            with bounds.timed(full=start.full) as took:
                [[(there, _)], *found] = await call.timed(call.select_clock(now), *asked)
            heads = _read_heads(topics, found, start)
            wakes, ends, due = _next_wakes(heads, wants, there)
            if start.thorough:
                bounds.scanned(start, took(), there)
                bounds.left(heads)
                # the scan of the due topics, which follows, has to be thorough as well
                positions.scanned([topic for topic in topics if topic not in due], ends)
            next_scans = positions.heads(wants, wakes, there, thorough=start.thorough)
            positions.emptied([topic for topic in topics if wants[topic] > 0 and topic not in due], there)
            return Leased([], next_scans, there), due

        return await self._connection.read(work)

    async def wakes_between(
        self, call: Call, topics: Sequence[Topic], since: Millis, until: Millis
    ) -> dict[Topic, Millis]:
        """The earliest wake time of each topic that has one from `since` to `until`; or an earlier one."""
        start = self.bounds.start(topics, [since] * len(topics), thorough=False)
        answers = await call.send(*_ask_heads(call, topics, start, until))
        heads = _read_heads(topics, answers, start)
        return {topic: wake for topic, (wake, _) in heads.items() if wake is not None and wake <= until}

    async def _scan_fully(self, call: Call, asked: Sequence[Topic]) -> None:
        full, began = from_the_start(asked), time.monotonic()
        answers = await call.send(*_ask_heads(call, asked, full))
        self.bounds.found(_read_heads(asked, answers, full), time.monotonic() - began)


class LockedTasks(NamedTuple):
    """The due tasks that were locked."""

    there: Millis
    micros: int
    found: dict[Topic, list[Row]]
    """The tasks of each topic, oldest first."""
    expired: dict[Topic, Millis]
    """The earliest expiry of the expired batches in each topic that has any."""
    rewritten: list[bytes]
    """The statements that replace those batches by their remaining leases."""


class Given(NamedTuple):
    """The leases that a call gives out."""

    dues: list[Row]
    """The tasks, oldest first."""
    tokens: dict[int, Token]
    """The new token of each row, in this order."""
    batch_of: Mapping[int, lease_batches.LeaseBatch]
    """The batch that records each row."""
    statements: list[bytes]


async def _still_held(topics: Sequence[Topic], row: Repeated, call: Call) -> tuple[Leased, bool]:
    """The tasks that an earlier sending leased and still holds, so that none is returned that others hold."""
    tokens = dict(lease_batches.decode_pairs(row.answer or b"\x90"))
    held: dict[int, Record] = {}
    if tokens:
        for one in await call.ask("tasks_by_rows", these=these(sorted(tokens))):
            record = record_of(one)
            if record.state is State.LEASED and record.token == tokens[one[ROW]]:
                held[one[ROW]] = record
    return Leased([held[number] for number in tokens if number in held], dict.fromkeys(topics, row.now), row.now), False


def _wake(row: Row) -> Millis:
    """The time since which the task is due."""
    at: Millis = row[WAKE] if row[STATE] else row[AT]
    return at


Heads = tuple[Millis | None, Millis | None]
"""The earliest wake time in a topic, and its earliest expiry; None: there is none, or it is unknown."""


def _together(topics: Sequence[Topic], start: ScanStart) -> bool:
    """True if one statement reads all heads."""
    return start.cheap and len(topics) > _FEW


def _ask_heads(call: Call, topics: Sequence[Topic], start: ScanStart, until: Millis = NEVER) -> list[bytes]:
    if _together(topics, start):
        return [call.write("heads", wanted=call.packed(topics), until=until)]
    statements = []
    for topic in topics:
        statements.append(call.write("waiting_head", topic=topic, floor=start.head[topic]))
        if start.thorough:
            statements.append(call.write("leased_head", topic=topic, floor=start.lost[topic]))
    return statements


def _read_heads(topics: Sequence[Topic], answers: list[Rows], start: ScanStart) -> dict[Topic, Heads]:
    if _together(topics, start):
        heads: dict[Topic, Heads] = dict.fromkeys(topics, (None, None))
        return heads | {Call.name(topic): (wake, end if start.thorough else None) for topic, wake, end in answers[0]}
    first = iter([rows[0][0] if rows else None for rows in answers])
    return {topic: (next(first), next(first) if start.thorough else None) for topic in topics}


def _next_wakes(
    heads: Mapping[Topic, Heads], counts: Mapping[Topic, int], there: Millis
) -> tuple[dict[Topic, Millis], dict[Topic, Millis], set[Topic]]:
    """By topic, the earliest wake time and the earliest expiry; and the topics that want a task and have a due one."""
    wakes: dict[Topic, Millis] = {}
    ends: dict[Topic, Millis] = {}
    due: set[Topic] = set()
    for topic, first in heads.items():
        if first == (None, None):
            continue
        for at, known in zip(first, (wakes, ends), strict=True):
            if at is not None and (at > there or counts[topic] <= 0):
                known[topic] = at
            elif at is not None:
                due.add(topic)
                wakes[topic] = min(wakes.get(topic, NEVER), there + LATER)
    return wakes, ends, due
