"""Leasing: one statement leases the due tasks of each topic, and returns when to lease again.

`PostgresLeasing._take` runs the query `lease` of `queries.sql`. The rest is about where a scan may begin.

While an old transaction blocks vacuum, a full index scan visits every dead entry and its row: 0.3 us each. After a
minute of 4,000 tasks a second that is a quarter of a second, in which nothing else is leased. So thorough scans then
begin at a bound: a time before which nothing new can appear.

A scan from a bound still finds everything, however long transactions last. A row's wake time, and the expiry of its
lease, is no earlier than the start of the statement that wrote it. And a transaction that has written or locked tasks
holds a lock on the table until it ends. So before each scan the worker reads the time, and the transactions that hold
such a lock. A transaction without the lock has either ended, and the scan sees its rows; or it has written nothing yet,
and its rows will wake after that time. A transaction with the lock is remembered with the time of the last reading at
which it had none. The earliest of these times is the next scan's bound, for each topic in which nothing due was left.

A pooler hides the replacement of a connection, such as after a crash. So behind a pooler each thorough scan is full.

Only the next full scan finds two kinds of rows. One kind was written by hand, or after the server's clock was set back
by too little for two readings to show it. The other kind was locked while a full scan found more due tasks than wanted:
then there is no bound, and thorough scans begin where ordinary ones do.

To find the next expiry of a lease, a scan searches the next 1.5 s, and then from the earliest expiry that the last scan
saw. So shorter leases given to other workers since then are noticed shortly before they expire.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from bide.core.instants import Millis
from bide.core.records import Leased, Record, Topic
from bide.stores.postgres.connection import Call, Row
from bide.stores.postgres.queries import MOST
from bide.stores.sql.leasing import LATER, SLACK, Leasing, ScanBounds, ScanPositions
from bide.stores.sql.operations import WIDTH, WOKE, record_of

# --- where scans begin

EXPENSIVE = 0.003
"""Seconds above which a full scan counts as expensive."""
PER_TOPIC = 0.00002
"""The seconds for each topic that make no scan expensive."""
SOON: Millis = 1_500
"""How far ahead each scan searches for the expiry of leases: until well after the next thorough scan."""
PREPARED = "-1/"
"""The prefix of a prepared transaction's name; it had another name when it wrote."""


class ScanStart(NamedTuple):
    """The start of a scan in each topic: for waiting tasks, for expired leases, and for the next expiry."""

    waiting: list[Millis]
    lost: list[Millis]
    ends: list[Millis]
    full: bool


class FullScan(NamedTuple):
    """A full scan of some topics in the background. It sees everything written before `seen_until`."""

    topics: list[Topic]
    seen_until: Millis


class PostgresScanBounds(ScanBounds):
    watching = False
    """True if full scans have become expensive; then `read` has to be called before each thorough scan."""
    _lease_length: Millis = 0
    _was_full = True

    def _forget(self) -> None:
        super()._forget()
        self._bounded = False
        """True once a full scan has followed a reading: from then on there can be bounds."""
        self._asked: FullScan | None = None
        """The last full scan in the background; None if the bounds were forgotten since."""
        self._next_ends: dict[Topic, Millis] = {}
        self._scanned_at: dict[Topic, Millis] = {}
        self._read_at: Millis | None = None
        self._writers_since: dict[str, Millis] = {}
        self._seen_until: Millis = 0

    def read(self, at: Millis, writers: Sequence[str]) -> None:
        """Note the server's time, and the transactions that had the table locked for writing at or just after it."""
        if self._read_at is not None and at < self._read_at:
            self._forget()  # the clock was set back
        before = 0 if self._read_at is None else self._read_at
        self._writers_since = {
            name: self._writers_since.get(name, self._seen_until if name.startswith(PREPARED) else before)
            for name in writers
        }
        self._read_at, self._seen_until = at, min([at, *self._writers_since.values()])

    def start(self, topics: Sequence[Topic], positions: Sequence[Millis]) -> ScanStart:
        """The start of a thorough scan; `positions`: that of an ordinary one.

        There is no bound if something due was left, or a transaction is older than the first reading. The scan then
        begins where an ordinary one would, and for expired leases where the last thorough scan stopped.
        """
        first = not self._bounded and self._seen_until > 0
        if not (self._used and self.watching) or first or self._full_at is None:
            nothing = [0] * len(topics)
            return ScanStart(nothing, nothing, nothing, True)
        return ScanStart(
            [min(floor, self._bounds.get(topic, floor)) for topic, floor in zip(topics, positions, strict=True)],
            [self._bounds.get(topic, max(0, self._scanned_at.get(topic, 0) - SLACK)) for topic in topics],
            [self._next_ends.get(topic, 0) for topic in topics],
            False,
        )

    def scanned(
        self, topics: Collection[Topic], took: float, there: Millis, start: ScanStart, lasts: Millis | None = None
    ) -> None:
        """Note a thorough scan at `there` that took `took` seconds, and the length `lasts` of the leases it gave."""
        self._was_full = start.full
        if lasts is not None:
            self._lease_length = lasts
        if start.full:
            self.watching = self._used and took > EXPENSIVE + len(topics) * PER_TOPIC
            self._wait(took)
            self.patience = 0.0
            self._bounded = self._seen_until > 0
            if not self.watching:
                self._forget()
        elif self._full_at is not None and self._clock() >= self._full_at and self._bounded:
            asked = FullScan(list(topics), self._seen_until)
            if self._background(asked):
                self._asked = asked
        self._scanned_at.update(dict.fromkeys(topics, there))

    def found(self, asked: FullScan, first: Millis | None, took: float) -> None:
        """Note the result of a background full scan: the earliest wake time or expiry of a lease."""
        if asked is not self._asked:  # the bounds were forgotten meanwhile
            return
        self._wait(took)
        if took <= EXPENSIVE + len(asked.topics) * PER_TOPIC:
            self.watching = False
            self._forget()
            return
        for topic in asked.topics:
            known = self._bounds.get(topic, asked.seen_until)
            self._bounds[topic] = known if first is None else min(known, first)

    def emptied(self, topics: Collection[Topic], first: Millis | None = None) -> None:
        """Note that the thorough scan left nothing due in these topics, or nothing before `first`."""
        if self._bounded:
            bound = self._seen_until if first is None else min(first, self._seen_until)
            for topic in topics:
                if self._was_full or topic in self._bounds:
                    self._bounds[topic] = bound

    def ended(self, topics: Collection[Topic], ends: Mapping[Topic, Millis], there: Millis) -> None:
        """Note the earliest expiry of a lease that the thorough scan at `there` saw in each of these topics."""
        if self._bounded:
            latest = there + self._lease_length
            self._next_ends.update({topic: min(ends.get(topic, latest), latest) for topic in topics})


