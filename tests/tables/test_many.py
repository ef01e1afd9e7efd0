"""Many tables by one pattern: each is looked at on its own, over few connections."""

from __future__ import annotations

import time
from typing import Any

import pytest
from msgspec.structs import replace
from tests.tables.conftest import START, Mysql, Place
from tests.waiting import until

from bide import BadInput, Bide, Dead, Row, SetupError, TableSource
from bide.engine.delivery.tables import TableLoop
from bide.service.metrics import Metrics
from bide.stores.sql.server_table import TableConnections
from bide.testing.clock import ManualClock

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
        "t_{1..0}",
        "t_{0..1024}",
        "t_{00..3}",
        "t_{0..03}",
        "a_{0..1}.t_{0..1}",
        "t_{0..1}.a.b",
        "t_{0..}",
        7,
        "{0..9}" * 9,
    ],
)
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

    now = time.time_ns() // 1_000_000
    for number in range(8, 8 + MANY):
        for identity in (1, 2, 3):
            await add(place, number, identity, now)
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

    now = time.time_ns() // 1_000_000
    for number in range(8, 8 + MANY):
        await add(place, number, 1, now)
    async with app.worker() as worker:
        loops += worker.tables
        await until(
            lambda: begun and sum(bool(loop._running) for loop in loops) == MANY,
            "one to have begun, and all others to wait",
        )
    assert len(begun) == 1
    states = [await place.run(f"SELECT status FROM {place.table}_{number:02}") for number in range(8, 8 + MANY)]
    assert sorted(states) == [[(2,)]] * (MANY - 1) + [[(3,)]]
