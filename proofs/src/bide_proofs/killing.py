"""Kills a process that works on a SQLite file, again and again, and checks what it had promised.

    python -m bide_proofs.killing --runs 500

Each run is one file and a row of lives. A life schedules, moves, cancels, leases, fails, retries and settles, and says
each thing in a log *after* it was answered. It dies by SIGKILL: at a fault point inside the store (between any two
statements of schedule, change, lease, settle, and around the commit), or at a random moment from outside. The last life
is let live until nothing is left. Then the log is read:

- every acknowledged task was delivered, or acknowledged as cancelled (P2)
- nothing was delivered after its settle, or its cancel, was acknowledged (P2, P4)
- nothing was early (P1); each redelivery has a higher token and the same id (P12)
- nothing is left behind (P10)
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bide.app import Bide
from bide.core.records import Record, Settlement, Verdict
from bide.core.retry import Fixed
from bide.core.tasks import Task
from bide.stores.sqlite import SqliteStore
from bide_proofs.harness.command import PATIENCE

TASKS = 14
_KILLED_LIVES = 3
_MOST_PASSAGES = 100


class Log:
    """Lines that survive the death of who wrote them: one unbuffered append each."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def say(self, what: str, **details: Any) -> None:
        os.write(self._file, json.dumps({"what": what, **details}).encode() + b"\n")

    def close(self) -> None:
        os.close(self._file)


def run(seed: int, folder: Path) -> tuple[list[str], Counter[str]]:
    """One run; what was wrong (nothing, it is hoped), and at which points it was killed."""
    chance = random.Random(seed)
    database, path = folder / f"{seed}.db", folder / f"{seed}.log"
    points: Counter[str] = Counter()
    for life in range(_KILLED_LIVES + 1):
        last = life == _KILLED_LIVES
        fatal = None if last or chance.random() < 0.2 else chance.randint(1, _MOST_PASSAGES)
        moment = None if last or fatal is not None else chance.uniform(0.005, 0.25)
        child = os.fork()
        if child == 0:
            _live_and_exit(database, path, fatal, chance.randint(0, 2**31))
        if moment is not None:
            time.sleep(moment)
            os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        code = os.waitstatus_to_exitcode(status)
        if code == 0:
            break
        if code != -signal.SIGKILL:
            return [f"seed {seed}: life {life} ended with {code}"], points
        if moment is not None:
            points["from outside"] += 1
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    points.update(line["point"] for line in lines if line["what"] == "killed")
    wrong = [f"seed {seed}: {problem}" for problem in check(lines)]
    if not wrong:
        for file in (*folder.glob(f"{seed}.db*"), path):
            file.unlink()
    return wrong, points


def check(lines: list[dict[str, Any]]) -> list[str]:
    """What the log shows to be broken."""
    wrong: list[str] = []
    promised: dict[str, str] = {}
    cancelling: set[str] = set()
    over: dict[tuple[str, str], str] = {}
    seen: dict[str, dict[str, Any]] = {}
    for line in lines:
        key = line.get("key", "")
        if line["what"] == "scheduled":
            promised[key] = line["id"]
        elif line["what"] == "cancelling":
            cancelling.add(key)
        elif line["what"] in ("done", "cancelled"):
            over[key, line["id"]] = line["what"]
        elif line["what"] == "delivered":
            if (key, line["id"]) in over:
                wrong.append(f"{key} was delivered after it was acknowledged as {over[key, line['id']]}")
            if line["at"] < line["planned_at"]:
                wrong.append(f"{key} was {line['planned_at'] - line['at']} ms early")
            before = seen.get(key)
            if before is not None and line["token"] <= before["token"]:
                wrong.append(f"{key} was delivered again with token {line['token']}, not above {before['token']}")
            if promised.get(key, line["id"]) != line["id"]:
                wrong.append(f"{key} changed its id from {promised[key]} to {line['id']}")
            seen[key] = line
        elif line["what"] == "left":
            wrong.append(f"{key} was left behind in state {line['state']}")
    # a cancel that was asked for and died before its answer may have been done
    wrong += [f"{key} was acknowledged and lost" for key in promised if key not in seen and key not in cancelling]
    if not lines or lines[-1]["what"] != "end":
        wrong.append("the last life did not come to its end")
    return wrong


