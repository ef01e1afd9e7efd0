"""What workers tell of their routes: once at the start, one row for all who tell alike, gone after a day."""

from __future__ import annotations

from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st
from tests.engine.conftest import World, virtual

from bide import Bide, Exponential, Fixed, Ladder, StoreUnavailable, Task
from bide.core.instants import In
from bide.core.names import SHOWN_TOPIC, new_id
from bide.core.records import Filter, NewTask, Page
from bide.core.retry import FOREVER, PRESETS
from bide.engine.client import Client
from bide.engine.registry import MOST_PAUSES, RouteSettings, announce, announced_routes, ladder_of
from bide.stores.memory import MemoryStore


async def close(task: Task[Any]) -> None:
    """A handler with a name of its own."""


def shop(world: World, **settings: Any) -> Bide:
    app = world.app(**settings)
    app.handler("order.close", retry=Ladder("15s", "1m"), timeout="30s", concurrency=50, keep_done="1h")(close)
    return app


async def told_in(world: World) -> list[RouteSettings]:
    return [told.route for told in await announced_routes(world.store, world.clock)]


@virtual
async def test_a_worker_tells_once_in_one_call(world: World) -> None:
    app = shop(world)
    app.handler("order.remind")(close)
    async with app.worker():
        await world.pause(1_000)
        assert world.store.calls["add"] == 1
        closes, reminds = await told_in(world)
        assert closes == RouteSettings(
            topic="order.close", kind="handler", what=f"{__name__}.close", concurrency=50, timeout=30_000,
            pauses=[15_000, 60_000], tries=3, losses=10, keep_done=3_600_000, keep_cancelled=3_600_000,
            keep_dead=14 * 86_400_000,
        )  # fmt: skip
        assert (reminds.topic, reminds.timeout, reminds.tries, reminds.jitter) == ("order.remind", None, 12, 0.2)
        assert [told.at for told in await announced_routes(world.store, world.clock)] == [world.start] * 2


@virtual
async def test_what_many_tell_alike_is_one_row_and_the_newest_word_stays(world: World) -> None:
    apps = [shop(world, max_sleep="1h") for _ in range(3)]
    for app in apps:
        await app.worker().__aenter__()
    await world.pause(1)
    assert len(await told_in(world)) == 1
    changed = world.app()
    changed.handler("order.close", concurrency=1)(close)
    async with changed.worker():
        await world.pause(1)
        [told] = await told_in(world)
        assert told.concurrency == 1
        await world.pause(3_600)
        [told] = await told_in(world)
        assert told.concurrency in (1, 50), "all tell again, and one of them was the last"
        assert (await announced_routes(world.store, world.clock))[0].at >= world.start + 3_600_000


@virtual
async def test_it_is_forgotten_a_day_after_the_last_worker(world: World) -> None:
    app = shop(world)
    async with app:
        async with app.worker():
            await world.pause(10)
        await world.pause(23 * 3_600)
        assert len(await told_in(world)) == 1
        await world.pause(3 * 3_600)
        assert await told_in(world) == []


@virtual
async def test_where_the_store_is_away_it_is_told_later(world: World) -> None:
    world.store.fault = lambda point: StoreUnavailable("away") if point == "add:before" else None
    async with shop(world).worker():
        await world.pause(150)
        assert await told_in(world) == []
        world.store.fault = lambda _: None
        await world.pause(60)
        assert len(await told_in(world)) == 1


@virtual
async def test_a_sink_of_ones_own_and_what_cannot_be_read(world: World) -> None:
    class Own:
        async def deliver(self, task: Task[Any]) -> None:
            """Takes it."""

    app = world.app()
    app.route("t", Own())
    async with app.worker():
        await world.pause(1)
        [told] = await told_in(world)
        assert (told.kind, told.what) == ("sink", f"{__name__}.{Own.__qualname__}")
        [record] = (await world.store.find(Filter(topic=SHOWN_TOPIC), Page())).tasks
        async with Client(lambda: MemoryStore(), clock=world.clock) as other:
            await announce(other.store, other.clock, [told])
            [same] = (await other.store.find(Filter(topic=SHOWN_TOPIC), Page())).tasks
            assert (same.key, same.payload) == (record.key, record.payload)
            longest = msgspec.structs.replace(told, topic="t" * 200, what="w" * 5_000)
            await announce(other.store, other.clock, [longest])
            assert len(await announced_routes(other.store, other.clock)) == 2
            row = NewTask(SHOWN_TOPIC, "route:damaged", new_id(), In(1_000), b"{", record.group)
            await other.store.add([row], now=world.clock.now())
            assert len(await announced_routes(other.store, other.clock)) == 2, "the damaged one is passed over"


def test_the_ladder_of_each_policy() -> None:
    assert ladder_of(Ladder("15s", "15s", "30s")) == ([15_000, 15_000, 30_000], 4)
    assert ladder_of(Fixed("10s", tries=3)) == ([10_000, 10_000], 3)
    assert ladder_of(PRESETS["never"]) == ([], 1)
    assert ladder_of(Exponential("1s", longest="10s", tries=6)) == ([1_000, 2_000, 4_000, 8_000, 10_000], 6)
    assert ladder_of(Fixed("1s", tries=FOREVER)) == ([1_000] * MOST_PAUSES, None)


@given(st.integers(1, 60), st.floats(1, 3), st.floats(0, 1))
def test_a_ladder_is_what_the_policy_waits_at_most(tries: int, factor: float, jitter: float) -> None:
    policy = Exponential("1s", factor=factor, longest="1h", tries=tries, jitter=jitter)
    pauses, told = ladder_of(policy)
    assert told == tries
    assert len(pauses) == min(tries - 1, MOST_PAUSES)
    assert pauses == sorted(pauses)
    assert all((policy.delay(place) or 0) <= pause for place, pause in enumerate(pauses, 1))
