"""Kill a process that works on a SQLite file, between any two of its statements, and check bide's promises.

    python -m bide_proofs.crash_points --runs 500

Each run has one file and a series of processes, its lives. They schedule, move, cancel, lease, fail, retry and settle,
and record each call before it is made and each answer after it arrived. A life dies by SIGKILL: at a fault point inside
the store (between any two statements of schedule, change, lease, settle, and around the commit), or at a random moment
from outside. The last life runs until no task is left. `bide.testing.history.check` is the judge.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from itertools import count
from pathlib import Path

from bide.app import Bide
from bide.core.retry import Fixed
from bide.core.tasks import Task
from bide.stores.sqlite import SqliteStore
from bide.testing.history.check import Violation, check
from bide.testing.history.events import Died, End, Event, Fault, Header, Left, seen
from bide.testing.history.recording import Journal, Log, RecordedClient, Recording, read_all
from bide_proofs.harness.command import PATIENCE, live_tasks, parser_of, tell
from bide_proofs.torture.clock import SLACK

TASKS = 14
TOPIC = "work"
_KILLED_LIVES = 3
_MOST_PASSAGES = 100
_CALLS = 100_000
"""The number of call numbers reserved for each life."""
_AT = "killed at "


def run(seed: int, folder: Path) -> list[Event]:
    """Run once in its own folder; return the history. Raises RuntimeError if a life ended by itself with an error."""
    chance = random.Random(seed)
    frame = Log(folder / "frame.jsonl")
    frame.say(Header("sqlite", slack=SLACK, at=time.monotonic_ns()))
    for life in range(_KILLED_LIVES + 1):
        last = life == _KILLED_LIVES
        fatal = None if last or chance.random() < 0.2 else chance.randint(1, _MOST_PASSAGES)
        moment = None if last or fatal is not None else chance.uniform(0.005, 0.25)
        child = os.fork()
        if child == 0:
            _live_and_exit(folder, life, fatal, chance.randint(0, 2**31))
        if moment is not None:
            time.sleep(moment)
            os.kill(child, signal.SIGKILL)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        frame.say(Died(_name(life), time.monotonic_ns()))
        if code == 0:
            break
        if code != -signal.SIGKILL:
            raise RuntimeError(f"seed {seed}: life {life} ended with {code}")
        if moment is not None:
            frame.say(Fault(time.monotonic_ns(), f"{_AT}a moment from outside"))
    frame.close()
    return list(read_all(sorted(folder.glob("*.jsonl"))))


def _name(life: int) -> str:
    return f"life-{life}"


def _live_and_exit(folder: Path, life: int, fatal: int | None, seed: int) -> None:
    logging.disable()
    log = Log(folder / f"{_name(life)}.jsonl")
    journal = Journal(
        log.say, time_ns=time.monotonic_ns, clock=lambda: time.time_ns() // 1_000_000, calls=count(life * _CALLS)
    )
    passed = 0

    def killer(point: str) -> None:
        nonlocal passed
        passed += 1
        if passed == fatal:
            journal.say(Fault(journal.time_ns(), f"{_AT}{point}"))
            os.kill(os.getpid(), signal.SIGKILL)

    try:
        asyncio.run(asyncio.wait_for(_life(folder, _name(life), journal, killer, random.Random(seed)), PATIENCE))
    except BaseException as error:  # noqa: BLE001 - the parent reads the exit code
        sys.stderr.write(f"{error!r}\n")
        os._exit(3)
    os._exit(0)


async def _life(
    folder: Path, name: str, journal: Journal, killer: Callable[[str], None], chance: random.Random
) -> None:
    store = SqliteStore(str(folder / "store.db"), fault=killer)
    app = Bide(store, lease="150ms", max_sleep="50ms", keep_done="0s", keep_cancelled="0s")
    app.instruments.append(Recording(journal, name))
    client = RecordedClient(app, journal, name)

    @app.handler(TOPIC, retry=Fixed("5ms", tries=1_000))
    async def work(task: Task[int]) -> None:
        await asyncio.sleep(chance.choice((0, 0, 0.001, 0.01)))
        if task.failures == 0 and task.payload % 3 == 0:
            raise OSError("the first time it fails")

    async def ask(number: int) -> None:
        key, delay = f"k{number}", chance.choice(("0s", "3ms", "20ms", "60ms"))
        await client.schedule(client.new(TOPIC, number, key=key, delay=delay, on_conflict="keep"))
        if number % 5 == 1:
            await client.reschedule(TOPIC, key, delay=timedelta(milliseconds=10))
        if number % 5 == 2:
            await client.fire_now(TOPIC, key)
        if number % 7 == 4:
            await client.cancel(TOPIC, key)

    async with app:
        async with app.worker():
            await asyncio.gather(*(ask(number) for number in range(TASKS)))
            while await live_tasks(app):  # noqa: ASYNC110 - nothing says that the last one has been settled
                await asyncio.sleep(0.005)
        async for task in app.find():
            journal.say(Left(journal.time_ns(), journal.clock(), task.topic, task.key, seen(task.record)))
    journal.say(End(journal.time_ns(), journal.clock(), True))


def main() -> int:
    parser = parser_of("bide_proofs.crash_points", __doc__)
    parser.add_argument("--runs", type=int, default=500)
    parser.add_argument("--seed", type=int, default=1, help="the first seed")
    given = parser.parse_args()
    points: Counter[str] = Counter()
    wrong: dict[str, list[str | Violation]] = {}
    undecided = 0
    for seed in range(given.seed, given.seed + given.runs):
        with tempfile.TemporaryDirectory(prefix="bide-crash-points-") as folder:
            try:
                events = run(seed, Path(folder))
            except RuntimeError as error:
                wrong.setdefault("process ended", []).append(str(error))
                continue
        points.update(one.what.removeprefix(_AT) for one in events if isinstance(one, Fault))
        checked = check(events)
        undecided += len(checked.undecided)
        for violation in checked.violations:
            wrong.setdefault(violation.promise, []).append(f"seed {seed}: {violation}")
    report = {
        "runs": given.runs,
        "kills": sum(points.values()),
        "undecided": undecided,
        "points": dict(sorted(points.items())),
    }
    return tell(report, wrong)


if __name__ == "__main__":
    sys.exit(main())
