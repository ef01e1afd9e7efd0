"""Event reminders: 2 h before the end; when the end moves, so do all reminders; and none comes after the end."""

import asyncio
import logging
import sqlite3
from collections import Counter
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from tempfile import TemporaryDirectory

from bide import Bide, ScaledClock, Task

SPEED, HOUR = 3600, timedelta(hours=1)  # an hour of the story takes a second
logging.getLogger("bide").setLevel(logging.CRITICAL)  # the log of 500 deaths would fill the screen
folder = TemporaryDirectory()  # gone when the program ends
app = Bide(f"sqlite:///{folder.name}/events.db", clock=ScaledClock(SPEED))
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
        late = task.lateness.total_seconds() / SPEED
        print(f"{row[0]} ends {row[2]}: first reminder, due {task.due_at:%H:%M}, {late * 1000:.0f} ms late")


async def main() -> None:
    print(f"1 hour = {3600 / SPEED:g} s")
    begin = app.now()
    async with app:
        for event, hours in (("match", 2.25), ("concert", 5), ("fair", 8)):
            end = begin + hours * HOUR
            visitors = [Reminder(event, number) for number in range(1, 501)]
            plan = partial(remind.new, group=event, at=end - 2 * HOUR, deadline=end)
            await app.schedule_many(plan(visitor, key=f"{event}/{visitor.visitor}") for visitor in visitors)
            print(f"{event} ends {end:%H:%M}")
        await asyncio.sleep(2.5 * 3600 / SPEED)  # no worker is up, and meanwhile the match is over
        async with app.worker() as worker:
            for event, by in (("concert", "1h"), ("fair", "-4h")):  # the fair's reminders are overdue then: at once
                moved = await app.shift(event, by, deadlines=True)
                print(f"the end of the {event} moves by {by}, and {len(moved)} reminders with it")
            await worker.until_empty()
        dead = Counter([f"{task.group}, {task.error}" async for task in app.find(state="dead")])
    print(f"not sent: {dict(dead)}")
    sent = Counter(events.execute("SELECT event, ends FROM reminded"))
    assert sent == {("concert", f"{begin + 6 * HOUR:%H:%M}"): 500, ("fair", f"{begin + 4 * HOUR:%H:%M}"): 500}, sent
    assert list(dead.values()) == [500], dead


asyncio.run(main())
