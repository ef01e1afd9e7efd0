"""Place orders with timers, and kill clients and workers at random: see the package."""

from __future__ import annotations

import argparse
import asyncio
import random
import secrets
import sys
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

from bide.wiring import without_secrets
from bide_proofs import kill_in_transaction
from bide_proofs.harness.command import WrongByKind, add_seed, drained, migrated, parser_of, refuse_unless_empty, tried
from bide_proofs.harness.processes import READY, Child, ChildSpec, ProcessGroup
from bide_proofs.kill_in_transaction.child import EFFECT, PLACED, TOPIC, Spec, Tables, app_on, judge

CLIENT, WORKER = "client", "worker"


async def run(given: argparse.Namespace, folder: Path) -> tuple[dict[str, Any], WrongByKind]:
    """Run once; return the report and the failures."""
    name = f"orders_{secrets.token_hex(4)}"
    tables = Tables(given.url, name)
    await migrated(given.url)
    await tables.make()
    try:
        async with app_on(given.url) as app:
            await refuse_unless_empty(app, [TOPIC])
        kills = Kills(given, name, folder)
        try:
            placed, took = await kills.run()
        finally:
            await kills.group.abandon()
        async with app_on(given.url) as app:
            left = [task.key async for task in app.find(topic=TOPIC)]
        orders, effects = await tables.numbers(PLACED), await tables.numbers(EFFECT)
    finally:
        with suppress(Exception):
            await tables.drop()
    wrong = judge(kills.said, orders, effects, left, kills.group.wrong)
    report = {
        "store": without_secrets(given.url), "seed": given.seed, "orders": given.orders, "committed": len(orders),
        "effects": len(effects), "killed": kills.killed,
        "seconds": {"placing": round(placed, 1), "all": round(took, 1)},
    }  # fmt: skip
    return report, wrong


class Kills:
    """Clients and workers, which are killed at random."""

    def __init__(self, given: argparse.Namespace, name: str, folder: Path) -> None:
        self.said: dict[int, str] = {}
        """The last report about each order."""
        self.killed: Counter[str] = Counter()
        self.group = ProcessGroup(folder, self._spec_of, heard=self._heard)
        self._given = given
        self._name = name
        self._chance = random.Random(given.seed)

    def _spec_of(self, kind: str, slot: int, _: str) -> ChildSpec:
        given, orders = self._given, None
        if kind == CLIENT:
            orders = [one for one in range(slot, given.orders, given.clients) if one not in self.said]
        spec = Spec(url=given.url, tables=self._name, orders=orders)
        return ChildSpec(module="bide_proofs.kill_in_transaction.child", spec=spec, finishes=kind == CLIENT)

    def _heard(self, _: Child, said: dict[str, Any]) -> None:
        if "order" in said:
            number, word = said["order"]
            self.said[number] = word

    async def run(self) -> tuple[float, float]:
        """Run until no timer waits any more; return the seconds until all orders were placed, and in all."""
        given, group, began = self._given, self.group, time.monotonic()
        await group.start(WORKER, given.workers)
        await group.start(CLIENT, given.clients)
        while clients := group.of(CLIENT):
            every = given.every * self._chance.uniform(0.5, 1.5)
            await asyncio.wait([client.over for client in clients], timeout=every)
            await self._kill(self._chance.choice((CLIENT, WORKER)))
        placed = time.monotonic() - began
        draining = asyncio.create_task(drained(lambda: app_on(given.url), TOPIC))
        # kill workers also while only timers are left, and at least once if all orders were placed before any kill
        for _ in range(2):
            await self._kill(WORKER)
            await asyncio.wait([draining], timeout=given.every)
        await draining
        await group.end(WORKER)
        return placed, time.monotonic() - began

    async def _kill(self, kind: str) -> None:
        """Kill a process that is already at work, so that all make progress."""
        works = "order" if kind == CLIENT else READY
        if children := [child for child in self.group.of(kind) if works in child.said]:
            self.killed[kind] += await self.group.kill(self._chance.choice(children))


def main() -> int:
    parser = parser_of("bide_proofs.kill_in_transaction", kill_in_transaction.__doc__)
    parser.add_argument("url", help="a store that shares a database with its callers: postgresql:, mysql: or sqlite:")
    parser.add_argument("--orders", type=int, default=10_000)
    parser.add_argument("--clients", type=int, default=3, help="processes that place orders")
    parser.add_argument("--workers", type=int, default=2, help="processes that carry out their timers")
    parser.add_argument("--every", type=float, default=0.7, help="seconds from one kill to the next, about")
    add_seed(parser)
    given = parser.parse_args()
    return tried("kill_in_transaction", lambda folder: run(given, folder))


if __name__ == "__main__":
    sys.exit(main())
