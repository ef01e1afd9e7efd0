"""A service remembers what ended for a while, and of each topic at most so many."""

from __future__ import annotations

from tests.service.instance import served

from bide.core.records import State
from bide.engine.terms import Retention, Terms
from bide.service.keeping import counted

HOUR = 3_600_000


def test_so_many_of_a_topic_and_state_are_remembered() -> None:
    terms = counted(Terms(retention=Retention(done=HOUR, cancelled=HOUR)), most=3)
    done = [terms.retention_of("a").keep_until(State.DONE, now) for now in range(5)]
    assert done == [HOUR, HOUR + 1, HOUR + 2, 0, 0]
    assert terms.retention_of("a").keep_until(State.CANCELLED, 0) == HOUR, "each state by itself"
    assert terms.retention_of("b").keep_until(State.DONE, 0) == HOUR, "and each topic"
    assert terms.retention_of("a").keep_until(State.DONE, HOUR + 1) == 2 * HOUR + 1, (
        "those that were forgotten make room"
    )
    assert [terms.retention_of("a").keep_until(State.DEAD, 0) > 0 for _ in range(9)] == [True] * 9


def test_what_a_topic_says_itself_counts() -> None:
    given = Terms(retention=Retention(done=HOUR), retention_by_topic={"a": Retention(done=5), "b": Retention(done=0)})
    terms = counted(given)
    assert terms.retention_of("a").keep_until(State.DONE, 10) == 15
    assert terms.retention_of("b").keep_until(State.DONE, 10) == 0


async def test_a_service_remembers_no_more() -> None:
    async with served("memory:", keep_done="1h", keep_cancelled="1h") as instance:
        app = instance.app
        app.terms = counted(app.terms, most=3)
        await app.schedule_many([app.new("t", key=str(number), delay="1h") for number in range(5)])
        await app.cancel_many([("t", str(number)) for number in range(5)])
        assert len([True async for _ in app.find(topic="t", state="cancelled")]) == 3
