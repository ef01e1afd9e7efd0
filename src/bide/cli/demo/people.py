"""People who change their minds: an editor about her posts, and players who are in a hurry about their pets' meals."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timedelta

import msgspec

from bide.app import Bide
from bide.cli.demo.story import Story
from bide.core.outcomes import Done
from bide.core.records import NewTask
from bide.core.tasks import Task
from bide.engine.acting import acting_as

_SUBJECTS = ("Morning news", "Price list", "Recipe of the day", "Harbour report", "Match preview", "Interview")
_HOURS = (8, 12, 18, 21)
_DAYS = 6
_TOMORROW_AT_8 = 12
"""Posts that all go out at once."""
_PLAYERS = 40
_PETS = ("cat", "dog", "rabbit", "duck", "goat", "pony", "hen", "turtle", "mouse", "owl")


class Post(msgspec.Struct):
    title: str
    author: str = "anna"


class Posts(Story):
    """Scheduled publishing: posts that go out tomorrow at 08:00 and at other hours; Anna, the editor, thinks again."""

    def define(self, app: Bide) -> None:
        @app.handler("post.publish")
        async def publish(task: Task[Post]) -> None:
            """The page is public now."""

        self.publish = publish

    async def play(self) -> None:
        tomorrow = self.at(1, 8)
        await self.fill(f"posts:{tomorrow.date()}", self._of_the_next_days, until=tomorrow)
        await self.now_and_then(25, self._think_again)

    def _of_the_next_days(self) -> Iterator[NewTask]:
        for day in range(1, _DAYS):
            for hour in _HOURS:
                count = _TOMORROW_AT_8 if (day, hour) == (1, 8) else self.chance.randrange(1, 4)
                yield from (self._post(self.at(day, hour), place) for place in range(count))

    def _post(self, at: datetime, place: int) -> NewTask:
        subject = _SUBJECTS[place % len(_SUBJECTS)]
        key = f"{at:%m-%d-%H%M}-{subject.lower().replace(' ', '-')}-{place}"
        return self.publish.new(Post(f"{subject}, {at:%A}"), key=key, at=at, on_conflict="keep")

    async def _think_again(self) -> None:
        """Publish now, another time, or not at all; and one more post is written."""
        post = await self.one_of("post.publish")
        if post is None:
            return
        with acting_as("anna"):
            thought = self.chance.random()
            if thought < 0.6:
                hours = self.chance.randint(1, 3)
                await self.app.reschedule(*post.record.ref, at=post.due_at + timedelta(hours=hours))
            elif thought < 0.8:
                await self.app.fire_now(*post.record.ref)
            else:
                await self.app.cancel(*post.record.ref)
        [number] = await self.notebook.numbers()
        at = self.waking_hours(self.chance.randrange(1, _DAYS))
        await self.publish.schedule(Post(f"{self.chance.choice(_SUBJECTS)} {number}"), key=f"draft-{number}", at=at)


class Meal(msgspec.Struct):
    pet: str
    player: int


class Meals(Story):
    """A meal takes a pet some minutes, then the next is served. A speed card shortens all meals of one player."""

    def define(self, app: Bide) -> None:
        @app.handler("meal.done")
        async def done(task: Task[Meal]) -> Done:
            return Done(again_in=self._takes())

        self.done = done

    def _takes(self) -> str:
        return f"{self.chance.randrange(180, 1200)}s"

    async def play(self) -> None:
        await self.app.schedule_many(
            self.done.new(
                Meal(pet, player), key=f"player-{player}-{pet}", group=f"player-{player}", delay=self._takes(),
                on_conflict="keep",
            )
            for player in range(_PLAYERS)
            for pet in _PETS
        )  # fmt: skip
        await self.now_and_then(30, self._speed_card)

    async def _speed_card(self) -> None:
        """Somebody is in a hurry."""
        player = f"player-{self.chance.randrange(_PLAYERS)}"
        with acting_as(player):
            await self.app.shift(player, "-2m", topic="meal.done")
