"""Tables of others at work: real workers, many tables, the command line."""

from __future__ import annotations

import asyncio
import random
import signal
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, closing
from pathlib import Path
from typing import Any

import asyncpg
import pytest
from msgspec.structs import replace
from tests.tables.conftest import START, Mysql, Place, Postgres, Sqlite
from tests.tables.writing import write
from tests.waiting import PATIENCE, forever, not_before, pause, until, wait_until

from bide import BadInput, Bide, Dead, Row, SetupError, Sql, TableSource, Watch
from bide.core.instants import Millis
from bide.engine.delivery.tables import TableLoop
from bide.service.metrics import Metrics
from bide.stores.sql.server_table import TableConnections
from bide.testing.clock import ManualClock

HOUR: Millis = 3_600_000


def now() -> Millis:
    return time.time_ns() // 1_000_000


@asynccontextmanager
async def watching(app: Bide, watch: Watch) -> AsyncIterator[TableLoop]:
    """The app's worker at work, once it has looked."""
    async with app.worker() as worker:
        [loop] = [loop for loop in worker.tables if loop.watch is watch]
        await until(lambda: loop.stats.looks, "the first look")
        yield loop


async def fired(loop: TableLoop, count: int) -> None:
    await until(lambda: loop.stats.fired == count, f"{count} rows to fire")


async def emptied(app: Bide) -> None:
    """A worker of the app is at work until nothing is left."""
    async with app.worker() as worker:
        await worker.until_empty()


async def test_the_sleep_ends_when_the_next_row_is_due_and_not_before(place: Place) -> None:
    app = await place.app()
    watch = app.watch(place.source(look_every="1h"))
    handled: list[tuple[Millis, Row]] = []

    @watch.handler
    async def publish(row: Row) -> None:
        handled.append((now(), row))

    for number in range(1, 4):
        await place.add(number, now() + 200 * number)
    async with watching(app, watch) as loop:
        await fired(loop, 3)
    assert [row.id for _, row in handled] == [1, 2, 3]
    for at, row in handled:
        # by the machine's clock: what a worker knows of the server's may be behind it by half of a slow answer
        not_before(at, round(row.due_at.timestamp() * 1000), f"row {row.id}")


async def test_a_row_that_this_process_writes_is_seen_when_it_says_so(place: Place) -> None:
    app = await place.app()
    watch = app.watch(place.source(look_every="1h"))
    async with watching(app, watch) as loop:
        await place.add(1, now())
        watch.look()
        await fired(loop, 1)
    assert await place.states() == {1: (3, 1)}
    watch.look()  # nobody is there any more, and that is no error


async def test_an_idle_table_is_looked_at_as_often_as_it_says(place: Place) -> None:
    """The one table as two: of the one that is looked at every hour a worker reads next to nothing."""
    app = await place.app()
    often, seldom = app.watch(place.source(look_every="20ms")), app.watch(place.source(look_every="1h"))
    await place.add(1, now() + HOUR)
    async with app.worker() as worker:
        looks = {loop.watch: loop.stats for loop in worker.tables}
        await until(lambda: looks[often].looks >= 20, "twenty looks")
        assert 1 <= looks[seldom].looks <= 10
    assert await place.states() == {1: (2, 0)}


async def test_thousands_of_rows_by_four_workers_are_fired_once_each(place: Place) -> None:
    count = 4_000
    await place.add_many(1, count, now() - 1_000)
    async with AsyncExitStack() as workers:
        working = []
        for _ in range(4):
            app = await place.app()
            app.watch(place.source())
            working.append(await workers.enter_async_context(app.worker()))
        await asyncio.gather(*(worker.until_empty() for worker in working))
        assert sum(worker.tables[0].stats.fired for worker in working) == count
    assert Counter((await place.states()).values()) == {(3, 1): count}


async def test_handlers_of_several_workers_have_each_row_once(place: Place) -> None:
    count = 100
    await place.add_many(1, count, now() - 1_000)
    handled: list[int] = []

    async def publish(row: Row) -> None:
        handled.append(row.id)
        await write(row, f"INSERT INTO {place.log} VALUES ({row.id})")

    async with AsyncExitStack() as workers:
        working = []
        for _ in range(3):
            app = await place.app()
            app.watch(place.source(), concurrency=4).handler(publish)
            working.append(await workers.enter_async_context(app.worker()))
        await asyncio.gather(*(worker.until_empty() for worker in working))
    assert sorted(handled) == list(range(1, count + 1))
    assert await place.run(f"SELECT count(*), count(DISTINCT id) FROM {place.log}") == [(count, count)]


