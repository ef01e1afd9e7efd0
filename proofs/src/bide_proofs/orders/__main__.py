"""Places orders with timers and kills everybody at random: see the package."""

from __future__ import annotations

import argparse
import asyncio
import random
import secrets
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from bide.ports import HasSchema
from bide.settings import Settings
from bide.wiring import store_maker, without_secrets
from bide_proofs.harness.command import PATIENCE, parser_of, tried
from bide_proofs.harness.stores import live_tasks
from bide_proofs.orders.crew import TOPIC, Crew, app_on, read
from bide_proofs.orders.databases import EFFECT, PLACED, database_of, tables
from bide_proofs.orders.judge import judge

_SHOWN = 10


async def run(given: argparse.Namespace, folder: Path) -> tuple[dict[str, Any], dict[str, list[str]]]:
    """One run; the report, and what was wrong."""
    store = store_maker(given.url, Settings())()
    if isinstance(store, HasSchema):
        await store.migrate()
    name = f"orders_{secrets.token_hex(4)}"
    database = database_of(given.url, name)
    crew = Crew(given.url, name, folder, random.Random(given.seed))
    began = time.monotonic()
    await database.run(*tables(name))
    try:
        async with app_on(given.url) as app:
            if await live_tasks(app, TOPIC):
                raise SystemExit(f"the store has tasks of the topic {TOPIC!r} already")
            try:
                await crew.start(given.orders, given.clients, given.workers)
                await crew.cull(given.every)
                if not sum(crew.killed.values()):  # all was placed before anybody's turn came
                    await crew.kill_worker()
                placed, kills_at = time.monotonic() - began, time.monotonic()
                while await live_tasks(app, TOPIC) and time.monotonic() < kills_at + PATIENCE:
                    await asyncio.sleep(min(0.5, given.every))
                    if time.monotonic() < kills_at + 2 * given.every:
                        await crew.kill_worker()
            finally:
                await crew.stop()
            left = [task.key async for task in app.find(topic=TOPIC)]
        said: dict[int, str] = {}
        for path in crew.logs:
            said |= read(path)
        orders = [number for (number,) in await database.run(f"SELECT number FROM {name}_{PLACED}")]
        effects = [number for (number,) in await database.run(f"SELECT number FROM {name}_{EFFECT}")]
    finally:
        with suppress(Exception):
            await database.run(f"DROP TABLE {name}_{PLACED}", f"DROP TABLE {name}_{EFFECT}")
    wrong = judge(said, orders, effects, left, crew.ended)
    report = {
        "store": without_secrets(given.url),
        "seed": given.seed,
        "orders": given.orders,
        "committed": len(orders),
        "effects": len(effects),
        "killed": crew.killed,
        "seconds": {"placing": round(placed, 1), "all": round(time.monotonic() - began, 1)},
        "wrong": {kind: len(cases) for kind, cases in wrong.items()},
    }
    return report, wrong


def main() -> int:
    parser = parser_of("orders", __doc__)
    parser.add_argument("url", help="a store that shares a database with its callers: postgresql:, mysql: or sqlite:")
    parser.add_argument("--orders", type=int, default=10_000)
    parser.add_argument("--clients", type=int, default=3, help="processes that place orders")
    parser.add_argument("--workers", type=int, default=2, help="processes that carry out their timers")
    parser.add_argument("--every", type=float, default=0.7, help="seconds from one kill to the next, about")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**31))
    given = parser.parse_args()
    return tried("orders", lambda folder: run(given, folder))


if __name__ == "__main__":
    sys.exit(main())
