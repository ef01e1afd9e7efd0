"""Kills workers that share a store, under load, and checks what the store had promised: see the package."""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import time
from pathlib import Path
from typing import Any

from bide.wiring import without_secrets
from bide_proofs.culling.crew import LEASE, TOPIC, Crew, app_on
from bide_proofs.culling.judge import Judgement
from bide_proofs.culling.lines import Journal, Left, read
from bide_proofs.culling.load import Load
from bide_proofs.trial import (
    PATIENCE,
    WrongByKind,
    live_tasks,
    not_in_memory,
    own_namespace,
    parser_of,
    percentiles,
    tried,
)


async def run(given: argparse.Namespace, folder: Path) -> tuple[dict[str, Any], WrongByKind]:
    """One run on the store that is given; the report, and what was wrong."""
    journal = Journal(folder / "callers.log")
    async with own_namespace(given.url, "cull") as url, app_on(url) as app:
        if await live_tasks(app, TOPIC):
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
            while await live_tasks(app, TOPIC) and time.monotonic() < began + PATIENCE:  # noqa: ASYNC110 - nobody tells
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
        "leases_lost_alive": judgement.lost_alive,
        "wrong": judgement.counts,
        "lateness_ms": percentiles(judgement.lateness),
        "lateness_ms_first_attempts": percentiles(judgement.untouched),
    }
    return report, judgement.wrong


def logs(folder: Path) -> list[Path]:
    """One of the callers, and one of each worker that ever came to work."""
    return sorted(folder.glob("*.log"))


def main() -> int:
    parser = parser_of("culling", __doc__)
    parser.add_argument("url", help="a store that several processes can share, on this machine")
    parser.add_argument("--seconds", type=float, default=120, help="how long tasks are scheduled")
    parser.add_argument("--rate", type=float, default=2000, help="tasks a second")
    parser.add_argument("--every", type=float, default=2, help="seconds from one kill to the next")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**31))
    given = parser.parse_args()
    not_in_memory(parser, given.url)
    return tried("culling", lambda folder: run(given, folder))


if __name__ == "__main__":
    sys.exit(main())
