"""Leasing from many shards: a worker queries the shards where a task is due, in rounds, until it has enough tasks.

For each topic and shard the `HeadCache` holds the head, the earliest wake, from the last answer and later
notifications. So a worker queries only shards where a task is due. Without a lost notification, a cached head may be
too early but never too late. A lost notification is made up for when the heads are read again, once they are `CAP` old:
one call to a shard reads those of all topics that wake there soon, whether this process handles them or not. Each lease
returns the time by which the worker must lease again for that.

All workers compute from the same list of live workers which of them goes first on a (topic, shard), by rendezvous
hashing (Thaler and Ravishankar, 1998): when a worker leaves, only its shards get a new owner. **This is a preference,
not a lock; only the lease counts**: any worker with room takes tasks where the head is 50 ms overdue. If two workers
both believe they own a shard, the cost is one wasted call. A lease that leaves nothing due publishes the new head, so
that of many idle workers only the owner asks.
"""

from __future__ import annotations

import asyncio
import logging
import time as steady
from collections import defaultdict
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from hashlib import blake2b
from itertools import islice
from math import inf
from operator import itemgetter
from typing import Any

from msgspec import Struct

from bide.core.errors import StoreCorrupt, StoreError
from bide.core.instants import NEVER, Millis
from bide.core.records import Leased, Record, State, Token, Topic
from bide.stores.redis.layout import Layout, record_of, text_of
from bide.stores.redis.script_client import Call, ScriptClient
from bide.stores.server import ServerTime

CAP = 0.95
"""Seconds after which the cached heads of a shard are read again."""
GRACE: Millis = 50
"""How long only the owner of a shard leases a due task."""
_AT_LEAST = 64
"""The number of tasks that justifies a call to a shard with plenty of due tasks."""
_MOST_BYTES = 1 << 19
"""The most bytes of tasks that are requested at once, but for one task of each shard, and after which a lease ends: any
other call of the process waits for them, on a slow machine 10 ms for a MiB."""
_LARGE = 1 << 18
"""The size of a task of which none was leased yet: large, so that the first are requested of few shards."""
_CHECKED = 8
"""The number of topics whose entry in the index of topics is checked with each reading of it, in turn."""


# --- heads, and which worker goes first


