"""Automatic review: 5 stars after 48 hours, unless the rider has spoken; the first review is the one that counts."""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass

import pytest

from bide import Bide, Handler, Result, Task
from bide.testing.time_machine import TimeMachine


@dataclass
class Ride:
    number: int


class Rides:
    """The rides, and what is done with them."""

    def __init__(self, app: Bide, database: sqlite3.Connection) -> None:
        self.database = database
        database.execute("CREATE TABLE rides (number INTEGER PRIMARY KEY, stars INTEGER, by TEXT)")
        self.rider_is_as_fast = False

        @app.handler("ride.review")
        async def review(task: Task[Ride]) -> None:
            if self.rider_is_as_fast:
                assert await self.rider_gives(task.payload.number, 1) is Result.CANCELLED_WHILE_LEASED
            self.rate(task.payload.number, 5, "us")

        self.review: Handler[Ride] = review

    def rate(self, ride: int, stars: int, by: str) -> None:
        sql = "UPDATE rides SET stars = ?, by = ? WHERE number = ? AND stars IS NULL"
        self.database.execute(sql, (stars, by, ride))

    async def end(self, ride: int) -> None:
        self.database.execute("INSERT INTO rides (number) VALUES (?)", (ride,))
        await self.review.schedule(Ride(ride), key=str(ride), delay="48h")

    async def rider_gives(self, ride: int, stars: int) -> Result:
        self.rate(ride, stars, "the rider")
        return (await self.review.cancel(str(ride))).result

    @property
    def stars(self) -> list[tuple[int | None, str | None]]:
        return list(self.database.execute("SELECT stars, by FROM rides ORDER BY number"))


@pytest.fixture
def rides(bide_app: Bide, database: sqlite3.Connection) -> Rides:
    return Rides(bide_app, database)


async def test_five_stars_after_48_hours_and_not_before(rides: Rides, bide_time: TimeMachine) -> None:
    await rides.end(1)
    assert await bide_time.advance("47h59m59s999ms") == []
    assert rides.stars == [(None, None)]
    (fired,) = await bide_time.advance("1ms")
    assert fired.payload == {"number": 1}
    assert rides.stars == [(5, "us")]


async def test_a_review_before_that_calls_it_off(rides: Rides, bide_time: TimeMachine) -> None:
    await rides.end(1)
    await rides.end(2)
    await bide_time.advance("47h")
    assert await rides.rider_gives(1, 2) is Result.CANCELLED
    assert [one.key for one in await bide_time.advance("30d")] == ["2"]
    assert rides.stars == [(2, "the rider"), (5, "us")]


async def test_a_review_after_that_is_too_late(rides: Rides, bide_time: TimeMachine) -> None:
    await rides.end(1)
    await bide_time.advance("48h")
    assert await rides.rider_gives(1, 1) is Result.FINISHED
    assert rides.stars == [(5, "us")]


async def test_in_a_race_the_row_decides(rides: Rides, bide_time: TimeMachine) -> None:
    rides.rider_is_as_fast = True
    await rides.end(1)
    await bide_time.advance("49h")
    assert rides.stars == [(1, "the rider")]
    assert not await bide_time.waiting()
