"""Workloads in which something goes wrong: a process is killed, cut off, doubled or away. What becomes of the tasks?"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Mapping

from bide_lab.figures import Figures
from bide_lab.journal import Call, judge, whole_lines
from bide_lab.processes import Process, Step
from bide_lab.strategy import now
from bide_lab.workload import Reason, Trial, batches, keys_of, steps_at, unless, workload


def _within(why: str) -> Reason:
    """For what makes no sense for a strategy within one process."""
    return unless(lambda strategy: not strategy.in_process, why)


_ONE_PROCESS = _within("it is one process")
_WITH_ITS_CLIENT = _within("it is one process with its client: see restarted")
_HOLD = 1.5
"""Seconds that a consumer may hold a task, where that can be asked for."""


@workload(for_all=True, alone=False, senseless=_WITH_ITS_CLIENT)
async def killed(trial: Trial, *, quick: bool) -> Figures:
    """500 tasks due at once and 200 over the next 0.6 s; every consumer is killed -9, and started again.

    A strategy that does one task after another is then in the middle of what was due at once; one that does many at
    a time is done with that, and in the middle of what comes after it.
    """
    count, more, every, seconds = 500, 200, 3, 0.002
    first = await trial.start(seconds=seconds)
    client = await trial.client()
    begin, ahead = now(), 1_500
    at_once = [(key, ahead) for key in keys_of(count)]
    after = [(key, ahead + every * number) for number, key in enumerate(keys_of(more, "after"))]
    await client.play(begin, batches(at_once + after), callers=4)
    first_due, last_due = (begin + ahead) / 1000, (begin + after[-1][1]) / 1000
    under_way = await trial.until_fired(count // 3, by=first_due + trial.patience)
    await asyncio.sleep((first_due + last_due) / 2 - time.time())
    for process in first:
        process.kill()
    before = trial.fired()
    await asyncio.sleep(1.0)
    await trial.start(seconds=seconds)
    return await trial.outcome(
        count + more, by=time.time() + trial.patience + trial.hold + 1, until=last_due, rest=0.5,
        fired_before_the_kill=before, killed_under_way=float(under_way),
    )  # fmt: skip


@workload(
    for_all=True, alone=False, relayed=True, senseless=unless(lambda strategy: strategy.needs, "it has no connections")
)
async def cut(trial: Trial, *, quick: bool) -> Figures:
    """every connection is reset in the middle of 200 tasks a second.

    Calls that fail are not repeated.
    """
    count, rate, ahead = 400, 200.0, 1_000
    client, begin = await trial.ready(lead=200)
    playing = asyncio.create_task(client.play(begin, steps_at(rate, keys_of(count), ahead=ahead), may_fail=True))
    await asyncio.sleep(0.2 + count / rate / 2)
    for relay in trial.relays:
        relay.cut()
    answer = await playing
    end = begin / 1000 + count / rate + ahead / 1000
    # one more than there are: what is done twice has all the time to be
    by = end + trial.patience + trial.hold
    return await trial.outcome(count + 1, by=by, until=end, rest=0, failed_calls=answer["failed"])


@workload(for_all=True, senseless=_ONE_PROCESS)
async def two(trial: Trial, *, quick: bool) -> Figures:
    """two of each consumer at once, each effect taking 1 ms.

    As after a deployment, or for more throughput.
    """
    count, rate, ahead = (300, 300.0, 800) if quick else (1_200, 400.0, 2_000)
    steps = steps_at(rate, keys_of(count), ahead=ahead)
    return await trial.through(
        steps, fires=count, last=count * 1000 / rate + ahead, lead=200, sets=2, seconds=0.001
    )  # fmt: skip


@workload(for_all=True, alone=False, senseless=_WITH_ITS_CLIENT)
async def away(trial: Trial, *, quick: bool) -> Figures:
    """no consumer runs for six minutes of strategy time, in which 100 tasks come due."""
    first = await trial.start()
    client = await trial.client()
    count, ahead = 100, 500
    begin = now()
    for process in first:
        await process.stop()
    await client.play(begin, batches([(key, ahead + number) for number, key in enumerate(keys_of(count))]))
    due = (begin + ahead + count) / 1000
    await asyncio.sleep(max(0.0, due - time.time()) + trial.setting.span(6 * 60))
    back = time.time()
    await trial.start()
    return await trial.outcome(count, by=back + trial.patience, until=due, away_seconds=round(back - due, 2))


_IN_MEMORY = unless(lambda strategy: strategy.in_process, "its tasks are on a server: see killed")


@workload(for_all=True, alone=False, senseless=_IN_MEMORY)
async def restarted(trial: Trial, *, quick: bool) -> Figures:
    """the process ends with 500 tasks waiting, and is started again.

    It is the one process of a strategy without a server.
    """
    count, ahead = 500, 4_000  # none is due before all are there: a thread each takes a slow machine a second
    [process] = await trial.start()
    begin = now()
    await process.play(begin, batches([(key, ahead) for key in keys_of(count)]), callers=4)
    process.kill()
    await trial.start()
    due = (begin + ahead) / 1000
    return await trial.outcome(count, by=due + trial.patience, until=due, rest=0)


@workload(alone=False, senseless=_ONE_PROCESS)
async def failover(trial: Trial, *, quick: bool) -> Figures:
    """two of each consumer; the first of each is killed -9 in the middle of 100 tasks a second.

    Nobody replaces them.
    """
    trial.option(hold=_HOLD)
    count, rate, ahead = (150, 100.0, 500) if quick else (500, 100.0, 1_000)
    first = await trial.start()
    client, begin = await trial.ready(lead=200)
    playing = asyncio.create_task(client.play(begin, steps_at(rate, keys_of(count), ahead=ahead)))
    await asyncio.sleep(begin / 1000 + count / rate * 2 / 3 - time.time())
    fired = trial.fired()
    for process in first:
        process.kill()
    await playing
    end = (begin + ahead) / 1000 + count / rate
    figures = await trial.finish(count, end=end, more=trial.strategy.hold + 2 * _HOLD)
    figures.counts["fired_before_the_kill"] = fired
    return figures


@workload(alone=False, senseless=unless(lambda one: one.time_out, "nothing is given out again after a time-out"))
async def beyond(trial: Trial, *, quick: bool) -> Figures:
    """100 tasks due in 2.5 s, where one that is held for 1 s is given out again."""
    time_out = 1.0
    trial.option(hold=time_out)
    count, ahead = (100, 2_500) if quick else (1_000, 5_500)
    steps = batches([(key, ahead) for key in keys_of(count)])
    figures = await trial.through(steps, fires=count, last=ahead, sets=2)
    figures.counts |= {"time_out_s": time_out, "ahead_s": ahead / 1000}
    return figures


_SUBSCRIBED = unless(lambda strategy: {"redis", "postgres"} & set(strategy.needs), "it has no subscription")


@workload(alone=False, relayed=True, senseless=_SUBSCRIBED)
async def deaf(trial: Trial, *, quick: bool) -> Figures:
    """subscriptions go silent, unnoticed; then 100 tasks come due, then the consumers are started again.

    They go silent while nothing waits. The consumers are started again only if tasks have not fired a while after
    their time.
    """
    first = await trial.start()
    client = await trial.client()
    before, after = keys_of(20, "a"), keys_of(100 if quick else 500, "b")
    every = len(before) + len(after)
    begin = now()
    await client.play(begin, batches([(key, 200) for key in before]))
    await trial.until_fired(len(before), by=begin / 1000 + 0.2 + trial.patience)
    silent = sum(relay.deafen() for relay in trial.relays)
    begin = now()
    await client.play(begin, steps_at(200.0, after, ahead=300))
    due = begin / 1000 + len(after) / 200 + 0.3
    by = due + trial.patience
    await trial.until_fired(every, by=by)
    waiting, counts = every - trial.fired(), await trial.counts()
    if waiting:
        for process in first:
            await process.stop()
        await trial.start()
        by = time.time() + trial.patience + trial.strategy.hold
    return await trial.outcome(
        every, by=by, until=due, **counts, deaf_connections=silent, waited_for_a_restart=waiting
    )  # fmt: skip


_KEYS = 5_000
"""More than a client schedules until it is killed."""
_LIVES = 1_000
"""Milliseconds from a client's first call until its tasks are due; it is killed after a quarter of that."""
_CALLERS = 32
"""Calls of one client at a time."""
_PER_SECOND = 3_000
"""Tasks that a strategy is given a second for, since many of them come due at once."""