# --- leasing

_BEFORE = 4
"""The number of columns before the record's: now, micros, heads, skipped."""
_BEFORE_MORE = 2
"""The same for `lease_more`: now, micros."""
_RECORD, _RECORD_MORE = slice(_BEFORE, _BEFORE + WIDTH), slice(_BEFORE_MORE, _BEFORE_MORE + WIDTH)
_SLACK: Millis = 100
"""The slack of the positions if notifications arrive: a transaction that commits late sends one."""


class PostgresLeasing(Leasing):
    """See `sql.leasing`."""

    def __init__(self, runtime: Any) -> None:
        pooled = runtime.address.pooled
        super().__init__(runtime, ScanPositions(used=runtime.by_server, slack=SLACK if pooled else _SLACK))
        self.bounds = PostgresScanBounds(used=runtime.by_server and not pooled, background=self.scan_in_background)

    async def _take(
        self, wants: Mapping[Topic, int], now: Millis | None, about: Millis, lasts: Millis, holder: str
    ) -> tuple[Leased, bool]:
        positions, bounds = self.positions, self.bounds
        topics = list(wants)
        counts = [min(want, MOST[-1]) for want in wants.values()]
        form = next(most for most in MOST if most >= max(counts))

        async def take(call: Call) -> tuple[Leased, bool]:
            since, thorough = positions.begin(wants, about)
            if not thorough and len(topics) == 1 and topics[0] in positions.plenty:
                rows = await call.numbered(f"lease_more_{form}", now, topics[0], counts[0], lasts, holder, since[0])
                return self._taken_more(rows, topics[0], counts[0]), False
            start = await self._scan_start(call, topics, since, thorough=thorough)
            with bounds.timed(full=start.full) as took:
                rows = await call.numbered(
                    f"lease_{form}", now, topics, counts, lasts, holder, start.waiting, thorough, start.lost,
                    start.ends, SOON,
                )  # fmt: skip
            if thorough:
                bounds.scanned(topics, took(), rows[0]["now"], start, lasts)
            return self._taken(rows, dict(zip(topics, counts, strict=True)), thorough=thorough)

        async def taken(row: Row, call: Call) -> tuple[Leased, bool]:
            """The tasks that an earlier sending leased and still holds, so that none is returned that others hold."""
            there = row["now"]
            rows = await call.fetch("leased_then", list(row["topics"]), there + lasts, row["tokens"][0], holder)
            rows.sort(key=lambda one: one[WOKE])
            return Leased([record_of(one) for one in rows], dict.fromkeys(topics, there), there), False

        return await self._connection.run(take, taken)

    async def _scan_start(self, call: Call, topics: list[Topic], since: list[Millis], *, thorough: bool) -> ScanStart:
        """Determine the start of a scan, and allow the call the time for it."""
        bounds = self.bounds
        if not thorough:
            return ScanStart(since, since, since, False)
        bounds.on_connection(call.connection)
        if bounds.watching:
            [row] = await call.fetch("writers")
            bounds.read(row["now"], row["writers"])
        start: ScanStart = bounds.start(topics, since)
        if start.full and bounds.patience:
            call.allow(bounds.patience)
        return start

    def _taken(self, rows: list[Any], wants: Mapping[Topic, int], *, thorough: bool) -> tuple[Leased, bool]:
        """The tasks, oldest first, and whether some were skipped; note how far the scan came."""
        positions, bounds = self.positions, self.bounds
        there, _, heads, skipped = rows[0][:_BEFORE]
        wakes, ends = _by_topic(heads or ())
        if skipped:
            wakes |= {topic: min(wakes.get(topic, there + LATER), there + LATER) for topic in wants}
        tasks: list[Record] = []
        numbers: dict[Topic, int] = {}
        reached: dict[Topic, Millis] = {}
        if rows[0]["topic"] is not None:
            rows.sort(key=lambda row: row[_BEFORE + WOKE])
            for row in rows:
                record = record_of(row[_RECORD])
                tasks.append(record)
                numbers[record.topic] = numbers.get(record.topic, 0) + 1
                if record.planned_at == row[_BEFORE + WOKE]:  # it was waiting, not lost
                    reached[record.topic] = record.planned_at
        emptied = [topic for topic, want in wants.items() if not skipped and 0 <= numbers.get(topic, 0) < want]
        if not skipped:
            positions.emptied(emptied, there)
            positions.reached({topic: at for topic, at in reached.items() if numbers[topic] >= wants[topic]})
        if thorough:
            positions.scanned(wants, ends)
            bounds.ended([topic for topic, want in wants.items() if numbers.get(topic, 0) < max(want, 1)], ends, there)
            bounds.emptied(emptied)
            for topic, want in wants.items():
                if want <= 0:
                    bounds.emptied([topic], _first(wakes.get(topic), ends.get(topic)))
        return Leased(tasks, positions.heads(wants, wakes, there, thorough=thorough), there), skipped

    def _taken_more(self, rows: list[Any], topic: Topic, want: int) -> Leased:
        """The tasks, oldest first. If there are fewer than wanted, the next scan follows at once and determines why."""
        there = rows[0]["now"]
        if rows[0]["topic"] is None:
            rows = []
        rows.sort(key=lambda row: row[_BEFORE_MORE + WOKE])
        tasks = [record_of(row[_RECORD_MORE]) for row in rows]
        if len(tasks) < want:
            self.positions.plenty.discard(topic)
            return Leased(tasks, {topic: there}, there)
        self.positions.reached({topic: tasks[-1].planned_at})
        return Leased(tasks, self.positions.heads({topic: want}, {}, there, thorough=False), there)

    async def _read_wake(
        self, wants: Mapping[Topic, int], now: Millis | None, about: Millis
    ) -> tuple[Leased, Collection[Topic]]:
        positions, bounds = self.positions, self.bounds
        topics = list(wants)

        async def work(call: Call) -> Leased:
            since, thorough = positions.begin(wants, about)
            start = await self._scan_start(call, topics, since, thorough=thorough)
            asked = (now, topics, start.waiting, thorough, start.lost, start.ends, SOON)
            with bounds.timed(full=start.full) as took:
                [row] = await call.timed("heads", *asked)
            there, (wakes, ends) = row["now"], _by_topic(row["heads"] or ())
            if thorough:
                bounds.scanned(topics, took(), there, start)
                positions.scanned(topics, ends)
                bounds.ended(topics, ends, there)
                for topic in topics:
                    bounds.emptied([topic], _first(wakes.get(topic), ends.get(topic)))
            return Leased([], positions.heads(wants, wakes, there, thorough=thorough), there)

        return await self._connection.read(work), ()

    async def _scan_fully(self, call: Call, asked: FullScan) -> None:
        nothing, began = [0] * len(asked.topics), time.monotonic()
        [row] = await call.fetch("heads", None, asked.topics, nothing, True, nothing, nothing, SOON)
        wakes, ends = _by_topic(row["heads"] or ())
        self.bounds.found(asked, _first(*wakes.values(), *ends.values()), time.monotonic() - began)


def _by_topic(heads: Sequence[tuple[Topic, Millis | None, Millis | None]]) -> tuple[dict[Topic, Millis], ...]:
    """By topic, the earliest wake time; and by topic, the earliest expiry of a lease."""
    wakes = {topic: wake for topic, wake, _ in heads if wake is not None}
    return wakes, {topic: end for topic, _, end in heads if end is not None}


def _first(*heads: Millis | None) -> Millis | None:
    """The earliest known time."""
    return min((at for at in heads if at is not None), default=None)
