"""The base of all stories of the demo: handlers, people who act, and state that survives a restart."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable
from datetime import datetime, time, timedelta
from itertools import islice
from random import Random
from typing import Any

from bide.app import Bide
from bide.cli.context import without_password
from bide.core.errors import BadInput, StoreError
from bide.core.instants import Millis, instant
from bide.core.names import SHOWN_TOPIC
from bide.core.records import Filter, NewTask, Page
from bide.core.tasks import Task
from bide.engine.settings_store import SettingsStore
from bide.engine.verbs import filter_of

_log = logging.getLogger("bide.demo")
_MARK = "demo:numbers"
_FIRST = 10_000
_BLOCK = 2_000
"""Numbers that are reserved at a time, so that an order costs no extra write; a restart skips the rest of them."""
_BATCH = 500
_BREATH = 0.04
"""Seconds between two batches, in which the loop serves pages."""
_HOURS = (1, 1, 1, 1, 1, 2, 4, 8, 10, 8, 7, 7, 9, 7, 6, 6, 7, 8, 10, 12, 10, 7, 4, 2)
"""The relative activity in each hour of a day."""


class DemoState:
    """The state of the demo between two runs, kept in the store of an open app. Raises StoreError."""

    def __init__(self, app: Bide) -> None:
        self._app = app
        self._next = self._end = 0

    async def refuse_foreign_tasks(self) -> None:
        """Claim an empty store for the demo; raise BadInput for one with foreign tasks.

        Called before any delivery: the demo's handlers would take foreign orders for their own.
        """
        marks = SettingsStore(self._app.store, self._app.clock)
        if await marks.get(_MARK) is not None:
            return
        found = await self._app.find_page(Filter(), Page(limit=1))
        if found.tasks:
            raise BadInput(
                "--store",
                without_password(self._app.url),
                f"an empty store, or one of an earlier `bide serve --demo`: this one holds {found.tasks[0].topic}, and "
                "the demo would deliver what is not its own",
            )
        await marks.put_if_absent(_MARK, b"%d" % _FIRST)

    async def numbers(self, count: int = 1) -> range:
        """Fresh consecutive numbers, which no other order gets."""
        if self._end - self._next < count:
            marks = SettingsStore(self._app.store, self._app.clock)
            self._next = max(self._end, int(await marks.get(_MARK) or _FIRST))
            self._end = self._next + max(count, _BLOCK)
            await marks.put(_MARK, b"%d" % self._end)
        self._next += count
        return range(self._next - count, self._next)

    async def made_until(self, what: str) -> Millis | None:
        """The end of the time for which `what` has been scheduled, by this run or an earlier one; None: it has not."""
        until = int(await SettingsStore(self._app.store, self._app.clock, SHOWN_TOPIC).get(f"demo:{what}") or 0)
        return until if until > self._app.clock.now() else None

    async def note_made(self, what: str, *, until: Millis) -> None:
        marks = SettingsStore(self._app.store, self._app.clock, SHOWN_TOPIC)
        await marks.put(f"demo:{what}", b"%d" % until, until=until)


class Story:
    """One kind of traffic. Subclasses declare handlers in `define`, and implement `prepare` and `play`."""

    def __init__(self, app: Bide, state: DemoState) -> None:
        self.app = app
        self.state = state
        self.chance = Random(type(self).__name__)
        self._people: set[asyncio.Task[bool]] = set()
        self._away = False
        self.define(app)

    def define(self, app: Bide) -> None:
        raise NotImplementedError

    async def prepare(self) -> None:
        """Do what the first page needs, within some milliseconds."""

    async def play(self) -> None:
        """Act as people do, until cancelled. Called again after the store was unavailable."""

    async def live(self) -> None:
        """Play. A defect is logged and ends this story, but neither the others nor the service."""
        try:
            await self.retry_while_away(self.play)
        except Exception:  # noqa: BLE001 - whatever it is, it is logged
            _log.exception("a defect in the demo: %s are over", type(self).__name__.lower())
        finally:
            for person in self._people:
                person.cancel()
            await asyncio.gather(*self._people, return_exceptions=True)

    def person(self, doing: Coroutine[Any, Any, None]) -> None:
        """Let a person act once, in the background. If the store is unavailable, nothing is done."""
        acting = asyncio.get_running_loop().create_task(self._unless_away(doing), name="bide demo person")
        self._people.add(acting)
        acting.add_done_callback(self._people.discard)

    async def now_and_then(self, seconds: float, act: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Act again and again, at random times, on average every `seconds`."""
        while True:
            await asyncio.sleep(self.chance.uniform(0.4, 1.6) * seconds)
            await self._unless_away(act())

    async def retry_while_away(self, act: Callable[[], Coroutine[Any, Any, None]]) -> None:
        while not await self._unless_away(act()):  # noqa: ASYNC110 - no event tells that it is back
            await asyncio.sleep(1)

    async def _unless_away(self, doing: Coroutine[Any, Any, None]) -> bool:
        """Return True if it was done, False if the store was unavailable."""
        try:
            await doing
        except StoreError as error:
            if not self._away:
                _log.warning("in the demo %s cannot go on: %s", type(self).__name__.lower(), error)
            self._away = True
            return False
        self._away = False
        return True

    async def until(self, at: Millis) -> None:
        """Wait until an instant; not at all if it has passed."""
        await asyncio.sleep(max(0.0, self.app.clock.seconds_until(at)))

    async def one_of(self, topic: str) -> Task[Any] | None:
        """A random one of the first waiting tasks of a topic; None if there is none."""
        found = await self.app.find_page(filter_of(topic, "waiting", None, None, None), Page(limit=100))
        return Task(self.chance.choice(found.tasks)) if found.tasks else None

    def at(self, days: int, hour: int) -> datetime:
        """This hour of local time, `days` from today."""
        today = self.app.now().astimezone().date()
        return datetime.combine(today + timedelta(days=days), time(hour)).astimezone()

    def waking_hours(self, day: int) -> datetime:
        """A time of that day, more likely in busy hours."""
        [hour] = self.chance.choices(range(24), _HOURS)
        return self.at(day, hour) + timedelta(seconds=self.chance.randrange(3600))

    async def fill(self, what: str, tasks: Callable[[], Iterable[NewTask]], *, until: datetime | None = None) -> None:
        """Schedule many tasks, once: not again before `until`, even by a later run.

        A later run continues one that was interrupted, so each task should have `on_conflict="keep"`.
        """
        if await self.state.made_until(what) is not None:
            return
        left = iter(tasks())
        while batch := list(islice(left, _BATCH)):
            await self.app.schedule_many(batch)
            await asyncio.sleep(_BREATH)
        await self.state.note_made(what, until=instant(until or self.app.now() + timedelta(days=3650)))
