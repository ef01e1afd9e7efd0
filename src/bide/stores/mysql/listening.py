"""Who wants to be told of an earlier wake in this process. Others see it when they look, every 200 ms."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping

from bide.core.instants import Millis
from bide.core.records import Topic
from bide.ports import Heard

_log = logging.getLogger("bide.mysql")
POLL: Millis = 200
"""How often a worker looks: what another process has scheduled for sooner is late by so much at most."""


class Listener:
    """One subscription of a worker."""

    def __init__(self, topics: Collection[Topic], heard: Heard, listeners: list[Listener]) -> None:
        self.topics = frozenset(topics)
        self.heard = heard
        self._listeners = listeners
        listeners.append(self)

    async def close(self) -> None:
        if self in self._listeners:
            self._listeners.remove(self)


class Listeners:
    """All subscriptions of a store."""

    def __init__(self) -> None:
        self._all: list[Listener] = []

    def listen(self, topics: Collection[Topic], heard: Heard) -> Listener:
        return Listener(topics, heard, self._all)

    def tell(self, wakes: Mapping[Topic, Millis]) -> None:
        """Whoever listens to these topics is to ask then."""
        for listener in tuple(self._all):
            for topic, wake in wakes.items():
                if topic in listener.topics and listener in self._all:
                    try:
                        listener.heard(topic, wake)
                    except Exception:  # noqa: BLE001 - one listener's defect is not the others'
                        _log.exception("a listener of %s failed", topic)
