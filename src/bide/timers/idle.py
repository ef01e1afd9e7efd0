"""An idle ring finds the connections, among very many, that have been silent for a while.

**The idea.** Every packet restarts the time-out of its connection. Packets are frequent, so a packet must cost almost
nothing; time-outs are rare and may cost slightly more. A ring has one slot per `tick`, as many as fit into `timeout`,
and a map from each uid to its slot.

    timeout 30 s, tick 1 s.     touch("a", 0.4 s)    "a" rests in slot 31, the first boundary at or after 30.4 s
                                touch("a", 12.0 s)   the slot only records "last touch 12.0 s"; "a" stays where it is
                                advance(31 s)        the hand meets "a", sees 12.0, and puts it into slot 42
                                advance(42 s)        nothing since 12.0 s: "a" is idle

The published ring moves the uid to the slot behind the hand at every packet. Here a packet only overwrites one number,
and the hand moves the uid when it gets there: once per `timeout` instead of once per packet.

**The cost.** `touch`, `remove`: O(1), two dictionary operations. `advance`: O(uids in the slots passed), each live uid
at most once per `timeout`. One timer serves all. The alternatives are a timer per connection, cancelled and remade by
every packet, or a full scan of a map of last times every second. For 100,000 connections, that scan reads 100,000
entries to find the few idle ones, while the ring reads the 3,300 of one slot.

**The waste, and why it is fine.** An idle uid is reported up to one tick late, never early. A coarser tick means fewer
wake-ups, and it does not matter whether a dead connection is closed after 30 or 31 s. Slots are kept by number in a
dictionary and their numbers in a heap, so that a ring of many slots takes memory only for those in use.

Source: the same wheel as elsewhere (Varghese and Lauck, 1987) with all delays equal; kernels move TCP's keep-alive
timers in the same lazy way.
"""

from __future__ import annotations

from collections.abc import Hashable
from heapq import heappop, heappush
from typing import Generic, TypeVar

from bide.core.instants import Millis

Uid = TypeVar("Uid", bound=Hashable)


def slot_after(at: Millis, tick: Millis) -> int:
    """The number of the first tick boundary that is not before `at`.

    >>> slot_after(30_400, tick=1000), slot_after(31_000, tick=1000)
    (31, 31)
    """
    return -(-at // tick)


class IdleRing(Generic[Uid]):
    """Finds the uids that have not been touched for `timeout` ms; each is reported once, then removed.

    >>> ring = IdleRing[str](timeout=30_000, tick=1_000)
    >>> ring.touch("a", now=400)
    >>> ring.touch("b", now=500)
    >>> ring.touch("a", now=12_000)
    >>> ring.advance(31_000)
    ['b']
    >>> ring.next_deadline()
    42000
    >>> ring.advance(42_000)
    ['a']

    A uid is never reported before `timeout` has passed since its last touch, and at the latest by the first `advance` a
    tick after that. A `now` smaller than an earlier one counts as the latest one.

    Raises ValueError for a timeout or tick below 1.
    """

    __slots__ = ("_latest", "_resting", "_slots", "_tick", "_timeout", "_waiting")

    def __init__(self, timeout: Millis, tick: Millis = 1000) -> None:
        if timeout < 1 or tick < 1:
            raise ValueError(f"timeout and tick must be 1 ms or more, not {timeout} and {tick}")
        self._timeout = timeout
        self._tick = tick
        self._latest: Millis = 0
        # slot number -> the uids in it, with the time of the last touch
        self._slots: dict[int, dict[Uid, Millis]] = {}
        # the numbers of these slots, as a heap
        self._waiting: list[int] = []
        # uid -> its slot
        self._resting: dict[Uid, dict[Uid, Millis]] = {}

    def touch(self, uid: Uid, now: Millis) -> None:
        """Restart the time-out of `uid`, which may be new. O(1)."""
        if now > self._latest:
            self._latest = now
        else:
            now = self._latest
        slot = self._resting.get(uid)
        if slot is None:
            self._rest(uid, now)
        else:
            slot[uid] = now

    def remove(self, uid: Uid) -> bool:
        """Remove `uid`; False: it was absent. O(1)."""
        slot = self._resting.pop(uid, None)
        if slot is None:
            return False
        del slot[uid]
        return True

    def advance(self, now: Millis) -> list[Uid]:
        """Remove and return the idle uids, longest silent first."""
        self._latest = now = max(self._latest, now)
        newest = now - self._timeout
        idle: dict[Uid, Millis] = {}
        while self._waiting and self._waiting[0] * self._tick <= now:
            for uid, last in self._slots.pop(heappop(self._waiting)).items():
                if last <= newest:
                    idle[uid] = last
                    del self._resting[uid]
                else:
                    self._rest(uid, last)
        return sorted(idle, key=idle.__getitem__)

    def next_deadline(self) -> Millis | None:
        """The time at which the hand meets the next uid, idle or not; None when empty. O(1), amortised."""
        while self._waiting and not self._slots[self._waiting[0]]:
            del self._slots[heappop(self._waiting)]
        return self._waiting[0] * self._tick if self._waiting else None

    def _rest(self, uid: Uid, last: Millis) -> None:
        number = slot_after(last + self._timeout, self._tick)
        slot = self._slots.get(number)
        if slot is None:
            slot = self._slots[number] = {}
            heappush(self._waiting, number)
        slot[uid] = last
        self._resting[uid] = slot

    def __len__(self) -> int:
        return len(self._resting)

    def __contains__(self, uid: object) -> bool:
        return uid in self._resting
