"""Who wants to be told of an earlier wake, and telling them on their own event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Collection, Mapping

from bide.core.instants import Millis
from bide.core.records import Topic
from bide.ports import Heard


class Listener:
    """One subscription; closing it ends the calls."""

    def __init__(self, topics: Collection[Topic], heard: Heard, closed: Callable[[Listener], None]) -> None:
        self.topics = frozenset(topics)
        self.loop = asyncio.get_running_loop()
        self._heard = heard
        self._closed = closed
        self._open = True

    async def close(self) -> None:
        self.end()

    def end(self) -> None:
        self._open = False
        self._closed(self)

    def hear(self, wakes: Mapping[Topic, Millis]) -> None:
        for topic, wake_at in wakes.items():
            if self._open and topic in self.topics:
                self._heard(topic, wake_at)


class CommitListener(Listener):
    """A subscription to every commit that is not the store's own, whatever it has changed."""

    def __init__(self, committed: Callable[[], None], closed: Callable[[Listener], None]) -> None:
        super().__init__((), lambda topic, wake: None, closed)
        self._committed = committed

    def committed(self) -> None:
        if self._open:
            self._committed()


class Listeners:
    """All subscriptions of a store. `tell` may be called from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._all: dict[Listener, None] = {}

    def __bool__(self) -> bool:
        return bool(self._all)

    def add(self, listener: Listener) -> None:
        with self._lock:
            self._all[listener] = None

    def remove(self, listener: Listener) -> None:
        with self._lock:
            self._all.pop(listener, None)

    def _now(self) -> list[Listener]:
        with self._lock:
            return list(self._all)

    def topics(self) -> set[Topic]:
        """Everything that anybody listens to."""
        return set[Topic]().union(*(listener.topics for listener in self._now()))

    def committed(self) -> None:
        """Somebody has committed something."""
        for listener in self._now():
            if isinstance(listener, CommitListener):
                try:
                    listener.loop.call_soon_threadsafe(listener.committed)
                except RuntimeError:  # its loop has been closed without closing it
                    self.remove(listener)

    def tell(self, wakes: Mapping[Topic, Millis]) -> None:
        """Pass on the earliest wake of each topic: one call into each loop that cares."""
        for listener in self._now():
            if not listener.topics.isdisjoint(wakes):
                try:
                    listener.loop.call_soon_threadsafe(listener.hear, wakes)
                except RuntimeError:  # its loop has been closed without closing it
                    self.remove(listener)
