"""E7, pet feeding: a meal takes four hours; a speed card takes two off all meals of its player; some pets eat again."""

from __future__ import annotations

import msgspec

from bide.app import Bide
from bide.cli.demo.pace import Scale
from bide.cli.demo.story import Story, act
from bide.core.records import Record
from bide.core.tasks import Task


class Meal(msgspec.Struct):
    pet: str
    serving: int = 1


class Egg(msgspec.Struct):
    name: str


class Feeding(Story):
    code = "E7"
    title = "Pet feeding"
    scale = Scale("1h", "4s")
    topics = ("pet.meal", "pet.hatch")
    tables = ("demo_pet (name TEXT PRIMARY KEY, meals INTEGER NOT NULL, auto_feed INTEGER NOT NULL)",)

    def define(self, app: Bide) -> None:
        @app.handler("pet.meal")
        async def meal_ends(task: Task[Meal]) -> None:
            meal = task.payload
            async with task.transaction() as database:
                (auto_feed,) = database.execute("SELECT auto_feed FROM demo_pet WHERE name = ?", (meal.pet,)).fetchone()
                database.execute("UPDATE demo_pet SET meals = meals + 1, auto_feed = 0 WHERE name = ?", (meal.pet,))
                if auto_feed:  # in the same transaction: the meal ends and the next begins, or neither
                    await self._serve(Meal(meal.pet, meal.serving + 1), group=task.group)
            self.fired(task, "ate, and eats again" if auto_feed else "ate")

        @app.handler("pet.hatch")
        async def hatch(task: Task[Egg]) -> None:
            self.fired(task, "hatched")

        self.meal_ends, self.hatch = meal_ends, hatch

    def thing_of(self, record: Record) -> str:
        return record.key.partition(", meal")[0]

    async def _serve(self, meal: Meal, *, group: str | None) -> None:
        key = f"{meal.pet}, meal {meal.serving}"
        await self.meal_ends.schedule(meal, key=key, group=group, delay=self.pace.length("4h"))

    async def _feed(self, pet: str, player: str, *, auto_feed: bool = False) -> None:
        async with self.transaction() as database, self.app.using(database):
            database.execute("INSERT OR REPLACE INTO demo_pet VALUES (?, 0, ?)", (pet, auto_feed))
            await self._serve(Meal(pet), group=player)
        self.said(pet, "auto-fed" if auto_feed else "fed")

    @act("0h")
    async def mia_and_ben_feed(self) -> None:
        await self._feed("Mia's cat", "mia")
        await self._feed("Ben's rabbit", "ben")
        await self.hatch.schedule(Egg("Mia's egg"), key="Mia's egg", group="mia", delay=self.pace.length("6h"))
        self.said("Mia's egg", "laid")

    @act("1h30m")
    async def mia_feeds_the_dog(self) -> None:
        await self._feed("Mia's dog", "mia", auto_feed=True)

    @act("3h")
    async def mia_plays_a_speed_card(self) -> None:
        """All of Mia's meals end two hours earlier, the cat's at once; her egg and Ben's rabbit are left alone."""
        for answer in await self.app.shift(group="mia", topic="pet.meal", by=-self.pace.length("2h")):
            if answer.ok and answer.record is not None:
                self.said(self.thing_of(answer.record), "2h off")
