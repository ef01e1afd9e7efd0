"""The listeners of this process: callbacks for wakes that are earlier than the last known wake."""

from __future__ import annotations

from collections.abc import Collection
from logging import Logger

from bide.core.instants import Millis
from bide.core.records import Topic
from bide.ports import OnWake


class Listener:
    """One subscription of a worker."""

    def __init__(self, topics: Collection[Topic], on_wake: OnWake, listeners: dict[Listener, None]) -> None:
        self.topics = frozenset(topics)
        self.on_wake = on_wake
        self._listeners = listeners
        listeners[self] = None

    async def close(self) -> None:
        self._listeners.pop(self, None)


class Listeners:
    """All subscriptions of a store; truthy if there are any."""

    def __init__(self, log: Logger) -> None:
        self._all: dict[Listener, None] = {}
        self._log = log

    def __bool__(self) -> bool:
        return bool(self._all)

    def listen(self, topics: Collection[Topic], on_wake: OnWake) -> Listener:
        return Listener(topics, on_wake, self._all)

    def topics(self) -> set[Topic]:
        """The topics that have a listener."""
        return set().union(*(listener.topics for listener in self._all))

    def notify(self, topic: Topic, wake: Millis) -> None:
        """Notify the listeners of `topic` of a wake."""
        for listener in tuple(self._all):
            if topic in listener.topics and listener in self._all:
                try:
                    listener.on_wake(topic, wake)
                except Exception:  # noqa: BLE001 - a failing listener must not affect the other ones
                    self._log.exception("a listener of %s failed", topic)
