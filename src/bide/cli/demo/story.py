"""What the stories of the live traffic have in common: handlers, people who act, and batches of what lies far ahead."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable
from datetime import datetime, time, timedelta
from itertools import islice
from random import Random
from typing import Any, ClassVar

from bide.app import Bide
from bide.cli.demo.notebook import Notebook
from bide.core.errors import StoreError
from bide.core.instants import Millis
from bide.core.records import NewTask, Page
from bide.core.tasks import Task
from bide.engine.arguments import filter_of

_log = logging.getLogger("bide.demo")
_BATCH = 500
_BREATH = 0.04
"""Seconds between two batches, so that the loop serves its pages meanwhile."""
_HOURS = (1, 1, 1, 1, 1, 2, 4, 8, 10, 8, 7, 7, 9, 7, 6, 6, 7, 8, 10, 12, 10, 7, 4, 2)
"""How much happens in each hour of a day."""


class Story:
    """One kind of traffic. Subclasses declare handlers, and say `prepare` and `play`."""

    topics: ClassVar[tuple[str, ...]]

    def __init__(self, app: Bide, notebook: Notebook) -> None:
        self.app = app
        self.notebook = notebook
        self.chance = Random(type(self).__name__)
        self._people: set[asyncio.Task[bool]] = set()
        self._away = False
        self.define(app)

    def define(self, app: Bide) -> None:
        """Declare the handlers."""
        raise NotImplementedError

    async def prepare(self) -> None:
        """What has to be there before anybody looks. Some milliseconds."""

    async def play(self) -> None:
        """What people do, until cancelled. Begun again where the store was away."""

    async def live(self) -> None:
        """Play; and send everybody home at the end."""
        try:
            await self.patiently(self.play)
        finally:
            for person in self._people:
                person.cancel()
            await asyncio.gather(*self._people, return_exceptions=True)

    # --- people

    def person(self, doing: Coroutine[Any, Any, None]) -> None:
        """Somebody acts by themselves, once. Where the store is away, what they wanted is not done."""
        acting = asyncio.get_running_loop().create_task(self._unless_away(doing), name="bide demo person")
        self._people.add(acting)
        acting.add_done_callback(self._people.discard)

    async def now_and_then(self, seconds: float, act: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Act for ever, at random: on average that often."""
        while True:
            await asyncio.sleep(self.chance.uniform(0.4, 1.6) * seconds)
            await self._unless_away(act())

    async def patiently(self, act: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Act, and again every second for as long as the store is away."""
        while not await self._unless_away(act()):  # noqa: ASYNC110 - nobody tells us that it is back
            await asyncio.sleep(1)

    async def _unless_away(self, doing: Coroutine[Any, Any, None]) -> bool:
        """Whether it was done."""
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
        """Wait until then; not at all for what has passed."""
        await asyncio.sleep(max(0.0, self.app.clock.seconds_until(at)))

    async def one_of(self, topic: str, *, state: str = "waiting") -> Task[Any] | None:
        """Any of the first few tasks of a topic; None where there is none."""
        found = await self.app.find_page(filter_of(topic, state, None, None, None), Page(limit=100))
        return Task(self.chance.choice(found.tasks)) if found.tasks else None

    # --- times

    def at(self, days: int, hour: int, minute: int = 0) -> datetime:
        """What the clock on the wall here shows so many days from today, at that time."""
        today = self.app.now().astimezone().date()
        return datetime.combine(today + timedelta(days=days), time(hour, minute)).astimezone()

    def waking_hours(self, day: int) -> datetime:
        """A time of that day, more likely one at which people are up."""
        [hour] = self.chance.choices(range(24), _HOURS)
        return self.at(day, hour) + timedelta(seconds=self.chance.randrange(3600))

    # --- what lies ahead

    async def fill(self, what: str, tasks: Callable[[], Iterable[NewTask]], *, until: datetime | None = None) -> None:
        """Schedule very many, once: what was made is not made again before `until`, also by a later run.

        A run that was ended in the middle is taken up by the next, so each task should `keep` what is there.
        """
        if await self.notebook.made_until(what) is not None:
            return
        left = iter(tasks())
        while batch := list(islice(left, _BATCH)):
            await self.app.schedule_many(batch)
            await asyncio.sleep(_BREATH)
        await self.notebook.note_made(what, until=millis_of(until or self.app.now() + timedelta(days=3650)))


def millis_of(moment: datetime) -> Millis:
    """The instant of an aware datetime, in milliseconds."""
    return round(moment.timestamp() * 1000)
