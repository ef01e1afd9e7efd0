"""Workloads in which something goes wrong: a process is killed, cut off, doubled or away. What becomes of the tasks?"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Mapping

from bide.testing.proxy import Act, Chunk
from bide_lab.figures import Figures
from bide_lab.journal import Call, judge, whole_lines
from bide_lab.processes import Process, Step
from bide_lab.strategy import Strategy, now
from bide_lab.workload import Relay, Trial, Workload, batches, keys_of, steps_at

_ONE_PROCESS = "it is one process"
_WITH_ITS_CLIENT = "it is one process with its client: see restarted"
_HOLD = 1.5
"""Seconds that a consumer may hold a task, where that can be asked for."""


class Killed(Workload):
    """500 tasks due at once and 200 over the next 0.6 s; every consumer is killed -9, and started again.

    A strategy that does one task after another is then in the middle of what was due at once; one that does many at
    a time is done with that, and in the middle of what comes after it.
    """

    name = "killed"
    for_all = True
    alone = False
    within = _WITH_ITS_CLIENT
    count, after, every = 500, 200, 3
    """Tasks due at once; tasks after that, and milliseconds from one to the next."""
    seconds = 0.002

    async def play(self, trial: Trial, *, quick: bool) -> Figures:
        first = await trial.start(seconds=self.seconds)
        client = await trial.client()
        begin, ahead = now(), 1_500
        at_once = [(key, ahead) for key in keys_of(self.count)]
        after = [(key, ahead + self.every * number) for number, key in enumerate(keys_of(self.after, "after"))]
        await client.play(begin, batches(at_once + after), callers=4)
        first_due, last_due = (begin + ahead) / 1000, (begin + after[-1][1]) / 1000
        under_way = await trial.until_fired(self.count // 3, by=first_due + trial.patience)
        await asyncio.sleep((first_due + last_due) / 2 - time.time())
        for process in first:
            process.kill()
        before = trial.fired()
        await asyncio.sleep(1.0)
        await trial.start(seconds=self.seconds)
        await trial.until_fired(self.count + self.after, by=time.time() + trial.patience + trial.hold + 1)
        await trial.rest(0.5)
        figures = trial.judged(until=last_due)
        figures.counts = {"fired_before_the_kill": before, "killed_under_way": float(under_way)}
        return figures


class Cut(Workload):
    """every connection is reset in the middle of 200 tasks a second.

    Calls that fail are not repeated.
    """

    name = "cut"
    for_all = True
    alone = False
    relayed = True
    serverless = "it has no connections"

    async def play(self, trial: Trial, *, quick: bool) -> Figures:
        count, rate, ahead = 400, 200.0, 1_000
        await trial.start()
        client = await trial.client()
        begin = now() + 200
        steps = steps_at(rate, keys_of(count), ahead=ahead)
        playing = asyncio.create_task(client.play(begin, steps, may_fail=True))
        await asyncio.sleep(0.2 + count / rate / 2)
        for relay in trial.relays:
            relay.proxy.cut()
        answer = await playing
        end = begin / 1000 + count / rate + ahead / 1000
        await trial.until_fired(count + 1, by=end + trial.patience + trial.hold)
        figures = trial.judged(until=end)
        figures.counts = {"failed_calls": answer["failed"]}
        return figures


class TwoAtOnce(Workload):
    """two of each consumer at once, each effect taking 1 ms.

    As after a deployment, or for more throughput.
    """

    name = "two"
    for_all = True
    within = _ONE_PROCESS
    seconds = 0.001

    async def play(self, trial: Trial, *, quick: bool) -> Figures:
        count, rate, ahead = (300, 300.0, 800) if quick else (1_200, 400.0, 2_000)
        last = count * 1000 / rate + ahead
        steps = steps_at(rate, keys_of(count), ahead=ahead)
        return await trial.through(steps, fires=count, last=last, lead=200, sets=2, seconds=self.seconds)


class Away(Workload):
    """no consumer runs for six minutes of strategy time, in which 100 tasks come due."""

    name = "away"
    for_all = True
    alone = False
    within = _WITH_ITS_CLIENT
    minutes = 6.0

    async def play(self, trial: Trial, *, quick: bool) -> Figures:
        first = await trial.start()
        client = await trial.client()
        count, ahead = 100, 500
        begin = now()
        for process in first:
            await process.stop()
        await client.play(begin, batches([(key, ahead + number) for number, key in enumerate(keys_of(count))]))
        due = (begin + ahead + count) / 1000
        await asyncio.sleep(max(0.0, due - time.time()) + trial.setting.span(self.minutes * 60))
        back = time.time()
        await trial.start()
        await trial.until_fired(count, by=back + trial.patience)
        await trial.rest()
        figures = trial.judged(until=due)
        figures.counts = {"away_seconds": round(back - due, 2)}
        return figures


class Restarted(Workload):
    """the process ends with 500 tasks waiting, and is started again.

    It is the one process of a strategy without a server.
    """

    name = "restarted"
    for_all = True
    alone = False

    def why_not(self, strategy: type[Strategy]) -> str:
        return super().why_not(strategy) or ("" if strategy.in_process else "its tasks are on a server: see killed")

    async def play(self, trial: Trial, *, quick: bool) -> Figures:
        count, ahead = 500, 4_000  # none is due before all are there: a thread each takes a slow machine a second
        [process] = await trial.start()
        begin = now()
        await process.play(begin, batches([(key, ahead) for key in keys_of(count)]), callers=4)
        process.kill()
        await trial.start()
        due = (begin + ahead) / 1000
        await trial.until_fired(count, by=due + trial.patience)
        return trial.judged(until=due)


class Failover(Workload):
    """two of each consumer; the first of each is killed -9 in the middle of 100 tasks a second.

    Nobody replaces them.
    """

    name = "failover"
    alone = False
    within = _ONE_PROCESS

    async def play(self, trial: Trial, *, quick: bool) -> Figures:
        trial.option(hold=str(_HOLD))
        count, rate, ahead = (150, 100.0, 500) if quick else (500, 100.0, 1_000)
        first = await trial.start()
        await trial.start()
        client = await trial.client()
        begin = now() + 200
        playing = asyncio.create_task(client.play(begin, steps_at(rate, keys_of(count), ahead=ahead)))
        await asyncio.sleep(begin / 1000 + count / rate * 2 / 3 - time.time())
        fired = trial.fired()
        for process in first:
            process.kill()
        await playing
        end = (begin + ahead) / 1000 + count / rate
        figures = await trial.finish(count, end=end, more=trial.strategy.hold + 2 * _HOLD)
        figures.counts = {**figures.counts, "fired_before_the_kill": fired}
        return figures


class Beyond(Workload):
    """100 tasks due in 2.5 s, where whoever holds one for 1 s has it given out again."""

    name = "beyond"
    alone = False
    time_out = 1.0
    part = {"time_out": "nothing is given out again after a time-out"}  # noqa: RUF012 - a ClassVar of the base

    async def play(self, trial: Trial, *, quick: bool) -> Figures:
        trial.option(hold=str(self.time_out))
        count, ahead = (100, 2_500) if quick else (1_000, 5_500)
        steps = batches([(key, ahead) for key in keys_of(count)])
        figures = await trial.through(steps, fires=count, last=ahead, sets=2)
        figures.counts = {**figures.counts, "time_out_s": self.time_out, "ahead_s": ahead / 1000}
        return figures


_SUBSCRIBES = (b"SUBSCRIBE", b"LISTEN ")
"""The words of a connection that is to be told of things: Redis, PostgreSQL."""


class _Subscriptions:
    """The connections through a relay that are to be told of things; from `deafen` on those hear nothing, and nobody
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
    """subscriptions go silent, unnoticed; then 100 tasks come due, then the consumers are started again.

    They go silent while nothing waits. The consumers are started again only if tasks have not fired a while after
    their time.
    """

    name = "deaf"
    alone = False
    relayed = True

    def why_not(self, strategy: type[Strategy]) -> str:
        without = "" if {"redis", "postgres"} & set(strategy.needs) else "it has no subscription"
        return super().why_not(strategy) or without

    async def play(self, trial: Trial, *, quick: bool) -> Figures:
        subscriptions = [_Subscriptions(relay) for relay in trial.relays]
        first = await trial.start()
        client = await trial.client()
        before, after = keys_of(20, "a"), keys_of(100 if quick else 500, "b")
        every = len(before) + len(after)
        begin = now()
        await client.play(begin, batches([(key, 200) for key in before]))
        await trial.until_fired(len(before), by=begin / 1000 + 0.2 + trial.patience)
        deaf = sum(one.deafen() for one in subscriptions)
        begin = now()
        await client.play(begin, steps_at(200.0, after, ahead=300))
        due = begin / 1000 + len(after) / 200 + 0.3
        await trial.until_fired(every, by=due + trial.patience)
        waiting, counts = every - trial.fired(), await trial.counts()
        if waiting:
            for process in first:
                await process.stop()
            await trial.start()
            await trial.until_fired(every, by=time.time() + trial.patience + trial.strategy.hold)
        await trial.rest()
        figures = trial.judged(until=due)
        figures.counts = {**counts, "deaf_connections": deaf, "waited_for_a_restart": waiting}
        return figures


