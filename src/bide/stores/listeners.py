"""The listeners of this process: callbacks for wakes that are earlier than the last known wake."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from logging import Logger
from typing import TypeVarTuple

from msgspec import Struct

from bide.core.instants import Millis
from bide.core.records import Topic
from bide.ports import OnTaken, OnWake
from bide.stores.batches import Drained

Ts = TypeVarTuple("Ts")


class Listener(Struct, eq=False):
    """One subscription of a worker."""

    topics: frozenset[Topic]
    on_wake: OnWake
    on_taken: OnTaken | None
    listeners: dict[Listener, None]

    async def close(self) -> None:
        self.listeners.pop(self, None)


class Listeners:
    """All subscriptions of a store; truthy if there are any."""

    def __init__(self, log: Logger) -> None:
        self._all: dict[Listener, None] = {}
        self._log = log

    def __bool__(self) -> bool:
        return bool(self._all)

    def listen(self, topics: Collection[Topic], on_wake: OnWake, on_taken: OnTaken | None = None) -> Listener:
        listener = Listener(frozenset(topics), on_wake, on_taken, self._all)
        self._all[listener] = None
        return listener

    def topics(self) -> set[Topic]:
        """The topics that have a listener."""
        return set().union(*(listener.topics for listener in self._all))

    def notify(self, topic: Topic, wake: Millis) -> None:
        """Notify the listeners of `topic` of a wake."""
        for listener in self._of(topic):
            self._call(topic, listener.on_wake, topic, wake)

    def notify_taken(self, taken: Mapping[Topic, Drained], holder: str) -> None:
        """Notify the listeners of each topic of what `holder` took; see `batches.drained`."""
        for topic, (by, head) in taken.items():
            for listener in self._of(topic):
                if listener.on_taken is not None:
                    self._call(topic, listener.on_taken, topic, by, head, holder)

    def _of(self, topic: Topic) -> Iterator[Listener]:
        return (one for one in tuple(self._all) if topic in one.topics and one in self._all)

    def _call(self, topic: Topic, callback: Callable[[*Ts], None], *said: *Ts) -> None:
        try:
            callback(*said)
        except Exception:  # noqa: BLE001 - a failing listener must not affect the other ones
            self._log.exception("a listener of %s failed", topic)
