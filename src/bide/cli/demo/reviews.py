"""E3, the automatic review: a ride that nobody has reviewed after 48 hours gets five stars."""

from __future__ import annotations

import msgspec

from bide.app import Bide
from bide.cli.demo.pace import Scale
from bide.cli.demo.story import Story, act
from bide.core.tasks import Task


class Ride(msgspec.Struct):
    passenger: str


class Reviews(Story):
    code = "E3"
    title = "Automatic review"
    scale = Scale("1d", "10s")
    topics = ("ride.review",)
    tables = ("demo_ride (passenger TEXT PRIMARY KEY, stars INTEGER)",)

    def define(self, app: Bide) -> None:
        @app.handler("ride.review")
        async def review(task: Task[Ride]) -> None:
            async with task.transaction() as database:  # the row decides: a review in the last moment stays
                changed = database.execute(
                    "UPDATE demo_ride SET stars = 5 WHERE passenger = ? AND stars IS NULL", (task.payload.passenger,)
                )
                stars = "5 stars" if changed.rowcount else "reviewed already"
            self.fired(task, stars)

        self.review = review

    @act("0h")
    async def two_rides_end(self) -> None:
        await self._ride_ends("Ada's ride", now="0h")
        await self._ride_ends("Ben's ride", now="0h")

    @act("12h")
    async def another_ride_ends(self) -> None:
        await self._ride_ends("Cem's ride", now="12h")

    @act("30h")
    async def ben_reviews(self) -> None:
        async with self.transaction() as database, self.app.using(database):
            database.execute("UPDATE demo_ride SET stars = 4 WHERE passenger = ?", ("Ben's ride",))
            await self.review.cancel("Ben's ride")
        self.called_off("Ben's ride", "Ben gave 4 stars")

    async def _ride_ends(self, passenger: str, *, now: str) -> None:
        async with self.transaction() as database, self.app.using(database):
            database.execute("INSERT OR REPLACE INTO demo_ride VALUES (?, NULL)", (passenger,))
            await self.review.schedule(Ride(passenger), key=passenger, at=self.pace.after("48h", since=now))
        self.said(passenger, "ended")
