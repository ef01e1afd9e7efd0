"""How many of each topic a worker can start now, so that no topic's flood takes all that the others need (P6).

Idle topics lend their slots. What is kept back from a flood is the last slot of each idle topic, together at most an
eighth of all: with ten topics that is a slot for each, with a thousand the flood still gets seven eighths. Topics that
are known to have more than they could start share what is left in equal parts, the one that runs least first. The sum
is never more than the free slots. Pure arithmetic, O(topics).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Protocol

from msgspec.structs import replace

from bide.core.records import Leased, Topic


class Room(Protocol):
    """The room of a topic: `Lanes` has it."""

    @property
    def free(self) -> int:
        """How many more of it could run."""
        ...

    @property
    def occupied(self) -> int: ...

    @property
    def hungry(self) -> bool:
        """True if there may be due tasks that there was no room for."""
        ...


def wants(rooms: Mapping[Topic, Room], slots: int, turn: int = 0) -> dict[Topic, int]:
    """How many to ask for, by topic, beginning with another one each `turn`.

    Topics without room are left out, and hungry ones without a free slot. 0: no slot is left for a topic of which it is
    not known whether it has anything.
    """
    free = slots - sum(room.occupied for room in rooms.values())
    opened = [topic for topic, room in rooms.items() if room.free > 0]
    if free <= 0 or not opened:
        return {}
    if len(rooms) == 1:  # nobody to share with
        return {opened[0]: min(free, rooms[opened[0]].free)}
    begin = turn % len(opened)
    in_turn = opened[begin:] + opened[:begin]
    hungry = sorted((one for one in in_turn if rooms[one].hungry), key=lambda one: rooms[one].occupied)
    others = [one for one in in_turn if not rooms[one].hungry]
    kept = min(sum(not rooms[one].occupied for one in others), max(slots // 8, min(2, slots // 2)))
    asked: dict[Topic, int] = {}
    free -= _share(rooms, hungry, free - kept, asked)
    asked |= dict.fromkeys(others, 0)
    _share(rooms, others, free, asked)
    return asked


def _share(rooms: Mapping[Topic, Room], topics: Sequence[Topic], count: int, asked: dict[Topic, int]) -> int:
    """Add to `asked` equal parts of `count`, as far as there is room. How many that were."""
    left = count
    while left > 0 and (topics := [one for one in topics if asked.get(one, 0) < rooms[one].free]):
        part = max(1, left // len(topics))
        for topic in topics:
            has = asked.get(topic, 0)
            more = min(part, left, rooms[topic].free - has)
            if more > 0:
                asked[topic] = has + more
                left -= more
    return max(0, count) - max(0, left)


async def lease_in_turn(ask: Callable[[Mapping[Topic, int]], Awaitable[Leased]], asked: Mapping[Topic, int]) -> Leased:
    """Lease what is `asked`; or, if it has nothing and a topic that asks for 0 has, what a search by halves finds.

    One call, unless there are more topics than free slots: then as many as it takes to halve them, all together at
    twice the cost of one.
    """
    leased = await ask(asked)
    others = [topic for topic, count in asked.items() if not count]
    if leased.tasks or not others or not _due(leased):
        return leased
    free = max(1, sum(asked.values()))
    while len(others) > free:
        half = others[: max(free, len(others) // 2)]
        others = half if _due(await ask(dict.fromkeys(half, 0))) else others[len(half) :]
    return replace(await ask(dict.fromkeys(others, 1)), next_wake=leased.next_wake)


def _due(leased: Leased) -> bool:
    return leased.next_wake is not None and leased.next_wake <= leased.now
