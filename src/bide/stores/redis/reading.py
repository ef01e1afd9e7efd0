"""Plain reads, lists and counts: sent to each shard's server in one write, and retried while a server is away.

Each page of a list merges entries of the shards' indexes, and no shard reads more than a page. A list ordered by time
goes topic by topic; its place is the last (topic, time, key) shown. A plain list has no index of its own, because that
would cost every task a hundred bytes: within a topic it goes through the five indexes by state. A group has an index by
(topic, key). A cursor consists of the list's kind and the last place shown.
"""

from __future__ import annotations

import asyncio
import heapq
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Collection, Sequence
from itertools import chain, islice, product
from operator import add
from typing import Any, TypeVar

from msgspec.structs import replace

from bide.core.errors import BadInput
from bide.core.instants import LAST_INSTANT, Millis
from bide.core.names import RESERVED_TOPICS
from bide.core.payloads import slices
from bide.core.records import Count, Filter, Found, Page, Record, Ref, State, Tally, Topic
from bide.stores.cursors import Place, read_cursor, write_cursor
from bide.stores.redis.layout import STATES, Layout, record_of, text_of
from bide.stores.redis.script_client import ShardCaller, script
from bide.stores.redis.topology import Command, SharedConnection, Topology
from bide.stores.resending import NotSent

_PAGE, _COUNT = script("page", flags=False, library=False), script("count", flags=False, library=False)
_MOST_EDGES = 1_000
"""The most intervals in one call, so that it blocks the server for a few milliseconds at most."""
_COUNTS, _SCRIPTS_AT_ONCE = 500, 4
"""The most counts of one script, and the scripts that are sent together: both sides are busy for a few milliseconds."""
_PLACES = 2_000
"""How many (topic, shard) a list examines at once."""
Index = tuple[int, bytes]
"""The shard and the key of an index."""
Entry = TypeVar("Entry", "Position", bytes)
Position = tuple[float, bytes]
"""The position of an index entry: its raw score and member. A list skips an entry whose score is not a task's time or
whose member is not text, but continues from its position."""


class Reader(ShardCaller):
    """Sends read-only commands, which can be retried any number of times."""

    def __init__(self, layout: Layout, topology: Topology, *, patience: float) -> None:
        super().__init__(topology, layout, patience, _PAGE, _COUNT)

    async def ask(self, asked: Sequence[tuple[int | None, Command]]) -> list[Any]:
        """The replies to each (shard, command), in order. Raises StoreUnavailable if one cannot be obtained."""
        replies = await self._together(asked)
        failed = [place for place, one in enumerate(replies) if isinstance(one, Exception)]
        for place in failed[:1]:
            replies[place] = await self._reply(*asked[place], replies[place], reads=True)
        if others := failed[1:]:  # once the first problem is over, most of the others are
            for place, reply in zip(others, await self._together([asked[place] for place in others]), strict=True):
                replies[place] = await self._reply(*asked[place], reply, reads=True)
        return replies

    async def _together(self, asked: Sequence[tuple[int | None, Command]]) -> list[Any]:
        """Send the commands once, those of each server together; return a reply or an error for each."""
        replies: list[Any] = [None] * len(asked)
        groups: dict[SharedConnection, list[int]] = {}
        for place, (shard, _) in enumerate(asked):
            try:
                groups.setdefault(await self._topology.connection(shard), []).append(place)
            except NotSent as error:
                replies[place] = error

        async def ask_together(connection: SharedConnection, places: list[int]) -> None:
            got = await self._ask(connection, [asked[place][1] for place in places], fresh=True)
            for place, reply in zip(places, got, strict=True):
                replies[place] = reply

        await asyncio.gather(*(ask_together(*group) for group in groups.items()))
        return replies

    async def get(self, refs: Sequence[Ref]) -> list[Record | None]:
        """The tasks as they are now; None for a missing or unreadable one."""
        groups: dict[tuple[int, str], list[int]] = {}
        for place, (topic, key) in enumerate(refs):
            groups.setdefault((self.layout.shard_of(topic, key), topic), []).append(place)
        commands: list[tuple[int | None, Command]] = []
        for (shard, topic), places in groups.items():
            keys = [refs[place].key for place in places]
            bodies, leased = self.layout.topic(shard, topic)[0], self.layout.index(shard, topic, State.LEASED)
            commands += (shard, ("ZMSCORE", leased, *keys)), (shard, ("HMGET", bodies, *keys))
        records: list[Record | None] = [None] * len(refs)
        replies = iter(await self.ask(commands))
        for places, ends, found in zip(groups.values(), replies, replies, strict=True):
            for place, end, body in zip(places, ends, found, strict=True):
                if body is not None:
                    records[place] = _readable(refs[place], body, end)
        return records