class Writer(Workload):
    """clients are killed -9 while they schedule; what they had committed has to fire.

    The tasks of each are due together, some time after its death. What a client was never answered may have been
    done or not: where the strategy keeps the caller's own data (`Strategy.committed`), those decide. What is
    committed is owed.
    """

    name = "writer"
    alone = False
    within = "it is one process: see restarted"
    kills, quick_kills = 12, 4
    keys = 5_000
    """More than a client schedules until it is killed."""
    ahead = 1_000
    """Milliseconds from a client's first call until its tasks are due; it lives for a quarter of that."""
    callers = 32
    """Calls of one client at a time."""
    per_second = 3_000
    """Tasks that a strategy is given a second for, since many of them come due at once."""

    async def play(self, trial: Trial, *, quick: bool) -> Figures:
        writers = self.quick_kills if quick else self.kills
        chance = random.Random(7)
        await trial.start()
        clients = [await trial.client() for _ in range(writers)]
        due = 0
        for number, client in enumerate(clients):
            begin = now()
            due = begin + self.ahead
            steps = [Step(0, "schedule", [(key, self.ahead)]) for key in keys_of(self.keys, f"w{number}-")]
            playing = asyncio.create_task(client.play(begin, steps, callers=self.callers))
            await self._warm(client)
            await asyncio.sleep(0.1 * chance.random())
            client.kill()
            await playing
        promised = {call.key for call in _as_committed(trial, await trial.owner.committed()) if call.done}
        until = due / 1000 + trial.patience + len(promised) / self.per_second
        await _until_fired(trial, promised, by=until)
        await trial.rest()
        rows = await trial.owner.committed()  # again: a server may finish what a dead client had sent
        calls, firings = _as_committed(trial, rows), trial.written()[1]
        figures = judge(calls, firings, until=due * 1_000_000)
        figures.counts = {
            **await trial.counts(), "kills": writers, "committed": len({call.key for call in calls if call.done}),
            "unanswered": sum(call.answered is None for call in trial.written()[0]),
            **({"fired_without_a_row": len({one.key for one in firings} - rows.keys())} if rows else {}),
        }  # fmt: skip
        return figures

    async def _warm(self, client: Process) -> None:
        """Until each caller has been answered twice: connecting takes longer than a call, and is no call's part."""
        for _ in range(200):
            if whole_lines(client.spec.journal).count(b"\n< ") >= 2 * self.callers:
                return
            await asyncio.sleep(0.01)


async def _until_fired(trial: Trial, keys: set[str], *, by: float) -> None:
    """Until all of these have; it does not help that others did, which should not."""
    while keys - {firing.key for firing in trial.written()[1]}:
        if time.time() > by:
            return
        await asyncio.sleep(0.1)


def _as_committed(trial: Trial, rows: Mapping[str, int]) -> list[Call]:
    """The calls; one whose row is there has been done, though nobody was left to hear of it."""
    return [
        call._replace(answered=call.begun, done=True) if call.answered is None and call.key in rows else call
        for call in trial.written()[0]
    ]
