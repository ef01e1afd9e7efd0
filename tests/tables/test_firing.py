"""What fires of a watched table, when, and what comes of a row that fails; under a clock that the test moves."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

import pytest
from tests.tables.conftest import START, Place
from tests.tables.writing import write
from tests.waiting import until

from bide import BadInput, Bide, Defer, Fixed, Row, SetupError, Sql
from bide.core.instants import Millis, as_datetime, instant
from bide.testing.clock import ManualClock

HOUR = 3_600_000


async def test_a_row_fires_at_its_time_and_not_before(place: Place, clock: ManualClock) -> None:
    loop = await place.watched(clock)
    await place.add(1, START + 1_000)
    assert await loop.run_once() == (0, START + 1_000)
    clock.advance(999)
    assert await loop.run_once() == (0, START + 1_000)
    assert await place.states() == {1: (2, 0)}
    clock.advance(1)
    assert await loop.run_once() == (1, None)
    assert await place.states() == {1: (3, 1)}
    clock.advance(HOUR)
    assert await loop.run_once() == (0, None)


async def test_there_is_no_window_that_a_row_could_fall_out_of(place: Place, clock: ManualClock) -> None:
    loop = await place.watched(clock)
    await place.add(1, 0)
    await place.add(2, START - 400 * 24 * HOUR)
    await place.add(3, None)
    await place.add(4, START - HOUR, status=1)
    assert await loop.run_once() == (2, None)
    assert await place.states() == {1: (3, 1), 2: (3, 1), 3: (2, 0), 4: (1, 0)}


async def test_what_is_moved_or_taken_back_does_not_fire(place: Place, clock: ManualClock) -> None:
    loop = await place.watched(clock)
    for number in (1, 2, 3):
        await place.add(number, START + 1_000)
    assert (await loop.run_once())[1] == START + 1_000
    await place.run(f"UPDATE {place.table} SET due = $1 WHERE id = 1", place.time(START + HOUR))
    await place.run(f"UPDATE {place.table} SET status = 1 WHERE id = 2 AND status = 2")
    await place.run(f"UPDATE {place.table} SET due = $1 WHERE id = 3", place.time(START - 1))
    assert await loop.run_once() == (1, START + HOUR)
    clock.advance(1_000)
    assert await loop.run_once() == (0, START + HOUR)
    assert await place.states() == {1: (2, 0), 2: (1, 0), 3: (3, 1)}


async def test_the_handler_s_effect_and_the_changes_are_one(place: Place, clock: ManualClock) -> None:
    seen: list[Row] = []

    async def publish(row: Row) -> None:
        seen.append(row)
        await write(row, f"INSERT INTO {place.log} VALUES ({row.id})")
        if len(seen) == 1:
            raise ConnectionError("not yet")

    loop = await place.watched(clock, publish)
    await place.add(1, START - 500, title="bees")
    assert await loop.run_once() == (1, START + 60_000)
    assert await place.states() == {1: (2, 0)}
    assert await place.run(f"SELECT * FROM {place.log}") == []
    clock.advance(60_000)
    assert await loop.run_once() == (1, None)
    assert await place.states() == {1: (3, 1)}
    assert await place.run(f"SELECT * FROM {place.log}") == [(1,)]
    row = seen[-1]
    assert (row.id, row["title"], row.columns) == (1, "bees", {"id": 1, "title": "bees"})
    assert (row.due_at.timestamp() * 1000, row.lateness.total_seconds()) == (START - 500, 60.5)
    assert "Row 1" in repr(row)


async def test_a_row_that_fails_holds_up_nobody(
    place: Place, clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    app = await place.app(clock=clock)
    watch = app.watch(place.source(), retry=Fixed("1m", tries=2))
    tried: list[int] = []

    @watch.handler
    def publish(row: Row) -> None:
        tried.append(row.id)
        if row.id == 1:
            raise ValueError("never")

    loop = await place.loop(app)
    await place.add(1, START - HOUR)
    for number in (2, 3, 4):
        await place.add(number, START - number)
    assert await loop.run_once() == (4, START + 60_000)
    assert "row 1 failed; again in" in caplog.text
    assert tried == [1, 4, 3, 2]
    assert await loop.run_once() == (0, START + 60_000)
    clock.advance(60_000)
    assert await loop.run_once() == (1, START + 60_000 + HOUR), "its policy is at an end; it is still due"
    await place.add(5, START)
    assert (await loop.run_once())[0] == 1
    await place.run(f"UPDATE {place.table} SET status = 1 WHERE id = 1")
    clock.advance(HOUR)
    assert await loop.run_once() == (0, None)


async def test_changes_that_leave_a_row_due_are_undone(
    place: Place, clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    loop = await place.watched(clock, changes={"times": Sql("times + 1")})
    await place.add(1, START)
    await loop.run_once()
    assert "still due after the changes" in caplog.text
    assert await place.states() == {1: (2, 0)}


async def test_a_row_may_move_itself_ahead(place: Place, clock: ManualClock) -> None:
    loop = await place.watched(clock, changes={"due": Sql(place.an_hour_on), "times": Sql("times + 1")})
    await place.add(1, START)
    assert await loop.run_once() == (1, START + HOUR)
    assert await place.states() == {1: (2, 1)}


@pytest.mark.parametrize(("due_is", "factor"), [("seconds", 1), ("milliseconds", 1000)])
async def test_times_may_be_numbers_and_that_of_firing_be_written(
    place: Place, clock: ManualClock, due_is: str, factor: int
) -> None:
    loop = await place.watched(clock, due="stamp", due_is=due_is, changes={"status": 3, "stamp": Sql(":now + 5")})
    stamp = (START // 1000 + 7) * factor
    await place.run(f"INSERT INTO {place.table} (id, status, stamp) VALUES (1, 2, $1)", stamp)
    clock.advance(6_999)
    assert await loop.run_once() == (0, START + 7_000)
    clock.advance(1)
    assert (await loop.run_once())[0] == 1
    assert await place.run(f"SELECT stamp FROM {place.table}") == [(stamp + 5,)]


async def test_rows_become_tasks_in_the_same_transaction(place: Place, clock: ManualClock) -> None:
    app = await place.app(clock=clock)
    app.watch(place.source(), topic="post.publish", retry=Fixed("1m", tries=9))
    loop = await place.loop(app)
    for number in (1, 2, 3):
        await place.add(number, START - number, title="cursed" if number == 2 else "")
    await loop.run_once()
    tasks = [task async for task in app.find(topic="post.publish")]
    assert sorted(task.key for task in tasks) == ["1", "3"]
    assert {task.key: task.payload for task in tasks}["3"] == {"id": 3, "title": "post 3"}
    assert {task.key: task.due_at.timestamp() * 1000 for task in tasks}["3"] == START - 3
    assert await place.states() == {1: (3, 1), 2: (2, 0), 3: (3, 1)}


async def test_verbs_within_a_handler_join_its_transaction(place: Place, clock: ManualClock) -> None:
    app = await place.app(clock=clock)
    watch = app.watch(place.source(), retry=Fixed("1m", tries=9))

    @watch.handler
    async def publish(row: Row) -> None:
        await app.schedule("announce", key=str(row.id), delay="0s")
        if row.id == 2:
            raise ValueError("rolled back, and its task with it")

    loop = await place.loop(app)
    await place.add(1, START)
    await place.add(2, START)
    await loop.run_once()
    assert [task.key async for task in app.find(topic="announce")] == ["1"]


BERLIN = [("2027-03-28T02:30:00", "2027-03-28T03:00:00+02:00"), ("2027-10-31T02:30:00", "2027-10-31T02:30:00+01:00")]
"""Where the clock is put forward and back; `stores/test_parts.py` has all other times."""


@pytest.mark.parametrize(("wall", "comes"), BERLIN)
async def test_times_without_a_zone_are_the_zone_s(place: Place, wall: str, comes: str) -> None:
    at = instant(comes)
    clock = ManualClock(at - 5 * HOUR)
    loop = await place.watched(clock, due="wall", zone="Europe/Berlin")
    value = datetime.fromisoformat(wall) if place.holds_rows else wall.replace("T", " ")
    await place.run(f"INSERT INTO {place.table} (id, status, wall) VALUES (1, 2, $1)", value)
    for before in (5 * HOUR, 2 * HOUR, HOUR, HOUR // 2, 1):
        clock.advance(at - before - clock.now())
        assert await loop.run_once() == (0, at), before
    clock.advance(1)
    fired, _ = await loop.run_once()
    if not fired:  # a server's clock is taken to be 10 ms ahead of what is known of it, where an offset changes
        clock.advance(10)
        fired, _ = await loop.run_once()
    assert fired == 1


@pytest.mark.parametrize(
    ("there", "cure"),
    [
        ("", "{advice}"),
        # it goes through all that was ever published
        ("CREATE INDEX all_of_them ON {table} (due)", "CREATE INDEX by_both ON {table} (status, due)"),
    ],
)
async def test_a_table_without_a_fit_index_is_watched_with_a_warning_that_says_what_to_do(
    empty: Place, clock: ManualClock, caplog: pytest.LogCaptureFixture, there: str, cure: str
) -> None:
    await empty.create(index=False)
    if there:
        await empty.run(there.format(table=empty.table))
    app = await empty.app(clock=clock)
    app.watch(empty.source())
    loop = await empty.loop(app)
    assert "no index leads to the due rows" in caplog.text
    advice = caplog.text.partition("run: ")[2].strip()
    assert advice.startswith("CREATE INDEX")
    await empty.add(1, START)
    assert (await loop.run_once())[0] == 1
    await empty.run(cure.format(advice=advice, table=empty.table))

    async def used() -> bool:
        """PostgreSQL uses a new index once the transactions have ended that are older than it."""
        caplog.clear()
        await empty.loop(app)
        return not caplog.text

    await until(used, "the new index to be used")


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"table": "nothing"}, "no table nothing"),
        ({"due": "when"}, "no column 'when' (due)"),
        ({"columns": ["titel"]}, "no column 'titel' (columns)"),
        ({"changes": {"stauts": 3}}, "no column 'stauts' (changes)"),
        ({"where": "stauts = 2"}, "stauts"),
        ({"where": "status = = 2"}, "refused"),
    ],
)
async def test_what_is_not_there_is_said_at_the_start(
    place: Place, clock: ManualClock, wrong: dict[str, Any], says: str
) -> None:
    app = await place.app(clock=clock)
    app.watch(place.source(**wrong))
    [loop] = app.table_loops()
    with pytest.raises(SetupError) as raised:
        await loop.open()
    assert says in str(raised.value)
    with pytest.raises(SetupError):
        async with app.worker():
            raise AssertionError("it must not start")


@pytest.mark.parametrize("empty", ["sqlite", "postgres"], indirect=True)  # on MySQL the tests' user may make none
async def test_a_view_cannot_be_watched(place: Place) -> None:
    app = await place.app()
    await place.run(f"CREATE VIEW {place.table}_seen AS SELECT * FROM {place.table}")
    place.exits.push_async_callback(place.run, f"DROP VIEW {place.table}_seen")
    app.watch(place.source(table=f"{place.table}_seen"))
    [loop] = app.table_loops()
    with pytest.raises(SetupError, match="a view"):
        await loop.open()


async def test_a_topic_needs_tasks_in_the_same_database(place: Place) -> None:
    app = Bide("memory:")
    with pytest.raises(BadInput, match="another database"):
        app.watch(place.source(database=place.url), topic="post.publish")
    app.watch(place.source())
    async with app:
        with pytest.raises(SetupError, match="database=URL"):
            app.table_loops()


async def test_a_database_without_bide_s_tables_will_do(place: Place, clock: ManualClock) -> None:
    app = Bide("memory:", clock=clock)
    app.watch(place.source(database=place.url))
    async with app:
        loop = await place.loop(app)
        await place.add(1, START)
        assert await loop.run_once() == (1, None)
        await loop.stop(0)
    assert await place.states() == {1: (3, 1)}


@pytest.mark.parametrize("handled", [False, True])
async def test_an_id_of_several_columns(
    place: Place, clock: ManualClock, caplog: pytest.LogCaptureFixture, handled: bool
) -> None:
    table = f"{place.table}2"
    await place.run(
        f"CREATE TABLE {table} (tenant integer, number integer, status integer, due {place.due_type}, "
        "PRIMARY KEY (tenant, number), CHECK (tenant + number <> 4 OR status < 3))"
    )
    place.exits.push_async_callback(place.run, f"DROP TABLE {table}")
    seen: list[Any] = []
    handler = (lambda row: seen.append(row.id)) if handled else None
    loop = await place.watched(clock, handler, table=table, id=["tenant", "number"], columns=[], changes={"status": 3})
    assert "unique" not in caplog.text
    for tenant, number in ((1, 1), (1, 2), (2, 1), (2, 2)):
        await place.run(f"INSERT INTO {table} VALUES ({tenant}, {number}, 2, $1)", place.time(START - number))
    assert (await loop.run_once())[1] == START + 60_000
    assert (await loop.run_once())[0] == 0
    found = await place.run(f"SELECT tenant, number FROM {table} WHERE status = 3 ORDER BY tenant, number")
    assert found == [(1, 1), (1, 2), (2, 1)]
    assert not handled or {(1, 1), (1, 2), (2, 1)} <= set(seen)


async def test_an_id_that_is_not_unique_fires_nothing_without_its_handler(
    place: Place, clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    table = f"{place.table}3"
    await place.run(f"CREATE TABLE {table} (id integer, title text, status integer, due {place.due_type})")
    place.exits.push_async_callback(place.run, f"DROP TABLE {table}")
    seen: list[int] = []
    loop = await place.watched(clock, lambda row: seen.append(row.id), table=table, changes={"status": 3})
    assert "not known to be unique" in caplog.text
    for number in (1, 1, 2):
        await place.run(f"INSERT INTO {table} VALUES ({number}, '', 2, $1)", place.time(START))
    await loop.run_once()
    assert seen == [2]
    assert await place.run(f"SELECT id FROM {table} WHERE status = 3") == [(2,)]


@pytest.mark.parametrize(
    ("column", "due_is"), [("due", "timestamp"), ("wall", "timestamp"), ("stamp", "seconds"), ("stamp", "milliseconds")]
)
async def test_a_row_is_due_a_length_after_its_time(
    place: Place, clock: ManualClock, column: str, due_is: str, caplog: pytest.LogCaptureFixture
) -> None:
    changes = {"status": 3, "stamp": Sql(":now")} if column == "stamp" else {"status": 3}
    handled: list[tuple[Millis, timedelta]] = []

    async def lapse(row: Row) -> Defer | None:
        handled.append((instant(row.due_at), row.lateness))
        return Defer("5m") if len(handled) == 1 else None

    loop = await place.watched(clock, lapse, due=column, due_is=due_is, after="48h", changes=changes)
    assert "no index" not in caplog.text or not place.holds_rows or column != "due"
    values: dict[str, Any] = {
        "due": place.time(START),
        "wall": as_datetime(START).replace(tzinfo=None) if place.holds_rows else as_datetime(START).isoformat()[:19],
        "stamp": START // (1_000 if due_is == "seconds" else 1),
    }
    await place.run(f"INSERT INTO {place.table} (id, status, {column}) VALUES (1, 2, $1)", values[column])
    for wait in (0, 48 * HOUR - 1):
        clock.advance(wait)
        assert await loop.run_once() == (0, START + 48 * HOUR)
    clock.advance(1)
    assert await loop.run_once() == (0, START + 48 * HOUR + 300_000)
    clock.advance(300_000)
    assert await loop.run_once() == (1, None)
    assert handled == [(START + 48 * HOUR, timedelta(seconds=late)) for late in (0, 300)]
    if column == "stamp":
        assert await place.run(f"SELECT stamp * {1_000 if due_is == 'seconds' else 1} FROM {place.table}") == [
            (START + 48 * HOUR + 300_000,)
        ]


async def test_a_length_after_the_time_leaves_the_index_of_use_and_is_checked_again(
    place: Place, clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    loop = await place.watched(clock, after="400d", changes={"due": Sql(place.an_hour_on)})
    assert "index" not in caplog.text
    await place.add(1, START - 400 * 24 * HOUR)
    await place.add(2, START)
    if not place.holds_rows:  # there the change is a fixed time
        return
    assert await loop.run_once() == (1, START + HOUR)
