"""A client that places orders, each with its timer in one transaction; or a worker that carries out their timers."""

from __future__ import annotations

import asyncio
import random
from datetime import timedelta
from typing import Any

import msgspec

from bide.app import Bide
from bide.core.errors import StoreError
from bide.core.tasks import Task
from bide.settings import Settings
from bide_proofs.harness.processes import Parent, ready, run, say, spec_of
from bide_proofs.kill_in_transaction.tables import BEGUN, COMMITTED, EFFECT, PLACED, ROLLED_BACK, Tables

TOPIC = "orders.close"
LEASE = 2.0
"""Seconds after which what a dead worker held comes back."""
_LONGEST_DELAY = 1.0
_SIDE_BY_SIDE = 4


class Spec(msgspec.Struct, frozen=True, kw_only=True):
    """The first line of its standard input."""

    url: str
    tables: str
    orders: list[int] | None = None
    """Of a client: those that it places. A worker has none."""


def app_on(url: str) -> Bide:
    """With the shipped defaults but for leases, whatever the environment says.

    On a slow machine workers are killed again and again before they have done anything: no task is dead for that.
    """
    return Bide(url, settings=Settings(lease=int(LEASE * 1000), losses=1_000_000, keep_done=0, keep_cancelled=0))


async def _work(spec: Spec, parent: Parent) -> None:
    app, tables = app_on(spec.url), Tables(spec.url, spec.tables)

    @app.handler(TOPIC)
    async def close(task: Task[Any]) -> None:
        async with task.transaction() as connection:
            await tables.write(connection, EFFECT, int(task.key))

    async with app, app.worker():
        ready()
        await parent.over.wait()


async def _place(spec: Spec, parent: Parent) -> None:
    tables, chance, left = Tables(spec.url, spec.tables), random.Random(), iter(spec.orders or ())
    execute, begins = tables.driver.execute, tables.driver.begins

    async def place(connection: Any) -> None:
        for number in left:
            say(order=(number, BEGUN))
            await execute(connection, begins)
            try:
                await tables.write(connection, PLACED, number)
                delay = timedelta(seconds=chance.uniform(0, _LONGEST_DELAY))
                await app.using(connection).schedule(TOPIC, key=f"{number}", group=f"order-{number}", delay=delay)
            except StoreError:  # on SQLite others may write for long
                await execute(connection, "ROLLBACK")
                say(order=(number, ROLLED_BACK))
                continue
            commits = chance.random() < 0.5
            await execute(connection, "COMMIT" if commits else "ROLLBACK")
            say(order=(number, COMMITTED if commits else ROLLED_BACK))

    async with app_on(spec.url) as app:
        ready()
        await asyncio.gather(*[place(await tables.connect()) for _ in range(_SIDE_BY_SIDE)])


if __name__ == "__main__":
    given = spec_of(Spec)
    run(lambda parent: (_work if given.orders is None else _place)(given, parent))
