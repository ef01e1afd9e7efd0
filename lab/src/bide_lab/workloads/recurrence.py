"""The workload of rules: which of their runs are lost, doubled or late when processes die around an instant."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections import Counter
from collections.abc import Sequence

from bide_lab.figures import Figures
from bide_lab.journal import Call, Firing, judge
from bide_lab.processes import Process
from bide_lab.strategy import Recurrent, Strategy
from bide_lab.workload import Trial, unless, workload

_RUN = 0.1
"""Length of a run; this and all that follows in periods of the rule."""
_FAULTS = (
    ("killed_after", 0.05, 0.2), ("killed_before", -0.05, 0.6), ("stopped", -0.4, 1.2), ("stopped", -0.1, 1.0),
    ("killed_at", 0.0, 1.6), ("killed_before", -0.05, 0.2), ("killed_at", 0.0, 0.6), ("killed_after", 0.05, 1.6),
)  # fmt: skip
"""Each with its time from an instant on, and the time until it is undone; a process needs some 0.3 s more to begin."""
_APART = 3
_ASKED = 0.03
"""Before a fault, to learn whose turn it is."""


@workload(senseless=unless(lambda one: issubclass(one, Recurrent), "it does tasks, and follows no rule"))
async def recurrence(trial: Trial, *, quick: bool) -> Figures:
    """a run each period; whose turn it is is killed -9 just before, at or just after its time, and started again.

    Twice it is stopped instead (SIGSTOP), and goes on later. Each fault comes some periods after the one before it.
    """
    strategy, every = trial.strategy, trial.setting.span(60)
    assert issubclass(strategy, Recurrent)
    first, *others = strategy.roles
    for role in others:
        await trial.process(role, seconds=_RUN * every)
    nodes = [await trial.process(first, seconds=_RUN * every) for _ in range(strategy.nodes)]
    await _whose_turn(nodes)  # the first question takes longest
    begin = (time.time() // every + 3) * every
    at, faults = begin + every, []
    for word, offset, undone in _FAULTS[: 4 if quick else None]:
        at = max(at + every, (time.time() // every + 2) * every)
        faults.append((round(at * 1000), word))
        await _until(at + (offset - _ASKED) * every)
        number = await _whose_turn(nodes)
        await _until(at + offset * every)
        if word == "stopped":
            os.killpg(nodes[number].pid, signal.SIGSTOP)
            await asyncio.sleep(undone * every)
            os.killpg(nodes[number].pid, signal.SIGCONT)
        else:
            nodes[number].kill()
            await asyncio.sleep(undone * every)
            nodes[number] = await trial.process(first, seconds=_RUN * every)
        at = max(at + (_APART - 1) * every, time.time() // every * every)
    await _until(at + 2 * every)
    await trial.unharmed()
    instants = range(round(begin * 1000), round(at * 1000) + 1, round(every * 1000))
    figures, blamed = by_instants(trial.written()[1], instants, faults)
    figures.counts = {**await trial.counts(), **blamed}
    return figures


def by_instants(
    firings: Sequence[Firing], instants: range, faults: Sequence[tuple[int, str]]
) -> tuple[Figures, Counter[str]]:
    """The figures of these instants; and how many of them were lost, or doubled, after each kind of fault."""
    calls = [Call("schedule", str(due), due, 0, 0, True) for due in instants]
    runs = [one._replace(key=str(one.due)) for one in firings if one.due in instants]
    times, blamed = Counter(one.due for one in runs), Counter[str]()
    for due in (one for one in instants if times[one] != 1):
        fault = next((word for at, word in reversed(faults) if at <= due), "undisturbed")
        blamed[f"{'twice' if times[due] else 'lost'}_when_{fault}"] += 1
    return judge(calls, runs, until=instants[-1] * 1_000_000), blamed


async def _whose_turn(nodes: list[Process]) -> int:
    """The place of the node that does the next run, or the one under way; of several, and if none knows, the first."""
    turns = [(await node.measure(turn_of))["turn"] for node in nodes]
    return turns.index(max(turns))


async def turn_of(strategy: Strategy) -> dict[str, int]:
    """In a node."""
    return {"turn": getattr(strategy, "turn", 0)}


async def _until(at: float) -> None:
    await asyncio.sleep(max(0.0, at - time.time()))
