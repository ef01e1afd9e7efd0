"""Workloads about how a consumer learns that something is due, and what it does with it until then."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

from bide.testing.proxy import Act, Chunk
from bide_lab.actor import Step
from bide_lab.figures import Figures
from bide_lab.stage import Relay, Stage, keys_of, steps_at
from bide_lab.strategy import Strategy, now
from bide_lab.workload import Workload
from bide_lab.workloads.load import batches

_HOUR = 3_600_000
_SUBSCRIBES = (b"SUBSCRIBE", b"LISTEN ")
"""What a connection sends that is to be told of things: Redis, PostgreSQL."""


class Slow(Workload):
    """One task that takes long among many that do not, which come due while it runs."""

    name = "slow"
    about = "one slow task, and quick ones that come due while it runs"

    async def play(self, stage: Stage, *, quick: bool) -> Figures:
        count, slow = (150, 1.5) if quick else (1_000, 5.0)
        await stage.start(slow=slow)
        client = await stage.client()
        ahead = 500
        # the slow one is due first; the others from a moment later until it is done
        due = [("slow", ahead)]
        due += [(key, ahead + 50 + round(number * slow * 900 / count)) for number, key in enumerate(keys_of(count))]
        begin = now()
        stage.sound(await client.play(begin, batches(due)))
        end = begin / 1000 + ahead / 1000 + slow
        await stage.until_fired(count + 1, by=end + stage.patience + slow)
        await stage.rest()
        await stage.unharmed()
        figures = stage.verdict(until=end).figures()
        figures.counts = {**await stage.counts(), "slow_ms": slow * 1000}
        return figures


class Gap(Workload):
    """Tasks that are due as soon as they are there, while a consumer looks: some come between two of its commands."""

    name = "gap"
    about = "2,000 tasks a second that are due at once, so that some come between two commands of a consumer"
    alone = False

    async def play(self, stage: Stage, *, quick: bool) -> Figures:
        count, rate = (4_000, 2_000.0) if quick else (20_000, 2_000.0)
        await stage.start()
        client = await stage.client()
        stage.sound(await client.play(now() + 100, steps_at(rate, keys_of(count), ahead=0)))
        end = time.time()
        await stage.until_fired(count, by=end + stage.patience)
        await stage.rest()
        await stage.unharmed()
        figures = stage.verdict(until=end).figures()
        figures.counts = await stage.counts()
        return figures


class _Hearing:
    """Which connections through a relay are to be told of things; from `deafen` on those hear nothing, and nobody
    knows it: a half-open connection, as a firewall leaves it that has forgotten it.
    """

    def __init__(self, relay: Relay) -> None:
        assert relay.proxy.hook is not None
        self._next = relay.proxy.hook
        self._subscribed: set[int] = set()
        self._deaf: set[int] = set()
        relay.proxy.hook = self._judge

    def _judge(self, chunk: Chunk) -> Act:
        if chunk.connection in self._deaf:
            return Act.HOLD
        if chunk.to_server and any(word in chunk.data.upper() for word in _SUBSCRIBES):
            self._subscribed.add(chunk.connection)
        return self._next(chunk)

    def deafen(self) -> int:
        """How many there are."""
        self._deaf |= self._subscribed
        return len(self._deaf)


class Deaf(Workload):
    """The connections by which consumers are told of things go silent while nothing waits; then tasks come. Those that
    have not fired a while after their time get a consumer that was started again.
    """

    name = "deaf"
    about = "subscriptions go silent, unnoticed; then 100 tasks come due, then the consumers are started again"
    alone = False
    relayed = True

    def why_not(self, strategy: type[Strategy]) -> str:
        without = "" if {"redis", "postgres"} & set(strategy.needs) else "it has no subscription"
        return super().why_not(strategy) or without

    async def play(self, stage: Stage, *, quick: bool) -> Figures:
        hearings = [_Hearing(relay) for relay in stage.relays]
        first = await stage.start()
        client = await stage.client()
        before, after = keys_of(20, "a"), keys_of(100 if quick else 500, "b")
        begin = now()
        stage.sound(await client.play(begin, batches([(key, 200) for key in before])))
        await stage.until_fired(len(before), by=begin / 1000 + 0.2 + stage.patience)
        deaf = sum(hearing.deafen() for hearing in hearings)
        begin = now()
        stage.sound(await client.play(begin, steps_at(200.0, after, ahead=300)))
        due = begin / 1000 + len(after) / 200 + 0.3
        await stage.until_fired(len(before) + len(after), by=due + stage.patience)
        waiting = len(before) + len(after) - stage.fired()
        counts = await stage.counts()
        if waiting:
            for player in first:
                await player.stop()
            await stage.start()
            await stage.until_fired(len(before) + len(after), by=time.time() + stage.patience + stage.strategy.hold)
        await stage.rest()
        figures = stage.verdict(until=due).figures()
        figures.counts = {**counts, "deaf_connections": deaf, "waited_for_a_restart": waiting}
        return figures


class Beyond(Workload):
    """Tasks that are due later than the time-out after which what a consumer holds is given out again."""

    name = "beyond"
    about = "100 tasks due in 2.5 s, where whoever holds one for 1 s has it given out again"
    alone = False
    time_out = 1.0

    def why_not(self, strategy: type[Strategy]) -> str:
        return super().why_not(strategy) or ("" if strategy.time_out else "nothing is given out again after a time-out")

    async def play(self, stage: Stage, *, quick: bool) -> Figures:
        stage.setting = replace(stage.setting, options={"hold": str(self.time_out)})
        count, ahead = (100, 2_500) if quick else (1_000, 5_500)
        await stage.start()
        await stage.start()
        client = await stage.client()
        begin = now()
        stage.sound(await client.play(begin, batches([(key, ahead) for key in keys_of(count)])))
        due = (begin + ahead) / 1000
        await stage.until_fired(count, by=due + stage.patience)
        await stage.rest()
        await stage.unharmed()
        figures = stage.verdict(until=due).figures()
        figures.counts = {**await stage.counts(), "time_out_s": self.time_out, "ahead_s": ahead / 1000}
        return figures


class Failover(Workload):
    """Of two of each consumer those that were first are killed in the middle of a steady load; nobody replaces them."""

    name = "failover"
    about = "two of each consumer; the first of each is killed -9 in the middle of 100 tasks a second"
    alone = False
    time_out = 1.5

    def why_not(self, strategy: type[Strategy]) -> str:
        return super().why_not(strategy) or ("it is one process" if strategy.in_process else "")

    async def play(self, stage: Stage, *, quick: bool) -> Figures:
        stage.setting = replace(stage.setting, options={"hold": str(self.time_out)})
        count, rate, ahead = (150, 100.0, 500) if quick else (500, 100.0, 1_000)
        first = await stage.start()
        await stage.start()
        client = await stage.client()
        begin = now() + 200
        playing = asyncio.create_task(client.play(begin, steps_at(rate, keys_of(count), ahead=ahead)))
        await asyncio.sleep(begin / 1000 + count / rate * 2 / 3 - time.time())
        fired = stage.fired()
        for player in first:
            player.kill()
        stage.sound(await playing)
        end = (begin + ahead) / 1000 + count / rate
        await stage.until_fired(count, by=end + stage.patience + stage.strategy.hold + 2 * self.time_out)
        await stage.rest()
        figures = stage.verdict(until=end).figures()
        figures.counts = {**await stage.counts(), "fired_before_the_kill": fired}
        return figures


class Many(Workload):
    """A few tasks come due while many more wait for a time far off."""

    name = "many"
    about = "20 tasks come due while many others wait for an hour"

    async def play(self, stage: Stage, *, quick: bool) -> Figures:
        far, near, wait = (600, 20, 5.0) if quick else (10_000, 200, 60.0)
        await stage.start()
        client = await stage.client()
        begin, ahead = now(), 500 if quick else 5_000
        tasks = [(key, _HOUR) for key in keys_of(far, "far")]
        tasks += [(key, ahead) for key in keys_of(near, "near")]
        stage.sound(await client.play(begin, batches(tasks), callers=4))
        due = (begin + ahead) / 1000
        await stage.until_fired(near, by=due + stage.patience + wait)
        await stage.rest()
        await stage.unharmed()
        figures = stage.verdict(until=due).figures()
        figures.counts = {**await stage.counts(), "far_off": far}
        return figures


class Uneven(Workload):
    """One large call and many small ones, whose tasks are due soon or in an hour: where is what is left?"""

    name = "uneven"
    about = "one large call and 250 small ones, due in an hour but for every fifth, which is due soon"

    async def play(self, stage: Stage, *, quick: bool) -> Figures:
        size = 10 if quick else 50
        plan = [(40 * size, _HOUR), *[(size, 500), *[(size, _HOUR)] * 4] * 50]
        near = sum(count for count, due in plan if due < _HOUR)
        await stage.start()
        client = await stage.client()
        keys = iter(keys_of(sum(count for count, _ in plan)))
        steps = [Step(0, "schedule", [(next(keys), due) for _ in range(count)]) for count, due in plan]
        begin = now()
        stage.sound(await client.play(begin, steps, callers=1))
        end = max(begin / 1000 + 0.5, time.time())
        await stage.until_fired(near, by=end + stage.patience + near / 1_000)
        await stage.rest()
        await stage.unharmed()
        figures = stage.verdict(until=end).figures()
        figures.counts = await stage.counts()
        return figures