def _live_and_exit(database: Path, path: Path, fatal: int | None, seed: int) -> None:
    logging.disable()
    log = Log(path)
    passed = 0

    def killer(point: str) -> None:
        nonlocal passed
        passed += 1
        if passed == fatal:
            log.say("killed", point=point)
            os.kill(os.getpid(), signal.SIGKILL)

    try:
        asyncio.run(asyncio.wait_for(_life(database, log, killer, random.Random(seed)), PATIENCE))
    except BaseException as error:  # noqa: BLE001 - the parent reads the exit code
        log.say("error", error=repr(error))
        os._exit(3)
    os._exit(0)


async def _life(database: Path, log: Log, killer: Callable[[str], None], chance: random.Random) -> None:
    store = SqliteStore(str(database), fault=killer)
    app = Bide(store, lease="150ms", max_sleep="50ms", keep_done="0s", keep_cancelled="0s")

    @app.handler("work", retry=Fixed("5ms", tries=1_000))
    async def work(task: Task[int]) -> None:
        record = task.record
        now = app.clock.now()
        log.say("delivered", key=task.key, id=task.id, token=task.token, at=now, planned_at=record.planned_at)
        await asyncio.sleep(chance.choice((0, 0, 0.001, 0.01)))
        if task.failures == 0 and task.payload % 3 == 0:
            raise OSError("the first time it fails")

    def observe(record: Record, settlement: Settlement) -> None:
        if settlement.verdict is Verdict.DONE:
            log.say("done", key=record.key, id=record.id)

    async def ask(number: int) -> None:
        key = f"k{number}"
        delay = chance.choice(("0s", "3ms", "20ms", "60ms"))
        answer = await work.schedule(number, key=key, delay=delay, on_conflict="keep")
        assert answer.task is not None
        log.say("scheduled", key=key, id=answer.task.id)
        if number % 5 == 1:
            await app.reschedule("work", key, delay="10ms")
        if number % 5 == 2:
            await app.fire_now("work", key)
        if number % 7 == 4:
            log.say("cancelling", key=key)
            cancelled = await app.cancel("work", key)
            if cancelled.result == "cancelled" and cancelled.task is not None:
                log.say("cancelled", key=key, id=cancelled.task.id)

    async with app:
        fresh = [number for number in range(TASKS) if not log_has(database, number)]
        async with app.worker(observe=observe):
            await asyncio.gather(*(ask(number) for number in fresh))
            while await _live(app):  # noqa: ASYNC110 - nothing says that the last one has been settled
                await asyncio.sleep(0.005)
        for task in [task async for task in app.find()]:
            log.say("left", key=task.key, state=task.state.value)
    log.say("end")


async def _live(app: Bide) -> bool:
    return any([task.state.live async for task in app.find(topic="work")])


def log_has(database: Path, number: int) -> bool:
    """Whether an earlier life was answered that this task is scheduled: it must not be scheduled twice."""
    return f'"what": "scheduled", "key": "k{number}"' in database.with_suffix(".log").read_text()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bide_proofs.killing", description=__doc__)
    parser.add_argument("--runs", type=int, default=500)
    parser.add_argument("--seed", type=int, default=1, help="the first seed")
    given = parser.parse_args()
    points: Counter[str] = Counter()
    wrong: list[str] = []
    with tempfile.TemporaryDirectory(prefix="bide-killing-") as folder:
        for seed in range(given.seed, given.seed + given.runs):
            problems, killed = run(seed, Path(folder))
            points += killed
            wrong += problems
            for problem in problems:
                sys.stderr.write(f"{problem}\n")
    report = {
        "runs": given.runs,
        "kills": sum(points.values()),
        "wrong": len(wrong),
        "points": dict(sorted(points.items())),
    }
    sys.stdout.write(json.dumps(report, indent=2) + "\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
