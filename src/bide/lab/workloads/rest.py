"""Workloads in which nothing is due: what waiting costs, and what a verb costs."""

from __future__ import annotations

import asyncio
import time
from statistics import median

from bide.lab.actor import Step
from bide.lab.figures import Figures
from bide.lab.stage import Stage, keys_of
from bide.lab.strategy import VERBS, now
from bide.lab.usage import ServerUse
from bide.lab.workload import Workload
from bide.lab.workloads.load import batches

_HOUR = 3_600_000


class Idle(Workload):
    """Tasks wait and none is due: processor time of client and server, messages, and memory for each."""

    name = "idle"
    about = "tasks due in an hour: what it costs to wait"
    relayed = True

    async def play(self, stage: Stage, *, quick: bool) -> Figures:
        count, seconds = (5_000, 2.0) if quick else (100_000, 10.0)
        count = stage.bearable(count)
        await stage.start()
        client = await stage.client()
        await asyncio.sleep(1.0)
        servers = ServerUse(stage.server_urls)
        empty = [await player.usage() for player in stage.players]
        bytes_before = servers.resident()
        answer = await client.play(now(), batches([(key, _HOUR) for key in keys_of(count)]), callers=4)
        stage.sound(answer)
        await asyncio.sleep(1.0)  # what was begun is finished, on the servers too
        before, cpu_before = [await player.usage() for player in stage.players], servers.cpu()
        sent_before, began = sum(relay.to_server for relay in stage.relays), time.monotonic()
        await asyncio.sleep(seconds)
        after, cpu_after = [await player.usage() for player in stage.players], servers.cpu()
        sent, took = sum(relay.to_server for relay in stage.relays) - sent_before, time.monotonic() - began
        await stage.unharmed()
        figures = stage.verdict().figures()
        figures.schedules_per_s = round(count / answer["seconds"], 1)
        spent = sum(one["cpu"] - two["cpu"] for one, two in zip(after, before, strict=True))
        figures.client_cpu_pct = round(spent / took * 100, 3)
        if cpu_before is not None and cpu_after is not None:
            figures.server_cpu_pct = round((cpu_after - cpu_before) / took * 100, 3)
        grown = sum(one["resident"] - two["resident"] for one, two in zip(after, empty, strict=True))
        figures.client_bytes_per_task = round(max(0, grown) / count, 1)
        bytes_after = servers.resident()
        if bytes_before is not None and bytes_after is not None and stage.strategy.needs:
            figures.server_bytes_per_task = round(max(0, bytes_after - bytes_before) / count, 1)
        figures.threads = sum(used["threads"] for used in after)
        if stage.relays:
            figures.idle_trips_per_s = round(sent / took, 2)
        figures.counts = await stage.counts()
        return figures


class Verbs(Workload):
    """Each verb alone, one call after another: what it costs a caller, and how often the servers are asked."""

    name = "verbs"
    about = "one call at a time: microseconds of each verb"

    async def play(self, stage: Stage, *, quick: bool) -> Figures:
        count = 50 if quick else 500
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
        figures = stage.verdict().figures()
        figures.verbs = verbs
        return figures