async def test_firing_and_taking_back_at_once(place: Place) -> None:
    """Whoever takes a post back is told the truth: either it is a draft again for good, or it was too late.

    Between the first post, which was due long ago, and the last, which is not due for an hour, both is possible.
    """
    count, taken_back = 400, set()
    app = await place.app()
    watch = app.watch(place.source(page=7, look_every="1h"))
    begin = now() + 100
    await place.add_each([begin - HOUR, *(begin + number for number in range(2, count)), begin + HOUR])
    async with watching(app, watch) as loop:
        await until(lambda: loop.stats.fired, "the first row to fire")
        for number in range(1, count + 1):
            ahead = begin + number - now() + random.uniform(-3, 3)
            # also when late: a file answers at once, and the worker would have no turn at all
            await pause(max(ahead, 0) / 1000, why="each is taken back at about the time that it is due")
            if await place.changed(f"UPDATE {place.table} SET status = 1 WHERE id = $1 AND status = 2", number):
                taken_back.add(number)
        await fired(loop, count - len(taken_back))
    states = await place.states()
    assert {number for number, state in states.items() if state == (1, 0)} == taken_back
    assert {number for number, state in states.items() if state == (3, 1)} == set(states) - taken_back
    assert 1 not in taken_back
    assert count in taken_back


async def test_a_handler_that_outlasts_the_drain_is_rolled_back(place: Place) -> None:
    app = await place.app(grace="50ms")
    watch = app.watch(place.source())
    begun = asyncio.Event()

    @watch.handler
    async def publish(row: Row) -> None:
        await write(row, f"INSERT INTO {place.log} VALUES ({row.id})")
        begun.set()
        await forever()

    await place.add(1, now())
    async with app.worker():
        await until(begun.is_set, "the handler")
    assert await place.states() == {1: (2, 0)}
    assert await place.run(f"SELECT id FROM {place.log}") == []


async def test_a_time_limit_rolls_back(place: Place, caplog: pytest.LogCaptureFixture) -> None:
    app = await place.app()
    watch = app.watch(place.source(), timeout="50ms", retry="quick")
    tries: list[int] = []

    @watch.handler
    async def publish(row: Row) -> None:
        tries.append(row.id)
        if len(tries) == 1:
            await write(row, f"INSERT INTO {place.log} VALUES ({row.id})")
            await forever()

    await place.add(1, now())
    await emptied(app)
    assert tries == [1, 1]
    assert "TimeoutError: no outcome within 50ms" in caplog.text
    assert await place.states() == {1: (3, 1)}
    assert await place.run(f"SELECT id FROM {place.log}") == []


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
    async with app.worker() as worker:
        await until(waiting.is_set, "the handler")
        await place.add(2, now())
        await worker.tables[1].until_empty()
        assert await place.states() == {1: (7, 0), 2: (3, 1)}
        go.set()
        await worker.until_empty()
    assert await place.states() == {1: (3, 1), 2: (3, 1)}


