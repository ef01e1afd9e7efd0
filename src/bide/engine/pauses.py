"""Paused topics: they accept new tasks, but their tasks are not leased until they are resumed.

A pause is kept in the store, so it survives every restart and applies to every process that leases. Such a process
reads the pauses before its first lease and every two seconds from then on, and at once after it changes one itself. So
a pause takes effect within two seconds; running handlers go on. A read is one call, and its cost grows with the number
of pauses alone. A notification by the store would save the reads, but cost every worker one more subscription.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Mapping
from hashlib import blake2b

import msgspec

from bide.core.errors import StoreError
from bide.core.instants import instant_text
from bide.core.names import PAUSED_TOPIC, check_topic
from bide.core.records import Pause, Topic
from bide.engine.background import repeat
from bide.engine.settings_store import SettingsStore
from bide.ports import Clock, Store, Verbs

_log = logging.getLogger("bide.pauses")
EVERY = 2.0
"""Seconds between two reads, and so the time until a pause applies everywhere."""

_encode = msgspec.json.encode
_decode = msgspec.json.Decoder(Pause).decode


class Pauses:
    """The pauses in a store or a service. `verbs`: an open transaction in which to read and write them."""

    def __init__(self, store: Store, clock: Clock, verbs: Verbs | None = None) -> None:
        self._remote = store.features.remote
        self._kept = SettingsStore(verbs or store, clock, PAUSED_TOPIC)
        self._clock = clock

    async def all(self) -> dict[Topic, Pause]:
        """All pauses, by topic. One call. Raises StoreError."""
        if self._remote is not None:
            return {pause.topic: pause for pause in await self._remote.paused()}
        found: dict[Topic, Pause] = {}
        for name, value in (await self._kept.all()).items():
            try:
                pause = _decode(value)
            except (msgspec.MsgspecError, UnicodeDecodeError):
                _log.error("the pause %s cannot be read and is skipped: this version of bide did not write it", name)
            else:
                found[pause.topic] = pause
        return found

    async def pause(self, topic: Topic, *, who: str | None = None) -> bool:
        """Pause `topic`; False if it was already paused. Durable once answered. Raises BadInput, StoreError."""
        topic = check_topic(topic)
        if self._remote is not None:
            return await self._remote.pause(topic, who)
        pause = Pause(topic=topic, since=self._clock.now(), who=who)
        return await self._kept.put_if_absent(_name(topic), _encode(pause))

    async def resume(self, topic: Topic, *, who: str | None = None) -> bool:
        """Resume `topic`; False if it was not paused. Durable once answered. Raises BadInput, StoreError."""
        topic = check_topic(topic)
        if self._remote is not None:
            return await self._remote.resume(topic, who)
        return await self._kept.remove(_name(topic))


class PauseGate:
    """The pauses that a lease loop obeys; it reads them before its first lease, then every two seconds.

    Calls `changed` when the set of paused topics has changed; changes of the topics in `of` are logged.
    """

    def __init__(self, store: Store, clock: Clock, changed: Callable[[], None], *, of: Collection[Topic] = ()) -> None:
        self.topics: Mapping[Topic, Pause] = {}
        self._pauses = Pauses(store, clock)
        self._changed = changed
        self._of = of
        self._served = store.features.remote is not None
        """True: the store is a service, which leaves out paused topics itself."""
        self._turn = asyncio.Lock()
        """Allows one read at a time, so that an older answer does not overwrite a newer one."""
        self.known = self._served
        """True once they have been read."""

    async def first(self) -> None:
        """Read the pauses if they have not been read yet. Raises StoreError."""
        if not self.known:
            await self._read()
            self.known = True

    async def again(self) -> None:
        """Read now, after a pause or a resume in this process. If the store is unavailable, a later read catches up."""
        if self._served:
            return
        try:
            await self._read()
        except StoreError as error:
            _log.warning("reading the pauses failed, trying again in %g s: %s", EVERY, error)

    async def refresh_for_ever(self) -> None:
        if not self._served:
            await repeat("reading the pauses", self._read, EVERY, log=_log, first_after=EVERY)

    async def _read(self) -> None:
        async with self._turn:
            before, self.topics = self.topics, await self._pauses.all()
        if before.keys() == self.topics.keys():
            return
        for topic in self._of:
            pause = self.topics.get(topic)
            if pause is not None and topic not in before:
                by = "" if pause.who is None else f" by {pause.who}"
                _log.info("%s is held back: paused since %s%s", topic, instant_text(pause.since), by)
            elif pause is None and topic in before:
                _log.info("%s is resumed", topic)
        self._changed()


def _name(topic: Topic) -> str:
    """Hash the topic: it may be as long as a name, so a name cannot contain it."""
    return blake2b(topic.encode(), digest_size=16).hexdigest()
