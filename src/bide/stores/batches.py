"""Batches: split into parts with distinct sorted keys; and the answers and wakes of a batch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

from bide.core.errors import PartlyFailed
from bide.core.instants import LAST_INSTANT, NEVER, At, Millis
from bide.core.records import Leased, Move, NewTask, Topic


class Named(Protocol):
    """An item of a batch, with the name of its task."""

    @property
    def topic(self) -> Topic: ...

    @property
    def key(self) -> str: ...


def rounds(asked: Sequence[Named]) -> list[list[int]]:
    """The positions of a batch in parts with distinct keys, each sorted by name; a repeated key goes to a later part.

    The order keeps two batches over the same tasks from deadlocking: one waits for the other.
    """
    keys = [one.key for one in asked]
    if len({one.topic for one in asked}) == 1 and len(set(keys)) == len(keys):
        return [sorted(range(len(keys)), key=keys.__getitem__)]  # strings compare four times as fast as pairs
    names = [(one.topic, one.key) for one in asked]
    if len(set(names)) == len(names):
        return [sorted(range(len(names)), key=names.__getitem__)]
    parts: list[dict[tuple[str, str], int]] = [{}]
    for place, name in enumerate(names):
        for part in parts:
            if name not in part:
                part[name] = place
                break
        else:
            parts.append({name: place})
    return [[part[name] for name in sorted(part)] for part in parts]


class Conflicts:
    """The topics with recent key conflicts. An insert for other topics need not handle conflicts.

    An insert that does not handle conflicts and meets a taken key fails as a whole, and leaves the rows it had inserted
    for vacuum to clean up. So after a conflict, the topic's inserts handle conflicts for the next `BATCHES` batches.
    """

    BATCHES = 100
    TOPICS = 1_000

    def __init__(self) -> None:
        self._wary: dict[Topic, int] = {}

    def likely(self, tasks: Sequence[Named]) -> bool:
        """Return true if one of these may already exist."""
        return bool(self._wary) and not self._wary.keys().isdisjoint({one.topic for one in tasks})

    def met(self, tasks: Sequence[Named], taken: Iterable[Named]) -> None:
        """Note which tasks of a batch were `taken`: they already existed."""
        there = {one.topic for one in taken}
        if self._wary:
            for topic in {one.topic for one in tasks} - there:
                left = self._wary.pop(topic, 1) - 1
                if left:
                    self._wary[topic] = left
        if len(self._wary) >= self.TOPICS:
            self._wary.clear()  # an unbounded number of topics must not fill the memory
        self._wary.update(dict.fromkeys(there, self.BATCHES))


def earliest(wakes: dict[Topic, Millis], topic: Topic, wake: Millis) -> None:
    """Note a wake if it is the earliest of its topic so far."""
    known = wakes.get(topic)
    if known is None or wake < known:
        wakes[topic] = wake


def merge_earliest(wakes: dict[Topic, Millis], others: Mapping[Topic, Millis]) -> None:
    """Note several wakes, each if it is the earliest of its topic so far."""
    for topic, wake in others.items():
        earliest(wakes, topic, wake)


Drained: TypeAlias = tuple[Millis, Millis]
"""The latest wake of the tasks that were taken of a topic, and the topic's next wake (NEVER: none)."""


def drained(wants: Mapping[Topic, int], leased: Leased) -> dict[Topic, Drained]:
    """The topics of which a lease took some tasks, fewer than wanted, and left none that is due."""
    numbers = Counter(record.topic for record in leased.tasks)
    latest = dict.fromkeys(numbers, 0)
    for record in leased.tasks:
        latest[record.topic] = max(latest[record.topic], record.planned_at)
    heads = {topic: leased.heads.get(topic, NEVER) for topic in numbers}
    return {
        topic: (latest[topic], head)
        for topic, head in heads.items()
        if head > leased.now and numbers[topic] < wants.get(topic, 0)
    }


def wakes_of(tasks: Sequence[NewTask | Move], about: Millis) -> dict[Topic, Millis]:
    """The earliest wake of each topic if these tasks are scheduled or moved at the time `about`. O(tasks)."""
    dues: dict[Topic, Millis] = {}
    for new in tasks:
        topic, due = new.topic, new.due
        millis = due.millis if type(due) is At else about + due.millis
        if millis < dues.get(topic, LAST_INSTANT + 1):
            dues[topic] = millis
    return {topic: min(max(due, about), LAST_INSTANT) for topic, due in dues.items()}


def gathered(answers: list[Any]) -> list[Any]:
    """The answers if none is an error. Raises the first error if all are errors of one type, else PartlyFailed."""
    failed = [one for one in answers if isinstance(one, Exception)]
    if not failed:
        return answers
    if len(failed) == len(answers) and len({type(one) for one in failed}) == 1:
        raise failed[0]
    raise PartlyFailed(answers)