@pytest.mark.parametrize("empty", ["postgres"], indirect=True)
async def test_a_held_row_is_looked_at_again_after_a_pause_and_not_at_once(
    place: Postgres, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = await place.app()
    app.watch(place.source(), concurrency=2).handler(lambda row: None)
    loop, kicks = await place.loop(app), list[bool]()
    monkeypatch.setattr(loop._waker, "kick", lambda: kicks.append(True))
    await place.add(1, now() - 10)
    editor = await asyncpg.connect(place.plain)
    place.exits.push_async_callback(editor.close)
    async with editor.transaction():
        await editor.execute(f"SELECT id FROM {place.table} FOR UPDATE")
        fired, wake = await loop.run_once()
        assert (fired, loop.stats.looks) == (0, 2), "at what is due, and at what comes after that"
        assert wake is not None
        assert not kicks, "it sleeps until that wake"
    assert (await loop.run_once())[0] == 1
    assert kicks


@pytest.mark.parametrize("empty", ["postgres"], indirect=True)
async def test_handlers_run_beside_one_another_and_a_held_row_is_passed_over(place: Postgres) -> None:
    app = await place.app()
    watch = app.watch(place.source(), concurrency=2)
    both = asyncio.Barrier(2)

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
        await fired(worker.tables[0], 2)
        assert await place.states() == {1: (2, 0), 2: (3, 1), 3: (3, 1)}
        await editor.execute(f"UPDATE {place.table} SET status = 1 WHERE id = 1")
        await held.commit()
        await worker.until_empty()
    assert await place.states() == {1: (1, 0), 2: (3, 1), 3: (3, 1)}


@pytest.mark.parametrize("empty", ["postgres"], indirect=True)
async def test_a_channel_tells_of_what_others_write(place: Postgres) -> None:
    await place.run(
        f"CREATE OR REPLACE FUNCTION {place.own}.tell() RETURNS trigger LANGUAGE plpgsql AS "
        f"$$ BEGIN PERFORM pg_notify('{place.own}', ''); RETURN NULL; END $$"
    )
    await place.run(
        f"CREATE TRIGGER tell AFTER INSERT OR UPDATE ON {place.table} "
        f"FOR EACH STATEMENT EXECUTE FUNCTION {place.own}.tell()"
    )
    app = await place.app()
    watch = app.watch(place.source(look_every="1h", channel=place.own))
    async with watching(app, watch) as loop:
        await place.add(1, now() + 100)
        await fired(loop, 1)
    assert await place.states() == {1: (3, 1)}


@pytest.mark.parametrize("empty", ["sqlite"], indirect=True)
async def test_in_a_sqlite_store_s_own_file_every_commit_is_noticed(place: Sqlite) -> None:
    app = await place.app()
    watch = app.watch(place.source(look_every="1h", changes={"status": 3, "times": Sql("times + 1")}))
    async with watching(app, watch) as loop:
        await place.add(1, now() + 100)
        await fired(loop, 1)
    assert watch.listeners == set()


MANY = 6


async def made(place: Place, **options: Any) -> TableSource:
    """As many tables, and their source."""
    for number in range(8, 8 + MANY):
        table = f"{place.table}_{number:02}"
        index = ", INDEX (status, due)" if isinstance(place, Mysql) else ""
        await place.run(
            f"CREATE TABLE {table} (id integer PRIMARY KEY, title varchar(9), status integer, due {place.due_type}"
            f"{index})"
        )
        place.exits.push_async_callback(place.run, f"DROP TABLE {table}")
        if not index:
            await place.run(f"CREATE INDEX posts_{number:02}_due ON {table} (due) WHERE status = 2")
    return place.source(table=f"{place.table}_{{08..{7 + MANY}}}", changes={"status": 3}, **options)


async def add(place: Place, number: int, identity: int, due: int) -> None:
    await place.run(f"INSERT INTO {place.table}_{number:02} VALUES ($1, 'x', 2, $2)", identity, place.time(due))


@pytest.mark.parametrize(
    "table",
    [
        "t_{1..0}", "t_{0..1024}", "t_{00..3}", "t_{0..03}", "a_{0..1}.t_{0..1}", "t_{0..1}.a.b", "t_{0..}", 7,
        "{0..9}" * 9,
    ],
)  # fmt: skip
def test_a_pattern_that_cannot_be_meant_is_refused(table: Any) -> None:
    with pytest.raises(BadInput, match=r"order_\{00..63\}") as raised:
        TableSource(table=table, due="due", where="status = 2", changes={"status": 3})
    assert raised.value.field == "table"


@pytest.mark.parametrize(
    ("table", "tables"),
    [
        ("shop.t_{09..11}", ["shop.t_09", "shop.t_10", "shop.t_11"]), ("t_{9..10}_new", ["t_9_new", "t_10_new"]),
        ("shop_{1..2}.t", ["shop_1.t", "shop_2.t"]), ("t{1}", ["t{1}"]),
    ],
)  # fmt: skip
def test_a_pattern_stands_for_its_tables(table: str, tables: list[str]) -> None:
    source = TableSource(table=table, due="due", where="status = 2", changes={"status": 3}, dead={"status": 9})
    assert [one.table for one in source.each()] == list(source.tables) == tables


async def test_each_table_has_its_own_rows(place: Place, clock: ManualClock, caplog: pytest.LogCaptureFixture) -> None:
    app = Bide(place.url, clock=clock)
    metrics = Metrics(app)
    watch = app.watch(await made(place))
    seen: list[tuple[str, int]] = []

    @watch.handler
    def publish(row: Row) -> Dead | None:
        seen.append((row.table.rpartition("_")[2], row.id))
        return Dead("never") if row.id == 3 else None

    for number in (8, 13):
        for identity in (1, 2, 3):
            await add(place, number, identity, START + number - identity)
    clock.advance(1_000)
    async with app.worker() as worker:
        await worker.until_empty()
        assert "index" not in caplog.text
        assert sorted(seen) == [(number, identity) for number in ("08", "13") for identity in (1, 2, 3)]
        dead = {row.table: row for row in watch.dead}
        assert {(row.id, row.tries, row.why) for row in dead.values()} == {(3, 1, "never")}
        assert sorted(dead) == [f"{place.table}_08", f"{place.table}_13"]
        assert not watch.redrive(3, table=f"{place.table}_09")
        assert watch.redrive(3, table=f"{place.table}_13")
        await until(lambda: len(watch.dead) == 2 and len(seen) == 7, "the row to be tried again")
        assert seen[-1] == ("13", 3)
        text = (await metrics.exposition())[0].decode()
    assert f'bide_table_rows_total{{result="fired",table="{place.table}_{{08..13}}"}} 4' in text
    assert f'bide_table_rows_total{{result="dead",table="{place.table}_{{08..13}}"}} 3' in text
    assert text.count('result="fired"') == 1


async def test_rows_with_the_same_id_are_tasks_of_their_own(place: Place, clock: ManualClock) -> None:
    app = await place.app(clock=clock)
    app.watch(await made(place), topic="post.publish")
    for number in (8, 9):
        await add(place, number, 1, START)
    for loop in app.table_loops():
        await loop.open()
        place.exits.push_async_callback(loop.stop, 0)
        await loop.run_once()
    keys = sorted([task.key async for task in app.find(topic="post.publish")])
    assert keys == [f"{place.table}_08/1", f"{place.table}_09/1"]


async def test_a_missing_one_is_named_at_the_start(place: Place) -> None:
    app = await place.app()
    source = await made(place)
    app.watch(replace(source, table=source.table.replace("..13}", "..14}")))
    with pytest.raises(SetupError, match=f"no table {place.table}_14"):
        async with app.worker():
            raise AssertionError("it must not start")


@pytest.mark.parametrize("own", [False, True])
async def test_they_share_few_connections(place: Place, monkeypatch: pytest.MonkeyPatch, own: bool) -> None:
    made_there: list[str] = []
    for kind in TableConnections.__subclasses__():
        connect: Any = kind._connect

        async def counted(self: Any, *, polling: bool, _connect: Any = connect) -> Any:
            made_there.append("polls" if polling else "fires")
            return await _connect(self, polling=polling)

        monkeypatch.setattr(kind, "_connect", counted)
    app = await place.app() if own else Bide("memory:")
    watch = app.watch(await made(place, **({} if own else {"database": place.url})), concurrency=2)
    running: set[Row] = set()
    most = 0

    @watch.handler
    async def publish(row: Row) -> None:
        nonlocal most
        running.add(row)
        most = max(most, len(running))
        if place.holds_rows and row.id == 1:
            await until(lambda: most == 2, "another handler")
        running.remove(row)

    for number in range(8, 8 + MANY):
        for identity in (1, 2, 3):
            await add(place, number, identity, now())
    async with app.worker() as worker:
        await worker.until_empty()
        assert sum(table.stats.fired for table in worker.tables) == 3 * MANY
    assert most == (2 if place.holds_rows else 1)
    assert made_there.count("polls") == int(place.holds_rows)
    assert made_there.count("fires") <= 2


async def test_a_stop_lets_none_begin_that_waits_for_its_turn(place: Place) -> None:
    app = await place.app()
    watch = app.watch(await made(place))
    begun: list[str] = []
    loops: list[TableLoop] = []

    @watch.handler
    async def publish(row: Row) -> None:
        begun.append(row.table)
        await until(lambda: loops and all(loop._stopping for loop in loops), "the stop")

    for number in range(8, 8 + MANY):
        await add(place, number, 1, now())
    async with app.worker() as worker:
        loops += worker.tables
        await until(
            lambda: begun and sum(bool(loop._running) for loop in loops) == MANY,
            "one to have begun, and all others to wait",
        )
    assert len(begun) == 1
    states = [await place.run(f"SELECT status FROM {place.table}_{number:02}") for number in range(8, 8 + MANY)]
    assert sorted(states) == [[(2,)]] * (MANY - 1) + [[(3,)]]


APP = """
from bide import Bide, TableSource

app = Bide("sqlite:///blog.db")
posts = app.watch(TableSource(table="posts", due="due", where="status = 2", changes={"status": 3}))
"""


def test_bide_work_watches_tables(tmp_path: Path) -> None:
    (tmp_path / "blog.py").write_text(APP)
    with closing(sqlite3.connect(tmp_path / "blog.db", isolation_level=None)) as blog:
        blog.execute("CREATE TABLE posts (id INTEGER PRIMARY KEY, status INTEGER, due TEXT)")
        blog.execute("CREATE INDEX posts_by_due ON posts (due) WHERE status = 2")
        blog.execute("INSERT INTO posts (status, due) VALUES (2, '2020-01-01 08:00:00')")
        command = [sys.executable, "-m", "bide", "work", "blog:app"]
        with subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True) as worker:
            try:
                wait_until(lambda: worker.poll() is not None or status(blog) == 3, "the row to fire")
                worker.send_signal(signal.SIGTERM)
                _, said = worker.communicate(timeout=PATIENCE)
            finally:
                worker.kill()
        assert worker.returncode == 0, said
        assert "table posts" in said
        assert status(blog) == 3


def status(blog: sqlite3.Connection) -> int:
    [(found,)] = blog.execute("SELECT status FROM posts")
    return int(found)
