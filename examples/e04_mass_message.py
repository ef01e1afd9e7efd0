"""Mass message at 20:00: 20,000 members hear at that very moment, as many guests over the seconds after it."""

import asyncio
import sqlite3
import time
from dataclasses import dataclass
from datetime import timedelta
from tempfile import TemporaryDirectory

from bide import Bide, Task

PEOPLE, SECOND = 20_000, timedelta(seconds=1)
WINDOW = 3 * SECOND  # for the guests: what need not happen at once is spread
folder = TemporaryDirectory()  # gone when the program ends
app = Bide(f"sqlite:///{folder.name}/messages.db", topic_concurrency=1000)
audience = sqlite3.connect(":memory:")
audience.execute("CREATE TABLE people (phone INTEGER PRIMARY KEY, member INTEGER, heard TEXT)")
lateness: dict[bool, list[timedelta]] = {True: [], False: []}


@dataclass
class Message:
    phone: int
    member: bool
    text: str


@app.handler("message.send")
async def send(task: Task[Message]) -> None:
    lateness[task.payload.member].append(task.lateness)
    # the row refuses a message that it has heard: delivered again after a crash, nobody hears it twice
    audience.execute("UPDATE people SET heard = ? WHERE phone = ? AND heard IS NULL", (task.id, task.payload.phone))


async def main() -> None:
    people = [(phone, phone <= PEOPLE) for phone in range(1, 2 * PEOPLE + 1)]
    audience.executemany("INSERT INTO people (phone, member) VALUES (?, ?)", people)
    print("1 second = 1 s: here 20:00 comes as soon as everything is scheduled")
    async with app:
        begun = time.perf_counter()
        eight = app.now() + 2.5 * SECOND
        tasks = []
        for phone, member in people:
            at = eight if member else eight + SECOND + WINDOW * ((phone - PEOPLE) / PEOPLE)
            tasks.append(send.new(Message(phone, member, "The sale begins!"), key=str(phone), at=at))
        await app.schedule_many(tasks)
        print(f"{len(tasks):,} scheduled in {time.perf_counter() - begun:.1f} s")
        async with app.worker() as worker:
            await worker.until_empty()
    for member, measured in lateness.items():
        late = sorted(length // timedelta(milliseconds=1) for length in measured)
        assert late[0] >= 0, "nobody hears it early"
        who = "members, all at once" if member else f"guests, over {WINDOW.seconds} s"
        print(f"{len(late):,} {who}: half within {late[len(late) // 2]} ms, 99 % within {late[-len(late) // 100]} ms")
    heard = audience.execute("SELECT count(heard) FROM people").fetchone()[0]
    assert heard == 2 * PEOPLE, heard


asyncio.run(main())