class HeadCache:
    """The heads of one topic, by shard: the wake, and whether plenty was due; and how large its tasks are."""

    __slots__ = ("_mine", "_owned", "noted", "plenty", "size", "wakes")

    def __init__(self, shards: int, owned: Callable[[], list[bool]]) -> None:
        """`owned`: computes for each shard whether this process goes first there."""
        self.wakes: list[Millis] = [NEVER] * shards
        self.noted: dict[int, Millis] = {}
        """The wakes noted while a call to that shard is under way: they count, whatever the call answers."""
        self.plenty = [False] * shards
        self.size = _LARGE
        """The bytes of a task, on average; falls slowly."""
        self._owned = owned
        self._mine: list[bool] | None = None

    @property
    def mine(self) -> list[bool]:
        """For each shard, true if this process goes first there. Computed only when needed after a change."""
        if self._mine is None:
            self._mine = self._owned()
        return self._mine

    def others_changed(self) -> None:
        """Note that the live workers of the topic have changed."""
        self._mine = None

    def note_wake(self, shard: int, wake: Millis) -> None:
        """Note a wake on a shard. It can only shorten the sleep."""
        if wake < self.wakes[shard]:
            self.wakes[shard] = wake
        if shard in self.noted:
            self.noted[shard] = min(wake, self.noted[shard])

    def asking(self, shard: int) -> None:
        """Note that a call to the shard is about to be sent."""
        self.noted[shard] = NEVER

    def wake(self, shard: int) -> Millis:
        """The time at which this worker should query the shard."""
        wake = self.wakes[shard]
        return wake if wake >= NEVER or self.mine[shard] else wake + GRACE

    def next_wake(self) -> Millis | None:
        """The time of the next query; None if no shard has a waiting task."""
        if min(self.wakes) >= NEVER:
            return None
        return min(map(self.wake, range(len(self.wakes))))

    def due(self, now: Millis) -> list[int]:
        """The shards to query now, the most overdue first."""
        found = [shard for shard in range(len(self.wakes)) if self.wake(shard) <= now]
        if len(found) > 1:
            found.sort(key=self.wakes.__getitem__)
        return found

    def read(self, shard: int, wake: Millis) -> None:
        """Note the head that was read with those of other topics."""
        if shard in self.noted:  # the answer to the call under way may be older or newer
            self.note_wake(shard, wake)
        else:
            self.wakes[shard] = wake

    def answered(self, shard: int, waiting: int, leased: int, *, plenty: bool) -> None:
        wake = self.noted.pop(shard, NEVER)
        if 0 <= waiting < wake:
            wake = waiting
        self.wakes[shard] = leased if 0 <= leased < wake else wake
        self.plenty[shard] = plenty

    def shares(self, due: list[int], room: int) -> dict[int, int]:
        """Divide `room` among the due shards: among a few if one has plenty or the tasks are large, else among all."""
        if any(self.plenty[shard] for shard in due):
            due = due[: max(1, room // _AT_LEAST)]
        due = due[: min(room, max(1, _MOST_BYTES // self.size))]
        part, rest = divmod(room, len(due))
        return {shard: part + (number < rest) for number, shard in enumerate(due)}


def owner_of(topic: Topic, shard: int, workers: Collection[str]) -> str:
    """The worker of `workers` that goes first on the shard.

    The weights are hashes of pairs of integers, which are alike in every process; else calls are wasted, see above.
    """
    place = _number(topic) + shard
    return max(workers, key=lambda worker: (hash((_number(worker), place)), worker))


def owned(topic: Topic, shards: int, workers: Collection[str], mine: Collection[str]) -> list[bool]:
    """For each shard, true if one of `mine` goes first there, among the live `workers` of the topic and `mine`."""
    everybody = {*workers, *mine}
    if len(everybody) == len(mine):
        return [True] * shards
    return [owner_of(topic, shard, everybody) in mine for shard in range(shards)]


@lru_cache(maxsize=16_384)
def _number(name: str) -> int:
    """A number of 60 bits for the name of a topic or a worker."""
    return int.from_bytes(blake2b(name.encode(), digest_size=8).digest()) >> 4


# --- late answers

_log = logging.getLogger("bide.redis")
_STRAGGLES = 0.2
"""Seconds that a lease waits for each of several servers."""
_KEPT = 1.0
"""Seconds that tasks of a late answer are kept for the holder's next lease, before they are given back."""
_PARTING = 1.0
"""Seconds that a departing holder waits for outstanding answers, so that it can give back their tasks."""
_woke = itemgetter(0)
_Taken = list[tuple[Millis, Record]]
"""Leased tasks, each with the time at which it woke."""


class LateAnswers(Struct, eq=False):
    """Queries several servers without waiting for a slow or unreachable one.

    The tasks of a late answer are kept for the holder's next call for `_KEPT` seconds, and then given back.
    """

    _client: ScriptClient
    _time: ServerTime
    _part_of: Callable[[int], int]
    """Shards with the same result fail together."""
    _give_back: Callable[[Sequence[Record]], Awaitable[None]]
    """Ends unused leases; if that fails, the leases expire."""
    _notify: Callable[[Topic, Millis], None]
    """Called when a late answer has brought tasks."""
    _tasks: dict[str, _Taken] = {}
    """The tasks of late answers, by holder."""
    _background: dict[asyncio.Task[None], str] = {}
    """The asyncio tasks that wait for late answers or keep their tasks for a moment, each with its holder."""
    away: dict[int, asyncio.Task[None]] = {}
    """The shards with an outstanding answer for which no lease waits any more."""

    async def ask(self, calls: list[Call], holder: str) -> list[Any]:
        """The replies; None for a server that did not answer within `_STRAGGLES` seconds."""
        parts: dict[int, list[int]] = {}
        for place, call in enumerate(calls):
            parts.setdefault(self._part_of(call.shard), []).append(place)
        replies: list[Any] = [None] * len(calls)
        asking = [asyncio.create_task(self._ask_part(calls, places, replies)) for places in parts.values()]
        try:
            await asyncio.wait(asking, timeout=_STRAGGLES)
        except asyncio.CancelledError:
            for task in asking:
                task.cancel()
            raise
        answers = list(replies)
        for task, places in zip(asking, parts.values(), strict=True):
            if task.done():
                task.result()
                continue
            mine = [(calls[place], place) for place in places]
            waiting = self._in_background(self._await(task, mine, replies, holder), holder)
            for place in places:
                answers[place] = None
                self.away[calls[place].shard] = waiting
        return answers

    async def _ask_part(self, calls: list[Call], places: list[int], replies: list[Any]) -> None:
        def read(number: int, reply: Any) -> None:
            replies[places[number]] = reply

        await self._client.run([calls[place] for place in places], read)

    def _in_background(self, step: Coroutine[Any, Any, None], holder: str) -> asyncio.Task[None]:
        task = asyncio.create_task(step)
        self._background[task] = holder
        task.add_done_callback(self._background.pop)
        return task

    async def _await(
        self, asking: asyncio.Task[None], calls: list[tuple[Call, int]], replies: list[Any], holder: str
    ) -> None:
        _log.info("a server is slow to lease or away; going on with the others")
        try:
            await asking
            late = self._tasks.setdefault(holder, [])
            for call, place in calls:
                if isinstance(replies[place], StoreError):
                    _log.warning("leasing failed: %s", replies[place])
                    continue
                for topic, (_, _, tasks) in _answers_in(call, replies[place]):
                    late += tasks
                    self._notify(topic, self._now())
            if late:
                self._in_background(self._return(holder, after=_KEPT), holder)
        finally:
            asking.cancel()
            for call, _ in calls:
                self.away.pop(call.shard, None)

    async def _return(self, holder: str, *, after: float = 0.0) -> None:
        """Give back the late tasks of this holder `after` some seconds, so that any worker can lease them."""
        await asyncio.sleep(after)
        late = self._tasks.pop(holder, None)
        if late:
            await self._give_back([record for _, record in late])

    def take(self, holder: str, room: dict[Topic, int], taken: _Taken) -> None:
        """Take the late tasks of an earlier call of this holder, if they are wanted and still held."""
        left: _Taken = []
        for woke, record in self._tasks.pop(holder, []):
            if record.wake_at <= self._now():
                continue  # its lease has expired, so it can be leased again
            if room.get(record.topic, 0) > 0:
                room[record.topic] -= 1
                taken.append((woke, record))
            else:
                left.append((woke, record))
        if left:
            self._tasks[holder] = left

    async def leave(self, holder: str) -> None:
        """Wait briefly for the outstanding answers of a holder that has stopped leasing, and give back their tasks.

        The tasks of later answers are given back when they arrive, while the process lives.
        """
        coming = {task for task in self.away.values() if self._background[task] == holder}
        if coming:
            await asyncio.wait(coming, timeout=_PARTING)
        await self._return(holder)

    async def close(self) -> None:
        """Let all holders of this process leave. Tasks of later answers stay leased until their leases end."""
        await asyncio.gather(*(self.leave(holder) for holder in {*self._background.values(), *self._tasks}))
        background = list(self._background)
        for task in background:
            task.cancel()
        await asyncio.gather(*background, return_exceptions=True)

    def _now(self) -> Millis:
        return int(self._time.seconds() * 1000)


def _answers_in(call: Call, reply: list[Any]) -> Iterator[tuple[Topic, tuple[Millis, Millis, _Taken]]]:
    """For each topic, both heads and the tasks, except tasks that changed hands before a repeated answer."""
    place = 3
    for topic in call.topics:
        waiting, leased, count = reply[place : place + 3]
        place += 3
        end = place + 3 * count
        yield topic, (waiting, leased, [
            (reply[at + 1], record_of(topic, text_of(reply[at]), reply[at + 2]))
            for at in range(place, end, 3) if reply[at + 2]
        ])  # fmt: skip
        place = end


# --- leasing

_AGAIN: Millis = 1_000
"""How long a shard is not queried after its server was away."""
_NO_TOKEN: Token = 2**53
_Noted = dict[int, dict[Topic, Millis]]
"""Wakes by shard and topic."""
_Empty = set[tuple[Topic, int]]
"""The (topic, shard) pairs that returned fewer tasks than were asked for: they have no more for this call."""


class Leaser:
    """Leases tasks for the workers of one process, and caches the heads."""

    def __init__(
        self, client: ScriptClient, layout: Layout, time: ServerTime, late: LateAnswers | None, *, by_server: bool
    ) -> None:
        """`late`: set if the shards are on several servers."""
        self._client = client
        self._layout = layout
        self._time = time
        self._by_server = by_server
        self.late = late
        self._away: Mapping[int, object] = {} if late is None else late.away
        """The shards that are not queried, because an answer is outstanding."""
        self._heads: dict[Topic, HeadCache] = {}
        self._read_at = [-inf] * layout.shards
        """When the heads of each shard were last read."""
        self._cached: list[set[Topic]] = [set() for _ in range(layout.shards)]
        """The topics that may have a cached head, by shard."""
        self._starved: list[Topic] = []
        """The topics of which the last lease took nothing that is due, since others had large tasks. They go first."""
        self._to_check: Iterator[Topic] = iter(())
        self._reading: list[_Noted] = []
        """One for each lease that is reading heads: the wakes noted meanwhile, which count whatever it reads."""
        self._live: Mapping[str, Collection[Topic]] = {}
        self._workers: Mapping[Topic, set[str]] = {}
        self._mine: set[str] = set()
        self._others = False
        """True if there are live workers in other processes."""

    def note_wake(self, shard: int, topic: Topic, wake: Millis) -> Millis:
        """Note a wake, and return the time at which this process should query the shard."""
        heads = self._heads.get(topic)
        if heads is None:
            return wake
        self._note(shard, topic, heads, wake)
        return wake if heads.mine[shard] else wake + GRACE

    def _note(self, shard: int, topic: Topic, heads: HeadCache, wake: Millis) -> None:
        heads.note_wake(shard, wake)
        self._cached[shard].add(topic)
        for noted in self._reading:
            if shard in noted:
                noted[shard][topic] = min(wake, noted[shard].get(topic, NEVER))

    def note_drained(self, shard: int, topic: Topic, head: Millis) -> Millis:
        """Note that another worker has leased all that was due, and return when this process should query the topic.

        The message comes after those of earlier wakes and before those of later ones, so it cannot hide a later one.
        """
        heads = self._heads.get(topic)
        if heads is None:
            return head
        if shard not in heads.noted:
            heads.wakes[shard] = head
        wake = heads.next_wake()
        return NEVER if wake is None else wake

    def note_written(self, answers: Sequence[Any], places: Sequence[int]) -> None:
        """Note the wakes that this process has written itself, without waiting for their notifications."""
        if not self._heads:
            return
        for place in places:
            record = answers[place].record
            if record is not None and record.state is State.WAITING:
                heads = self._heads.get(record.topic)
                if heads is not None:
                    shard = self._layout.shard_of(record.topic, record.key)
                    self._note(shard, record.topic, heads, record.wake_at)

    def share(self, holder: str, topics: Collection[Topic], live: Mapping[str, Collection[Topic]]) -> None:
        """Note that `holder` belongs to this process (has left, without topics), and all `live` workers."""
        if (holder in self._mine) is bool(topics) and live == self._live:
            return
        if topics:
            self._mine.add(holder)
        else:
            self._mine.discard(holder)
        workers = defaultdict[Topic, set[str]](set)
        for worker, its_topics in live.items():
            for topic in its_topics:
                workers[topic].add(worker)
        self._live, self._workers, self._others = live, workers, bool(live.keys() - self._mine)
        for heads in self._heads.values():
            heads.others_changed()

    def _owned(self, topic: Topic) -> list[bool]:
        if not self._mine:  # no worker here has announced itself: no need to hold back
            return [True] * self._layout.shards
        return owned(topic, self._layout.shards, self._workers.get(topic, ()), self._mine)

    async def lease(self, wants: Mapping[Topic, int], now: Millis, until: Millis, holder: str) -> Leased:
        """See `ports.Store.lease`."""
        began = steady.monotonic()
        taken: _Taken = []
        empty: _Empty = set()
        since: dict[int, Token] = {}
        """By shard, the first token that this call may have given out."""
        room = {**{topic: wants[topic] for topic in self._starved if topic in wants}, **wants}
        if self.late is not None:
            self.late.take(holder, room, taken)
        failed: StoreError | None = None
        size = 0
        for topic in wants:
            if topic not in self._heads:
                self._heads[topic] = HeadCache(self._layout.shards, partial(self._owned, topic))
                self._read_at = [-inf] * self._layout.shards
        reading: _Noted = {shard: {} for shard in self._shards_to_read()}
        checked = self._next_to_check() if reading else []
        while (size < _MOST_BYTES and (asked := self._shards_to_ask(room, self._now(now), empty))) or reading:
            clock = steady.monotonic()
            calls = []
            most = _MOST_BYTES // max(1, len(asked))
            for shard in reading:
                shares = asked.setdefault(shard, {})
                for topic in checked:
                    shares.setdefault(topic, 0)
            for shard, shares in asked.items():
                for topic, share in shares.items():
                    if share:
                        self._heads[topic].asking(shard)
                # all heads at first, then those that wake soon: a later one is known, or is read when it wakes soon
                soon = self._by_server and self._read_at[shard] > -inf
                which = "" if shard not in reading else "s" if soon else "a"
                first = since.get(shard, _NO_TOKEN)
                about = (until - now, holder, most, first, which, int(self._others))
                calls.append(Call(shard, list(shares), [*about, *shares.values()]))
            replies = await self._replies(calls, now, holder, reading)
            for call, reply in zip(calls, replies, strict=True):
                if call.shard in reading:
                    self._read_at[call.shard] = clock if type(reply) is list else clock - CAP / 2
                if reply is None or isinstance(reply, StoreError):
                    failed = reply or failed
                    for topic, share in asked[call.shard].items():
                        if share:
                            self._heads[topic].answered(call.shard, self._now(now) + _AGAIN, -1, plenty=False)
                else:
                    try:
                        since.setdefault(call.shard, reply[2] + 1)
                        size += self._read(call, asked[call.shard], reply, room, taken, empty)
                        if call.shard in reading:
                            self._read_heads(call.shard, reply[-1], reading[call.shard])
                    except (AttributeError, IndexError, TypeError, ValueError) as error:
                        where = f"{self._layout.namespace}, shard {call.shard}"
                        failed = StoreCorrupt(f"{where}: a remembered answer to a lease cannot be read: {error}")
            reading = {}
        if failed is not None and not taken:
            raise failed
        taken.sort(key=_woke)
        tasks, there = [record for _, record in taken], self._now(now)
        return Leased(tasks, self._heads_of(wants, room, there), there, self._again_by(began))

    def _heads_of(self, wants: Mapping[Topic, int], room: Mapping[Topic, int], now: Millis) -> dict[Topic, Millis]:
        """When to ask again about the topics with room left, and about those of which only that was asked."""
        for shard in self._away:  # a query is outstanding, so they must not keep the caller from sleeping
            for topic in wants:
                wakes = self._heads[topic].wakes
                wakes[shard] = max(now + _AGAIN, wakes[shard])
        heads: dict[Topic, Millis] = {}
        for topic, left in room.items():
            if (left > 0 or wants[topic] == 0) and (wake := self._heads[topic].next_wake()) is not None:
                heads[topic] = wake
        self._starved = [topic for topic, wake in heads.items() if wake <= now and room[topic] == wants[topic]]
        return heads

    async def _replies(self, calls: list[Call], now: Millis, holder: str, reading: _Noted) -> list[Any]:
        self._reading.append(reading)
        try:
            if self.late is not None:
                return await self.late.ask(calls, holder)
            replies: list[Any] = [None] * len(calls)
            await self._client.run(calls, replies.__setitem__, now="" if self._by_server else str(now))
            return replies
        finally:
            self._reading = [one for one in self._reading if one is not reading]

    def _now(self, now: Millis) -> Millis:
        return int(self._time.seconds() * 1000) if self._by_server else now

    def _shards_to_ask(self, room: Mapping[Topic, int], now: Millis, empty: _Empty) -> dict[int, dict[Topic, int]]:
        """The shards where a task is due, each with a number of tasks by topic."""
        asked: dict[int, dict[Topic, int]] = {}
        for topic, left in room.items():
            if left > 0:
                heads = self._heads[topic]
                due = [shard for shard in heads.due(now) if (topic, shard) not in empty and shard not in self._away]
                if due:
                    for shard, share in heads.shares(due, left).items():
                        asked.setdefault(shard, {})[topic] = share
        return asked

    def _oldest(self) -> float:
        """When the heads of the shard that was not read for longest were read."""
        return min((at for shard, at in enumerate(self._read_at) if shard not in self._away), default=inf)

    def _shards_to_read(self) -> list[int]:
        """The shards whose heads are stale. When those of one are `CAP` old, those half as old are read with them, so
        that all are eventually read together."""
        before = clock = steady.monotonic()
        if self._by_server:  # otherwise the caller's clock may jump, so a cached head says nothing
            before = clock - (CAP / 2 if self._oldest() < clock - CAP else CAP)
        return [shard for shard, at in enumerate(self._read_at) if at < before and shard not in self._away]

    def _next_to_check(self) -> list[Topic]:
        """The topics whose entry is to be checked now, so that an index that was lost or altered heals."""
        found = list(islice(self._to_check, _CHECKED))
        if len(found) < _CHECKED:
            self._to_check = iter(list(self._heads))
            found += islice(self._to_check, min(_CHECKED, len(self._heads)) - len(found))
        return found

    def _again_by(self, began: float) -> Millis | None:
        """The time at which the oldest heads become stale; None if all were read since `began`.

        Without it, a worker that leases just before a head becomes stale would sleep for the longest allowed time.
        """
        oldest = self._oldest()
        if not self._by_server or oldest >= began:
            return None
        return self._now(0) + max(int((oldest + CAP - steady.monotonic()) * 1000), 0) + 1

    def _read(
        self,
        call: Call,
        shares: Mapping[Topic, int],
        reply: list[Any],
        room: dict[Topic, int],
        taken: _Taken,
        empty: _Empty,
    ) -> int:
        """Note the answer of a shard; return the bytes of its tasks."""
        all_bytes = 0
        for topic, (waiting, leased, tasks) in _answers_in(call, reply):
            taken += tasks
            share = shares[topic]
            if share == 0:  # its entry was checked, and is read with the others
                continue
            room[topic] -= len(tasks)
            if len(tasks) < share:
                empty.add((topic, call.shard))
            self._cached[call.shard].add(topic)
            heads = self._heads[topic]
            heads.answered(call.shard, waiting, leased, plenty=share <= len(tasks))
            if tasks:
                size = sum([len(record.payload) for _, record in tasks])
                all_bytes += size
                heads.size = max(heads.size // 2, size // len(tasks), 1)
        return all_bytes

    def _read_heads(self, shard: int, found: list[Any], noted: Mapping[Topic, Millis]) -> None:
        """Note the heads of the topics of a shard. `noted`: the wakes noted since they were asked for."""
        cached = self._cached[shard]
        wakes = dict.fromkeys(cached, NEVER) if found[0] else {}
        for place in range(1, len(found), 2):
            topic = text_of(found[place])
            if topic in self._heads:
                wakes[topic] = int(float(found[place + 1]))
        for topic, wake in wakes.items():
            self._heads[topic].read(shard, min(wake, noted.get(topic, NEVER)))
            if wake < NEVER or topic in noted:
                cached.add(topic)
            else:
                cached.discard(topic)
