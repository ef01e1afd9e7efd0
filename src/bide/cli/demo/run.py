"""One run of the demo: the stories, a real worker in the same process, and somebody who watches."""

from __future__ import annotations

import asyncio
import os
import sqlite3
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack, closing, suppress
from typing import Protocol

from bide.app import Bide
from bide.cli.demo.feeding import Feeding
from bide.cli.demo.ledger import Ledger, Line
from bide.cli.demo.orders import Orders
from bide.cli.demo.pace import Pace
from bide.cli.demo.payments import Payments
from bide.cli.demo.publishing import Publishing
from bide.cli.demo.record import Lateness
from bide.cli.demo.reviews import Reviews
from bide.cli.demo.story import Act, Story, keep_looking, perform
from bide.core.errors import BadInput
from bide.core.instants import Millis
from bide.ports import Shares

STORIES: tuple[type[Story], ...] = (Publishing, Orders, Reviews, Payments, Feeding)


_NAME = "bide demo "
_APART = 350
"""Milliseconds between the stories' beginnings, so that their acts do not all fall on the same second."""


class Watch(Protocol):
    """Who shows what happens."""

    def note(self, words: str) -> None:
        """Something about the demo itself."""

    def told(self, line: Line) -> None:
        """Something has happened in a story; maybe called from a handler's thread."""

    async def run(self, stories: Sequence[Story], lateness: Lateness) -> None:
        """Show it until cancelled."""


class Demo:
    """`path` is the SQLite file, `store` its URL as the user gave it."""

    def __init__(self, app: Bide, path: str, *, speed: float, fresh: bool) -> None:
        self.app = app
        self.stories: list[Story] = [story(app) for story in STORIES]
        self._path = path
        self._speed = speed
        self._fresh = fresh
        self._started = _now()
        self.lateness = Lateness(self._started)
        self._watched: Watch

    async def play(self, watch: Watch, *, seconds: float | None) -> bool:
        """Whether every story came to its end (in time, if there is a limit)."""
        self._watched = watch
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(self.app)
            await self._alone()
            ledger = Ledger(self._path)
            stack.callback(ledger.close)
            database = stack.enter_context(closing(sqlite3.connect(self._path, isolation_level=None, timeout=0)))
            acts = await self._begin(ledger, database)
            for story in self.stories:
                await story.enter()
                stack.push_async_callback(story.leave)
            await self._catch_up(acts, ledger)
            await stack.enter_async_context(self.app.worker(name=f"{_NAME}{os.getpid()}"))
            directors = [
                asyncio.create_task(perform(story, script, ledger))
                for story, script in zip(self.stories, acts, strict=True)
            ]
            beside = [
                asyncio.create_task(keep_looking(self.stories)),
                asyncio.create_task(watch.run(self.stories, self.lateness)),
            ]
            try:
                with suppress(TimeoutError):
                    async with asyncio.timeout(seconds):
                        await _all_or_first_error(directors, beside)
            finally:
                for task in (*directors, *beside):
                    task.cancel()
                for failed in await asyncio.gather(*directors, *beside, return_exceptions=True):
                    if isinstance(failed, Exception):
                        raise failed
            ended = all(story.ended for story in self.stories)
            if ended:
                ledger.end()
            return ended

    # --- begin, or go on

    async def _alone(self) -> None:
        """Raises BadInput if another demo runs on this file: its people would do everything a second time."""
        now = _now()
        store = self.app.store
        live = await store.announce(f"{_NAME}asks", [], now, now=now) if isinstance(store, Shares) else {}
        for holder in live:
            pid = holder.removeprefix(_NAME)
            if pid != holder and pid.isdigit() and _is_alive(int(pid)):
                raise BadInput("--store", self.app.url, f"another file: on this one a demo is running, process {pid}")

    async def _begin(self, ledger: Ledger, database: sqlite3.Connection) -> list[list[Act]]:
        """Take up the run that is in the file, or begin another; what people have yet to do in each story."""
        run = ledger.run()
        if run is not None and not run.ended and not self._fresh:
            began_at, speed = run.began_at, run.speed
            self._watched.note(f"continuing: the stories began {(self._started - began_at) / 1000:.0f} s ago")
        else:
            await self._clear()
            began_at, speed = _now() + 300, self._speed
            ledger.begin(began_at, speed)
        for place, story in enumerate(self.stories):
            begins = began_at + round(place * _APART / speed)
            pace = Pace(story.scale, begins=begins, speed=speed, opens=story.opens)
            story.begin(pace, ledger, database, self._tell)
        by_code = {story.code: story for story in self.stories}
        for line in ledger.lines():
            by_code[line.story].recall(line)
            self.lateness.add(line)
        done = ledger.acts()
        return [[one for one in story.script() if one.name not in done] for story in self.stories]

    async def _clear(self) -> None:
        """Take back what an earlier run has left in the store."""
        for story in self.stories:
            for topic in story.topics:
                left = [task.record.ref async for task in self.app.find(topic=topic) if task.state.live]
                await self.app.cancel_many(left)

    async def _catch_up(self, acts: Sequence[list[Act]], ledger: Ledger) -> None:
        """What people would have done while the demo was stopped, they do first; then what fell due may happen."""
        for story, script in zip(self.stories, acts, strict=True):
            while script and story.pace.real_at(script[0].at) < self._started:
                one = script.pop(0)
                await one.perform()
                ledger.acted(one.name)

    def _tell(self, line: Line) -> None:
        self.lateness.add(line)
        self._watched.told(line)


async def _all_or_first_error(directors: list[asyncio.Task[None]], beside: list[asyncio.Task[None]]) -> None:
    """Wait until the stories have ended, or anything fails."""
    waiting = set(directors)
    while waiting:
        ended, _ = await asyncio.wait({*waiting, *beside}, return_when=asyncio.FIRST_COMPLETED)
        for task in ended:
            await task
        waiting -= ended


def _is_alive(pid: int) -> bool:
    """After a kill -9 a worker is announced for a while, but its process is gone."""
    try:
        os.kill(pid, 0)
    except PermissionError:
        return True
    except OSError:
        return False
    return True


def _now() -> Millis:
    return time.time_ns() // 1_000_000