@workload(alone=False, senseless=_within("it is one process: see restarted"))
async def writer(trial: Trial, *, quick: bool) -> Figures:
    """clients are killed -9 while they schedule; what they had committed has to fire.

    The tasks of each are due together, some time after its death. What a client was never answered may have been
    done or not: where the strategy keeps the caller's own data (`Strategy.committed`), those decide. What is
    committed is owed.
    """
    kills = 4 if quick else 12
    chance = random.Random(7)
    await trial.start()
    clients = [await trial.client() for _ in range(kills)]
    due = 0
    for number, client in enumerate(clients):
        begin = now()
        due = begin + _LIVES
        steps = [Step(0, "schedule", [(key, _LIVES)]) for key in keys_of(_KEYS, f"w{number}-")]
        playing = asyncio.create_task(client.play(begin, steps, callers=_CALLERS))
        await _until_answered(client)
        await asyncio.sleep(0.1 * chance.random())
        client.kill()
        await playing
    promised = {call.key for call in _as_committed(trial, await trial.owner.committed()) if call.done}
    by = due / 1000 + trial.patience + len(promised) / _PER_SECOND
    # it does not help that as many others were done, which should not have been
    while promised - {firing.key for firing in trial.written()[1]}:
        if time.time() > by:
            break
        await asyncio.sleep(0.1)
    await trial.rest()
    rows = await trial.owner.committed()  # again: a server may finish what a dead client had sent
    calls, firings = _as_committed(trial, rows), trial.written()[1]
    figures = judge(calls, firings, until=due * 1_000_000)
    figures.counts = {
        **await trial.counts(), "kills": kills, "committed": len({call.key for call in calls if call.done}),
        "unanswered": sum(call.answered is None for call in trial.written()[0]),
        **({"fired_without_a_row": len({one.key for one in firings} - rows.keys())} if rows else {}),
    }  # fmt: skip
    return figures


async def _until_answered(client: Process) -> None:
    """Each caller has been answered twice: connecting takes longer than a call, and is no call's part."""
    for _ in range(200):
        if whole_lines(client.spec.journal).count(b"\n< ") >= 2 * _CALLERS:
            return
        await asyncio.sleep(0.01)


def _as_committed(trial: Trial, rows: Mapping[str, int]) -> list[Call]:
    """The calls; one whose row is there has been done, though nobody was left to be answered."""
    return [
        call._replace(answered=call.begun, done=True) if call.answered is None and call.key in rows else call
        for call in trial.written()[0]
    ]
