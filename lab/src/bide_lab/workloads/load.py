"""Workloads in which nothing goes wrong: tasks at one rate or all at once, near and far, moved, cancelled, and slow."""

from __future__ import annotations

import random
import time
from statistics import median

from bide_lab.figures import Figures
from bide_lab.processes import Step
from bide_lab.strategy import now
from bide_lab.workload import HOUR, Trial, batches, keys_of, processor_share, steps_at, workload

_YEAR = 365 * 24 * HOUR


@workload(for_all=True)
async def steady(trial: Trial, *, quick: bool) -> Figures:
    """200 tasks a second, each due 2 s ahead (in a quick run 1 s).

    Lateness is measured by it.
    """
    count, ahead, rate = (200, 1_000, 200.0) if quick else (2_000, 2_000, 200.0)
    client, _ = await trial.ready()
    before, begin = await trial.usages(), now() + 200
    await client.play(begin, steps_at(rate, keys_of(count), ahead=ahead))
    figures = await trial.finish(count, end=begin / 1000 + count / rate + ahead / 1000)
    figures.client_cpu_pct = processor_share(before, await trial.usages())
    return figures


@workload(for_all=True)
async def burst(trial: Trial, *, quick: bool) -> Figures:
    """5,000 tasks due at one instant.

    How fast do they come out, and how late is the last?
    """
    count = min(1_000 if quick else 5_000, trial.strategy.bears)
    ahead = 1_500 if quick else 5_000
    client, begin = await trial.ready()
    answer = await client.play(begin, batches([(key, ahead) for key in keys_of(count)]), callers=4)
    figures = await trial.finish(count, end=(begin + ahead) / 1000, more=count / 100)
    figures.schedules_per_s = round(count / answer["seconds"], 1)
    return figures


@workload(for_all=True)
async def horizon(trial: Trial, *, quick: bool) -> Figures:
    """tasks due in 1 s to 1 year; those of the first seconds have to fire.

    They are spread evenly over the powers of ten.
    """
    count, seconds = (1_000, 3.0) if quick else (10_000, 6.0)
    chance = random.Random(7)
    keys = keys_of(min(count, trial.strategy.bears))
    due = [round(1_000 * (_YEAR / 1_000) ** chance.random()) for _ in keys]
    client, begin = await trial.ready()
    await client.play(begin, batches(list(zip(keys, due, strict=True))), callers=4)
    end = begin / 1000 + seconds
    near = sum(1 for one in due if one <= seconds * 1000)
    await trial.until_fired(near, by=end + trial.patience)
    return await trial.finish(near, end=end, rest=max(0.3, end - time.time()))


@workload(for_all=True, verbs=("reschedule", "cancel"))
async def churn(trial: Trial, *, quick: bool) -> Figures:
    """half of the tasks are moved, a third are cancelled, the rest fire."""
    count = min(300 if quick else 1_500, trial.strategy.bears)
    window = count * 5
    # each is due 2 s after the last change of it is made, so that only a strategy's own fault makes it late
    first, moved = window + 2_000, window + 2_500
    steps = batches([(key, first) for key in keys_of(count)])
    fires = 0
    for number, key in enumerate(keys_of(count)):
        at = 500 + round(number * window / count)
        if number % 6 in (0, 1, 2):
            steps.append(Step(at, "reschedule", [(key, moved)]))
        elif number % 6 in (3, 4):
            steps.append(Step(at, "cancel", [(key, None)]))
        fires += number % 6 not in (3, 4)
    return await trial.through(steps, fires=fires, last=moved, lead=100)


@workload(alone=False)
async def gap(trial: Trial, *, quick: bool) -> Figures:
    """2,000 tasks a second that are due at once, so that some come between two commands of a consumer."""
    count = 4_000 if quick else 20_000
    return await trial.through(steps_at(2_000.0, keys_of(count), ahead=0), fires=count, last=0, lead=100)


@workload()
async def slow(trial: Trial, *, quick: bool) -> Figures:
    """one slow task, and quick ones that come due while it runs."""
    return await _beside_slow_ones(trial, 1, *((150, 1.5) if quick else (1_000, 5.0)))


@workload()
async def crowd(trial: Trial, *, quick: bool) -> Figures:
    """ten slow tasks at once, and quick ones that come due while they run."""
    figures = await _beside_slow_ones(trial, 10, 100 if quick else 1_000, 1.0)
    figures.counts["slow"] = 10
    return figures


async def _beside_slow_ones(trial: Trial, many: int, count: int, seconds: float) -> Figures:
    """The slow ones are due first; the others from a moment later until they are done."""
    ahead = 500
    due = [(key, ahead) for key in keys_of(many, "slow")]
    due += [(key, ahead + 50 + round(number * seconds * 900 / count)) for number, key in enumerate(keys_of(count))]
    figures = await trial.through(
        batches(due), fires=len(due), last=ahead + seconds * 1000, callers=4, more=many * seconds, slow=seconds
    )
    figures.counts["slow_ms"] = seconds * 1000
    return figures


