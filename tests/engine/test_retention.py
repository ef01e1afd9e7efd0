"""What ended is remembered for a while, the same in every process, and of each topic at most so many."""

from __future__ import annotations

from pathlib import Path

import aiohttp
from msgspec.structs import replace
from tests.service.instance import served

from bide import Bide, Task
from bide.core.records import State
from bide.engine.config import MOST, Retention, Retentions

HOUR = 3_600_000


def test_so_many_of_a_topic_and_state_are_remembered() -> None:
    kept = Retentions(Retention(done=HOUR, cancelled=HOUR), most=3)
    done = [kept.of("a").keep_until(State.DONE, now) for now in range(5)]
    assert done == [HOUR, HOUR + 1, HOUR + 2, 0, 0]
    assert kept.of("a").keep_until(State.CANCELLED, 0) == HOUR, "each state by itself"
    assert kept.of("b").keep_until(State.DONE, 0) == HOUR, "and each topic"
    assert kept.of("a").keep_until(State.DONE, HOUR + 1) == 2 * HOUR + 1, "those that were forgotten make room"
    assert [kept.of("a").keep_until(State.DEAD, 0) > 0 for _ in range(9)] == [True] * 9


def test_what_a_topic_says_itself_counts() -> None:
    given = Retentions(Retention(done=HOUR), {"a": Retention(done=5), "b": Retention(done=0)})
    kept = given.at_most(MOST)
    assert kept.of("a").keep_until(State.DONE, 10) == 15
    assert kept.of("b").keep_until(State.DONE, 10) == 0


async def test_a_service_remembers_no_more() -> None:
    async with served("memory:") as instance:
        app = instance.app
        app.config = replace(app.config, retentions=app.config.retentions.at_most(3))
        await app.schedule_many([app.new("t", key=str(number), delay="1h") for number in range(5)])
        await app.cancel_many([("t", str(number)) for number in range(5)])
        assert len([True async for _ in app.find(topic="t", state="cancelled")]) == 3


def test_what_a_handler_says_is_kept_whatever_its_number() -> None:
    app = Bide("memory:")
    app.retain("a", done="1d")
    told = app.config.retentions.of("a")
    assert [told.keep_until(State.DONE, 0) for _ in range(MOST + 1)] == [24 * HOUR] * (MOST + 1)
    assert [told.keep_until(State.CANCELLED, 0) for _ in range(MOST + 1)] == [HOUR] * MOST + [0]
    assert [app.config.retentions.of("b").keep_until(State.DONE, 0) for _ in range(MOST + 1)] == [HOUR] * MOST + [0]


async def test_the_answer_after_the_end_is_the_same_from_every_door(tmp_path: Path) -> None:
    """One task is done by a worker of the app, as in `bide work`, one by a consumer of a service, each as it is set."""
    url = f"sqlite:///{tmp_path}/tasks.db"
    app = Bide(url)

    @app.handler("by.worker")
    async def handle(task: Task[None]) -> None: ...

    async with app, app.worker() as worker, served(url) as instance, aiohttp.ClientSession(instance.url) as session:
        await handle.schedule(None, key="k", delay="0s")
        await worker.until_empty()
        await app.schedule("by.consumer", None, key="k", delay="0s")
        async with session.post("/v1/lease", json={"topics": {"by.consumer": 1}, "wait": "30s"}) as reply:
            [leased] = (await reply.json())["tasks"]
        ended = [{"topic": "by.consumer", "key": "k", "token": leased["token"], "outcome": "done"}]
        async with session.post("/v1/settle", json=ended) as reply:
            assert await reply.json() == {"settled": [True]}
        for asked in (app, instance.app):
            for topic in ("by.worker", "by.consumer"):
                answer = await asked.schedule(topic, None, key="k", delay="1h", on_conflict="keep")
                assert (answer.result, answer.task and answer.task.state) == ("kept", "done")
                assert (
                    await asked.schedule(topic, None, key="k", delay="1h", on_conflict="refuse")
                ).result == "refused"
                assert (await asked.cancel(topic, "k")).result == "finished"
            await asked.schedule("cancelled", None, key="k", delay="1h")
            assert [(await asked.cancel("cancelled", "k")).result for _ in range(2)] == ["cancelled", "finished"]
