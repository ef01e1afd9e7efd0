"""Workloads in which something goes wrong: who is killed, cut off, doubled or away, and what becomes of the tasks."""

from __future__ import annotations

import asyncio
import time

from bide_lab.figures import Figures
from bide_lab.stage import Stage, keys_of, steps_at
from bide_lab.strategy import Strategy, now
from bide_lab.workload import Workload
from bide_lab.workloads.load import batches


class Killed(Workload):
    """In the middle of it all every consumer is killed by SIGKILL; a second later others take their places.

    Who does one after another is then in the middle of what was due at once; who does many at a time is done with that,
    and in the middle of what comes after it.
    """

    name = "killed"
    about = "500 tasks due at once and 200 over the next 0.6 s; every consumer is killed -9, and started again"
    for_all = True
    alone = False
    count, after, every = 500, 200, 3
    """Tasks due at once; tasks after that, and milliseconds from one to the next."""
    seconds = 0.002

    def why_not(self, strategy: type[Strategy]) -> str:
        within = "it is one process with its client: see restarted" if strategy.in_process else ""
        return super().why_not(strategy) or within

    async def play(self, stage: Stage, *, quick: bool) -> Figures:
        first = await stage.start(seconds=self.seconds)
        client = await stage.client()
        begin, ahead = now(), 1_500
        at_once = [(key, ahead) for key in keys_of(self.count)]
        after = [(key, ahead + self.every * number) for number, key in enumerate(keys_of(self.after, "after"))]
        stage.sound(await client.play(begin, batches(at_once + after), callers=4))
        first_due, last_due = (begin + ahead) / 1000, (begin + after[-1][1]) / 1000
        under_way = await stage.until_fired(self.count // 3, by=first_due + stage.patience)
        await asyncio.sleep((first_due + last_due) / 2 - time.time())
        for player in first:
            player.kill()
        before = stage.fired()
        await asyncio.sleep(1.0)
        await stage.start(seconds=self.seconds)
        every = self.count + self.after
        await stage.until_fired(every, by=time.time() + stage.patience + stage.hold + 1)
        await stage.rest(0.5)
        figures = stage.verdict(until=last_due).figures()
        figures.counts = {"fired_before_the_kill": before, "killed_under_way": float(under_way)}
        return figures


class Cut(Workload):
    """Every connection is reset in the middle of a steady load, once; calls that fail are not repeated."""

    name = "cut"
    about = "every connection is reset in the middle of 200 tasks a second"
    for_all = True
    alone = False
    relayed = True

    def why_not(self, strategy: type[Strategy]) -> str:
        return super().why_not(strategy) or ("" if strategy.needs else "it has no connections")

    async def play(self, stage: Stage, *, quick: bool) -> Figures:
        count, rate, ahead = 400, 200.0, 1_000
        await stage.start()
        client = await stage.client()
        begin = now() + 200
        playing = asyncio.create_task(client.play(begin, steps_at(rate, keys_of(count), ahead=ahead)))
        await asyncio.sleep(0.2 + count / rate / 2)
        for relay in stage.relays:
            relay.proxy.cut()
        answer = await playing
        end = begin / 1000 + count / rate + ahead / 1000
        await stage.until_fired(count + 1, by=end + stage.patience + stage.hold)
        figures = stage.verdict(until=end).figures()
        figures.counts = {"failed_calls": answer["failed"]}
        return figures


class TwoAtOnce(Workload):
    """Two of each consumer at the same time, as after a deployment, or for more throughput."""

    name = "two"
    about = "two of each consumer at once, each effect taking 1 ms"
    for_all = True
    seconds = 0.001

    def why_not(self, strategy: type[Strategy]) -> str:
        return super().why_not(strategy) or ("it is one process" if strategy.in_process else "")

    async def play(self, stage: Stage, *, quick: bool) -> Figures:
        count, rate, ahead = (300, 300.0, 800) if quick else (1_200, 400.0, 2_000)
        await stage.start(seconds=self.seconds)
        await stage.start(seconds=self.seconds)
        client = await stage.client()
        begin = now() + 200
        stage.sound(await client.play(begin, steps_at(rate, keys_of(count), ahead=ahead)))
        end = begin / 1000 + count / rate + ahead / 1000
        await stage.until_fired(count, by=end + stage.patience)
        await stage.rest()
        await stage.unharmed()
        figures = stage.verdict(until=end).figures()
        figures.counts = await stage.counts()
        return figures


class Away(Workload):
    """No consumer runs for six strategy-minutes, in which tasks come due; then one comes back."""

    name = "away"
    about = "no consumer runs for six minutes of strategy time, in which 100 tasks come due"
    for_all = True
    alone = False
    minutes = 6.0

    def why_not(self, strategy: type[Strategy]) -> str:
        within = "it is one process with its client: see restarted" if strategy.in_process else ""
        return super().why_not(strategy) or within

    async def play(self, stage: Stage, *, quick: bool) -> Figures:
        first = await stage.start()
        client = await stage.client()
        count, ahead = 100, 500
        begin = now()
        for player in first:
            await player.stop()
        stage.sound(
            await client.play(begin, batches([(key, ahead + number) for number, key in enumerate(keys_of(count))]))
        )
        due = (begin + ahead + count) / 1000
        await asyncio.sleep(max(0.0, due - time.time()) + stage.setting.span(self.minutes * 60))
        back = time.time()
        await stage.start()
        await stage.until_fired(count, by=back + stage.patience)
        await stage.rest()
        figures = stage.verdict(until=due).figures()
        figures.counts = {"away_seconds": round(back - due, 2)}
        return figures


class Restarted(Workload):
    """The one process of a strategy without a server ends and begins again, with tasks waiting."""

    name = "restarted"
    about = "the process ends with 500 tasks waiting, and is started again"
    for_all = True
    alone = False

    def why_not(self, strategy: type[Strategy]) -> str:
        return super().why_not(strategy) or ("" if strategy.in_process else "its tasks are on a server: see killed")

    async def play(self, stage: Stage, *, quick: bool) -> Figures:
        count, ahead = 500, 4_000  # none is due before all are there: a thread each takes a slow machine a second
        [player] = await stage.start()
        begin = now()
        stage.sound(await player.play(begin, batches([(key, ahead) for key in keys_of(count)]), callers=4))
        player.kill()
        await stage.start()
        due = (begin + ahead) / 1000
        await stage.until_fired(count, by=due + stage.patience)
        return stage.verdict(until=due).figures()
