"""Workloads in which nothing goes wrong: tasks, at one rate or all at once, near and far, moved and cancelled."""

from __future__ import annotations

import random
import time

from bide_lab.actor import Step
from bide_lab.figures import Figures
from bide_lab.stage import Stage, keys_of, steps_at
from bide_lab.strategy import Strategy, now
from bide_lab.workload import Workload

_BATCH = 500
_YEAR = 365 * 86_400_000


def batches(keys_and_due: list[tuple[str, int]], at: int = 0) -> list[Step]:
    """Schedules of many at a time, all as soon as may be; due in milliseconds from the beginning."""
    return [Step(at, "schedule", keys_and_due[begin : begin + _BATCH]) for begin in range(0, len(keys_and_due), _BATCH)]


class Steady(Workload):
    """Tasks at one rate, each due the same time after it is scheduled: what lateness is measured by."""

    name = "steady"
    about = "200 tasks a second, each due 2 s ahead (in a quick run 1 s)"
    for_all = True
    rate = 200.0

    async def play(self, stage: Stage, *, quick: bool) -> Figures:
        count, ahead = (200, 1_000) if quick else (2_000, 2_000)
        await stage.start()
        client = await stage.client()
        before = [await player.usage() for player in stage.players]
        begin = now() + 200
        answer = await client.play(begin, steps_at(self.rate, keys_of(count), ahead=ahead))
        stage.sound(answer)
        end = begin / 1000 + (count / self.rate) + ahead / 1000
        await stage.until_fired(count, by=end + stage.patience)
        await stage.rest()
        await stage.unharmed()
        after = [await player.usage() for player in stage.players]
        figures = stage.verdict(until=end).figures()
        spent = sum(used["cpu"] - first["cpu"] for used, first in zip(after, before, strict=True))
        figures.client_cpu_pct = round(spent / (after[0]["at"] - before[0]["at"]) * 100, 2)
        figures.counts = await stage.counts()
        return figures


class Burst(Workload):
    """Many tasks due at one instant: how fast they come out, and how late the last is."""

    name = "burst"
    about = "5,000 tasks due at one instant"
    for_all = True

    async def play(self, stage: Stage, *, quick: bool) -> Figures:
        count = stage.bearable(1_000 if quick else 5_000)
        ahead = 1_500 if quick else 5_000
        await stage.start()
        client = await stage.client()
        begin = now()
        answer = await client.play(begin, batches([(key, ahead) for key in keys_of(count)]), callers=4)
        stage.sound(answer)
        due = (begin + ahead) / 1000
        await stage.until_fired(count, by=due + stage.patience + count / 100)
        await stage.rest()
        await stage.unharmed()
        verdict = stage.verdict(until=due)
        figures = verdict.figures()
        figures.counts = await stage.counts()
        figures.schedules_per_s = round(count / answer["seconds"], 1)
        if verdict.fired > 1:
            figures.completed_per_s = round(verdict.fired / max((verdict.last - verdict.first) / 1e9, 1e-9), 1)
        return figures


class Horizon(Workload):
    """Tasks due between a second and a year from now, evenly over the powers of ten: only the near ones must fire."""

    name = "horizon"
    about = "tasks due in 1 s to 1 year; those of the first seconds have to fire"
    for_all = True

    async def play(self, stage: Stage, *, quick: bool) -> Figures:
        count, seconds = (1_000, 3.0) if quick else (10_000, 6.0)
        count = stage.bearable(count)
        chance = random.Random(7)
        keys = keys_of(count)
        due = [round(1_000 * (_YEAR / 1_000) ** chance.random()) for _ in keys]
        await stage.start()
        client = await stage.client()
        begin = now()
        stage.sound(await client.play(begin, batches(list(zip(keys, due, strict=True))), callers=4))
        end = begin / 1000 + seconds
        near = sum(1 for one in due if one <= seconds * 1000)
        await stage.until_fired(near, by=end + stage.patience)
        await stage.rest(max(0.3, end - time.time()))
        await stage.unharmed()
        return stage.verdict(until=end).figures()


class Churn(Workload):
    """Half of the tasks are moved before they are due, and a third are cancelled."""

    name = "churn"
    about = "half of the tasks are moved, a third are cancelled, the rest fire"
    for_all = True

    def why_not(self, strategy: type[Strategy]) -> str:
        return super().why_not(strategy) or strategy.cannot.get("reschedule", "") or strategy.cannot.get("cancel", "")

    async def play(self, stage: Stage, *, quick: bool) -> Figures:
        count = stage.bearable(300 if quick else 1_500)
        window = count * 5
        keys = keys_of(count)
        # each is due 2 s after the last change of it is made, so that only a strategy's own fault makes it late
        first, moved = window + 2_000, window + 2_500
        steps = batches([(key, first) for key in keys])
        fires = 0
        for number, key in enumerate(keys):
            at = 500 + round(number * window / count)
            if number % 6 in (0, 1, 2):
                steps.append(Step(at, "reschedule", [(key, moved)]))
            elif number % 6 in (3, 4):
                steps.append(Step(at, "cancel", [(key, None)]))
            fires += number % 6 not in (3, 4)
        await stage.start()
        client = await stage.client()
        begin = now() + 100
        stage.sound(await client.play(begin, steps))
        end = (begin + moved) / 1000
        await stage.until_fired(fires, by=end + stage.patience)
        await stage.rest()
        await stage.unharmed()
        figures = stage.verdict(until=end).figures()
        figures.counts = await stage.counts()
        return figures
