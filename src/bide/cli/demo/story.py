"""What the scenarios of the demo have in common: a pace, a script of people's acts, and what is told of each thing."""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from datetime import datetime
from typing import Any, ClassVar, NamedTuple, TypeVar

import msgspec

from bide.app import Bide
from bide.cli.demo.ledger import Ledger, Line
from bide.cli.demo.pace import Pace, Scale
from bide.core.instants import Millis, duration
from bide.core.outcomes import Outcome
from bide.core.records import Record
from bide.core.tasks import Task
from bide.ports import Sink

StoryType = TypeVar("StoryType", bound="Story")
Told = Callable[[Line], None]

FIRED, FAILED, SAID, CALLED_OFF = "fired", "failed", "said", "called off"


class Act(NamedTuple):
    """What somebody does at a time of the story."""

    at: Millis
    name: str
    perform: Callable[[], Awaitable[None]]


def act(at: str) -> Callable[[Callable[[StoryType], Awaitable[None]]], Callable[[StoryType], Awaitable[None]]]:
    """Mark a method of a story as what somebody does `at` this time after its begin."""

    def mark(method: Callable[[StoryType], Awaitable[None]]) -> Callable[[StoryType], Awaitable[None]]:
        method.__dict__["act_at"] = duration(at)
        return method

    return mark


class Story:
    """A scenario. Subclasses say `define` (the handlers), `tables`, and acts."""

    code: ClassVar[str]
    title: ClassVar[str]
    scale: ClassVar[Scale]
    topics: ClassVar[tuple[str, ...]]
    tables: ClassVar[tuple[str, ...]] = ()
    opens: ClassVar[datetime | None] = None
    place: ClassVar[str] = ""

    def __init__(self, app: Bide) -> None:
        self.app = app
        self.pace: Pace
        self.database: sqlite3.Connection
        """The shop's own connection to the file, as a web request would have one."""
        self.things: dict[str, list[Line]] = {}
        """What has happened to each thing, in the order in which the things appeared."""
        self.live: list[Record] = []
        """The tasks of this story that wait or run, as the store had them a moment ago."""
        self.ended = False
        self._started: dict[int, int] = {}
        self._ledger: Ledger
        self._told: Told
        self.define(app)
        for topic in self.topics:
            route = app.routes[topic]
            app.routes[topic] = msgspec.structs.replace(route, sink=_Timed(route.sink, self._started))

    def define(self, app: Bide) -> None:
        """Declare the handlers."""
        raise NotImplementedError

    def thing_of(self, record: Record) -> str:
        """Which line of the board a task belongs to."""
        return record.key

    async def enter(self) -> None:
        """Start what the story needs around it."""

    async def leave(self) -> None:
        """End it again."""

    # --- what scenarios say

    def said(self, thing: str, words: str) -> None:
        """Somebody did something."""
        self._tell(Line(self.code, thing, words, SAID, _now()))

    def called_off(self, thing: str, words: str) -> None:
        """Somebody did something after which nothing is left to happen."""
        self._tell(Line(self.code, thing, words, CALLED_OFF, _now()))

    def fired(self, task: Task[Any], words: str, *, failed: bool = False) -> None:
        """A handler has run: tells what it did, when it was due and how late it began."""
        started = self._started.get(task.token, time.time_ns())
        due_at = task.record.planned_at
        late = started / 1_000_000 - due_at
        mark = FAILED if failed else FIRED
        self._tell(Line(self.code, self.thing_of(task.record), words, mark, _now(), due_at, late))

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[sqlite3.Connection]:
        """The shop's own transaction: all of it or nothing.

        It waits for its turn without stopping the event loop, on which the one that it waits for may be running.
        """
        while True:
            try:
                self.database.execute("BEGIN IMMEDIATE")
                break
            except sqlite3.OperationalError as error:
                if error.sqlite_errorcode != sqlite3.SQLITE_BUSY:
                    raise
            await asyncio.sleep(0.002)
        try:
            yield self.database
        except BaseException:
            self.database.execute("ROLLBACK")
            raise
        self.database.execute("COMMIT")

    # --- what the demo does with them

    def begin(self, pace: Pace, ledger: Ledger, database: sqlite3.Connection, told: Told) -> None:
        """Take up the story, where it was if it has begun before."""
        self.pace, self.database, self._ledger, self._told = pace, database, ledger, told
        for table in self.tables:
            database.execute(f"CREATE TABLE IF NOT EXISTS {table}")

    def recall(self, line: Line) -> None:
        """A line from before the demo was stopped."""
        self.things.setdefault(line.thing, []).append(line)

    def script(self) -> list[Act]:
        """All acts, in the order of their times."""
        acts = [
            Act(method.__dict__["act_at"], f"{self.code} {name}", method.__get__(self))
            for name, method in vars(type(self)).items()
            if callable(method) and "act_at" in getattr(method, "__dict__", {})
        ]
        return sorted(acts, key=lambda one: one.at)

    async def look(self) -> None:
        """See what waits."""
        found: list[Record] = []
        for topic in self.topics:
            found += [task.record async for task in self.app.find(topic=topic, wake_from="1970-01-01T00:00:00Z")]
        self.live = found

    def _tell(self, line: Line) -> None:
        self.things.setdefault(line.thing, []).append(line)
        self._ledger.put(line)
        self._told(line)


class _Timed:
    """A sink that notes when its deliveries begin."""

    def __init__(self, sink: Sink, started: dict[int, int]) -> None:
        self._sink = sink
        self._started = started

    async def deliver(self, task: Task[Any]) -> Outcome | None:
        self._started[task.token] = time.time_ns()
        try:
            return await self._sink.deliver(task)
        finally:
            del self._started[task.token]


async def perform(story: Story, acts: list[Act], ledger: Ledger) -> None:
    """Let people act when it is time; the story has ended when they all have and nothing waits any more."""
    for one in acts:
        await asyncio.sleep(max(0.0, story.pace.real_at(one.at) / 1000 - time.time()))
        await one.perform()
        ledger.acted(one.name)
    await story.look()
    while story.live:  # noqa: ASYNC110 - `keep_looking` sees what the store has; nobody could tell us
        await asyncio.sleep(0.05)
    story.ended = True


async def keep_looking(stories: Sequence[Story]) -> None:
    """Keep what is known of the store fresh."""
    while True:
        await quiet(stories)
        for story in stories:
            if not story.ended:
                await story.look()
        await asyncio.sleep(0.2)


async def quiet(stories: Sequence[Story]) -> None:
    """Return when nothing is about to happen: the worker shares this loop, and a drawing would make it late."""
    while True:
        now = time.time()
        ahead = [record.wake_at / 1000 - now for story in stories for record in story.live]
        soon = [seconds for seconds in ahead if -0.005 < seconds < 0.05]
        if not soon:
            return
        await asyncio.sleep(max(soon) + 0.01)


def _now() -> Millis:
    return time.time_ns() // 1_000_000
