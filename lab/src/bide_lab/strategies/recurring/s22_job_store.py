"""S22: the clustered job store: triggers in a database, one row lock for all nodes."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, ClassVar
from uuid import uuid4

from bide_lab.processes import PostgresStrategy, changed
from bide_lab.strategy import RUN_LOST, RUN_TWICE, Effect, Flaw, Harm, Recurrent, due_or_told, now, poll, when

_CHECK_IN, _MISFIRE, _IDLE = 7.5, 60.0, 30.0
"""Seconds of strategy time, as Quartz has them: between check-ins; late enough for a misfire; to look ahead."""
_TAKEN_FOR_DEAD = Flaw(
    "a node that is taken for dead, and is not, does a run that another has done", "recurrence", RUN_TWICE, Harm.TWICE
)


class AtMostOnce(PostgresStrategy, Recurrent):
    """A node acquires the trigger ahead of its time, advances it at its time, and does the run then."""

    name = "S22"
    title = "clustered job store"
    loses = "the run that a node had begun when it died"
    recovers: ClassVar[bool] = False
    flaws: ClassVar[Sequence[Flaw]] = (
        Flaw("a node that dies after it advanced the trigger loses the run", "recurrence", RUN_LOST, Harm.LOST),
        _TAKEN_FOR_DEAD,
        Flaw("all nodes take turns at one row lock, several times for each run", "recurrence",
             when("locks", "{locks:,.0f} turns for {runs:.0f} runs of the nodes left, {waits:.0f} after a wait")),
    )  # fmt: skip

    async def open(self) -> None:
        await super().open()
        self.triggers, self.fired, self.states, self.locks = map(self.table, ("triggers", "fired", "states", "locks"))
        self.me, self._checked_in, self._signal = uuid4().hex, now(), asyncio.Event()

    async def prepare(self) -> None:
        await self.pool.execute(
            f"CREATE TABLE {self.triggers} (name text PRIMARY KEY, next bigint, state text);"
            f"CREATE TABLE {self.fired} (entry text PRIMARY KEY, node text, name text, due bigint, state text);"
            f"CREATE TABLE {self.states} (node text PRIMARY KEY, checked_in bigint);"
            f"CREATE TABLE {self.locks} AS SELECT 'TRIGGER_ACCESS' AS name;"
            f"INSERT INTO {self.triggers} VALUES ('rule', {self.nominal(now()) + self.every}, 'WAITING')"
        )

    @asynccontextmanager
    async def locked(self) -> AsyncIterator[Any]:
        """A transaction with the one row lock of the cluster; counts how often another node had it."""
        async with self.pool.acquire() as connection, connection.transaction():
            free = await connection.fetch(f"SELECT name FROM {self.locks} FOR UPDATE SKIP LOCKED")
            self.counted.update(locks=1, waits=not free)
            if not free:
                await connection.execute(f"SELECT name FROM {self.locks} FOR UPDATE")
            yield connection

    async def run(self, role: str, effect: Effect) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(poll(self.setting.span(_CHECK_IN), self.check_in))
            while True:
                if one := await self.acquire():
                    await asyncio.sleep(max(0, self.turn - now()) / 1000)
                    if await self.fire(*one):
                        group.create_task(self.execute(effect, *one))
                else:
                    idle = round(self.setting.span(_IDLE - random.uniform(0, 7)) * 1000)
                    await due_or_told(now() + idle, self._signal)

    async def acquire(self) -> tuple[str, str, int] | None:
        """The next trigger within the time that a node looks ahead; a misfired one is due once, now."""
        async with self.locked() as connection:
            await connection.execute(
                f"UPDATE {self.triggers} SET next = $1 WHERE state = 'WAITING' AND name = 'rule' AND next < $2",
                self.nominal(now()), now() - round(self.setting.span(_MISFIRE) * 1000),
            )  # fmt: skip
            found = await connection.fetchrow(
                f"UPDATE {self.triggers} SET state = 'ACQUIRED' WHERE name = (SELECT name FROM {self.triggers} WHERE "
                "state = 'WAITING' AND next <= $1 ORDER BY next LIMIT 1) RETURNING name, next",
                now() + round(self.setting.span(_IDLE) * 1000),
            )
            if found is None:
                return None
            entry, (name, self.turn) = uuid4().hex, found
            held = entry, self.me, name, self.turn
            await connection.execute(f"INSERT INTO {self.fired} VALUES ($1, $2, $3, $4, 'ACQUIRED')", *held)
            return entry, name, self.turn

    async def fire(self, entry: str, name: str, due: int) -> bool:
        """Advance it. Like Quartz it asks whether the trigger is acquired, and not by whom."""
        advance = f"UPDATE {self.triggers} SET next = $2, state = 'WAITING' WHERE name = $1 AND state = 'ACQUIRED'"
        async with self.locked() as connection:
            mine = changed(await connection.execute(advance, name, due + self.every))
            await connection.execute(f"DELETE FROM {self.triggers} WHERE name = $1 AND name <> 'rule'", name)
            begun = f"UPDATE {self.fired} SET state = 'EXECUTING'" if mine else f"DELETE FROM {self.fired}"
            await connection.execute(f"{begun} WHERE entry = $1", entry)
            return mine

    async def execute(self, effect: Effect, entry: str, name: str, due: int) -> None:
        await effect(name, due)
        self.counted["runs"] += 1
        async with self.locked() as connection:
            await connection.execute(f"DELETE FROM {self.fired} WHERE entry = $1", entry)

    async def check_in(self) -> None:
        """And take over from nodes that have not for long what they acquired, and what they began if it recovers."""
        at, interval = now(), round(self.setting.span(_CHECK_IN) * 1000)
        before, self._checked_in = at - max(interval, at - self._checked_in) - interval, at
        await self.pool.execute(
            f"INSERT INTO {self.states} VALUES ($1, $2) ON CONFLICT (node) DO UPDATE SET checked_in = $2", self.me, at
        )
        if dead := await self.pool.fetch(f"SELECT node FROM {self.states} WHERE checked_in < $1", before):
            theirs = f"FROM {self.fired} WHERE node = ANY($1::text[])"
            async with self.locked() as connection:
                for change in (
                    f"UPDATE {self.triggers} SET state = 'WAITING' WHERE state = 'ACQUIRED' AND name IN "
                    f"(SELECT name {theirs} AND state = 'ACQUIRED')",
                    f"INSERT INTO {self.triggers} SELECT 'recover_' || entry, due, 'WAITING' {theirs} "
                    f"AND state = 'EXECUTING' AND {self.recovers}",
                    f"DELETE {theirs}",
                    f"DELETE FROM {self.states} WHERE node = ANY($1::text[])",
                ):
                    await connection.execute(change, [one["node"] for one in dead])
            self._signal.set()


class RequestsRecovery(AtMostOnce):
    """The same with jobs that ask for it."""

    name = "S22-recovery"
    title = "clustered job store, jobs request recovery"
    loses = ""
    recovers = True
    flaws = (_TAKEN_FOR_DEAD,)
