"""Mass message: one instant for very many, each once; or the same crowd spread over a window."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from datetime import timedelta

import pytest

from bide import Bide, Handler, Task
from bide.testing.time_machine import TimeMachine

PEOPLE = 500


@dataclass
class Message:
    phone: int


class Gateway:
    """Where messages go to; it refuses an id that it has seen."""

    def __init__(self, app: Bide) -> None:
        self.heard: Counter[int] = Counter()
        self.seen: set[str] = set()
        self.calls = 0

        @app.handler("message.send", retry="quick")
        async def send(task: Task[Message]) -> None:
            self.calls += 1
            if task.id not in self.seen:
                self.seen.add(task.id)
                self.heard[task.payload.phone] += 1
            if self.calls % 10 == 0:
                raise ConnectionError("sent, but the answer was lost")

        self.send: Handler[Message] = send


@pytest.fixture
def gateway(bide_app: Bide) -> Gateway:
    return Gateway(bide_app)


async def test_all_at_one_instant_and_nobody_twice(bide_app: Bide, gateway: Gateway, bide_time: TimeMachine) -> None:
    eight = bide_time.now + timedelta(hours=12)
    new = [gateway.send.new(Message(phone), key=str(phone), at=eight) for phone in range(PEOPLE)]
    answers = await bide_app.schedule_many(new)
    assert {answer.result for answer in answers} == {"created"}
    assert await bide_time.advance("11h59m59s999ms") == []
    first = [one for one in await bide_time.advance("1ms") if one.attempt == 1]
    assert len(first) == PEOPLE
    assert {one.at for one in first} == {eight}
    await bide_time.advance("1h")
    assert gateway.calls > PEOPLE, "some answers were lost, so that some were sent again"
    assert gateway.heard == dict.fromkeys(range(PEOPLE), 1)


async def test_spread_over_a_window_instead_nobody_hears_it_twice(
    bide_app: Bide, gateway: Gateway, bide_time: TimeMachine
) -> None:
    eight = bide_time.now + timedelta(hours=12)
    for window in (timedelta(0), timedelta(minutes=10)):
        await bide_app.schedule_many(
            gateway.send.new(Message(phone), key=str(phone), at=eight + window * (phone / PEOPLE))
            for phone in range(PEOPLE)
        )
    fired = await bide_time.advance("1d")
    minutes = Counter((one.at - eight) // timedelta(minutes=1) for one in fired if one.attempt == 1)
    assert minutes == dict.fromkeys(range(10), PEOPLE // 10)
    assert gateway.heard == dict.fromkeys(range(PEOPLE), 1)
