"""Paused topics: held back by everybody who leases, whatever restarts, races or is away; taken up again at once."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
from pathlib import Path

import pytest
from tests.engine.conftest import World, task_of, virtual

from bide import BadInput, Bide, StoreUnavailable
from bide.core.names import PAUSED_TOPIC, RESERVED_TOPIC
from bide.core.records import Record
from bide.core.retry import policy
from bide.engine.delivery.long_poll import LongPoll
from bide.engine.delivery.worker import Worker
from bide.engine.pauses import EVERY
from bide.engine.settings_store import SettingsStore
from bide.ports import Policy


@virtual
async def test_what_is_paused_is_held_back_and_goes_out_at_once_when_it_is_resumed(world: World) -> None:
    app = world.app()
    slow, other = world.noted(app, "slow", takes=30).keys, world.noted(app, "other").keys
    async with app, app.worker() as worker:
        await app.schedule("slow", key="runs", delay="0s")
        await world.until(lambda: slow == ["runs"])
        assert await app.pause("slow") is True
        assert await app.pause("slow") is False
        for key in ("a", "b"):
            assert (await app.schedule("slow", key=key, delay="1s")).result == "created"
        await app.schedule("other", key="c", delay="1s")
        await world.pause(60)
        assert slow == ["runs"], "what is paused is not leased"
        assert other == ["c"], "the other topic is no matter of it"
        assert worker.stats.done == 2, "what ran has ended as ever"
        before = world.elapsed
        assert await app.resume("slow") is True
        assert await app.resume("slow") is False
        await world.until(lambda: len(slow) == 3)
        assert world.elapsed - before <= 10, "in the same process nobody waits for the next look"


@virtual
async def test_what_is_being_leased_at_that_moment_is_given_back(world: World) -> None:
    app = world.app()
    seen = world.noted(app, "t").keys
    async with app, app.worker():
        await world.pause(0.5)
        world.store.latency = lambda name: 0.2 if name == "lease" else 0.0
        await app.schedule("t", key="k", delay="0s")
        await world.pause(0.1)
        await app.pause("t")
        await world.pause(30)
        assert seen == []
        task = await task_of(app, "t", "k")
        assert (task.state, task.attempt) == ("waiting", 0), "it counts for nothing"
        await app.resume("t")
        await world.until(lambda: seen == ["k"])


@virtual
async def test_who_leases_elsewhere_heeds_it_within_two_seconds(world: World) -> None:
    here, there = world.app(), world.app()
    seen = world.noted(there, "t").keys
    async with here, there, there.worker():
        await world.pause(0.5)
        await here.pause("t")
        await world.pause(EVERY)
        await here.schedule("t", key="held", delay="0s")
        await world.pause(600)
        assert seen == []
        assert there.known_pauses.keys() == {"t"}
        before = world.elapsed
        await here.resume("t")
        await world.until(lambda: seen == ["held"])
        assert world.elapsed - before <= 1_000 * EVERY


@virtual
async def test_it_survives_a_restart_and_nothing_is_leased_before_it_is_known(world: World) -> None:
    async with world.app() as app:
        await app.pause("t")
        await app.schedule("t", key="k", delay="0s")
    for _ in range(3):
        again = world.app()
        seen = world.noted(again, "t").keys
        async with again.worker() as worker:
            await world.pause(1)
            assert worker.stats.leased == 0
        assert seen == []
    async with world.app() as app:
        await app.resume("t")
    last = world.app()
    seen = world.noted(last, "t").keys
    async with last.worker() as worker:
        await worker.until_empty()
    assert seen == ["k"]


@virtual
async def test_while_the_store_is_away_at_the_start_nothing_is_leased(world: World) -> None:
    """Else the first lease after it is back might come before the first look."""
    async with world.app() as app:
        await app.pause("t")
        await app.schedule("t", key="k", delay="0s")
    away = True

    def fault(point: str) -> BaseException | None:
        return StoreUnavailable("away") if away and point == "find:before" else None

    again = world.app()
    seen = world.noted(again, "t").keys
    world.store.fault = fault
    world.store.calls.clear()
    async with again.worker():
        await world.pause(30)
        assert world.store.calls.get("lease", 0) == 0
        away = False
        await world.pause(30)
        assert seen == []
        await again.resume("t")
        await world.until(lambda: seen == ["k"])


@virtual
async def test_a_backlog_that_is_held_back_costs_no_leases(world: World) -> None:
    app = world.app()
    world.noted(app, "t")
    seen = world.noted(app, "other").keys
    async with app:
        await app.pause("t")
        async with app.worker():
            await app.schedule_many([app.new("t", key=str(number), delay="0s") for number in range(1_000)])
            world.store.calls.clear()
            for number in range(20):
                await app.schedule("t", key=f"more {number}", delay="0s")
                await world.pause(0.05)
            await world.pause(59)
            assert seen == []
            assert world.store.calls["lease"] <= 62, "once a second at most: the longest sleep"


@pytest.mark.parametrize("topics", [["held", "other"], ["held"]], ids=["some", "all that there are"])
@virtual
async def test_until_empty_waits_for_what_is_held_back(world: World, topics: list[str]) -> None:
    app = world.app()
    seen = {topic: world.noted(app, topic).keys for topic in topics}
    async with app:
        await app.pause("held")
        async with app.worker() as worker:
            await worker.until_empty()
            for topic in topics:
                await app.schedule(topic, key="k", delay="0s")
            empty = asyncio.ensure_future(worker.until_empty())
            await world.pause(10)
            assert seen == {"other": ["k"], "held": []} if "other" in topics else {"held": []}
            assert not empty.done()
            await app.resume("held")
            await empty
            assert seen["held"] == ["k"]
            await app.pause("held")
            await worker.until_empty()


@virtual
async def test_run_once_heeds_it(world: World) -> None:
    app = world.app()
    seen = world.noted(app, "t").keys
    async with app:
        await app.pause("t")
        await app.schedule("t", key="k", delay="0s")
        assert await Worker(app, app.routes).run_once() == (0, None)
        assert seen == []


@virtual
async def test_consumers_at_the_desk_wait(world: World) -> None:
    async with world.app() as app:
        long_poll = LongPoll(app, policy_of=lambda _: Policy(policy(None)))
        await long_poll.start()
        await app.pause("t")
        await app.schedule("t", key="k", delay="0s")

        async def lease(*topics: str, wait: float) -> list[Record]:
            return await long_poll.lease(dict.fromkeys(topics, 5), holder="c", lease_for=10_000, wait=wait)

        assert await lease("t", wait=0) == []
        assert await lease("t", wait=20) == []
        waits = asyncio.ensure_future(lease("t", "other", wait=60))
        await world.pause(5)
        assert not waits.done()
        await app.schedule("other", key="o", delay="0s")
        assert [record.key for record in await waits] == ["o"]
        world.store.latency = lambda name: 0.2 if name == "lease" else 0.0
        waits = asyncio.ensure_future(lease("moment", wait=60))
        await world.pause(1)
        await app.schedule("moment", key="m", delay="0s")
        await world.pause(0.1)
        await app.pause("moment")
        await world.pause(5)
        assert not waits.done(), "what was being leased at that moment is given back"
        await app.resume("moment")
        assert [(record.key, record.attempt) for record in await waits] == [("m", 1)]
        world.store.latency = None
        waits = asyncio.ensure_future(lease("t", wait=60))
        await world.pause(5)
        before = world.elapsed
        await app.resume("t")
        assert [record.key for record in await waits] == ["k"]
        assert world.elapsed - before <= 10
        await long_poll.close()


@virtual
async def test_what_is_no_topic_is_refused_and_what_is_no_pause_passed_over(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    async with world.app() as app:
        for topic in ("", "\n", "x" * 201, RESERVED_TOPIC):
            with pytest.raises(BadInput, match="topic"):
                await app.pause(topic)
            with pytest.raises(BadInput, match="topic"):
                await app.resume(topic)
        longest = "ü" * 100
        assert await app.pause(longest)
        for number, damaged in enumerate((b"{", b'{"topic": 7}', b"\xff\xfe")):
            await SettingsStore(app.store, app.clock, PAUSED_TOPIC).put(f"damaged-{number}", damaged)
        assert (await app.paused()).keys() == {longest}
        assert caplog.text.count("cannot be read and is skipped") == 3


@virtual
async def test_a_worker_says_when_it_holds_back(world: World, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "bide.pauses")
    app = world.app(actor="anna")
    world.noted(app, "t")
    async with app, app.worker():
        await app.pause("t")
        await app.pause("somebody else's")
        await app.resume("t")
    assert [record.message.partition(":")[0] for record in caplog.records] == ["t is held back", "t is resumed"]
    assert caplog.records[0].message.endswith(" by anna")


@virtual
async def test_while_pauses_cannot_be_read_what_was_known_holds(world: World, caplog: pytest.LogCaptureFixture) -> None:
    app = world.app()
    seen = world.noted(app, "t").keys
    async with app:
        await app.pause("t")
        async with app.worker():
            await app.schedule("t", key="k", delay="0s")
            await world.pause(1)
            world.store.fault = lambda point: StoreUnavailable("away") if point.startswith("find") else None
            await world.pause(20)
            assert seen == []
            await app.resume("t")  # done, though nobody can see it yet
            world.store.fault = lambda _: None
            await world.until(lambda: seen == ["k"])
    assert "reading the pauses failed, trying again in 2 s" in caplog.text


def test_within_a_transaction_it_is_paused_when_that_is_committed(tmp_path: Path) -> None:
    app = Bide(f"sqlite:///{tmp_path}/tasks.db")
    assert app.sync.paused() == {}
    connection = sqlite3.connect(tmp_path / "tasks.db")
    for commit in (False, True):
        connection.execute("BEGIN IMMEDIATE")
        with app.sync.using(connection):
            assert app.sync.pause("t")
            assert app.sync.paused().keys() == {"t"}
        if commit:
            connection.commit()
        else:
            connection.rollback()
        assert bool(app.sync.paused()) is commit
    assert app.sync.resume("t")
    assert app.sync.paused() == {}
    connection.close()
    app.sync.close()
