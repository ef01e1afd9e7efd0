"""Kills workers that share a store, under load, and checks what the store had promised: see the package."""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from bide.app import Bide
from bide.core.errors import BideError
from bide.core.records import State
from bide.testing.culling.crew import LEASE, TOPIC, Crew, app_on
from bide.testing.culling.judge import Judgement
from bide.testing.culling.lines import Journal, Left, read
from bide.testing.culling.load import LONGEST, Load
from bide.testing.namespace import own_namespace
from bide.wiring import without_secrets

_DRAIN = LONGEST + LEASE + 20
"""Seconds within which everything has to be over after the last was asked for."""
_SHOWN = 10
"""Cases of each kind of wrong that are shown."""


async def run(given: argparse.Namespace, folder: Path) -> tuple[dict[str, Any], Judgement]:
    """One run on the store that is given; the report, and the judgement in it."""
    journal = Journal(folder / "callers.log")
    async with own_namespace(given.url, "cull") as url, app_on(url) as app:
        if await _live(app):
            raise SystemExit(f"the store has tasks of the topic {TOPIC!r} already")
        load, crew, over = Load(app, journal, given.seed), Crew(url, folder, journal), asyncio.Event()
        try:
            await crew.start(given.workers)
            culling = asyncio.create_task(crew.cull(given.every, over))
            try:
                await load.run(given.seconds, given.rate)
            finally:
                over.set()
                await culling
            began = time.monotonic()
            while await _live(app) and time.monotonic() < began + _DRAIN:  # noqa: ASYNC110 - nobody tells
                await asyncio.sleep(0.05)
            drained = time.monotonic() - began
        finally:
            await crew.stop()
        async for task in app.find(topic=TOPIC):
            journal.say(Left(task.key, task.state.value))
    judgement = Judgement(line for path in logs(folder) for line in read(path))
    report = {
        "store": without_secrets(given.url),
        "seed": given.seed,
        "workers": given.workers,
        "kills": crew.kills,
        "lease_seconds": LEASE,
        "load": {
            "seconds": round(load.lasted, 1),
            "rate_asked": given.rate,
            "rate": round(load.scheduled / load.lasted),
            "scheduled": load.scheduled,
            "answers": {verb: dict(sorted(words.items())) for verb, words in sorted(judgement.answers.items())},
        },
        "drained_seconds": round(drained, 1),
        "deliveries": judgement.deliveries,
        "redelivered": judgement.redelivered,
        "wrong": judgement.counts,
        "lateness_ms": _percentiles(judgement.lateness),
        "lateness_ms_first_attempts": _percentiles(judgement.untouched),
    }
    return report, judgement


def logs(folder: Path) -> list[Path]:
    """One of the callers, and one of each worker that ever came to work."""
    return sorted(folder.glob("*.log"))


async def _live(app: Bide) -> int:
    """How many tasks wait or are being delivered."""
    tally = await app.tally()
    return tally.number(TOPIC, State.WAITING) + tally.number(TOPIC, State.LEASED)


def _percentiles(lengths: Sequence[float]) -> dict[str, float]:
    """Of sorted lengths."""
    if not lengths:
        return {}
    parts = {"p50": 0.5, "p99": 0.99, "p999": 0.999, "most": 1.0}
    return {name: round(lengths[min(len(lengths) - 1, int(part * len(lengths)))], 2) for name, part in parts.items()}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bide.testing.culling", description=__doc__)
    parser.add_argument("url", help="a store that several processes can share, on this machine")
    parser.add_argument("--seconds", type=float, default=120, help="how long tasks are scheduled")
    parser.add_argument("--rate", type=float, default=2000, help="tasks a second")
    parser.add_argument("--every", type=float, default=2, help="seconds from one kill to the next")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**31))
    given = parser.parse_args()
    if urlsplit(given.url).scheme == "memory":
        parser.error("no other process can see what is in memory: give sqlite:///file.db or redis://host:6379/0")
    with tempfile.TemporaryDirectory(prefix="bide-culling-") as folder:
        try:
            report, judgement = asyncio.run(run(given, Path(folder)))
        except BideError as error:
            sys.stderr.write(f"{error}\n")
            return 2
    for kind, cases in judgement.wrong.items():
        for case in cases[:_SHOWN]:
            sys.stderr.write(f"{kind}: {case}\n")
    sys.stdout.write(json.dumps(report, indent=2) + "\n")
    return 1 if any(judgement.counts.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