def _readable(ref: Ref, body: bytes, end: bytes | None) -> Record | None:
    """The record of a body; None if it is damaged. `end`: that of the task's lease, since a body has only the first."""
    try:
        record = record_of(ref.topic, ref.key, body)
    except ValueError:
        return None
    if end is None or record.state is not State.LEASED:
        return record
    return replace(record, wake_at=int(max(0, min(float(end), LAST_INSTANT))))


# --- lists and counts


async def find(reader: Reader, where: Filter, page: Page) -> Found:
    """Read one page: at most a page of entries from each shard, and the bodies of the tasks shown."""
    if page.limit < 1:
        raise BadInput("limit", page.limit, "a whole number of at least 1")
    place, steps = read_cursor(page.cursor, where), _steps_of(where)
    order = place.order
    if order == "live" and where.state is not None and not where.state.live:
        return Found([], None)
    if order == "group":
        return await _group(reader, where, page, place)
    shown: list[tuple[Place, Record]] = []
    async for topic, step, indexes in _indexes(reader, where, place.topic, steps):
        if topic == place.topic and step < place.row:
            continue
        after: Position | None = None
        if (topic, step) == (place.topic, max(place.row, 0)) and place.key:
            after = place.instant, place.key.encode()
        growth = 1  # for indexes that fill one after the other, as by a long batch
        while len(shown) <= page.limit:
            wanted = page.limit + 1 - len(shown)
            share = min(wanted, growth * _share(wanted, len(indexes)))
            entries = await _entries(reader, where, indexes, after, wanted, share, timed=order == "live")
            growth *= 2
            if not entries:
                break
            after = entries[-1]
            records = await reader.get([Ref(topic, text_of(key)) for _, key in entries])
            for (time, _), record in zip(entries, records, strict=True):
                # the task may be gone or moved since its entry was read
                if record is not None and record.state in steps[step] and _time_of(record) == time:
                    shown.append((Place(order, topic, record.key, _time_of(record), step), record))
        if len(shown) > page.limit:
            break
    return _page(shown, page.limit)


def _page(shown: list[tuple[Place, Record]], limit: int) -> Found:
    more = len(shown) > limit
    shown = shown[:limit]
    return Found([record for _, record in shown], write_cursor(shown[-1][0]) if more else None)


def _steps_of(where: Filter) -> list[list[State]]:
    """The steps in which a list goes through a topic, each a list of states whose indexes are merged."""
    if where.state is not None:
        return [[where.state]]
    if where.wake_from is not None or where.wake_before is not None:
        return [[State.WAITING, State.LEASED]]
    return [[state] for state in STATES]


