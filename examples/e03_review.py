"""Automatic review: 48 hours after a ride without a review it gets 5 stars; a review before that calls it off."""

import asyncio
import sqlite3
from contextlib import closing
from dataclasses import dataclass
from tempfile import TemporaryDirectory

from bide import Bide, ScaledClock, Task

SPEED = 36_000  # an hour of the story takes 0.1 s
folder = TemporaryDirectory()  # gone when the program ends
path = f"{folder.name}/rides.db"
app = Bide(f"sqlite:///{path}", clock=ScaledClock(SPEED))


@dataclass
class Ride:
    number: int


def rate(ride: int, stars: int, by: str) -> bool:
    """The first review counts, of either side: the row decides, so a race has one winner."""
    sql = "UPDATE rides SET stars = ?, by = ? WHERE number = ? AND stars IS NULL"
    with closing(sqlite3.connect(path, isolation_level=None)) as rides:
        return rides.execute(sql, (stars, by, ride)).rowcount == 1


@app.handler("ride.review")
def review(task: Task[Ride]) -> None:  # a plain function: it runs in a thread and may block
    late = task.lateness.total_seconds() / SPEED
    counted = rate(task.payload.number, 5, "us")
    print(f"ride {task.payload.number}: 5 stars {'given' if counted else 'not needed'}, {late * 1000:.0f} ms late")


async def rider_reviews(ride: int, stars: int) -> None:
    counted = await asyncio.to_thread(rate, ride, stars, "the rider")
    answer = await review.cancel(str(ride))
    print(f"ride {ride}: the rider gives {stars} {'star' if counted else 'stars, too late'}; {answer.result.value}")


async def main() -> None:
    print(f"1 hour = {3600 / SPEED:g} s")
    with closing(sqlite3.connect(path, isolation_level=None)) as rides:
        rides.execute("CREATE TABLE rides (number INTEGER PRIMARY KEY, stars INTEGER, by TEXT)")
        rides.execute("INSERT INTO rides (number) VALUES (1), (2), (3)")
        async with app, app.worker() as worker:
            for ride in (1, 2, 3):
                await review.schedule(Ride(ride), key=str(ride), delay="48h")
            await asyncio.sleep(24 * 3600 / SPEED)
            await rider_reviews(2, 1)
            await worker.until_empty()
            await rider_reviews(3, 4)
        outcome = list(rides.execute("SELECT number, stars, by FROM rides"))
    assert outcome == [(1, 5, "us"), (2, 1, "the rider"), (3, 5, "us")], outcome


asyncio.run(main())
