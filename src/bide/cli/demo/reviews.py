"""Automatic reviews: a ride that nobody has reviewed 48 hours later gets five stars."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timedelta

import msgspec

from bide.app import Bide
from bide.cli.demo.story import Story, millis_of
from bide.core.records import NewTask
from bide.core.tasks import Task
from bide.engine.acting import acting_as

_RIDES = 4_000
"""Of the last two days."""
_AFTER = timedelta(hours=48)


class Ride(msgspec.Struct):
    driver: str
    stars: int = 5


class Reviews(Story):
    topics = ("review.default",)

    def define(self, app: Bide) -> None:
        @app.handler("review.default")
        async def review(task: Task[Ride]) -> None:
            """Five stars, unless there are some."""

        self.review = review

    async def play(self) -> None:
        await self.fill("reviews", self._of_the_last_days)
        await self.now_and_then(15, self._a_ride)

    def _of_the_last_days(self) -> Iterator[NewTask]:
        soon = self.app.clock.now() + 120_000
        for day in range(3):
            for ride, at in enumerate(sorted(self.waking_hours(day) for _ in range(_RIDES // 3))):
                if soon < millis_of(at):
                    yield self._new(f"before-{day}-{ride:04}", ride, at)

    def _new(self, name: str, number: int, at: datetime) -> NewTask:
        driver = f"driver-{number % 150}"
        return self.review.new(Ride(driver), key=f"ride-{name}", group=driver, at=at, on_conflict="keep")

    async def _a_ride(self) -> None:
        """One ends; the passenger of another has an opinion."""
        [number] = await self.notebook.numbers()
        await self.app.schedule_new(self._new(str(number), number, self.app.now() + _AFTER))
        if self.chance.random() < 0.5:
            reviewed = await self.one_of("review.default")
            if reviewed is not None:
                with acting_as("passenger"):
                    await self.app.cancel(*reviewed.record.ref)
