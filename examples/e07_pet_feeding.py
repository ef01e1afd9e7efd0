"""Pet feeding: a meal takes 4 h; a speed card takes 2 h off all meals of its player; auto-feed serves once more."""

import asyncio
import sqlite3
from dataclasses import dataclass
from tempfile import TemporaryDirectory

from bide import Bide, ScaledClock, Task

SPEED = 3600  # an hour of the story takes a second
folder = TemporaryDirectory()  # gone when the program ends
app = Bide(f"sqlite:///{folder.name}/game.db", clock=ScaledClock(SPEED))
game = sqlite3.connect(f"{folder.name}/game.db", isolation_level=None)  # the pets and their tasks rest in one file
game.execute("CREATE TABLE pets (name TEXT PRIMARY KEY, servings INTEGER, eaten INTEGER DEFAULT 0)")
game.execute("INSERT INTO pets (name, servings) VALUES ('rex', 2), ('tom', 1), ('kim', 1)")  # rex is on auto-feed


@dataclass
class Meal:
    pet: str
    player: str
    number: int = 1


async def serve(meal: Meal) -> None:  # a key for each meal: under one key the next meal would replace this one
    await finish_meal.schedule(meal, key=f"{meal.pet}/{meal.number}", group=meal.player, delay="4h")


@app.handler("meal.done")
async def finish_meal(task: Task[Meal]) -> None:
    meal, late = task.payload, task.lateness.total_seconds() / SPEED
    async with task.transaction() as conn:  # eaten, served again, and this meal over: all of it, or nothing
        eat = "UPDATE pets SET eaten = eaten + 1 WHERE name = ? RETURNING servings - eaten"
        if conn.execute(eat, (meal.pet,)).fetchone()[0]:
            await serve(Meal(meal.pet, meal.player, meal.number + 1))
    print(f"{meal.pet} has eaten, due {task.due_at:%H:%M}, {late * 1000:.0f} ms late")


@app.handler("walk.done")
async def finish_walk(task: Task[str]) -> None:
    print(f"{task.payload} is back from the walk, due {task.due_at:%H:%M}")


async def main() -> None:
    print(f"1 hour = {3600 / SPEED:g} s")
    async with app, app.worker() as worker:
        await asyncio.gather(*map(serve, [Meal("rex", "ann"), Meal("tom", "ann"), Meal("kim", "bob")]))
        await finish_walk.schedule("rex", key="rex", group="ann", delay="3h")
        for _ in range(2):  # the first card leaves a while to eat; the second takes more than is left
            await asyncio.sleep(0.75 * 3600 / SPEED)
            moved = await app.shift(group="ann", topic="meal.done", by="-2h")
            print("ann plays a speed card:", *(answer.result for answer in moved))
        await worker.until_empty()
    assert dict(game.execute("SELECT name, eaten FROM pets")) == {"rex": 2, "tom": 1, "kim": 1}


asyncio.run(main())
