"""Workloads for strategies on brokers: delays that are relayed over several levels, and a long one ahead of short ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import linear_regression, median
from typing import ClassVar

from bide.lab.actor import Step
from bide.lab.figures import Figures
from bide.lab.stage import Stage, keys_of
from bide.lab.strategy import Strategy, now
from bide.lab.workload import Workload

_HOUR = 3_600_000


class Relay(Workload):
    """Delays that take one hop and delays that take many, and tasks that are moved again and again meanwhile.

    Hops are what 18 levels from 1 s to 2 h make of a delay: the largest that is not above the rest, and so on.
    """

    name = "relay"
    about = "delays that are relayed over 1 to 10 of 18 levels, beside tasks that are moved five times"
    moves = 5
    quick_delays: ClassVar[Mapping[int, int]] = {60: 1, 125: 2, 156: 4, 217: 6, 239: 9}
    """By seconds of strategy time: hops."""
    delays: ClassVar[Mapping[int, int]] = {300: 1, 660: 2, 905: 3, 1056: 5, 1199: 10}

    def why_not(self, strategy: type[Strategy]) -> str:
        return super().why_not(strategy) or strategy.cannot.get("reschedule", "")

    async def play(self, stage: Stage, *, quick: bool) -> Figures:
        delays, each, moved = (self.quick_delays, 20, 20) if quick else (self.delays, 200, 200)
        far = keys_of(moved, "moved")
        steps, hops_of = self._steps(stage, delays, each)
        await stage.start()
        client = await stage.client()
        begin = now()
        schedules = [Step(0, "schedule", [(key, _HOUR) for key in far]), *steps]
        stage.sound(await client.play(begin, schedules))
        for number in range(self.moves):
            due = 2 * _HOUR + number * 60_000
            stage.sound(await client.play(begin, [Step(0, "reschedule", [(key, due)]) for key in far], callers=8))
        waiting = len(hops_of) - stage.fired()
        alive = (await stage.director.left()).get("messages_left")
        longest = stage.setting.span(max(delays))
        end = begin / 1000 + longest
        await stage.until_fired(len(hops_of), by=end + stage.patience)
        await stage.rest()
        await stage.unharmed()
        figures = stage.verdict(until=end).figures()
        figures.counts = {
            **await stage.counts(), "hops_most": max(delays.values()), "moves_per_task": self.moves,
            **_per_hop(stage, hops_of),
        }  # fmt: skip
        if alive is not None:  # what waits for the others is their own message, one each
            figures.counts["messages_alive_per_task"] = round((alive - waiting) / moved, 2)
        return figures

    @staticmethod
    def _steps(stage: Stage, delays: Mapping[int, int], each: int) -> tuple[list[Step], dict[str, int]]:
        """A schedule for each, the same delays spread over a quarter of a second; and the hops of each key."""
        steps, hops_of = [], {}
        for seconds, hops in delays.items():
            for number in range(each):
                key, at = f"h{hops}-{number}", number * 250 // each
                steps.append(Step(at, "schedule", [(key, at + round(stage.setting.span(seconds) * 1000))]))
                hops_of[key] = hops
        return sorted(steps, key=lambda step: step.at), hops_of


def _per_hop(stage: Stage, hops_of: Mapping[str, int]) -> dict[str, float]:
    """Milliseconds of lateness after each number of hops (median), and the slope of a line through all."""
    due = {call.key: call.due for call in stage.calls() if call.verb == "schedule" and call.due}
    late: dict[int, list[float]] = {}
    for firing in stage.firings():
        if firing.key in hops_of and firing.begun:
            late.setdefault(hops_of[firing.key], []).append(firing.at / 1e6 - due[firing.key])
    if len(late) < 2:
        return {}
    middle = {f"late_ms_after_{hops}": round(median(some), 2) for hops, some in sorted(late.items())}
    hops, some = zip(*((hops, one) for hops, some in late.items() for one in some), strict=True)
    return {**middle, "late_ms_per_hop": round(linear_regression(hops, some).slope, 3)}


class Head(Workload):
    """One task with a long delay, and then many with a short one."""

    name = "head"
    about = "one task due late, scheduled ahead of 100 that are due soon"

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
        late = self._short_late(stage, keys)
        bound = (long - short) / 2
        figures.counts = {
            **await stage.counts(), "short": len(keys), "short_late": sum(1 for one in late if one > bound),
        }  # fmt: skip
        if late:
            figures.counts["short_late_p50_ms"] = round(median(late), 1)
        return figures

    @staticmethod
    def _short_late(stage: Stage, keys: Sequence[str]) -> list[float]:
        due = {call.key: call.due for call in stage.calls() if call.verb == "schedule" and call.due}
        wanted = set(keys)
        return [one.at / 1e6 - due[one.key] for one in stage.firings() if one.key in wanted and one.begun]
