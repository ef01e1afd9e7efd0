"""Dependency not there yet: ask again every minute, give up after an hour; an unload waits for its beforeload."""

import asyncio
import sqlite3
from dataclasses import dataclass
from tempfile import TemporaryDirectory

from bide import Bide, Defer, ScaledClock, Task

SPEED = 750  # a minute of the story takes 0.08 s
folder = TemporaryDirectory()  # gone when the program ends
app = Bide(f"sqlite:///{folder.name}/import.db", clock=ScaledClock(SPEED))
data = sqlite3.connect(f"{folder.name}/import.db", isolation_level=None)
data.execute("CREATE TABLE records (name TEXT PRIMARY KEY, needs TEXT REFERENCES records)")
given_up: list[str] = []


@dataclass
class Record:
    name: str
    needs: str | None = None


@app.handler("record.import")
async def take_in(task: Task[Record]) -> None:
    record = task.payload
    # what counts is that the predecessor is done, and the row says so: that it is scheduled would not be enough
    if record.needs and not data.execute("SELECT 1 FROM records WHERE name = ?", (record.needs,)).fetchone():
        raise Defer("1m")  # not yet: no failure, and no attempt is used
    data.execute("INSERT OR IGNORE INTO records VALUES (?, ?)", (record.name, record.needs))
    waited, late = (app.now() - task.created_at).total_seconds(), task.lateness.total_seconds() / SPEED
    print(f"{task.key} is in after {waited / 60:.1f} min, attempt {task.attempt}, {late * 1000:.0f} ms late")


@app.on_dead("record.import")
def give_up(task: Task[Record]) -> None:
    print(f"{task.key} is given up: for an hour there has been no {task.payload.needs}")
    given_up.append(task.key)


async def arrive(*records: Record) -> None:
    new = (take_in.new(record, key=record.name, delay="0s", deadline="1h", on_conflict="keep") for record in records)
    await app.schedule_many(new)


async def main() -> None:
    print(f"1 minute = {60 / SPEED:g} s")
    async with app, app.worker() as worker:
        await arrive(Record("unload crane", "beforeload crane"), Record("ride 1", "ann"), Record("ride 2", "bob"))
        await asyncio.sleep(20 * 60 / SPEED)
        await arrive(Record("beforeload crane", "ann"), Record("ann"))
        await worker.until_empty()
    assert given_up == ["ride 2"], given_up
    names = [name for (name,) in data.execute("SELECT name FROM records ORDER BY rowid")]
    assert sorted(names) == ["ann", "beforeload crane", "ride 1", "unload crane"], names
    assert names.index("beforeload crane") < names.index("unload crane"), names


asyncio.run(main())
