"""Which shard to ask for what is due: the known heads, and who goes first.

For each topic and shard the store knows the head, the earliest wake: from the last answer, and from what it was told
since. So it asks only where something is due, and what it knows may only be too early, never too late: a wake that it
was not told of is found when a head is asked for again, which happens when it is `CAP` old: a lease says by when that
is, and a lease comes again by then.

Who goes first on a (topic, shard) is computed by rendezvous hashing (Thaler and Ravishankar, 1998) over the live
workers: all compute the same, and when one goes, only its shards go to others. **That only says who goes first; the
lease is the truth**: where the head is 50 ms overdue, anybody with room takes it. Two owners cost a wasted call.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from hashlib import blake2b
from math import inf

from bide.core.instants import Millis
from bide.core.records import Topic

CAP = 0.95
"""Seconds after which a head that was neither asked for nor told of is asked for again."""
GRACE: Millis = 50
"""How long a shard is its owner's alone."""
_AT_LEAST = 64
"""So many at once are worth a call to a shard that has plenty."""
NEVER: Millis = 2**62


class Heads:
    """The heads of one topic: for each shard the head, when it was asked for, and whether there was plenty."""

    __slots__ = ("asked", "heard", "mine", "plenty", "wakes")

    def __init__(self, shards: int) -> None:
        self.wakes: list[Millis] = [0] * shards
        """0 until it is known: ask."""
        self.asked = [-1e9] * shards
        self.heard: dict[int, Millis] = {}
        """The wakes told while a call to that shard was under way: they count, whatever the call answers."""
        self.plenty = [False] * shards
        self.mine = [True] * shards

    def told(self, shard: int, wake: Millis) -> None:
        """Something there wakes at that time: it only ever shortens the sleep."""
        if wake < self.wakes[shard]:
            self.wakes[shard] = wake
        if shard in self.heard:
            self.heard[shard] = min(wake, self.heard[shard])

    def asking(self, shard: int) -> None:
        """Call before a call to that shard is sent."""
        self.heard[shard] = NEVER

    def wake(self, shard: int) -> Millis:
        """When this worker should ask there."""
        wake = self.wakes[shard]
        return wake if self.mine[shard] or wake >= NEVER else wake + GRACE

    def next_wake(self) -> Millis | None:
        """When to ask again; None: nothing waits anywhere."""
        wake = min(map(self.wake, range(len(self.wakes))))
        return None if wake >= NEVER else wake

    def due(self, now: Millis) -> list[int]:
        """The shards to ask now, the most overdue first."""
        found = [shard for shard in range(len(self.wakes)) if self.wake(shard) <= now]
        if len(found) > 1:
            found.sort(key=self.wakes.__getitem__)
        return found

    def stale(self, before: float) -> list[int]:
        """The shards that were last asked before then."""
        return [shard for shard, asked in enumerate(self.asked) if asked < before]

    def oldest(self, away: Collection[int]) -> float:
        """When the shard was asked whose last answer is the oldest, `away` apart."""
        if not away:
            return min(self.asked)
        return min((asked for shard, asked in enumerate(self.asked) if shard not in away), default=inf)

    def answered(self, shard: int, waiting: int, leased: int, clock: float, *, plenty: bool) -> None:
        wake = self.heard.pop(shard, NEVER)
        if 0 <= waiting < wake:
            wake = waiting
        self.wakes[shard] = leased if 0 <= leased < wake else wake
        self.asked[shard] = clock
        self.plenty[shard] = plenty

    def put_off(self, shard: int, wake: Millis) -> None:
        """Nothing is to be had there before `wake`, whatever is known of it."""
        self.wakes[shard] = max(wake, self.wakes[shard])

    def shares(self, due: list[int], room: int) -> dict[int, int]:
        """How much to ask of which shard: of few where there is plenty, else a part of each."""
        if any(self.plenty[shard] for shard in due):
            due = due[: max(1, room // _AT_LEAST)]
        due = due[:room]
        part, rest = divmod(room, len(due))
        return {shard: part + (number < rest) for number, shard in enumerate(due)}


def owner_of(topic: Topic, shard: int, workers: Collection[str]) -> str:
    """The one of `workers` that goes first there."""
    return max(workers, key=lambda worker: _weight(topic, shard, worker))


def owned(topic: Topic, shards: int, live: Mapping[str, Collection[Topic]], mine: Collection[str]) -> list[bool]:
    """For each shard whether one of `mine` goes first there; workers that `live` does not know yet count too."""
    workers = {worker for worker, topics in live.items() if topic in topics} | set(mine)
    if len(workers) == len(mine):
        return [True] * shards
    return [owner_of(topic, shard, workers) in mine for shard in range(shards)]


def _weight(topic: Topic, shard: int, worker: str) -> bytes:
    return blake2b(f"{worker}\0{shard}\0{topic}".encode(), digest_size=8).digest()
