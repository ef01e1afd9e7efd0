"""Workloads in which nothing is due: what waiting costs, and what a verb costs."""

from __future__ import annotations

import asyncio
import time
from statistics import median

from bide_lab.actor import Step
from bide_lab.figures import Figures
from bide_lab.stage import Stage, keys_of
from bide_lab.strategy import VERBS, Strategy, now
from bide_lab.usage import ServerUse
from bide_lab.workload import Workload
from bide_lab.workloads.load import batches

_HOUR = 3_600_000


class Idle(Workload):
    """Tasks wait and none is due: processor time of client and server, messages, and memory for each."""

    name = "idle"
    about = "tasks due in an hour: what it costs to wait"
    for_all = True
    relayed = True

    async def play(self, stage: Stage, *, quick: bool) -> Figures:
        count, seconds = (10_000, 1.5) if quick else (100_000, 5.0)
        count = stage.bearable(count)
        await stage.start()
        client = await stage.client()
        # who holds what waits: the consumers, or the servers; a client beside them holds nothing
        holders = stage.players if stage.strategy.in_process else stage.players[:-1]
        await asyncio.sleep(0.5)
        servers = ServerUse(stage.server_urls)
        empty = [await player.usage(collect=True) for player in holders]
        bytes_before = await servers.size()
        took = await client.fill(count, ahead=_HOUR)
        await asyncio.sleep(1.5)  # what was begun is finished, on the servers too
        bytes_after = await servers.size()
        filled = [await player.usage(collect=True) for player in holders]
        before, cpu_before = [await player.usage() for player in holders], servers.cpu()
        sent_before, began = sum(relay.to_server for relay in stage.relays), time.monotonic()
        await asyncio.sleep(seconds)
        after, cpu_after = [await player.usage() for player in holders], servers.cpu()
        sent, lasted = sum(relay.to_server for relay in stage.relays) - sent_before, time.monotonic() - began
        await stage.unharmed()
        figures = stage.verdict().figures()
        figures.scheduled = count
        if not stage.relays:
            figures.schedules_per_s = round(count / took, 1)
        spent = sum(one["cpu"] - two["cpu"] for one, two in zip(after, before, strict=True))
        figures.client_cpu_pct = round(spent / lasted * 100, 3)
        grown = sum(one["resident"] - two["resident"] for one, two in zip(filled, empty, strict=True))
        figures.client_bytes_per_task = round(max(0, grown) / count, 1)
        figures.threads = sum(used["threads"] for used in after)
        if stage.relays:
            figures.idle_trips_per_s = round(sent / lasted, 2)
            if cpu_before is not None and cpu_after is not None:
                figures.server_cpu_pct = round((cpu_after - cpu_before) / lasted * 100, 3)
            if bytes_before is not None and bytes_after is not None:
                figures.server_bytes_per_task = round(max(0, bytes_after - bytes_before) / count, 1)
        figures.counts = await stage.counts()
        return figures


class Trips(Workload):
    """One task after another, each fired before the next is scheduled: how often the servers are asked for it."""

    name = "trips"
    about = "one task at a time, from schedule to done: messages to the servers"
    for_all = True
    relayed = True

    def why_not(self, strategy: type[Strategy]) -> str:
        if strategy.direct:  # nothing counts what goes past the relays, and nothing counted is not nothing sent
            return "its connections cannot be relayed, so its messages are not counted"
        return super().why_not(strategy) or ("" if strategy.needs else "it asks no server")

    async def play(self, stage: Stage, *, quick: bool) -> Figures:
        ahead, seconds = 50, 1.0
        each = ahead / 1000 + stage.strategy.period + stage.setting.span(stage.strategy.precision or 0.0)
        count = max(5, min(20 if quick else 100, int((5 if quick else 20) / each)))
        await stage.start()
        client = await stage.client()
        await asyncio.sleep(0.5)
        sent = sum(relay.to_server for relay in stage.relays)
        await asyncio.sleep(seconds)
        idle = (sum(relay.to_server for relay in stage.relays) - sent) / seconds
        sent, began = sum(relay.to_server for relay in stage.relays), time.monotonic()
        for number, key in enumerate(keys_of(count)):
            stage.sound(await client.play(now(), [Step(0, "schedule", [(key, ahead)])]))
            await stage.until_fired(number + 1, by=time.time() + ahead / 1000 + stage.patience)
        lasted = time.monotonic() - began
        sent = sum(relay.to_server for relay in stage.relays) - sent
        await stage.unharmed()
        figures = stage.verdict().figures()
        figures.idle_trips_per_s = round(idle, 2)
        figures.trips_per_task = round(max(0.0, sent - idle * lasted) / count, 2)
        return figures


class Verbs(Workload):
    """Each verb alone, one call after another: what it costs a caller, and how often the servers are asked."""

    name = "verbs"
    about = "one call at a time: microseconds of each verb"
    for_all = True

    async def play(self, stage: Stage, *, quick: bool) -> Figures:
        count = 50 if quick else 200
        keys = keys_of(count)
        await stage.start()
        client = await stage.client()
        verbs: dict[str, float | str] = {}
        for verb in VERBS:
            if verb in stage.strategy.cannot:
                verbs[verb] = stage.strategy.cannot[verb]
                continue
            some = keys_of(count, "f") if verb == "fire_now" else keys
            if verb == "fire_now":  # of tasks that are there, and nobody has touched
                stage.sound(await client.play(now(), batches([(key, _HOUR) for key in some])))
            due = {"schedule": _HOUR, "reschedule": 2 * _HOUR}.get(verb)
            stage.sound(await client.play(now(), [Step(0, verb, [(key, due)]) for key in some], callers=1))
            spans = [
                (call.answered - call.begun) / 1000
                for call in stage.calls()[-count:] if call.verb == verb and call.answered is not None
            ]  # fmt: skip
            verbs[verb] = round(median(spans), 1)
        end = time.time()
        await stage.until_fired(count if "fire_now" not in stage.strategy.cannot else 0, by=end + stage.patience)
        figures = stage.verdict(until=end).figures()
        figures.verbs = verbs
        return figures
