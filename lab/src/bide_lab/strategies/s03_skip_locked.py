"""Skip locked: workers claim due rows by row locks, and step over those that others hold.

**Idea.** A table of tasks with an index by due time. A worker begins a transaction, selects due rows FOR UPDATE SKIP
LOCKED, does them, deletes them and commits. The lock is the lease: a worker that dies loses its connection, the server
rolls back, and the rows are there for the next one. With nothing due a worker waits, longer each time.

**Origin.** PostgreSQL 9.5 brought the clause for just this; most queues that live in a database are built on it.

**Cost.** Four round trips per page of 50, shared by its rows. While nothing is due each of a worker's four lanes asks
twice a second. Lateness is up to the back-off, half a second. A transaction stays open for as long as all tasks of its
page take, and holds back vacuum for the whole database; of a worker that dies the page is done again from its start.

**Flaw.** Every task is an inserted and a deleted row, every move another: dead rows, which stay in table and index
until vacuum has been there and make each claim read more. Reading the head of the queue is what it does most.

**Right when.** The data are in PostgreSQL already, tasks are short, and half a second does not matter.

**To bide.** bide's store on PostgreSQL uses the same clause, with leases that outlive a connection and a wake-up for
what is due sooner: schedule each row that is left, in one transaction with its deletion (app.using).

      worker 1: BEGIN; SELECT ... WHERE due <= now        [ due 10:00:00  k1 ] locked by 1
                ORDER BY due LIMIT 50                     [ due 10:00:00  k2 ] locked by 1
                FOR UPDATE SKIP LOCKED;                   [ due 10:00:01  k3 ] locked by 2
                do them; DELETE; COMMIT                   [ due 10:00:01  k4 ] free
      worker 2: the same, steps over k1 and k2            [ dead row         ] until vacuum
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from bide_lab.journal import Figures
from bide_lab.servers.stores import PostgresStrategy, changed
from bide_lab.strategy import Effect, Flaw, Item, Setting, now, together

_PAGE = 50
_LANES = 4
"""Claims of one process at a time, each on a connection of its own."""
_SHORTEST, _LONGEST = 0.02, 0.5
"""Seconds between two questions while nothing is due; not scaled."""


def _bloat(seen: Figures) -> str:
    dead, live = seen.counts.get("dead_rows", 0), seen.counts.get("live_rows", 0)
    if not dead:
        return ""
    vacuums = seen.counts.get("vacuums", 0)
    return (
        f"{dead:.0f} dead rows beside {live:.0f} live ones, {seen.counts['table_bytes'] / 1024:.0f} KiB of table and "
        f"{seen.counts['index_bytes'] / 1024:.0f} KiB of indexes for {seen.scheduled} tasks that are all over"
        f"{f' (vacuums meanwhile: {vacuums:.0f})' if vacuums else ''}"
    )


class SkipLocked(PostgresStrategy):
    """Claim, do, delete, commit."""

    name = "S3"
    title = "claims by FOR UPDATE SKIP LOCKED"
    shows = ("steady", "burst")
    flaws = (Flaw("what is done or moved leaves dead rows until vacuum has been there", "churn", _bloat),)

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
