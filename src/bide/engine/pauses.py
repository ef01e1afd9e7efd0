"""Paused topics: they take new tasks, and nobody leases from them until they are resumed.

A pause is kept in the store, so it survives every restart and holds for all who lease: workers look before their first
lease and every two seconds from then on. So it takes hold within that, and what runs goes on.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from hashlib import blake2b

import msgspec
from msgspec import Struct

from bide.core.errors import StoreError
from bide.core.instants import Millis
from bide.core.names import check_topic
from bide.core.records import Topic
from bide.engine.kept import Kept
from bide.ports import Clock, Served, Store, Verbs

_log = logging.getLogger("bide.pauses")
EVERY = 2.0
"""Seconds between two looks: how long a pause may take to be seen by everybody."""
_PREFIX = "paused:"

_encode = msgspec.json.encode


class Pause(Struct, frozen=True, kw_only=True):
    """Since when a topic is paused, and by whom."""

    topic: Topic
    since: Millis
    who: str | None = None


_decode = msgspec.json.Decoder(Pause).decode


class Pauses:
    """Those of a store. `topics` is as new as the last `look`."""

    def __init__(self, store: Verbs, clock: Clock) -> None:
        self._kept = Kept(store, clock)
        self._clock = clock
        self.topics: Mapping[Topic, Pause] = {}

    async def look(self) -> bool:
        """Read them again; whether anything is paused or resumed since the last time. Raises StoreError."""
        found = {}
        for name, value in (await self._kept.all(_PREFIX)).items():
            try:
                pause = _decode(value)
            except msgspec.MsgspecError:
                _log.error("the pause %s cannot be read and is passed over: it was not written by this bide", name)
                continue
            found[pause.topic] = pause
        changed = found.keys() != self.topics.keys()
        self.topics = found
        return changed

    async def pause(self, topic: Topic, *, who: str | None = None) -> bool:
        """Whether it was not paused before. Durable once answered. Raises BadInput, StoreError."""
        pause = Pause(topic=check_topic(topic), since=self._clock.now(), who=who)
        return await self._kept.put_if_absent(_name(topic), _encode(pause))

    async def resume(self, topic: Topic) -> bool:
        """Whether it was paused. Durable once answered."""
        return await self._kept.remove(_name(check_topic(topic)))


class HeldBack:
    """What one who leases knows of pauses, and must heed: looked up before the first lease, then again and again."""

    def __init__(self, store: Store, clock: Clock, changed: Callable[[], None]) -> None:
        self.pauses = Pauses(store, clock)
        self._changed = changed
        self._known = isinstance(store, Served)
        """A service holds back by itself what it leases to us."""
        self._served = self._known

    @property
    def topics(self) -> Mapping[Topic, Pause]:
        return self.pauses.topics

    async def first(self) -> None:
        """See that they are known. Raises StoreError."""
        if not self._known:
            await self.pauses.look()
            self._known = True

    async def look_for_ever(self) -> None:
        while not self._served:
            await asyncio.sleep(EVERY)
            try:
                if await self.pauses.look():
                    self._changed()
            except StoreError as error:
                _log.warning("pauses cannot be read, trying again in %.0f s: %s", EVERY, error)


def _name(topic: Topic) -> str:
    """A topic may be as long as a name, so it cannot be part of one."""
    return _PREFIX + blake2b(topic.encode(), digest_size=16).hexdigest()
