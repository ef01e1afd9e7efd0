"""Event reminders: two hours before the end wherever the end goes, and never after it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from datetime import datetime, timedelta

import pytest

from bide import Bide, Defer, Handler, Result, Task
from bide.testing.time_machine import TimeMachine

HOUR = timedelta(hours=1)
VISITORS = 20


@dataclass
class Reminder:
    event: str
    visitor: int


class Events:
    """What ends when, and who was reminded of it."""

    def __init__(self, app: Bide) -> None:
        self.app = app
        self.reminded: Counter[tuple[str, int]] = Counter()
        self.busy_until: datetime | None = None

        @app.handler("event.remind")
        async def remind(task: Task[Reminder]) -> None:
            if self.busy_until is not None:
                raise Defer(at=self.busy_until)
            self.reminded[task.payload.event, task.payload.visitor] += 1

        self.remind: Handler[Reminder] = remind

    async def ends(self, event: str, at: datetime) -> Counter[Result]:
        """The end is there from now on; everybody's reminder with it."""
        answers = await self.app.schedule_many(
            self.remind.new(
                Reminder(event, visitor), key=f"{event}/{visitor}", group=event, at=at - 2 * HOUR, deadline=at
            )
            for visitor in range(VISITORS)
        )
        return Counter(answer.result for answer in answers)

    def count(self, event: str) -> int:
        return sum(number for (name, _), number in self.reminded.items() if name == event)


@pytest.fixture
def events(bide_app: Bide) -> Events:
    return Events(bide_app)


async def test_two_hours_before_the_end(events: Events, bide_time: TimeMachine) -> None:
    await events.ends("concert", bide_time.now + 5 * HOUR)
    assert await bide_time.advance("2h59m59s") == []
    fired = await bide_time.advance("1s")
    assert events.reminded == {("concert", visitor): 1 for visitor in range(VISITORS)}
    assert {one.at for one in fired} == {bide_time.now}


@pytest.mark.parametrize("hours", [3, 7, 48], ids=["earlier", "later", "much later"])
async def test_when_the_end_moves_all_reminders_do(events: Events, bide_time: TimeMachine, hours: int) -> None:
    await events.ends("concert", bide_time.now + 5 * HOUR)
    await events.ends("fair", bide_time.now + 6 * HOUR)
    end = bide_time.now + hours * HOUR
    assert await events.ends("concert", end) == {Result.REPLACED: VISITORS}
    fired = [one for one in await bide_time.advance("10d") if one.record.group == "concert"]
    assert {one.at for one in fired} == {end - 2 * HOUR}
    assert len(fired) == VISITORS, "and the old ones are gone"
    assert events.count("fair") == VISITORS


@pytest.mark.parametrize(
    ("by", "ends", "reminded"), [("3h", 8, 6), ("-1h", 4, 2), ("-4h", 1, 0)], ids=["later", "earlier", "at once"]
)
async def test_the_end_moves_along_with_its_reminders(
    events: Events, bide_app: Bide, bide_time: TimeMachine, by: str, ends: int, reminded: int
) -> None:
    begin = bide_time.now
    await events.ends("concert", begin + 5 * HOUR)
    await events.ends("fair", begin + 5 * HOUR)
    answers = await bide_app.shift(group="concert", by=by, deadlines=True)
    assert Counter(answer.result for answer in answers) == {Result.MOVED: VISITORS}
    assert {answer.task.deadline for answer in answers if answer.task} == {begin + ends * HOUR}
    fired = [one for one in await bide_time.advance("10d") if one.record.group == "concert"]
    assert {one.at for one in fired} == {begin + reminded * HOUR}
    assert (events.count("concert"), events.count("fair")) == (VISITORS, VISITORS)


async def test_workers_that_come_back_after_the_end_send_nothing(bide_app: Bide, events: Events) -> None:
    async with TimeMachine(bide_app) as time:
        await events.ends("concert", time.now + 5 * HOUR)
        await time.pass_unattended(5 * HOUR + timedelta(milliseconds=1))
        fired = await time.advance("0s")
        assert {one.outcome for one in fired} == {"dead"}
        assert {(one.error or "").split(":")[0] for one in fired} == {"deadline"}
        assert not events.reminded


async def test_put_off_past_the_end_they_are_given_up(events: Events, bide_time: TimeMachine) -> None:
    end = bide_time.now + 5 * HOUR
    await events.ends("concert", end)
    events.busy_until = end + timedelta(milliseconds=1)
    fired = await bide_time.advance("1d")
    assert [one.outcome for one in fired] == ["dead"] * VISITORS
    assert {one.at for one in fired} == {end - 2 * HOUR}, "known as soon as it is asked for"
