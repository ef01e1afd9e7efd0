"""A watched table that is looked at on a replica: what that shows too late makes rows late, and nothing else."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import pytest
from tests.stores.sql.database import Database
from tests.waiting import until

from bide import BadInput, Bide, Row, StoreUnavailable, TableSource

DUE = "2020-01-01 08:00:00"
STOP = {"postgres": "SELECT pg_wal_replay_pause()", "mysql": "STOP SLAVE SQL_THREAD"}
GO_ON = {"postgres": "SELECT pg_wal_replay_resume()", "mysql": "START SLAVE SQL_THREAD"}


def watched(app: Bide, **options: Any) -> tuple[Any, list[int]]:
    """A watch, and the ids that its handler is given."""
    given = {"table": "posts", "due": "due", "where": "status = 2", "changes": {"status": 3}}
    watch = app.watch(TableSource(**{**given, **options}))
    handled: list[int] = []

    @watch.handler
    async def publish(row: Row) -> None:
        handled.append(row.id)

    return watch, handled


async def test_a_replica_is_looked_at_and_what_fires_is_asked_for_on_the_primary(
    database: Database, starts: Any, caplog: pytest.LogCaptureFixture
) -> None:
    primary, replica, _ = await database.pair(starts)
    primary.ask("CREATE TABLE posts (id integer PRIMARY KEY, status integer, due timestamp)")
    app = Bide("memory:")
    _, handled = watched(app, database=primary.url, reads=replica.url, dead={"status": 9})

    def add(*numbers: int) -> None:
        for number in numbers:
            primary.ask(f"INSERT INTO posts VALUES ({number}, 2, '{DUE}')")

    async def follows() -> None:
        there = "SELECT id, status FROM posts ORDER BY id"
        await until(lambda: replica.ask(there) == primary.ask(there), "the replica to follow")

    await until(lambda: _has(replica, "posts"), "the table")
    async with app:
        [loop] = app.table_loops()
        await loop.open()
        try:
            assert await loop.run_once() == (0, None)
            replica.ask(STOP[database.name])
            add(1)
            assert await loop.run_once() == (0, None), "it is late"
            replica.ask(GO_ON[database.name])
            add(2, 3)
            await follows()
            replica.ask(STOP[database.name])
            primary.ask("UPDATE posts SET status = 1 WHERE id = 2")
            for _ in range(3):  # all three are due still on the replica
                await loop.run_once()
            assert sorted(handled) == [1, 3]
            assert sorted(map(tuple, primary.ask("SELECT id, status FROM posts"))) == [(1, 3), (2, 1), (3, 3)]
            assert (loop.stats.fired, loop.stats.failed) == (2, 0)
            replica.ask(GO_ON[database.name])
            add(4)
            await follows()
            table: Any = loop._table
            table._time.saw(0, 0.0, 0.0)  # as if this machine's clock had parted from the primary's meanwhile
            table._connections.answered = -math.inf
            await loop.run_once()
            assert sorted(handled) == [1, 3, 4]
            await asyncio.to_thread(replica.kill)
            with pytest.raises(StoreUnavailable, match=str(replica.port)):
                await loop.run_once()
        finally:
            await loop.stop(0)


def _has(server: Any, table: str) -> bool:
    [row] = server.ask(f"SELECT count(*) FROM information_schema.tables WHERE table_name = '{table}'")
    return bool(row[0])


@pytest.mark.parametrize(
    "reads",
    ["redis://:secret@h", "sqlite:///x", "nothing", "postgresql+x://u:secret@h", "mysql://u:secret@h/d?nothing=1"],
)
async def test_a_replica_is_one_of_the_same_kind(database: Database, url: str, reads: str) -> None:
    if database.name == "postgres" and reads.startswith("mysql"):
        reads = "mysql://u:secret@h/d"
    app = Bide("memory:")
    watched(app, database=url, reads=reads)
    async with app:
        with pytest.raises(BadInput) as raised:
            app.table_loops()
    assert raised.value.field == "reads"
    assert "secret" not in str(raised.value)
