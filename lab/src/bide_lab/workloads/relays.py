"""Workloads for strategies on brokers: delays relayed over several levels, and a long one ahead of short ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import ClassVar

from bide_lab.actor import Step
from bide_lab.figures import Figures
from bide_lab.stage import Stage, keys_of
from bide_lab.strategy import Strategy, now
from bide_lab.workload import Workload

_HOUR = 3_600_000
_FIRED_AFTER = "fired_after_"
"""What a strategy that relays counts its firings under, by their hops."""


class Relay(Workload):
    """Delays that take one hop and delays that take many, and tasks that are moved again and again meanwhile.

    Of 18 levels from 1 s to 2 h, taken as the largest that is not above the rest, they need 1 to 10.
    """

    name = "relay"
    about = "delays that are relayed over 1 to 10 of 18 levels, beside tasks that are moved five times"
    moves = 5
    quick_delays: ClassVar[Sequence[int]] = (60, 125, 156, 217, 239)
    delays: ClassVar[Sequence[int]] = (300, 660, 905, 1056, 1199)
    """Seconds of strategy time."""

    def why_not(self, strategy: type[Strategy]) -> str:
        return super().why_not(strategy) or strategy.cannot.get("reschedule", "")

    async def play(self, stage: Stage, *, quick: bool) -> Figures:
        delays, each, moved, spread = (self.quick_delays, 20, 20, 250) if quick else (self.delays, 200, 200, 2_500)
        far = keys_of(moved, "moved")
        steps, length_of = self._steps(stage, delays, each, spread)
        await stage.start()
        client = await stage.client()
        begin = now()
        schedules = [Step(0, "schedule", [(key, _HOUR) for key in far]), *steps]
        stage.sound(await client.play(begin, schedules))
        for number in range(self.moves):
            due = 2 * _HOUR + number * 60_000
            stage.sound(await client.play(begin, [Step(0, "reschedule", [(key, due)]) for key in far], callers=8))
        waiting = len(length_of) - stage.fired()
        alive = (await stage.director.left()).get("messages_left")
        end = (begin + spread) / 1000 + stage.setting.span(max(delays))
        await stage.until_fired(len(length_of), by=end + stage.patience)
        await stage.rest()
        await stage.unharmed()
        figures = stage.verdict(until=end).figures()
        counts = await stage.counts()
        figures.counts = {**counts, "moves_per_task": self.moves, **_late_after(stage, length_of)}
        taken = [int(name.removeprefix(_FIRED_AFTER)) for name in counts if name.startswith(_FIRED_AFTER)]
        if taken and counts.get("hops"):
            figures.counts |= {
                "hops_most": max(taken), "late_ms_per_hop": round(counts["hops_late_ms"] / counts["hops"], 2)
            }  # fmt: skip
        if alive is not None:  # what waits for the others is their own message, one each
            figures.counts["messages_alive_per_task"] = round((alive - waiting) / moved, 2)
        return figures

    @staticmethod
    def _steps(stage: Stage, delays: Sequence[int], each: int, spread: int) -> tuple[list[Step], dict[str, int]]:
        """So many schedules of each length within `spread` milliseconds; and the length of each key's delay."""
        steps, length_of = [], {}
        for seconds in delays:
            for number in range(each):
                key, at = f"d{seconds}-{number}", number * spread // each
                steps.append(Step(at, "schedule", [(key, at + round(stage.setting.span(seconds) * 1000))]))
                length_of[key] = seconds
        return sorted(steps, key=lambda step: step.at), length_of


def _late_after(stage: Stage, length_of: Mapping[str, int]) -> dict[str, float]:
    """Milliseconds of lateness in the end (median), by the length of the delay."""
    due = _due(stage)
    late: dict[int, list[float]] = {}
    for firing in stage.firings():
        if firing.key in length_of and firing.begun:
            late.setdefault(length_of[firing.key], []).append(firing.at / 1e6 - due[firing.key])
    return {f"late_ms_of_{seconds}_s": round(median(some), 2) for seconds, some in sorted(late.items())}


def _due(stage: Stage) -> dict[str, int]:
    return {call.key: call.due for call in stage.calls() if call.verb == "schedule" and call.due}


class Head(Workload):
    """One task with a long delay, and then many with a short one."""

    name = "head"
    about = "one task due late, scheduled ahead of 100 that are due soon"
    alone = False

    async def play(self, stage: Stage, *, quick: bool) -> Figures:
        short, long = (300, 3_000) if quick else (1_000, 20_000)
        keys = keys_of(100, "short")
        await stage.start()
        client = await stage.client()
        begin = now() + 100
        steps = [Step(0, "schedule", [("long", long)])]
        steps += [
            Step(50 + 2 * number, "schedule", [(key, 50 + 2 * number + short)]) for number, key in enumerate(keys)
        ]
        # one caller at a time, so that the long one is there before the others
        stage.sound(await client.play(begin, steps, callers=1))
        end = (begin + long) / 1000
        await stage.until_fired(len(keys) + 1, by=end + stage.patience)
        await stage.rest()
        await stage.unharmed()
        figures = stage.verdict(until=end).figures()
        due, wanted = _due(stage), set(keys)
        fired = [(one.key, one.at / 1e6) for one in stage.firings() if one.key in wanted and one.begun]
        # held up by the long one, and not just late: a machine that stands still for a second is no flaw
        figures.counts = {
            **await stage.counts(), "short": len(keys), "short_late": sum(1 for _, at in fired if at >= due["long"]),
        }  # fmt: skip
        if fired:
            figures.counts["short_late_p50_ms"] = round(median(at - due[key] for key, at in fired), 1)
        return figures