async def _indexes(
    reader: Reader, where: Filter, start: Topic, steps: Sequence[Sequence[State]]
) -> AsyncIterator[tuple[Topic, int, list[Index]]]:
    """The indexes of each (topic, step) of a list, from the topic `start` on; of all topics, those with entries."""
    index, shards = reader.layout.index, range(reader.layout.shards)
    if where.topic is not None:
        for step, states in enumerate(steps):
            yield where.topic, step, [(shard, index(shard, where.topic, state)) for shard in shards for state in states]
        return
    edges: Sequence[Millis] = ()
    if where.wake_from is not None or where.wake_before is not None:
        edges = where.wake_from or 0, LAST_INSTANT + 1 if where.wake_before is None else where.wake_before
    places = sorted((topic, shard) for shard, topic in await _places(reader))
    places = [place for place in places if place[0] >= start and place[0] not in RESERVED_TOPICS]
    while places:
        end = bisect_right(places, (places[:_PLACES][-1][0], reader.layout.shards))  # the end of a topic
        part, places = places[:end], places[end:]
        found: dict[tuple[Topic, int], list[Index]] = {}
        for step, state in chain.from_iterable(product([step], states) for step, states in enumerate(steps)):
            numbers = await _counted(reader, [(shard, topic) for topic, shard in part], [state], edges)
            for (topic, shard), (length, *between) in zip(part, numbers, strict=True):
                if length and (between or not edges):
                    found.setdefault((topic, step), []).append((shard, index(shard, topic, state)))
        for (topic, step), indexes in sorted(found.items()):
            yield topic, step, indexes


