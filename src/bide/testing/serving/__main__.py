"""Kills instances of `bide serve` under load, and checks what they had promised: see the package."""

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

from bide.core.errors import BideError
from bide.ports import HasSchema
from bide.settings import Settings
from bide.testing.namespace import own_namespace
from bide.testing.serving.instances import COUNT, LEASE, Instances
from bide.testing.serving.judge import Judgement
from bide.testing.serving.lines import Line, Wrong
from bide.testing.serving.load import LONGEST_MOVED, Load
from bide.testing.serving.receiver import Receiver
from bide.wiring import store_maker, without_secrets

_DRAIN = LONGEST_MOVED + LEASE + 30
"""Seconds within which everything has to be over after the last answer."""
_SHOWN = 10
"""Cases of each kind of wrong that are shown."""


async def run(given: argparse.Namespace, folder: Path) -> tuple[dict[str, Any], Judgement]:
    """One run on the store that is given; the report, and the judgement in it."""
    lines: list[Line] = []
    note, over = lines.append, asyncio.Event()
    async with own_namespace(given.url, "serving") as url, Receiver(note, given.seed) as receiver:
        store = store_maker(url, Settings())()
        if isinstance(store, HasSchema) and await store.plan():
            await store.migrate()
        instances = Instances(url, receiver, folder, note)
        try:
            await instances.start()
            async with Load(instances.urls, note, given.seed) as load:
                if await load.left():
                    raise SystemExit("the store has tasks of the topic already")
                culling = asyncio.create_task(instances.cull(given.kill_every, over))
                try:
                    await load.run(given.seconds, given.rate)
                    await load.finish()
                finally:
                    over.set()
                    await culling
                await instances.ready()
                began = time.monotonic()
                drained = await _drained(load, receiver, began + _DRAIN)
                for one in await load.left() if not drained else ():
                    note(Wrong("left", one))
                lasted = time.monotonic() - began
        finally:
            await instances.stop()
    judgement = Judgement(lines)
    report = {
        "store": without_secrets(given.url),
        "seed": given.seed,
        "instances": COUNT,
        "kills": instances.kills,
        "lease_seconds": LEASE,
        "load": {
            "seconds": round(load.lasted, 1),
            "rate_asked": given.rate,
            "rate": round(load.scheduled / load.lasted),
            "acknowledged": load.scheduled,
            "answers": {verb: dict(sorted(words.items())) for verb, words in sorted(judgement.answers.items())},
            "sent_again": {"maybe_done": load.unanswered, "not_done": load.not_done},
        },
        "drained_seconds": round(lasted, 1),
        "deliveries": {"all": sum(judgement.effects.values()), **dict(sorted(judgement.effects.items()))},
        "receiver": {"signatures_checked_by": receiver.checked_by, **dict(sorted(receiver.behaved.items()))},
        "wrong": judgement.counts,
        "call_ms": _percentiles(judgement.calls),
        "lateness_ms": _percentiles(judgement.lateness),
        "lateness_ms_first_attempts": _percentiles(judgement.untouched),
        "recovery_seconds": {
            "instance_answers": _percentiles(sorted(instances.ready_seconds)),
            "held_by_the_dead": {"tasks": len(judgement.recovered), **_percentiles(judgement.recovered)},
        },
    }
    return report, judgement


async def _drained(load: Load, receiver: Receiver, until: float) -> bool:
    """Whether everything is over in time: nothing waits in the store, or is under way, twice in a row."""
    times = 0
    while times < 2:
        times = 0 if await load.left() or receiver.busy else times + 1
        if time.monotonic() > until:
            return False
        await asyncio.sleep(0.1)
    return True


def _percentiles(lengths: Sequence[float]) -> dict[str, float]:
    """Of sorted lengths."""
    if not lengths:
        return {}
    parts = {"p50": 0.5, "p99": 0.99, "p999": 0.999, "most": 1.0}
    return {name: round(lengths[min(len(lengths) - 1, int(part * len(lengths)))], 2) for name, part in parts.items()}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bide.testing.serving", description=__doc__)
    parser.add_argument("url", help="a store that several processes can share, on this machine")
    parser.add_argument("--seconds", type=float, default=120, help="how long tasks are scheduled")
    parser.add_argument("--rate", type=float, default=500, help="tasks a second")
    parser.add_argument("--kill-every", type=float, default=3, help="seconds from one kill to the next")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**31))
    given = parser.parse_args()
    if urlsplit(given.url).scheme == "memory":
        parser.error("no other process can see what is in memory: give sqlite:///file.db or redis://host:6379/0")
    with tempfile.TemporaryDirectory(prefix="bide-serving-") as folder:
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
