"""One page of tasks, read in one snapshot: topic by topic, from the index that has the requested order."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Coroutine, Iterable, Sequence
from functools import partial
from heapq import merge
from itertools import islice
from typing import Any, ClassVar, TypeVar

from bide.core.instants import Millis
from bide.core.names import RESERVED_TOPICS
from bide.core.records import Count, Filter, Found, Page, Record, Ref, State, Tally, Topic
from bide.ports import COUNTED, run_at_once
from bide.stores.cursors import Place, place_of, read_cursor, write_cursor
from bide.stores.sql.operations import CODES, STATES

T = TypeVar("T")
_TOPICS, _TASKS = 500, 20_000
"""The most topics, and about the most tasks, that one statement counts."""
LATEST: Millis = 2**62
"""Later than every valid instant."""
Located = tuple[int, Record]
"""The row's number, which distinguishes equal times, and the record."""


class Reads(ABC):
    """The three ways to read, by the queries of one call. Each is a seek in an index and a range of rows from there."""

    _record_of: ClassVar[Callable[[Sequence[Any]], Record]]
    _row: ClassVar[int]
    """The position of the row's number in a row."""

    def __init__(self, call: Any) -> None:
        self._call = call

    def _located(self, rows: Iterable[Sequence[Any]]) -> list[Located]:
        record_of, place = type(self)._record_of, self._row
        return [(row[place], record_of(row)) for row in rows]

    async def next_topic(self, after: Topic, where: Filter) -> Topic | None:
        """The first topic after `after`, of one group, of the tasks in one state, or of all tasks: one seek."""
        if where.group is not None:
            ask = partial(self._call.ask, "next_topic_of_group", group=where.group)
            asked = [await ask(ended=ended, topic=after) for ended in _group_parts(where)]
        elif where.state is None:
            asked = [await self._call.ask("next_topic", topic=after)]
        else:
            asked = [await self._of_state(where.state, after)]
        found = [row[0] for rows in asked for row in rows if row[0] is not None]
        return self._call.name(min(found)) if found else None

    async def _of_state(self, state: State, after: Topic) -> Any:
        return await self._call.ask(f"next_topic_of_state_{CODES[state]}", topic=after)

    async def by_name(self, topic: Topic, after: str, where: Filter, most: int) -> list[Located]:
        """Read in the order of keys, after the key `after`, from one group or from all tasks."""
        if where.group is None:
            return self._located(await self._call.ask("page_by_name", topic=topic, key=after, most=most))
        ask = partial(self._call.ask, "page_by_group", group=where.group)
        asked = [await ask(ended=ended, topic=topic, key=after, most=most) for ended in _group_parts(where)]
        pages = map(self._located, asked)
        return next(pages) if len(asked) == 1 else list(islice(merge(*pages, key=lambda found: found[1].key), most))

    @abstractmethod
    async def by_time(
        self, topic: Topic, state: State, after: tuple[Millis, int], before: Millis, most: int
    ) -> list[Located]:
        """Read the tasks in one state by time, and by row among equal times, after the position `after`."""


def _group_parts(where: Filter) -> Sequence[int]:
    """The parts of a group that a list reads: its live members (0), those that have ended (1), or both."""
    return (0,) if where.live else (0, 1) if where.state is None else (1,)


class ServerReads(Reads):
    """The reads on a database server, by the queries of one call."""

    @abstractmethod
    async def get(self, refs: Sequence[Ref]) -> list[Record | None]:
        """Read tasks by their names. O(log n) per task."""

    @abstractmethod
    async def tally(
        self, spans: Sequence[tuple[Millis, Millis]], upto: int, only: Collection[Topic] | None, after: Topic, most: int
    ) -> tuple[Tally, Topic | None]:
        """Count by topic and state, and in each interval, each count up to `upto`. For the rest see `tally_all`."""


async def in_snapshot(connection: Any, read: Callable[[Any], Awaitable[T]]) -> T:
    """Run `read` in one snapshot, so that a task that moves meanwhile is seen once."""

    async def work(call: Any) -> T:
        await call.begin_snapshot()
        found = await read(call)
        await call.commit()
        return found

    found: T = await connection.read(work)
    return found


async def find(connection: Any, reads: type[Reads], where: Filter, page: Page) -> Found:
    """See `read_page`."""
    return await read_page(where, page, lambda read: in_snapshot(connection, lambda call: read(reads(call))))


