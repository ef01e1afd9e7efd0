"""Watched tables in real time: on time, quiet, by several workers, through a kill, and against whoever changes rows."""

from __future__ import annotations

import asyncio
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import asyncpg
import pytest
from tests.servers.stalls import Stalls
from tests.tables.conftest import Place, write

from bide import Bide, Row, Sql, Watch
from bide.core.instants import Millis
from bide.engine.tables import TableLoop

PATIENCE = 30.0


def now() -> Millis:
    return time.time_ns() // 1_000_000


def log_of(place: Place) -> str:
    return place.table.replace("posts", "log")


async def until(condition: Any, patience: float = PATIENCE) -> None:
    """Wait until the coroutine function `condition` says so."""
    ends = time.monotonic() + patience
    while not await condition():
        assert time.monotonic() < ends, "it did not happen in time"
        await asyncio.sleep(0.005)


@asynccontextmanager
async def watching(app: Bide, watch: Watch) -> AsyncIterator[TableLoop]:
    """The app's worker at work."""
    async with app.worker() as worker:
        [loop] = [loop for loop in worker.tables if loop.watch is watch]
        yield loop


@pytest.mark.real_time
async def test_the_sleep_ends_when_the_next_row_is_due(place: Place, stalls: Stalls) -> None:
    app = await place.app()
    watch = app.watch(place.source(look_every="1h"))
    late: list[float] = []

    @watch.handler
    async def publish(row: Row) -> None:
        late.append(row.lateness.total_seconds())

    for number in range(1, 4):
        await place.add(number, now() + 200 * number)
    async with watching(app, watch) as loop:
        await until(lambda: fired(loop, 3))
    assert min(late) >= 0, "never early"
    assert max(late) < 1.0 + stalls.seconds


@pytest.mark.real_time
async def test_a_row_that_this_process_writes_is_seen_when_it_says_so(place: Place) -> None:
    app = await place.app()
    watch = app.watch(place.source(look_every="1h"))
    async with watching(app, watch) as loop:
        await until(lambda: looked(loop, 1))
        await place.add(1, now())
        watch.look()

        async def fired() -> bool:
            return loop.stats.fired == 1

        await until(fired)
    assert await place.states() == {1: (3, 1)}
    watch.look()  # nobody is there any more, and that is no error


async def looked(loop: TableLoop, times: int) -> bool:
    return loop.stats.looks >= times


@pytest.mark.real_time
async def test_an_idle_table_costs_one_look_at_a_time(place: Place) -> None:
    app = await place.app()
    watch = app.watch(place.source(look_every="250ms"))
    await place.add(1, now() + 3_600_000)
    async with watching(app, watch) as loop:
        await until(lambda: looked(loop, 1))
        before = loop.stats.looks
        await asyncio.sleep(1.0)
        assert 2 <= loop.stats.looks - before <= 6


@pytest.mark.real_time
async def test_ten_thousand_rows_by_four_workers_are_fired_once_each(place: Place) -> None:
    count = 10_000
    await place.add_many(1, count, now() - 1_000)
    async with AsyncExitStack() as workers, asyncio.timeout(120):
        working = []
        for _ in range(4):
            app = await place.app()
            app.watch(place.source())
            working.append(await workers.enter_async_context(app.worker()))
        await asyncio.gather(*(worker.until_empty() for worker in working))
        fired = [worker.tables[0].stats.fired for worker in working]
    assert sum(fired) == count
    assert Counter((await place.states()).values()) == {(3, 1): count}


@pytest.mark.real_time
async def test_handlers_of_several_workers_have_each_row_once(place: Place) -> None:
    count = 200
    await place.add_many(1, count, now() - 1_000)
    handled: list[int] = []

    async def publish(row: Row) -> None:
        await asyncio.sleep(0.0005)
        handled.append(row.id)
        await write(row, f"INSERT INTO {log_of(place)} VALUES ({row.id})")

    async with AsyncExitStack() as workers, asyncio.timeout(120):
        working = []
        for _ in range(3):
            app = await place.app()
            app.watch(place.source(), concurrency=4).handler(publish)
            working.append(await workers.enter_async_context(app.worker()))
        await asyncio.gather(*(worker.until_empty() for worker in working))
    assert sorted(handled) == list(range(1, count + 1))
    assert await place.run(f"SELECT count(*), count(DISTINCT id) FROM {log_of(place)}") == [(count, count)]


