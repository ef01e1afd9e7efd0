"""S3: workers claim due rows by row locks, and step over those that others hold."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from bide_lab.processes import PostgresStrategy, changed
from bide_lab.strategy import Effect, Flaw, Item, Setting, now, together, when

_PAGE = 50
_LANES = 4
"""Claims of one process at a time, each on a connection of its own."""
_SHORTEST, _LONGEST = 0.02, 0.5
"""Seconds between two questions while nothing is due; not scaled."""


class SkipLocked(PostgresStrategy):
    """Claim, do, delete, commit."""

    name = "S3"
    title = "claims by FOR UPDATE SKIP LOCKED"
    shows = ("steady", "burst")
    flaws = (
        Flaw(
            "what is done or moved leaves dead rows until vacuum has been there", "churn",
            when("dead_rows",
                 "{dead_rows:,.0f} dead rows beside {live_rows:,.0f} live ones, {table_bytes:,.0f} bytes of table and "
                 "{index_bytes:,.0f} of indexes for {scheduled:,} tasks that are all over; vacuums meanwhile: "
                 "{vacuums:.0f}"),
        ),
    )  # fmt: skip

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self.tasks = self.table("task")

    async def prepare(self) -> None:
        await self.pool.execute(f"CREATE TABLE {self.tasks} (id text PRIMARY KEY, due bigint NOT NULL)")
        await self.pool.execute(f"CREATE INDEX ON {self.tasks} (due)")

    async def schedule(self, items: Sequence[Item]) -> None:
        await self.pool.execute(
            f"INSERT INTO {self.tasks} SELECT * FROM unnest($1::text[], $2::bigint[])",
            [item.key for item in items], [item.due for item in items],
        )  # fmt: skip

    async def reschedule(self, item: Item) -> bool:
        """Waits for a worker that has claimed it, and is too late then."""
        move = f"UPDATE {self.tasks} SET due = $1 WHERE id = $2"
        return changed(await self.pool.execute(move, item.due, item.key))

    async def cancel(self, key: str) -> bool:
        return changed(await self.pool.execute(f"DELETE FROM {self.tasks} WHERE id = $1", key))

    async def run(self, role: str, effect: Effect) -> None:
        await together(*(self.lane(effect) for _ in range(_LANES)))

    async def lane(self, effect: Effect) -> None:
        pause = _SHORTEST
        while True:
            if await self.claim(effect):
                pause = _SHORTEST
            else:
                await asyncio.sleep(pause)
                pause = min(2 * pause, _LONGEST)

    async def claim(self, effect: Effect) -> int:
        """How many it was."""
        async with self.pool.acquire() as connection, connection.transaction():
            found = await connection.fetch(
                f"SELECT id, due FROM {self.tasks} WHERE due <= $1 ORDER BY due LIMIT {_PAGE} FOR UPDATE SKIP LOCKED",
                now(),
            )
            self.counted.update(claims=1, empty_claims=not found)
            if found:
                for one in found:
                    await effect(one["id"], one["due"])
                done = [one["id"] for one in found]
                await connection.execute(f"DELETE FROM {self.tasks} WHERE id = ANY($1::text[])", done)
        return len(found)

    async def left(self) -> Mapping[str, float]:
        """ANALYZE reads all pages of a table of this size, so that its count of dead rows is one."""
        await self.pool.execute(f"ANALYZE {self.tasks}")
        seen = await self.pool.fetchrow(
            "SELECT n_live_tup AS live_rows, n_dead_tup AS dead_rows, pg_table_size(relid) AS table_bytes, "
            "pg_indexes_size(relid) AS index_bytes, vacuum_count + autovacuum_count AS vacuums "
            "FROM pg_stat_user_tables WHERE relid = $1::regclass",
            self.tasks,
        )
        return dict(seen)