@workload()
async def many(trial: Trial, *, quick: bool) -> Figures:
    """20 tasks come due while many others wait for an hour."""
    far, near, ahead, wait = (600, 20, 500, 5.0) if quick else (10_000, 200, 5_000, 60.0)
    tasks = [(key, HOUR) for key in keys_of(far, "far")] + [(key, ahead) for key in keys_of(near, "near")]
    figures = await trial.through(batches(tasks), fires=near, last=ahead, callers=4, more=wait)
    figures.counts["far_off"] = far
    return figures


@workload()
async def uneven(trial: Trial, *, quick: bool) -> Figures:
    """one large call and 250 small ones, due in an hour but for every fifth, which is due soon.

    Where is what is left?
    """
    size = 10 if quick else 50
    plan = [(40 * size, HOUR), *[(size, 500), *[(size, HOUR)] * 4] * 50]
    near = sum(count for count, due in plan if due < HOUR)
    keys = iter(keys_of(sum(count for count, _ in plan)))
    steps = [Step(0, "schedule", [(next(keys), due) for _ in range(count)]) for count, due in plan]
    return await trial.through(steps, fires=near, last=500, callers=1, more=near / 1_000)


_MOVES = 5
_FIRED_AFTER = "fired_after_"
"""The count of a strategy that relays of its firings, by their hops."""


@workload(verbs=("reschedule",))
async def relay(trial: Trial, *, quick: bool) -> Figures:
    """delays that are relayed over 1 to 10 of 18 levels, beside tasks that are moved five times.

    Of 18 levels from 1 s to 2 h, taken as the largest that is not above the rest, they need 1 to 10.
    """
    # seconds of strategy time
    delays = (60, 125, 156, 217, 239) if quick else (300, 660, 905, 1056, 1199)
    each, moved, spread = (20, 20, 250) if quick else (200, 200, 2_500)
    far = keys_of(moved, "moved")
    steps, length_of = [Step(0, "schedule", [(key, HOUR) for key in far])], {}
    for number in range(each):
        for seconds in delays:
            key, at = f"d{seconds}-{number}", number * spread // each
            steps.append(Step(at, "schedule", [(key, at + round(trial.setting.span(seconds) * 1000))]))
            length_of[key] = seconds
    client, begin = await trial.ready()
    await client.play(begin, steps)
    for number in range(_MOVES):
        due = 2 * HOUR + number * 60_000
        await client.play(begin, [Step(0, "reschedule", [(key, due)]) for key in far], callers=8)
    waiting = len(length_of) - trial.fired()
    alive = (await trial.owner.left()).get("messages_left")
    end = (begin + spread) / 1000 + trial.setting.span(max(delays))
    figures = await trial.finish(len(length_of), end=end)
    counts, every = figures.counts, lateness(trial)
    counts["moves_per_task"] = _MOVES
    for seconds in delays:
        if late := [ms for key, ms in every if length_of.get(key) == seconds]:
            counts[f"late_ms_of_{seconds}_s"] = round(median(late), 2)
    taken = [int(name.removeprefix(_FIRED_AFTER)) for name in counts if name.startswith(_FIRED_AFTER)]
    if taken and counts.get("hops"):
        counts["hops_most"] = max(taken)
        counts["late_ms_per_hop"] = round(counts["hops_late_ms"] / counts["hops"], 2)
    if alive is not None:  # what waits for the others is their own message, one each
        counts["messages_alive_per_task"] = round((alive - waiting) / moved, 2)
    return figures


@workload(alone=False)
async def head(trial: Trial, *, quick: bool) -> Figures:
    """one task due late, scheduled ahead of 100 that are due soon."""
    short, long = (300, 3_000) if quick else (1_000, 20_000)
    keys = keys_of(100, "short")
    client, begin = await trial.ready(lead=100)
    steps = [Step(0, "schedule", [("long", long)])]
    steps += [Step(50 + 2 * at, "schedule", [(key, 50 + 2 * at + short)]) for at, key in enumerate(keys)]
    # one caller at a time, so that the long one is there before the others
    await client.play(begin, steps, callers=1)
    figures = await trial.finish(len(keys) + 1, end=(begin + long) / 1000)
    late = [ms for key, ms in lateness(trial) if key != "long"]
    # held up by the long one, and not just late: a machine that stands still for a second is no flaw
    held_up = [one for one in trial.written()[1] if one.key != "long" and one.at / 1e6 >= begin + long]
    figures.counts |= {"short": len(keys), "short_late": len(held_up)}
    if late:
        figures.counts["short_late_p50_ms"] = round(median(late), 1)
    return figures


def lateness(trial: Trial) -> list[tuple[str, float]]:
    """The key of each effect, and by how many milliseconds it was late for its first due time."""
    calls, firings = trial.written()
    due = {call.key: call.due for call in calls if call.verb == "schedule" and call.due}
    return [(one.key, one.at / 1e6 - due[one.key]) for one in firings]
