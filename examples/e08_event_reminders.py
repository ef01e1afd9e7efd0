"""Event reminders: 2 h before the end; when the end moves, so do all reminders; and none comes after the end."""

import asyncio
import logging
import sqlite3
from collections import Counter
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from tempfile import TemporaryDirectory

from bide import Bide, Task
from bide.testing import ManualClock

HOUR, MILLIS_OF_HOUR = timedelta(hours=1), 3_600_000
clock = ManualClock()  # moved by hand, so that the story is the same on every machine
logging.getLogger("bide").setLevel(logging.CRITICAL)  # the log of 500 deaths would fill the screen
folder = TemporaryDirectory()  # gone when the program ends
app = Bide(f"sqlite:///{folder.name}/events.db", clock=clock)
events = sqlite3.connect(":memory:")
events.execute("CREATE TABLE reminded (event TEXT, visitor INTEGER, ends TEXT, PRIMARY KEY (event, visitor, ends))")


@dataclass
class Reminder:
    event: str
    visitor: int


@app.handler("event.remind")
async def remind(task: Task[Reminder]) -> None:
    row = (task.payload.event, task.payload.visitor, f"{task.deadline:%H:%M}")  # once for each end
    if events.execute("INSERT OR IGNORE INTO reminded VALUES (?, ?, ?)", row).rowcount and row[1] == 1:
        late = int(task.lateness.total_seconds() / 60)
        print(f"{row[0]} ends {row[2]}: first reminder, due {task.due_at:%H:%M}, {late} minutes late")


async def main() -> None:
    begin = app.now()
    async with app:
        for event, hours in (("match", 2.25), ("concert", 4.5), ("fair", 8)):
            end = begin + hours * HOUR
            visitors = [Reminder(event, number) for number in range(1, 501)]
            plan = partial(remind.new, group=event, at=end - 2 * HOUR, deadline=end)
            await app.schedule_many(plan(visitor, key=f"{event}/{visitor.visitor}") for visitor in visitors)
            print(f"{event} ends {end:%H:%M}")
        clock.advance(int(2.5 * MILLIS_OF_HOUR))  # no worker is up, and meanwhile the match is over
        for event, by in (("concert", "1h"), ("fair", "-4h")):  # the fair's reminders are overdue then: at once
            moved = await app.shift(event, by, deadlines=True)
            print(f"the end of the {event} moves by {by}, and {len(moved)} reminders with it")
        clock.advance(MILLIS_OF_HOUR)  # the concert's reminders are due
        async with app.worker() as worker:
            await worker.until_empty()
        dead = Counter([f"{task.group}, {task.error}" async for task in app.find(state="dead")])
    print(f"not sent: {dict(dead)}")
    sent = Counter(events.execute("SELECT event, ends FROM reminded"))
    assert sent == {("concert", f"{begin + 5.5 * HOUR:%H:%M}"): 500, ("fair", f"{begin + 4 * HOUR:%H:%M}"): 500}, sent
    assert list(dead.values()) == [500], dead


asyncio.run(main())
