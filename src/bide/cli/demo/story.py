"""The base of all stories of the demo: handlers, people who act, and a notebook that survives a restart."""

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
from bide.core.instants import Millis
from bide.core.names import SHOWN_TOPIC
from bide.core.records import Filter, NewTask, Page
from bide.core.tasks import Task
from bide.engine.arguments import filter_of
from bide.engine.settings_store import SettingsStore

_log = logging.getLogger("bide.demo")
_MARK = "demo:numbers"
_FIRST = 10_000
_BLOCK = 2_000
"""Numbers taken at a time, so that an order does not cost one more write; a restart leaves the rest of them out."""
_BATCH = 500
_BREATH = 0.04
"""Seconds between two batches, so that the loop serves its pages meanwhile."""
_HOURS = (1, 1, 1, 1, 1, 2, 4, 8, 10, 8, 7, 7, 9, 7, 6, 6, 7, 8, 10, 12, 10, 7, 4, 2)
"""How much happens in each hour of a day."""


class DemoState:
    """The memory of the demo between two runs, kept in the store of an open app. Errors are the store's own."""

    def __init__(self, app: Bide) -> None:
        self._app = app
        self._next = self._end = 0

    async def refuse_foreign_tasks(self) -> None:
        """Take an empty store for the demo's; raises BadInput for one that holds tasks of others.

        Before anything is worked on: its handlers would take an order of somebody else's for their own.
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
        """So many fresh numbers in a row: no order ever gets one of them again."""
        if self._end - self._next < count:
            marks = SettingsStore(self._app.store, self._app.clock)
            self._next = max(self._end, int(await marks.get(_MARK) or _FIRST))
            self._end = self._next + max(count, _BLOCK)
            await marks.put(_MARK, b"%d" % self._end)
        self._next += count
        return range(self._next - count, self._next)

    async def made_until(self, what: str) -> Millis | None:
        """Until when `what` is made, by this run or an earlier one; None: it is not."""
        until = int(await SettingsStore(self._app.store, self._app.clock, SHOWN_TOPIC).get(f"demo:{what}") or 0)
        return until if until > self._app.clock.now() else None

    async def note_made(self, what: str, *, until: Millis) -> None:
        marks = SettingsStore(self._app.store, self._app.clock, SHOWN_TOPIC)
        await marks.put(f"demo:{what}", b"%d" % until, until=until)


class Story:
    """One kind of traffic. Subclasses declare handlers in `define`, and say `prepare` and `play`."""

    def __init__(self, app: Bide, state: DemoState) -> None:
        self.app = app
        self.state = state
        self.chance = Random(type(self).__name__)
        self._people: set[asyncio.Task[bool]] = set()
        self._away = False
        self.define(app)

    def define(self, app: Bide) -> None:
        """Declare the handlers."""
        raise NotImplementedError

    async def prepare(self) -> None:
        """Do what must be done before anybody looks. Some milliseconds."""

    async def play(self) -> None:
        """Do what people do, until cancelled. Begun again where the store was away."""

    async def live(self) -> None:
        """Play; a defect ends this story, loudly, and neither the others nor the service."""
        try:
            await self.retry_while_away(self.play)
        except Exception:  # noqa: BLE001 - whatever it is, its traceback is told
            _log.exception("a defect in the demo: %s are over", type(self).__name__.lower())
        finally:
            for person in self._people:
                person.cancel()
            await asyncio.gather(*self._people, return_exceptions=True)

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

    async def retry_while_away(self, act: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Act, and again every second for as long as the store is away."""
        while not await self._unless_away(act()):  # noqa: ASYNC110 - nobody tells us that it is back
            await asyncio.sleep(1)

    async def _unless_away(self, doing: Coroutine[Any, Any, None]) -> bool:
        """True if it was done."""
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

    async def one_of(self, topic: str) -> Task[Any] | None:
        """Any of the first few waiting tasks of a topic; None where there is none."""
        found = await self.app.find_page(filter_of(topic, "waiting", None, None, None), Page(limit=100))
        return Task(self.chance.choice(found.tasks)) if found.tasks else None

    def at(self, days: int, hour: int) -> datetime:
        """That hour by the clock on the wall here, so many days from today."""
        today = self.app.now().astimezone().date()
        return datetime.combine(today + timedelta(days=days), time(hour)).astimezone()

    def waking_hours(self, day: int) -> datetime:
        """A time of that day, more likely one at which people are up."""
        [hour] = self.chance.choices(range(24), _HOURS)
        return self.at(day, hour) + timedelta(seconds=self.chance.randrange(3600))

    async def fill(self, what: str, tasks: Callable[[], Iterable[NewTask]], *, until: datetime | None = None) -> None:
        """Schedule very many, once: what was made is not made again before `until`, also by a later run.

        A run that was ended in the middle is taken up by the next, so each task should `keep` what is there.
        """
        if await self.state.made_until(what) is not None:
            return
        left = iter(tasks())
        while batch := list(islice(left, _BATCH)):
            await self.app.schedule_many(batch)
            await asyncio.sleep(_BREATH)
        await self.state.note_made(what, until=millis_of(until or self.app.now() + timedelta(days=3650)))


def millis_of(moment: datetime) -> Millis:
    """The instant of an aware datetime, in milliseconds."""
    return round(moment.timestamp() * 1000)
