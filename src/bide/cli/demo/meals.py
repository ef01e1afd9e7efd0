"""Pet feeding: a meal takes some minutes, then the next is served. A speed card shortens all meals of one player."""

from __future__ import annotations

import msgspec

from bide.app import Bide
from bide.cli.demo.story import Story
from bide.core.outcomes import Done
from bide.core.tasks import Task
from bide.engine.acting import acting_as

_PLAYERS = 40
_PETS = ("cat", "dog", "rabbit", "duck", "goat", "pony", "hen", "turtle", "mouse", "owl")
_SPEED_CARD = "-2m"


class Meal(msgspec.Struct):
    pet: str
    player: int


class Meals(Story):
    topics = ("meal.done",)

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
            await self.app.shift(player, _SPEED_CARD, topic="meal.done")
