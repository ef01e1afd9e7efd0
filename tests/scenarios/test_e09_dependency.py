"""Dependency not there yet: asking again costs no attempt, ends after an hour, and keeps the order of two tasks."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from bide import Bide, Defer, Handler, Task
from bide.testing.time_machine import TimeMachine


@dataclass
class Record:
    name: str
    needs: str | None = None


class Import:
    """What is in, in the order in which it came in."""

    def __init__(self, app: Bide) -> None:
        self.names: list[str] = []
        self.given_up: list[str] = []
        self.fails: dict[str, int] = {}

        @app.handler("record.import", retry="quick")
        async def take_in(task: Task[Record]) -> None:
            record = task.payload
            if record.needs and record.needs not in self.names:
                raise Defer("1m")
            if self.fails.get(record.name, 0):
                self.fails[record.name] -= 1
                raise ConnectionError("the database is away")
            self.names.append(record.name)

        @app.on_dead("record.import")
        async def give_up(task: Task[Record]) -> None:
            self.given_up.append(f"{task.key}, no {task.payload.needs}")

        self.take_in: Handler[Record] = take_in

    async def arrives(self, name: str, needs: str | None = None) -> None:
        await self.take_in.schedule(Record(name, needs), key=name, delay="0s", deadline="1h", on_conflict="keep")


@pytest.fixture
def imported(bide_app: Bide) -> Import:
    return Import(bide_app)


async def test_asking_again_uses_no_attempt(imported: Import, bide_time: TimeMachine) -> None:
    await imported.arrives("ride", "ann")
    asked = await bide_time.advance("30m")
    assert [one.outcome for one in asked] == ["defer"] * 31
    await imported.arrives("ann")
    fired = await bide_time.advance("1m")
    assert imported.names == ["ann", "ride"]
    last = fired[-1]
    assert (last.key, last.attempt, last.record.failures) == ("ride", 1, 0)


async def test_it_is_given_up_after_an_hour(imported: Import, bide_time: TimeMachine) -> None:
    begin = bide_time.now
    await imported.arrives("ride", "bob")
    fired = await bide_time.advance("2h")
    assert [one.outcome for one in fired] == ["defer"] * 60 + ["dead"]
    assert (fired[-1].at - begin).total_seconds() == 3600
    assert imported.given_up == ["ride, no bob"]
    await imported.arrives("bob")
    await bide_time.advance("2h")
    assert imported.names == ["bob"], "too late"


async def test_delivered_by_another_collector_again_it_does_not_start_over(
    imported: Import, bide_time: TimeMachine
) -> None:
    begin = bide_time.now
    await imported.arrives("ride", "bob")
    await bide_time.advance("40m")
    await imported.arrives("ride", "bob")
    fired = await bide_time.advance("2h")
    assert (fired[-1].at - begin).total_seconds() == 3600


async def test_a_successor_waits_until_its_predecessor_is_done(imported: Import, bide_time: TimeMachine) -> None:
    imported.fails["beforeload crane"] = 3
    await imported.arrives("unload crane", "beforeload crane")
    await bide_time.advance("10m")
    await imported.arrives("beforeload crane")
    await bide_time.advance("1h")
    assert imported.names == ["beforeload crane", "unload crane"]
    assert not imported.given_up