async def _counted(
    reader: Reader, places: Sequence[tuple[int, Topic]], states: Sequence[State], edges: Sequence[Millis]
) -> list[list[int]]:
    """The answer of `count` for each (shard, topic). A few scripts at a time, so that other calls go in between."""
    shards: defaultdict[int, list[int]] = defaultdict(list)
    for place, (shard, _) in enumerate(places):
        shards[shard].append(place)
    most = max(1, _COUNTS // (len(states) + len(edges)))
    scripts = [(shard, part) for shard, all_of in shards.items() for part in slices(all_of, most)]
    found: list[list[int]] = [[]] * len(places)
    index = reader.layout.index
    for some in slices(scripts, _SCRIPTS_AT_ONCE):
        asked: list[tuple[int | None, Command]] = []
        for shard, part in some:
            keys = [index(shard, places[place][1], state) for place in part for state in states]
            asked.append((shard, ("EVALSHA", _COUNT.sha, len(keys), *keys, len(states), *edges)))
        for (_, part), reply in zip(some, await reader.ask(asked), strict=True):
            for place, numbers in zip(part, reply, strict=True):
                found[place] = numbers
    return found


async def _entries(
    reader: Reader, where: Filter, indexes: Sequence[Index], after: Position | None, count: int, share: int, *,
    timed: bool,
) -> list[Position]:  # fmt: skip
    """The next `count` entries of these indexes, or fewer, from `share` of each. `timed`: for a list by wake time."""
    low = (where.wake_from or 0) if timed else 0
    high = where.wake_before if timed and where.wake_before is not None else LAST_INSTANT + 1
    if after is not None and after[0] < low:
        after = None
    place = (low, b"", "from") if after is None else (repr(after[0]), after[1], "behind")
    pages = await reader.ask(
        [(shard, ("EVALSHA", _PAGE.sha, 1, index, *place[:2], high, share, place[2])) for shard, index in indexes]
    )
    entries = [[(float(page[n + 1]), page[n]) for n in range(0, len(page), 2)] for page in pages]
    return _merged(entries, share, count)


def _share(count: int, indexes: int) -> int:
    """The number of entries to read from each index: its expected share of a page, and a margin for chance."""
    if indexes == 1:
        return count
    part = count / indexes
    return min(count, int(part + 2 * part**0.5) + 4)


def _merged(pages: Sequence[list[Entry]], share: int, count: int) -> list[Entry]:
    """The first `count` entries of several pages, or fewer, but at least one if there are any.

    An index with a full page may have more entries, so only entries up to the earliest end of a full page are certain.
    """
    ends = [page[-1] for page in pages if len(page) == share]
    merged = list(islice(heapq.merge(*pages), count))
    if ends:
        merged = merged[: bisect_right(merged, min(ends))]
    return merged


def _time_of(record: Record) -> Millis:
    return record.wake_at if record.finished_at is None else record.finished_at


async def _group(reader: Reader, where: Filter, page: Page, place: Place) -> Found:
    assert where.group is not None
    prefix = f"{where.group}\0".encode()
    if where.topic is not None:
        prefix += f"{where.topic}\0".encode()
    after = b"[" + prefix if page.cursor is None else f"({where.group}\0{place.topic}\0{place.key}".encode()
    # the prefix ends with NUL: all members that begin with it sort before the same prefix with byte 1 in place of NUL
    before = prefix[:-1] + b"\1"
    marks = [b"\0"] if where.live else [b""] if where.state is not None else [b"\0", b""]  # NUL: live tasks
    lists = [(reader.layout.groups[shard], shard, mark) for shard in range(reader.layout.shards) for mark in marks]
    shown: list[tuple[Place, Record]] = []
    while len(shown) <= page.limit:
        count = page.limit + 1 - len(shown)
        share = _share(count, reader.layout.shards)  # of each list: most groups are all live, or all ended
        ends = {mark: (after[:1] + mark + after[1:], b"(" + mark + before, "LIMIT", 0, share) for mark in marks}
        pages = await reader.ask([(shard, ("ZRANGEBYLEX", key, *ends[mark])) for key, shard, mark in lists])
        members = _merged([[member.removeprefix(b"\0") for member in found] for found in pages], share, count)
        if not members:
            break
        refs = [_ref_of(member) for member in dict.fromkeys(members)]  # twice if its state has changed meanwhile
        for ref, record in zip(refs, await reader.get(refs), strict=True):
            if record is not None and where.admits(record):
                shown.append((Place("group", ref.topic, ref.key), record))
        after = b"(" + members[-1]
    return _page(shown, page.limit)


def _ref_of(member: bytes) -> Ref:
    """The task of a group's entry: group NUL topic NUL key."""
    topic, _, key = text_of(member).partition("\0")[2].partition("\0")
    return Ref(topic, key)


async def _places(reader: Reader) -> list[tuple[int, Topic]]:
    """Every (shard, topic) that has a task."""
    layout = reader.layout
    replies = await reader.ask([(shard, ("ZRANGE", layout.topics[shard], 0, -1)) for shard in range(layout.shards)])
    return [(shard, text_of(one)) for shard, reply in enumerate(replies) for one in reply]


async def tally(reader: Reader, edges: Sequence[Millis] | None, only: Collection[Topic] | None) -> Tally:
    """Exact counts of every topic and state, in one call for some topics of a shard; each interval costs O(log n)."""
    edges, layout = edges or (), reader.layout
    places = await _places(reader) if only is None else [(shard, one) for shard in range(layout.shards) for one in only]
    parts = [edges[start : start + _MOST_EDGES + 1] for start in range(0, max(1, len(edges) - 1), _MOST_EDGES)]
    counts: Counter[tuple[Topic, State]] = Counter()
    forecast: dict[Topic, list[int]] = {}
    for some in slices(places, _PLACES):
        replies = [await _counted(reader, some, STATES, part) for part in parts]
        for (_, topic), *of in zip(some, *replies, strict=True):
            for state, number in zip(STATES, of[0], strict=False):
                if number:
                    counts[topic, state] += number
            if len(edges) > 1 and of[0][0]:
                found = (reply[len(STATES) :] or [0] * (len(part) - 1) for reply, part in zip(of, parts, strict=True))
                between = list(chain.from_iterable(found))
                before = forecast.get(topic)
                forecast[topic] = between if before is None else list(map(add, before, between))
    return Tally(
        {each: Count(number) for each, number in counts.items()},
        {topic: [Count(number) for number in numbers] for topic, numbers in forecast.items()},
    )
