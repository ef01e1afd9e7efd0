"""Reminders ahead of events: two hours before it begins, everybody who comes is told. A group each, which moves as one.

The summer party has five hundred guests: what somebody has to move by an hour when it begins later.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timedelta
from functools import partial
from typing import NamedTuple

import msgspec

from bide.app import Bide
from bide.cli.demo.story import Story, millis_of
from bide.core.records import NewTask
from bide.core.tasks import Task

BEFORE = timedelta(hours=2)
SUMMER = "event-summer"
GUESTS = 500


class Event(NamedTuple):
    """One event."""

    group: str
    title: str
    guests: int
    days: int
    """From today."""
    hour: int


EVENTS = (
    Event(SUMMER, "Summer party", GUESTS, 3, 19),
    Event("event-chess", "Chess evening", 40, 1, 18),
    Event("event-reading", "Reading by the river", 120, 2, 20),
    Event("event-run", "Morning run", 90, 4, 7),
    Event("event-market", "Night market", 180, 5, 21),
)


class Reminder(msgspec.Struct):
    event: str
    guest: int


class Reminders(Story):
    topics = ("event.remind",)

    def define(self, app: Bide) -> None:
        @app.handler("event.remind")
        async def remind(task: Task[Reminder]) -> None:
            """A message to the guest."""

        self.remind = remind

    async def play(self) -> None:
        """Each event is held again, as many days after it as it was ahead at first."""
        while True:
            begins = [self._begins(event) for event in EVENTS]
            for event, at in zip(EVENTS, begins, strict=True):
                await self.fill(event.group, partial(self._all, event, at), until=at)
            await self.until(millis_of(min(begins)))

    def _begins(self, event: Event) -> datetime:
        return self.at(event.days, event.hour)

    def _all(self, event: Event, at: datetime) -> Iterator[NewTask]:
        return (
            self.remind.new(
                Reminder(event.title, guest), key=f"{event.group}-{at:%m%d}-{guest:03}", group=event.group,
                at=at - BEFORE, on_conflict="keep",
            )
            for guest in range(event.guests)
        )  # fmt: skip
