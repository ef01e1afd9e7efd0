"""Deploys at the very instant of a recurring task, with real processes: each occurrence is exactly one task.

A process declares a rule and is killed, or asked to end, from three seconds before an instant of the rule to three
seconds after it; its successor, in half the cases another version, starts 0.1 to 5 seconds later. The usual faults
here: the next time is computed from now (lost), or the run is sent before it is recorded (doubled).
`python -m bide_proofs.deploys URL --deploys 50`.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import signal
import sys
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

from msgspec import Struct

from bide.app import Bide
from bide.core.instants import as_datetime
from bide.core.recurrence.rules import Every
from bide.core.tasks import Task
from bide.wiring import without_secrets
from bide_bench.worker import send
from bide_proofs.harness.command import WrongByKind, add_seed, migrated, own_place, parser_of, tried, whole
from bide_proofs.harness.processes import READY, Child, ChildSpec, ready, spec_of, told_to_end

AHEAD = 7.0
"""Seconds from the start of the first round to the instant of its rules."""
_WITHIN = 120.0
"""Seconds within which an occurrence has to run: only a hang reaches it."""
_DOUBLES = 3.0
"""Seconds for which a second run would still be noticed: more than a lease."""


class Spec(Struct):
    """One process: a version of the program of a topic."""

    url: str
    topic: str
    instant: int
    overlap: str
    version: int


class Deploys:
    """Rounds of some deploys side by side, each with its own topic."""

    def __init__(self, url: str, seed: int, folder: Path) -> None:
        self.url, self.folder = url, folder
        self.chance = random.Random(seed)
        self.ran: dict[str, Counter[str]] = {}
        """By topic: how often each task was run for the occurrence."""
        self.began: dict[str, asyncio.Event] = {}
        self.how: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.ahead = AHEAD

    async def round(self, number: int, count: int) -> int:
        """Return how many deploys were played. The others' processes were not at work in time; the next have longer."""
        instant = round((time.time() + self.ahead) * 1000)
        async with asyncio.TaskGroup() as lanes:
            played = [lanes.create_task(self._deploy(f"deploy.{number}.{lane}", instant)) for lane in range(count)]
        done = sum(one.result() for one in played)
        if done < count:
            self.ahead *= 1.5
        return done

    async def _deploy(self, topic: str, instant: int) -> bool:
        chance = self.chance
        strikes, after = instant / 1000 + chance.uniform(-3, 3), chance.uniform(0.1, 5)
        overlap, version = chance.choice(("skip", "queue", "allow", "cancel_running")), chance.choice((1, 2))
        first = await self._start(Spec(self.url, topic, instant, overlap, 1))
        await first.hear(READY)
        if time.time() > strikes:  # this machine is too busy
            first.signal(signal.SIGKILL)
            await first.over
            return False
        self.ran[topic], self.began[topic] = Counter(), asyncio.Event()
        kills = self.how.total() % 2 == 0
        self.how["kill -9" if kills else "SIGTERM"] += 1
        await asyncio.sleep(strikes - time.time())
        first.signal(signal.SIGKILL if kills else signal.SIGTERM)
        await asyncio.sleep(after)
        second = await self._start(Spec(self.url, topic, instant, overlap, version))
        with suppress(TimeoutError):
            await asyncio.wait_for(self.began[topic].wait(), _WITHIN)
        await asyncio.sleep(max(0.0, instant / 1000 - time.time()) + _DOUBLES)
        for child in (first, second):
            child.signal(signal.SIGKILL)
            await child.over
        return True

    async def _start(self, spec: Spec) -> Child:
        name = f"{spec.topic}-{spec.version}-{time.monotonic_ns()}"
        made = ChildSpec(module="bide_proofs.deploys", spec=spec, finishes=True)
        child = await Child.of("program", 0, name, made, self.folder / f"{name}.err")
        child.over = asyncio.create_task(child.listen(self._heard), name=f"listen to {name}")
        return child

    def _heard(self, child: Child, said: dict[str, Any]) -> None:
        if "ran" in said:
            occurrence, task = said["ran"]
            assert isinstance(child.spec.spec, Spec)
            if occurrence != child.spec.spec.instant:
                self.wrong.append(f"{child.name} ran occurrence {occurrence}")
            if child.spec.spec.topic in self.ran:
                self.ran[child.spec.spec.topic][task] += 1
                self.began[child.spec.spec.topic].set()

    def judged(self) -> WrongByKind:
        return {
            "lost": [topic for topic, tasks in self.ran.items() if not tasks],
            "doubled": [f"{topic}: {dict(tasks)}" for topic, tasks in self.ran.items() if len(tasks) > 1],
            "other": self.wrong,
        }


async def run(given: argparse.Namespace, folder: Path) -> tuple[dict[str, Any], WrongByKind]:
    """Run once on the given store; return the report and the failures."""
    async with own_place(given.url, made=True) as place:
        await migrated(place.url)
        deploys = Deploys(place.url, given.seed, folder)
        left, number = given.deploys, 0
        while left > 0:
            left -= await deploys.round(number, min(left, given.at_once))
            number += 1
    again = sum(times - 1 for tasks in deploys.ran.values() for times in tasks.values())
    report = {
        "store": without_secrets(given.url), "seed": given.seed, "deploys": given.deploys, **deploys.how,
        "redelivered": again,
    }  # fmt: skip
    return report, deploys.judged()


async def _program(spec: Spec) -> None:
    """The child: a worker that declares the rule, and tells its parent what it runs."""
    app = Bide(spec.url, lease="2s", history="off", keep_done="0s", grace="500ms")

    async def handle(task: Task[Any]) -> None:
        assert task.occurrence is not None
        send(ran=[round(task.occurrence.timestamp() * 1000), task.id])

    rule = Every("1h", start=as_datetime(spec.instant))
    app.recurs(rule, topic=spec.topic, payload=spec.version, overlap=spec.overlap)(handle)
    terminated = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, terminated.set)
    async with app, app.worker():
        while not await app.recurring.next(spec.topic):  # noqa: ASYNC110 - another task declares it
            await asyncio.sleep(0.02)
        ready()
        ends = [asyncio.ensure_future(one) for one in (told_to_end(), terminated.wait())]
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        ends[0].cancel()


def main() -> int:
    if not sys.stdin.isatty() and len(sys.argv) == 1:
        asyncio.run(_program(spec_of(Spec)))
        return 0
    parser = parser_of("bide_proofs.deploys", __doc__)
    parser.add_argument("url", help="a store that several processes can share, on this machine")
    parser.add_argument("--deploys", type=whole, default=50, help="how many")
    parser.add_argument("--at-once", type=whole, default=10, help="how many side by side")
    add_seed(parser)
    given = parser.parse_args()
    return tried("deploys", lambda folder: run(given, folder))


if __name__ == "__main__":
    sys.exit(main())
