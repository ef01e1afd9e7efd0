"""The simulated store: what its server promises, and what a process learns of it through a bad network."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from random import Random
from typing import Any

import pytest

from bide.core.errors import OutcomeUnknown, PartlyFailed, StoreFull, StoreUnavailable
from bide.core.records import (
    At,
    Cancel,
    Due,
    Filter,
    In,
    Leased,
    NewTask,
    OnConflict,
    Page,
    Ref,
    Result,
    Settlement,
    State,
    Verdict,
)
from bide.stores.memory import MemoryStore
from bide.testing.clock import FIRST_INSTANT
from bide.testing.simulate.link import Link, PartedLink, Weather
from bide.testing.simulate.loop import Process, SimulatedLoop, run_simulated
from bide.testing.simulate.server import Server, WallClock

_NOW = In(0)


def task(key: str, due: Due = _NOW, on_conflict: OnConflict = OnConflict.REPLACE) -> NewTask:
    return NewTask("t", key, f"id-{key}", due, on_conflict=on_conflict)


class World:
    """One server, and links to it."""

    def __init__(self, loop: SimulatedLoop, shards: int = 1) -> None:
        self.loop = loop
        self.clock = WallClock(loop)
        self.server = Server(self.clock, shards)
        self.weather = Weather()
        self.full = False
        self.moments: list[tuple[str, str]] = []

    def link(self, who: str = "one", *, skew: float = 0.0, by_caller: bool = False, parted: bool = False) -> Link:
        wall = WallClock(self.loop)
        wall.jump(skew)
        make = PartedLink if parted else Link
        return make(
            self.server, Process(self.loop, who), Random(who), weather=self.weather, wall=wall, by_caller=by_caller,
            full=lambda: self.full, moment=lambda operation, moment: self.moments.append((operation, moment)),
        )  # fmt: skip

    @property
    def now(self) -> int:
        return self.clock.now()


def played(main: Callable[[World], Coroutine[Any, Any, None]], shards: int = 1) -> None:
    run_simulated(Random(1), lambda loop: main(World(loop, shards)))


def test_what_was_lost_or_doubled_on_the_way_is_done_once() -> None:
    async def main(world: World) -> None:
        link = world.link()
        world.weather.loss, world.weather.twice = 0.4, 0.5
        unknown = 0
        for number in range(200):
            try:
                [answer] = await link.add([task(f"k{number}", on_conflict=OnConflict.REFUSE)], now=world.now)
                assert answer.result is Result.CREATED  # done twice, it would be refused
            except OutcomeUnknown:
                unknown += 1
        assert world.moments.count(("add", "applied")) > 200
        assert unknown < 20

    played(main)


def test_a_call_that_arrives_after_a_later_one_is_not_done() -> None:
    async def main(world: World) -> None:
        link = world.link()
        world.weather.twice = 1.0
        await link.add([task("k")], now=world.now)
        await link.change([Cancel("t", "k", keep_until=world.now + 60_000)], now=world.now)
        await asyncio.sleep(20)  # the doubles arrive
        [record] = await link.get([Ref("t", "k")])
        assert record is not None
        assert record.state is State.CANCELLED

    played(main)


def test_what_is_not_known_in_time_is_said_and_what_cannot_have_arrived_too() -> None:
    async def main(world: World) -> None:
        link = world.link()
        world.weather.loss = 1.0
        with pytest.raises(OutcomeUnknown):
            await link.add([task("k")], now=world.now)
        with pytest.raises(StoreUnavailable):
            await link.get([Ref("t", "k")])
        world.server.shards[0].stop()
        with pytest.raises(StoreUnavailable):
            await link.add([task("l")], now=world.now)
        world.server.shards[0].start()
        world.weather.loss = 0
        assert (await link.add([task("l")], now=world.now))[0].result is Result.CREATED

    played(main)


def test_a_shard_that_is_away_fails_alone() -> None:
    async def main(world: World) -> None:
        link = world.link(parted=True)
        tasks = [task("k0"), task("k1"), task("k2"), task("k3")]
        world.server.shards[1].stop()
        with pytest.raises(PartlyFailed) as partly:
            await link.add(tasks, now=world.now)
        away = [world.server.shard_of("t", one.key) == 1 for one in tasks]
        assert any(away)
        assert not all(away)
        assert [isinstance(answer, StoreUnavailable) for answer in partly.value.answers] == away
        leased = await link.lease({"t": 10}, now=world.now, until=world.now + 5_000, holder="one")
        assert len(leased.tasks) == 4 - sum(away)
        assert leased.again_by is not None

    played(main, shards=2)


def test_what_was_sent_before_a_restart_is_gone_with_the_old_connection() -> None:
    async def main(world: World) -> None:
        link = world.link()
        world.weather.base = 0.2
        asked = asyncio.ensure_future(link.add([task("k", on_conflict=OnConflict.REFUSE)], now=world.now))
        await asyncio.sleep(0.05)
        world.server.shards[0].stop()
        world.server.shards[0].start()
        assert (await asked)[0].result is Result.CREATED
        assert world.moments.count(("add", "applied")) == 1

    played(main)


def test_the_clock_is_the_servers_whatever_the_callers_says() -> None:
    async def main(world: World) -> None:
        link = world.link(skew=3600.0)
        await link.open()
        clock = link.clock()
        assert clock is not None
        assert abs(clock.now() - world.now) <= 2
        await link.add([task("k", At(world.now + 10_000))], now=clock.now())
        early = await link.lease({"t": 1}, now=world.now + 3_600_000, until=world.now + 3_601_000, holder="one")
        assert early.tasks == []
        assert early.next_wake is not None

    played(main)


def test_a_store_that_goes_by_its_callers_has_no_clock() -> None:
    async def main(world: World) -> None:
        link = world.link(by_caller=True)
        assert link.clock() is None
        await link.add([task("k", In(0))], now=FIRST_INSTANT + 500)
        [record] = await link.get([Ref("t", "k")])
        assert record is not None
        assert record.created_at == FIRST_INSTANT + 500

    played(main)


def test_a_full_store_refuses_new_work_alone() -> None:
    async def main(world: World) -> None:
        link = world.link()
        await link.add([task("k")], now=world.now)
        world.full = True
        with pytest.raises(StoreFull):
            await link.add([task("l")], now=world.now)
        leased = await link.lease({"t": 1}, now=world.now, until=world.now + 5_000, holder="one")
        [held] = leased.tasks
        assert await link.settle([Settlement("t", "k", held.token, Verdict.DONE)], now=world.now) == [True]

    played(main)


def test_a_repeated_lease_gives_nobody_what_has_changed_hands() -> None:
    async def main(world: World) -> None:
        link = world.link()
        await link.add([task("k"), task("l")], now=world.now)
        shard = world.server.shards[0]

        async def lease(store: MemoryStore, there: int) -> Leased:
            return await store.lease({"t": 2}, now=there, until=there + 1_000, holder="one")

        first = world.server.handle(shard, "one lease", 1, lease)
        assert len(first.value.tasks) == 2
        await link.change([Cancel("t", "k", keep_until=world.now + 1_000)], now=world.now)
        again = world.server.handle(shard, "one lease", 1, lease)
        assert [held.key for held in again.value.tasks] == ["l"]

    played(main)


def test_a_list_goes_through_all_shards() -> None:
    async def main(world: World) -> None:
        link = world.link()
        await link.add([task(f"k{number}") for number in range(9)], now=world.now)
        keys: list[str] = []
        cursor: str | None = None
        while True:
            found = await link.find(Filter(topic="t"), Page(limit=2, cursor=cursor))
            keys += [record.key for record in found.tasks]
            cursor = found.cursor
            if cursor is None:
                break
        assert sorted(keys) == [f"k{number}" for number in range(9)]

    played(main, shards=3)


def test_wake_ups_arrive_unless_nobody_hears() -> None:
    async def main(world: World) -> None:
        link = world.link()
        heard: list[tuple[str, int]] = []
        await link.listen(["t"], lambda topic, wake: heard.append((topic, wake)))
        await link.add([task("k", At(FIRST_INSTANT + 5_000))], now=world.now)
        await asyncio.sleep(1)
        assert heard == [("t", FIRST_INSTANT + 5_000)]
        world.weather.deaf = True
        await link.add([task("l", At(FIRST_INSTANT + 6_000))], now=world.now)
        await asyncio.sleep(1)
        assert len(heard) == 1

    played(main)
