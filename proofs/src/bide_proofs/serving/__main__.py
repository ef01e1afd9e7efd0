"""Kills instances of `bide serve` under load, and checks what they had promised: see the package."""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import time
from pathlib import Path
from typing import Any

from bide.ports import HasSchema
from bide.settings import Settings
from bide.wiring import store_maker, without_secrets
from bide_proofs.harness.command import PATIENCE, WrongByKind, not_in_memory, parser_of, percentiles, tried
from bide_proofs.harness.stores import own_namespace
from bide_proofs.serving.instances import COUNT, LEASE, Instances
from bide_proofs.serving.judge import Judgement
from bide_proofs.serving.lines import Line, Wrong
from bide_proofs.serving.load import Load
from bide_proofs.serving.receiver import Receiver


async def run(given: argparse.Namespace, folder: Path) -> tuple[dict[str, Any], WrongByKind]:
    """One run on the store that is given; the report, and what was wrong."""
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
                drained = await _drained(load, receiver, began + PATIENCE)
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
        "leases_lost_alive": judgement.lost_alive,
        "deliveries": {"all": sum(judgement.effects.values()), **dict(sorted(judgement.effects.items()))},
        "receiver": {"signatures_checked_by": receiver.checked_by, **dict(sorted(receiver.behaved.items()))},
        "wrong": judgement.counts,
        "call_ms": percentiles(judgement.calls),
        "lateness_ms": percentiles(judgement.lateness),
        "lateness_ms_first_attempts": percentiles(judgement.untouched),
        "recovery_seconds": {
            "instance_answers": percentiles(sorted(instances.ready_seconds)),
            "held_by_the_dead": {"tasks": len(judgement.recovered), **percentiles(judgement.recovered)},
        },
    }
    return report, judgement.wrong


async def _drained(load: Load, receiver: Receiver, until: float) -> bool:
    """Whether everything is over in time: nothing waits in the store, or is under way, twice in a row."""
    times = 0
    while times < 2:
        times = 0 if await load.left() or receiver.busy else times + 1
        if time.monotonic() > until:
            return False
        await asyncio.sleep(0.1)
    return True


def main() -> int:
    parser = parser_of("serving", __doc__)
    parser.add_argument("url", help="a store that several processes can share, on this machine")
    parser.add_argument("--seconds", type=float, default=120, help="how long tasks are scheduled")
    parser.add_argument("--rate", type=float, default=500, help="tasks a second")
    parser.add_argument("--kill-every", type=float, default=3, help="seconds from one kill to the next")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**31))
    given = parser.parse_args()
    not_in_memory(parser, given.url)
    return tried("serving", lambda folder: run(given, folder))


if __name__ == "__main__":
    sys.exit(main())
