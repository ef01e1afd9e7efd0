"""Pet feeding: a card moves the meals of one player and nothing else; auto-feed serves the next meal exactly once."""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass
from datetime import datetime

import pytest

from bide import Bide, Handler, Task
from bide.testing.time_machine import Fired, TimeMachine


@dataclass
class Meal:
    pet: str
    player: str
    number: int = 1


class Game:
    """The pets, and what is done with them."""

    def __init__(self, app: Bide, database: sqlite3.Connection) -> None:
        self.app = app
        self.database = database
        self.breaks = 0
        self.begin: datetime | None = None
        database.execute("CREATE TABLE pets (name TEXT PRIMARY KEY, cards INTEGER, eaten INTEGER DEFAULT 0)")

        @app.handler("meal.done", retry="quick")
        async def finish_meal(task: Task[Meal]) -> None:
            meal = task.payload
            async with task.transaction() as conn:
                conn.execute("UPDATE pets SET eaten = eaten + 1 WHERE name = ?", (meal.pet,))
                card = "UPDATE pets SET cards = cards - 1 WHERE name = ? AND cards > 0"
                if conn.execute(card, (meal.pet,)).rowcount:
                    await self.serve(meal.pet, meal.player, meal.number + 1)
                if self.breaks:
                    self.breaks -= 1
                    raise ConnectionError("between serving and the end of the meal")

        @app.handler("walk.done")
        async def finish_walk(task: Task[str]) -> None: ...

        self.finish_meal: Handler[Meal] = finish_meal
        self.finish_walk: Handler[str] = finish_walk

    async def serve(self, pet: str, player: str, number: int = 1) -> None:
        await self.finish_meal.schedule(Meal(pet, player, number), key=f"{pet}/{number}", group=player, delay="4h")

    def adopt(self, pet: str, *, cards: int = 0) -> None:
        with self.database:
            self.database.execute("INSERT INTO pets (name, cards) VALUES (?, ?)", (pet, cards))

    @property
    def pets(self) -> dict[str, tuple[int, int]]:
        return {
            name: (eaten, cards) for name, eaten, cards in self.database.execute("SELECT name, eaten, cards FROM pets")
        }


def hours(fired: list[Fired], begin: datetime) -> list[tuple[str, float]]:
    return [(one.key, (one.at - begin).total_seconds() / 3600) for one in fired]


@pytest.fixture
def game(bide_app: Bide, database: sqlite3.Connection) -> Game:
    return Game(bide_app, database)


async def test_a_card_moves_the_meals_of_its_player_and_nothing_else(game: Game, file_time: TimeMachine) -> None:
    begin = file_time.now
    for pet, player in (("rex", "ann"), ("tom", "ann"), ("kim", "bob")):
        game.adopt(pet)
        await game.serve(pet, player)
    await game.finish_walk.schedule("rex", key="rex", group="ann", delay="3h")
    await file_time.advance("1h")
    moved = await game.app.shift(group="ann", topic="meal.done", by="-2h")
    assert [answer.result for answer in moved] == ["moved", "moved"]
    fired = await file_time.advance("1d")
    assert sorted(hours(fired, begin)) == [("kim/1", 4), ("rex", 3), ("rex/1", 2), ("tom/1", 2)]


async def test_a_card_may_end_a_meal_now_but_not_before_now(game: Game, file_time: TimeMachine) -> None:
    begin = file_time.now
    game.adopt("rex")
    await game.serve("rex", "ann")
    await file_time.advance("3h")
    await game.app.shift(group="ann", topic="meal.done", by="-2h")
    assert hours(await file_time.advance("0s"), begin) == [("rex/1", 3)]


async def test_a_card_touches_no_meal_that_is_over_and_none_that_comes_after(
    game: Game, file_time: TimeMachine
) -> None:
    begin = file_time.now
    game.adopt("rex", cards=1)
    assert await game.app.shift(group="ann", topic="meal.done", by="-2h") == []
    await game.serve("rex", "ann")
    assert hours(await file_time.advance("5h"), begin) == [("rex/1", 4)]
    await game.app.shift(group="ann", topic="meal.done", by="-2h")
    assert hours(await file_time.advance("1d"), begin) == [("rex/2", 6)]


@pytest.mark.parametrize("cards", [0, 1, 3])
async def test_auto_feed_serves_once_for_each_card(game: Game, file_time: TimeMachine, cards: int) -> None:
    begin = file_time.now
    game.adopt("rex", cards=cards)
    await game.serve("rex", "ann")
    fired = await file_time.advance("10d")
    assert hours(fired, begin) == [(f"rex/{number}", 4 * number) for number in range(1, cards + 2)]
    assert game.pets == {"rex": (cards + 1, 0)}


async def test_a_failure_in_the_middle_uses_no_card_and_serves_nothing(game: Game, file_time: TimeMachine) -> None:
    game.breaks = 2
    game.adopt("rex", cards=1)
    await game.serve("rex", "ann")
    fired = await file_time.advance("4h")
    assert game.pets == {"rex": (0, 1)}
    assert len(await file_time.waiting()) == 1, "no second meal"
    fired += await file_time.advance("1m")
    assert [one.outcome for one in fired] == ["retry", "retry", "done"]
    assert game.pets == {"rex": (1, 0)}
    assert [task.key for task in await file_time.waiting()] == ["rex/2"]