@pytest.mark.real_time
async def test_firing_and_taking_back_at_once_a_thousand_times(place: Place) -> None:
    """Whoever takes a post back is told the truth: either it is a draft again for good, or it was too late."""
    count, taken_back = 1_000, set()
    app = await place.app()
    watch = app.watch(place.source(page=7))
    begin = now() + 200
    await place.add_each([begin + number // 2 for number in range(1, count + 1)])
    async with watching(app, watch) as loop:
        for number in range(1, count + 1):
            ahead = begin + number // 2 - now() + random.uniform(-3, 3)
            # also when late: a file answers at once, and the worker would have no turn at all
            await asyncio.sleep(max(ahead, 0) / 1000)
            if await place.changed(f"UPDATE {place.table} SET status = 1 WHERE id = $1 AND status = 2", number):
                taken_back.add(number)
        await until(lambda: fired(loop, count - len(taken_back)))
    states = await place.states()
    assert {number for number, state in states.items() if state == (1, 0)} == taken_back
    assert {number for number, state in states.items() if state == (3, 1)} == set(states) - taken_back
    assert 0 < len(taken_back) < count


@pytest.mark.faults
async def test_a_worker_that_is_killed_leaves_nothing_half_done(place: Place) -> None:
    await place.add(1, now() - 1_000)
    script = Path(__file__).parent / "stopped_worker.py"
    command = [sys.executable, str(script), place.url, place.table, log_of(place)]
    process = await asyncio.to_thread(subprocess.Popen, command, stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        assert await asyncio.to_thread(process.stdout.readline) == b"within\n"
        assert await place.states() == {1: (2, 0)}
        process.send_signal(signal.SIGKILL)
        process.wait()
    finally:
        process.kill()
        process.communicate()
    app = await place.app()
    watch = app.watch(place.source())

    @watch.handler
    async def publish(row: Row) -> None:
        await write(row, f"INSERT INTO {log_of(place)} VALUES ({row.id})")

    async with app.worker() as worker, asyncio.timeout(PATIENCE):
        await worker.until_empty()
    assert await place.states() == {1: (3, 1)}
    assert await place.run(f"SELECT id FROM {log_of(place)}") == [(1,)]


@pytest.mark.real_time
async def test_a_handler_that_outlasts_the_drain_is_rolled_back(place: Place) -> None:
    app = await place.app(grace="50ms")
    watch = app.watch(place.source())
    begun = asyncio.Event()

    @watch.handler
    async def publish(row: Row) -> None:
        await write(row, f"INSERT INTO {log_of(place)} VALUES ({row.id})")
        begun.set()
        await asyncio.sleep(600)

    await place.add(1, now())
    async with app.worker(), asyncio.timeout(PATIENCE):
        await begun.wait()
    assert await place.states() == {1: (2, 0)}
    assert await place.run(f"SELECT id FROM {log_of(place)}") == []


@pytest.mark.real_time
async def test_a_time_limit_rolls_back(place: Place) -> None:
    app = await place.app()
    watch = app.watch(place.source(), timeout="50ms", retry="quick")
    tries: list[int] = []

    @watch.handler
    async def publish(row: Row) -> None:
        tries.append(row.id)
        if len(tries) == 1:
            await asyncio.sleep(600)

    await place.add(1, now())
    async with app.worker() as worker, asyncio.timeout(PATIENCE):
        await worker.until_empty()
    assert tries == [1, 1]
    assert await place.states() == {1: (3, 1)}


@pytest.mark.real_time
async def test_tasks_that_rows_became_are_delivered(place: Place) -> None:
    app = await place.app()
    delivered: list[str] = []

    @app.handler("post.publish")
    async def publish(task: Any) -> None:
        delivered.append(task.key)

    app.watch(place.source(), topic="post.publish")
    await place.add_many(1, 250, now() - 5)
    async with app.worker() as worker, asyncio.timeout(PATIENCE):
        await worker.until_empty()
    assert sorted(map(int, delivered)) == list(range(1, 251))
    assert set((await place.states()).values()) == {(3, 1)}


@pytest.mark.real_time
async def test_two_tables_do_not_wait_for_each_other(place: Place) -> None:
    if not place.holds_rows:
        pytest.skip("in a SQLite file one transaction keeps all others from writing")
    app = await place.app()
    slow = app.watch(place.source(where="status = 7"))
    app.watch(place.source())
    waiting, go = asyncio.Event(), asyncio.Event()

    @slow.handler
    async def hang(row: Row) -> None:
        waiting.set()
        await go.wait()

    await place.add(1, now(), status=7)
    async with app.worker() as worker, asyncio.timeout(PATIENCE):
        await waiting.wait()
        await place.add(2, now())
        await worker.tables[1].until_empty()
        assert await place.states() == {1: (7, 0), 2: (3, 1)}
        go.set()
        await worker.until_empty()
    assert await place.states() == {1: (3, 1), 2: (3, 1)}


@pytest.mark.real_time
async def test_handlers_run_beside_one_another_and_a_held_row_is_passed_over(
    postgres_url: str, postgres_schema: str
) -> None:
    from tests.tables.conftest import Postgres

    place = Postgres(postgres_url, postgres_schema)
    async with place.exits, asyncio.timeout(PATIENCE):
        await place.create()
        app = await place.app()
        watch = app.watch(place.source(), concurrency=2)
        both, running = asyncio.Barrier(2), 0

        @watch.handler
        async def publish(row: Row) -> None:
            await both.wait()

        for number in (1, 2, 3):
            await place.add(number, now() - 10 + number)
        editor = await asyncpg.connect(place.plain)
        place.exits.push_async_callback(editor.close)
        held = editor.transaction()
        await held.start()
        await editor.execute(f"UPDATE {place.table} SET title = 'edited' WHERE id = 1")
        async with app.worker() as worker:
            await until(lambda: fired(worker.tables[0], 2))
            assert await place.states() == {1: (2, 0), 2: (3, 1), 3: (3, 1)}
            await editor.execute(f"UPDATE {place.table} SET status = 1 WHERE id = 1")
            await held.commit()
            await worker.until_empty()
        assert running == 0
        assert await place.states() == {1: (1, 0), 2: (3, 1), 3: (3, 1)}


async def fired(loop: TableLoop, count: int) -> bool:
    return loop.stats.fired == count


@pytest.mark.real_time
async def test_a_channel_tells_of_what_others_write(postgres_url: str, postgres_schema: str) -> None:
    from tests.tables.conftest import Postgres

    place = Postgres(postgres_url, postgres_schema)
    async with place.exits, asyncio.timeout(PATIENCE):
        await place.create()
        channel = postgres_schema
        await place.run(
            f"CREATE FUNCTION {postgres_schema}.tell() RETURNS trigger LANGUAGE plpgsql AS "
            f"$$ BEGIN PERFORM pg_notify('{channel}', ''); RETURN NULL; END $$"
        )
        await place.run(
            f"CREATE TRIGGER tell AFTER INSERT OR UPDATE ON {place.table} "
            f"FOR EACH STATEMENT EXECUTE FUNCTION {postgres_schema}.tell()"
        )
        app = await place.app()
        watch = app.watch(place.source(look_every="1h", channel=channel))
        async with watching(app, watch) as loop:
            await until(lambda: looked(loop, 1))
            await place.add(1, now() + 100)
            await until(lambda: fired(loop, 1))
        assert await place.states() == {1: (3, 1)}


@pytest.mark.real_time
async def test_in_a_sqlite_store_s_own_file_every_commit_is_noticed(tmp_path: Path) -> None:
    from tests.tables.conftest import Sqlite

    place = Sqlite(tmp_path)
    async with place.exits:
        await place.create()
        app = await place.app()
        watch = app.watch(place.source(look_every="1h", changes={"status": 3, "times": Sql("times + 1")}))
        async with watching(app, watch) as loop:
            await until(lambda: looked(loop, 1))
            await place.add(1, now() + 100)
            await until(lambda: fired(loop, 1))
    assert watch.heard == set()
