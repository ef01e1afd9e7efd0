"""Polling for tasks that other processes schedule: MySQL has no notification of a commit, so one task polls for all.

Every 200 ms it asks for the earliest wake of each topic that somebody in this process listens to, and tells of what is
due within a second. What lies further ahead it comes across several times before then, so there is nothing that it
would have to remember and that could be out of date. Whoever leases has looked too: then it keeps still, and a
busy worker costs not one look more.

A look is one packet with a seek for each topic, on a connection of its own, and as little of ours as can be: a
process that does so little that nothing of it stays in the processor's cache pays for each function that it enters. A
lease that looked in its place, as it once did, cost 0.9 ms of processor time instead of 0.6, of which 0.3 are those of
a process that only wakes.

While it gets no answer it is deaf. Then it wakes those who listen, and workers poll for themselves until it hears
again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Sequence
from typing import Any

from asyncmy.errors import MySQLError

from bide.core.errors import StoreError
from bide.core.instants import Millis
from bide.core.records import Topic
from bide.ports import Heard
from bide.stores.listeners import Listener, Listeners
from bide.stores.mysql.dialect import Broken, Connection, connect, said
from bide.stores.mysql.queries import Template, queries_of
from bide.stores.sql.dialect import NotSent

POLL: Millis = 200
"""How often somebody looks: what another process has scheduled for sooner is late by so much at most."""
_PERIOD = POLL / 1000
_SOON: Millis = 1_000
"""How far ahead is told of."""
_SILENCE = 2.0
"""Seconds that connecting or a look may take."""
_PAUSE = 1.0
_STILL = 10.0
"""Seconds that it keeps still at most: a connection that nobody uses may be ended by the server or on the way."""
_NEVER = float("-inf")

_log = logging.getLogger("bide.mysql")


class Poller:
    """Looks as long as somebody listens. Belongs to one event loop."""

    def __init__(self, runtime: Any) -> None:
        """It never looks where the clock is the caller's."""
        self.hears = False
        """True while its last look was answered. Until the first is, and where nobody listens, it does not hear."""
        self._runtime = runtime
        self._address = runtime.address
        self._listeners: Listeners = runtime.listeners
        self._looked: dict[Topic, float] = {}
        """When the last look was sent, by the loop's time."""
        self._task: asyncio.Task[None] | None = None

    async def listen(self, topics: Collection[Topic], heard: Heard) -> Listener:
        listener = self._listeners.listen(topics, heard)
        if self._runtime.by_server and (self._task is None or self._task.done()):
            self._task = asyncio.get_running_loop().create_task(self._run(), name="bide poller")
        return listener

    def misses(self, topics: Collection[Topic]) -> bool:
        """True unless whoever listens to these is told of what becomes due: else workers have to poll."""
        return not (self.hears and self._listeners.topics().issuperset(topics))

    def looked(self, topics: Collection[Topic], sent: float) -> None:
        """These were looked at by what was sent then: by a lease too, whose answer says when to come again."""
        if self.hears:
            for topic in topics:
                self._looked[topic] = sent

    async def _run(self) -> None:
        while self._listeners.topics():
            try:
                await self._hear()
            except (MySQLError, Broken, OSError, EOFError, TimeoutError, NotSent, StoreError) as error:
                self._deafened(said(error))
                await asyncio.sleep(_PAUSE)
            except Exception:  # noqa: BLE001 - it outlives its defects, loudly
                _log.exception("a defect stopped a look for what others have scheduled")
                self._deafened("a defect")
                await asyncio.sleep(_PAUSE)
            finally:
                self.hears = False
                self._looked.clear()

    async def _hear(self) -> None:
        """Until nobody listens any more, or one look fails."""
        loop = asyncio.get_running_loop()
        connection = await connect(self._address, within=_SILENCE)
        try:
            connection.check_writable(self._address.shown)  # a replica may be behind
            queries = queries_of(self._address.schema, self._address.prefix, mariadb=connection.mariadb)
            head = queries["waiting_head"]
            asked = _NEVER
            while topics := self._listeners.topics():
                sent = loop.time()
                for topic in self._looked.keys() - topics:
                    del self._looked[topic]
                latest = sent - _PERIOD if asked > sent - _STILL else sent
                unseen = [topic for topic in topics if self._looked.get(topic, _NEVER) <= latest]
                if unseen:
                    asked = sent
                    wakes = await self._look(connection, head, unseen)
                    self.hears = True
                    self.looked(unseen, sent)
                    if wakes:
                        self._runtime.tell(wakes)
                await asyncio.sleep(min(map(self._looked.__getitem__, topics)) + _PERIOD - loop.time())
        finally:
            connection.drop()

    async def _look(self, connection: Connection, head: Template, topics: Sequence[Topic]) -> dict[Topic, Millis]:
        """The earliest of each that is due soon."""
        floor = self._runtime.leasing.floors.floor
        statements = [head.write(topic=topic, floor=floor(topic)) for topic in topics]
        async with asyncio.timeout(_SILENCE):
            answers = await connection.ask(b"; ".join(statements))
        soon = self._runtime.about(0) + _SOON
        return {topic: rows[0][0] for topic, rows in zip(topics, answers, strict=True) if rows and rows[0][0] <= soon}

    def _deafened(self, why: str) -> None:
        """Wake those who rely on it and sleep, to look for themselves from now on."""
        if self.hears:
            self.hears = False
            _log.info("nobody hears of others' commits for now (%s): each worker looks for itself", why)
            now = self._runtime.about(0)
            for topic in self._listeners.topics():
                self._listeners.tell(topic, now)

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
            self._task = None