async def tally_all(some: Callable[[Topic, int], Awaitable[tuple[Tally, Topic | None]]]) -> Tally:
    """Count by calls that each take a few milliseconds, so that others go in between.

    `some`: counts up to that many topics after one, and returns the last of them; None: there are no more, or certain
    topics were asked for, which it counts at once.
    """
    counts: dict[tuple[Topic, State], Count] = {}
    forecast: dict[Topic, Sequence[Count]] = {}
    last: Topic | None = ""
    most = _TOPICS // 10
    while last is not None:
        found, last = await some(last, most)
        counts.update(found.counts)
        forecast.update(found.forecast)
        most = max(1, min(_TOPICS, most * _TASKS // (1 + found.number())))
    return Tally(counts, forecast)


def counts_in(rows: Iterable[Sequence[Any]]) -> dict[tuple[Topic, State], Count]:
    """The counts in rows of a topic and its number of tasks in each of `STATES`, counted up to `COUNTED` + 1."""
    return {
        (topic, state): count_of(number, COUNTED)
        for topic, *numbers in rows
        for state, number in zip(STATES, numbers, strict=True)
        if number
    }


def at_once(steps: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine that never waits, such as one that queries a file, to its end in this thread."""
    return run_at_once(steps, AssertionError("something was waited for"))


def count_of(number: int, upto: int) -> Count:
    """The Count for a `number` that was counted up to `upto` + 1."""
    return Count(min(number, upto), number <= upto)


async def read_page(
    where: Filter, page: Page, run: Callable[[Callable[[Reads], Awaitable[Found]]], Awaitable[Found]]
) -> Found:
    """Read one page, from the index that has its order. O(log n) per task, and one seek per topic passed.

    `run` calls what it is given with the indexes; it is not called if the cursor is damaged or nothing is asked for.
    """
    place = read_cursor(page.cursor, where)
    if page.limit <= 0:
        return Found([], page.cursor)
    return await run(lambda reads: _read_after(reads, where, place, page.limit))


async def _read_after(reads: Reads, where: Filter, place: Place, limit: int) -> Found:
    last = place
    tasks: list[Record] = []
    async for row, record in _walk(reads, where, place, limit + 1):
        if len(tasks) == limit:
            return Found(tasks, write_cursor(last))
        tasks.append(record)
        last = place_of(place.order, record, row)
    return Found(tasks, None)


async def topics_from(reads: Reads, where: Filter, first: Topic) -> AsyncIterator[Topic]:
    """The topics that `where` covers, in order, beginning with `first`."""
    if where.topic is not None:
        if where.topic >= first:
            yield where.topic
        return
    if first:
        yield first
    topic: Topic | None = first
    while (topic := await reads.next_topic(topic or "", where)) is not None:
        yield topic


async def _walk(reads: Reads, where: Filter, place: Place, enough: int) -> AsyncIterator[Located]:
    """Read in order, after `place`, at most `enough` rows at once."""
    async for topic in topics_from(reads, where, place.topic):
        if where.topic is None and where.group is None and topic in RESERVED_TOPICS:
            continue
        start = place if topic == place.topic else Place(place.order, topic)
        if place.order == "live":
            for one in await _live(reads, where, start, enough):
                yield one
        elif place.order == "ended":
            assert where.state is not None
            for one in await reads.by_time(topic, where.state, (start.instant, start.row), LATEST, enough):
                yield one
        else:
            async for one in _named(reads, where, start, enough):
                yield one


async def _live(reads: Reads, where: Filter, start: Place, enough: int) -> list[Located]:
    """Read the waiting and the leased tasks, each in order, and merge them by `wake_at`, then by row."""
    after = (start.instant, start.row)
    if where.wake_from is not None:
        after = max(after, (where.wake_from, -1))
    before = LATEST if where.wake_before is None else where.wake_before
    states = (State.WAITING, State.LEASED) if where.state is None else (where.state,)
    pages = [await reads.by_time(start.topic, state, after, before, enough) for state in states if state.live]
    return list(merge(*pages, key=by_wake_at))


def by_wake_at(found: Located) -> tuple[Millis, int]:
    """The sort key of live tasks."""
    return found[1].wake_at, found[0]


async def _named(reads: Reads, where: Filter, start: Place, enough: int) -> AsyncIterator[Located]:
    """Read by key, from one group or from all tasks; check the other conditions of `where` row by row."""
    key = start.key
    while True:
        page = await reads.by_name(start.topic, key, where, enough)
        for row, record in page:
            if where.admits(record):
                yield row, record
        if len(page) < enough:
            return
        key = page[-1][1].key
