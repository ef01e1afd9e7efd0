"""Rows that do not fire: what their table, their handler and their source say to it; the others go on."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from functools import wraps
from pathlib import Path
from typing import Any

import pytest
from tests.engine.test_handler_ends import Proxy
from tests.tables.conftest import START, Place, Sqlite
from tests.tables.writing import write

from bide import BadInput, Bide, Dead, DeadRow, Defer, Done, Retry, Row
from bide.core.errors import StoreUnavailable
from bide.ports import Raced
from bide.testing.clock import ManualClock

HOUR = 3_600_000


def answers(place: Place, answer: Any = None, *, raised: bool = False) -> Callable[[Row], Awaitable[Any]]:
    """A handler that gives `answer` for row 1, and writes before it does."""

    async def publish(row: Row) -> Any:
        await write(row, f"INSERT INTO {place.log} VALUES ({row.id})")
        if row.id != 1:
            return None
        if raised:
            raise ExceptionGroup("of a TaskGroup", [answer])
        return answer

    return publish


@pytest.mark.parametrize("handled", [False, True])
async def test_a_row_that_the_table_keeps_as_it_is_rests_and_is_named_once(
    place: Place, clock: ManualClock, caplog: pytest.LogCaptureFixture, handled: bool
) -> None:
    await place.keep("kept")
    loop = await place.watched(clock, answers(place) if handled else None)
    await place.add(1, START - HOUR, title="kept")
    for number in (2, 3):
        await place.add(number, START - number)
    assert await loop.run_once() == (3, START + 60_000)
    assert (loop.stats.fired, loop.stats.failed) == (2, 1)
    clock.advance(60_000)
    assert await loop.run_once() == (1, START + 120_000)
    assert caplog.text.count("row 1 ") == 1
    assert await place.states() == {1: (2, 0), 2: (3, 1), 3: (3, 1)}


@pytest.mark.parametrize("handled", [False, True])
async def test_each_of_several_rows_that_the_table_keeps_is_counted(
    place: Place, clock: ManualClock, handled: bool
) -> None:
    """The look after such a row leaves out the others; else it would find nothing, and their counts were forgotten."""
    await place.keep("kept")
    loop = await place.watched(clock, answers(place) if handled else None, concurrency=4, tries=3)
    for number in (1, 2, 3):
        await place.add(number, START - HOUR, title="kept")
    for _ in range(3):
        await loop.run_once()
        clock.advance(60_000)
    assert (loop.stats.failed, loop.stats.dead) == (9, 3)


async def test_failures_are_counted_while_the_loop_looks_for_other_rows(place: Place, clock: ManualClock) -> None:
    """With room for a second row the loop looks on while the first is retried."""
    looked = asyncio.Event()

    async def publish(row: Row) -> None:
        await looked.wait()
        raise ValueError("never")

    loop = await place.watched(clock, publish, concurrency=2, tries=3, dead={"status": 9})
    await place.add(1, START - HOUR)
    for _ in range(3):
        looked.clear()
        await loop._take_due()
        looked.set()
        await loop.run_once()
        clock.advance(60_000)
    assert (loop.stats.failed, loop.stats.dead) == (3, 1)
    assert await place.states() == {1: (9, 0)}


@pytest.mark.parametrize("ids", ["title", ["id", "title"]])
@pytest.mark.parametrize("handled", [False, True])
async def test_a_row_without_an_id_never_fires_and_holds_up_nobody(
    place: Place, clock: ManualClock, ids: Any, handled: bool
) -> None:
    loop = await place.watched(clock, (lambda row: None) if handled else None, id=ids, columns=[])
    for number in (1, 2, 3):
        await place.add(number, START - HOUR + number)
    await place.run(f"UPDATE {place.table} SET title = NULL WHERE id = 1")
    assert await loop.run_once() == (2, None)
    assert await place.states() == {1: (2, 0), 2: (3, 1), 3: (3, 1)}


@pytest.mark.parametrize("empty", ["sqlite"], indirect=True)
async def test_more_than_a_thousand_rows_that_fail_hold_up_nobody(
    place: Place, clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    count = 1_050
    loop = await place.watched(clock)
    await place.add_many(1, count, START - HOUR)
    await place.run(f"UPDATE {place.table} SET title = 'cursed'")
    await place.add(count + 1, START - 1)
    assert (await loop.run_once())[0] == count + 1
    assert (await place.states())[count + 1] == (3, 1)
    await place.add(count + 2, START)
    assert (await loop.run_once())[0] == 1
    assert (loop.stats.fired, loop.stats.failed) == (2, count)
    assert len([one for one in caplog.records if one.levelno >= logging.WARNING]) < 30
    assert "1000 rows fail" in caplog.text


async def test_however_many_rows_are_left_out(place: Place, clock: ManualClock) -> None:
    count = 3_000
    loop = await place.watched(clock)
    await place.add_many(1, count, START - HOUR)
    skip = range(1, count)
    head = await loop._table.head(now=START, skip=skip)
    assert (head.due, head.id) == (START - HOUR, count)
    assert (await loop._table.head(now=START, skip=[*skip, count])).due is None
    assert await loop._table.fire(now=START, limit=loop.watch.source.page, skip=skip, new_task=None) == [count]


@pytest.mark.parametrize("raised", [False, True])
@pytest.mark.parametrize(
    ("outcome", "again"), [(Defer("5s"), 5_000), (Retry("later", delay="9s"), 9_000), (Retry("x"), 60_000)]
)
async def test_an_outcome_is_obeyed_and_publishes_nothing(
    place: Place, clock: ManualClock, outcome: Any, again: int, raised: bool
) -> None:
    loop = await place.watched(clock, answers(place, outcome, raised=raised))
    await place.add(1, START - 2)
    await place.add(2, START - 1)
    assert (await loop.run_once())[1] == START + again
    assert await place.states() == {1: (2, 0), 2: (3, 1)}
    assert await place.run(f"SELECT id FROM {place.log}") == [(2,)]
    assert loop.stats.failed == isinstance(outcome, Retry)


@pytest.mark.parametrize("answer", [True, {"ok": 1}, Defer, Done(again_in="1h")])
async def test_an_answer_that_means_nothing_publishes_nothing(
    place: Place, clock: ManualClock, answer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    loop = await place.watched(clock, answers(place, answer))
    await place.add(1, START)
    await loop.run_once()
    assert await place.states() == {1: (2, 0)}
    assert "return None" in caplog.text


@pytest.mark.parametrize("outer", ["plain", "async"])
async def test_a_row_handler_runs_to_its_end_however_it_is_wrapped(
    place: Place, clock: ManualClock, outer: str
) -> None:
    ran: list[object] = []

    async def publish(row: Row) -> None:
        ran.append(row.id)

    @wraps(publish)
    def plain(row: Row) -> Any:
        return publish(row)

    @wraps(ran.append)
    async def asynchronous(row: Row) -> None:
        await publish(row)

    loop = await place.watched(clock, plain if outer == "plain" else asynchronous)
    await place.add(1, START)
    assert await loop.run_once() == (1, None)
    assert ran == [1]
    assert loop.stats.fired == 1


async def test_done_is_done(place: Place, clock: ManualClock) -> None:
    loop = await place.watched(clock, answers(place, Done(), raised=True))
    await place.add(1, START)
    assert await loop.run_once() == (1, None)
    assert await place.states() == {1: (3, 1)}


@pytest.mark.parametrize("empty", ["sqlite", "postgres"], indirect=True)  # on a file, and on a server
@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize(
    "error",
    [
        asyncio.CancelledError(), SystemExit(3), ExceptionGroup("", [ValueError()]), StopIteration(), GeneratorExit(),
        Proxy,
    ],
    ids=repr,
)  # fmt: skip
async def test_whatever_a_handler_raises_is_its_row_s(
    place: Place, clock: ManualClock, error: BaseException | type[BaseException], plain: bool
) -> None:
    def publish(row: Row) -> None:
        if row.id == 1:
            raise error

    async def publish_later(row: Row) -> None:
        publish(row)

    loop = await place.watched(clock, publish if plain else publish_later)
    await place.add(1, START)
    await place.add(2, START)
    assert await loop.run_once() == (2, START + 60_000)
    assert await place.states() == {1: (2, 0), 2: (3, 1)}


@pytest.mark.parametrize("handled", [False, True])
async def test_a_row_is_given_up_after_so_many_tries(
    place: Place, clock: ManualClock, caplog: pytest.LogCaptureFixture, handled: bool
) -> None:
    handler = answers(place, ValueError("never"), raised=True) if handled else None
    loop = await place.watched(clock, handler, tries=2)
    watch, told = loop.watch, list[DeadRow]()
    watch.on_dead(told.append)
    await place.add(1, START - 5, title="cursed")
    await loop.run_once()
    assert watch.dead == []
    clock.advance(60_000)
    await loop.run_once()
    assert "row 1 is given up" in caplog.text
    assert (told, loop.stats.dead) == (watch.dead, 1)
    assert [(row.id, row.due, row.tries) for row in told] == [(1, START - 5, 2)]
    for _ in range(3):  # it is due still: that is seen, and it is left alone
        clock.advance(HOUR)
        await loop.run_once()
    assert (len(told), len(watch.dead), loop.stats.dead) == (1, 1, 1)


async def test_a_row_that_was_given_up_can_be_tried_again(place: Place, clock: ManualClock) -> None:
    loop = await place.watched(clock, tries=1)
    watch = loop.watch
    await place.add(1, START - 5, title="cursed")
    await place.add(2, START - 5, title="cursed")
    await loop.run_once()
    assert len(watch.dead) == 2
    await place.run(f"UPDATE {place.table} SET title = 'blessed'")
    assert (await loop.run_once())[0] == 0
    assert watch.redrive(1)
    assert not watch.redrive(3)
    assert (await loop.run_once())[0] == 1
    assert await place.states() == {1: (3, 1), 2: (2, 0)}
    await place.run(f"UPDATE {place.table} SET due = $1 WHERE id = 2", place.time(START - 4))
    clock.advance(HOUR)
    assert (await loop.run_once())[0] == 1, "another time is another life"
    assert watch.dead == []


@pytest.mark.parametrize("refused", [False, True])
async def test_what_becomes_of_a_dead_row_stands_in_its_own_columns(
    place: Place, clock: ManualClock, refused: bool
) -> None:
    handler = answers(place, Dead("no such post"))
    loop = await place.watched(clock, handler, dead={"status": 9 if not refused else 2})
    watch, told = loop.watch, list[DeadRow]()
    watch.on_dead(told.append)
    await place.add(1, START)
    await loop.run_once()
    assert [row.why for row in told] == ["no such post"]
    assert await place.states() == {1: (2 if refused else 9, 0)}
    assert await place.run(f"SELECT id FROM {place.log}") == []
    assert [row.id for row in watch.dead] == ([1] if refused else [])


async def test_a_hook_that_fails_stops_nothing(place: Place, clock: ManualClock) -> None:
    loop = await place.watched(clock, answers(place, Dead("never")))

    @loop.watch.on_dead
    async def tell(row: DeadRow) -> None:
        raise ValueError("nobody is there")

    await place.add(1, START)
    await place.add(2, START)
    assert (await loop.run_once())[0] == 1
    assert await place.states() == {1: (2, 0), 2: (3, 1)}


@pytest.mark.parametrize(
    "wrong",
    [
        {"tries": 0}, {"tries": True}, {"dead": {}}, {"dead": {"id": 3}}, {"dead": 9}, {"id": []}, {"id": 3},
        {"after": "3651d"}, {"after": 48}, {"reads": 3}, {"reads": "postgresql://u:secret@h", "channel": "posts"},
    ],
)  # fmt: skip
def test_what_a_source_cannot_mean(wrong: dict[str, Any]) -> None:
    from bide import TableSource

    given: dict[str, Any] = {"table": "posts", "due": "due", "where": "status = 2", "changes": {"status": 3}}
    with pytest.raises(BadInput, match=next(iter(wrong))) as raised:
        TableSource(**given | wrong)
    assert "secret" not in str(raised.value)


@pytest.mark.parametrize("own", [False, True])
async def test_a_sqlite_file_has_no_replica(tmp_path: Path, own: bool) -> None:
    place = Sqlite(tmp_path)
    async with place.exits:
        app = await place.app() if own else Bide("memory:")
        app.watch(place.source(reads="postgresql://u:secret@h", database=None if own else place.url))
        async with app:
            with pytest.raises(BadInput, match=r"reads: .* has no replica") as raised:
                app.table_loops()
        assert "secret" not in str(raised.value)


async def test_rows_that_were_given_up_end_the_wait_for_an_empty_table(place: Place) -> None:
    app = await place.app()
    app.watch(place.source()).handler(answers(place, Dead("never")))
    await place.add(1, START - 10 * 365 * 24 * HOUR)
    async with app.worker() as worker:
        await worker.until_empty()
    assert await place.states() == {1: (2, 0)}


async def test_a_database_that_is_away_at_the_start_is_tried_again(
    place: Place, clock: ManualClock, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The app's own topics are worked on meanwhile."""
    app = await place.app()
    delivered = asyncio.Event()

    @app.handler("other")
    async def other(task: Any) -> None:
        delivered.set()

    app.watch(place.source(look_every="20ms"))
    loops = app.table_loops()
    monkeypatch.setattr(app, "table_loops", lambda: loops)
    opened = loops[0]._table.open
    away = True

    async def open_() -> Any:
        if away:
            raise StoreUnavailable("it is away")
        return await opened()

    monkeypatch.setattr(loops[0]._table, "open", open_)
    await place.add(1, 0)
    async with app.worker() as worker:
        await app.schedule("other", key="1", delay="0s")
        await asyncio.wait_for(delivered.wait(), 60)
        away = False
        await worker.until_empty()
    assert await place.states() == {1: (3, 1)}
    assert caplog.text.count("it is away") == 1


async def test_what_the_server_undoes_for_others_is_looked_at_again_at_once(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = await place.app()
    watch = app.watch(place.source(look_every="1h"))
    [loop] = app.table_loops()
    monkeypatch.setattr(app, "table_loops", lambda: [loop])
    monkeypatch.setattr("bide.engine.delivery.tables._FIRST_PAUSE", 3_600)
    fire, raced = loop._table.fire, [1, 2, 3]

    async def racing(**options: Any) -> Any:
        if raced:
            raise Raced(f"deadlock {raced.pop()}")
        return await fire(**options)

    monkeypatch.setattr(loop._table, "fire", racing)
    await place.add(1, 0)
    async with app.worker() as worker:
        await worker.until_empty()
        assert (loop.stats.fired, loop.stats.failed) == (1, 0)
    assert watch.dead == []
