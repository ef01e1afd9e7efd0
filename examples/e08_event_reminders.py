"""Event reminders: 2 h before the end; when the end moves, so do all reminders; and none comes after the end."""

import asyncio
import sqlite3
from collections import Counter
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import partial
from tempfile import TemporaryDirectory

from bide import Bide, Task
from bide.engine.clock import ScaledClock

SPEED, HOUR = 3600, timedelta(hours=1)  # an hour of the story takes a second
folder = TemporaryDirectory()  # gone when the program ends
app = Bide(f"sqlite:///{folder.name}/events.db", clock=ScaledClock(SPEED), lease="12h", max_sleep="1h")
events = sqlite3.connect(":memory:")
events.execute("CREATE TABLE reminded (event TEXT, visitor INTEGER, ends TEXT, PRIMARY KEY (event, visitor, ends))")


@dataclass
class Reminder:
    event: str
    visitor: int


@app.handler("event.remind")
async def remind(task: Task[Reminder]) -> None:
    row = (task.payload.event, task.payload.visitor, f"{task.deadline:%H:%M}")  # once for each end that it has had
    if events.execute("INSERT OR IGNORE INTO reminded VALUES (?, ?, ?)", row).rowcount and row[1] == 1:
        late = (app.clock.now() - task.record.planned_at) / SPEED
        print(f"{row[0]} ends {row[2]}: reminder due {task.due_at:%H:%M}, {late:.0f} ms late for the first visitor")


async def ends(event: str, at: datetime) -> None:  # for a key that waits: another time, and another deadline
    plan = partial(remind.new, group=event, at=at - 2 * HOUR, deadline=at)
    answers = await app.schedule_many(plan(Reminder(event, n), key=f"{event}/{n}") for n in range(1, 501))
    print(f"{event} ends {at:%H:%M}: {len(answers)} reminders {answers[0].result}")


async def main() -> None:
    print(f"1 hour = {3600 / SPEED:g} s")
    begin = datetime.now(UTC)
    async with app:
        for event, hours in (("match", 2.25), ("concert", 5), ("fair", 8)):
            await ends(event, begin + hours * HOUR)
        await asyncio.sleep(2.5 * 3600 / SPEED)  # no worker is up, and meanwhile the match is over
        async with app.worker():
            await ends("concert", begin + 6 * HOUR)
            await ends("fair", begin + 4 * HOUR)  # two hours before that is past: at once
            while [task async for task in app.find(state="waiting")]:  # noqa: ASYNC110 - until nothing is left
                await asyncio.sleep(0.1)
        dead = Counter([f"{task.group}, {task.error}" async for task in app.find(state="dead")])
    print(f"not sent: {dict(dead)}")
    sent = Counter(events.execute("SELECT event, ends FROM reminded"))
    assert sent == {("concert", f"{begin + 6 * HOUR:%H:%M}"): 500, ("fair", f"{begin + 4 * HOUR:%H:%M}"): 500}, sent
    assert list(dead.values()) == [500], dead


asyncio.run(main())
