"""A row that cannot be read stops nobody else, and is seen by whoever looks."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from contextlib import closing

import pytest

from bide.core.errors import StoreCorrupt
from bide.core.events import Event, EventKind
from bide.core.records import Cancel, Filter, OnConflict, Ref, Result, State
from bide.stores.sqlite import SqliteStore
from bide.testing.store_suite.base import (
    LEASE,
    NOW,
    do,
    done,
    keys,
    lease,
    listed,
    look,
    new,
    put,
    put_one,
    see,
    settle,
)


def damage(path: str, column: str, *names: str) -> None:
    with closing(sqlite3.connect(path)) as opened:
        opened.executemany(
            f"UPDATE bide_task SET {column} = CAST(x'6261ff64' AS TEXT) WHERE key = ?", [(name,) for name in names]
        )
        opened.commit()


@pytest.mark.parametrize("column", ["key", "id", "group_name", "holder", "error"])
async def test_a_lease_sets_the_damaged_aside_and_takes_the_others(store: SqliteStore, path: str, column: str) -> None:
    await put(store, *(new(name) for name in "abcd"))
    damage(path, column, "b")
    leased = await lease(store, 3)
    assert keys(leased.tasks) == ["a", "c", "d"], "as many as were wanted, for there are so many"
    assert leased.next_wake is None
    [dead] = await listed(store, Filter(topic="t", state=State.DEAD))
    assert dead.error is not None
    assert dead.error.startswith("damaged row: ")
    assert dead.token > 0
    assert (await lease(store, 3)).tasks == [], "and it does not come again"
    shown = {"key": dead.key, "id": dead.id, "group_name": dead.group, "holder": dead.holder, "error": None}[column]
    assert column == "error" or shown == "ba\\xffd"
    assert await store.purge(now=dead.keep_until or 0, limit=10) == 1


async def test_a_lost_lease_that_is_damaged_is_set_aside_too(store: SqliteStore, path: str) -> None:
    await put(store, *(new(name) for name in "ab"))
    await lease(store, 2)
    damage(path, "holder", "a")
    assert keys((await lease(store, 2, now=NOW + LEASE)).tasks) == ["b"]


async def test_when_all_are_damaged_the_rest_is_still_found(store: SqliteStore, path: str) -> None:
    names: Sequence[str] = [f"{number:03}" for number in range(30)]
    await put(store, *(new(name) for name in names), new("last"))
    damage(path, "id", *names)
    assert keys((await lease(store, 2)).tasks) == ["last"]


@pytest.mark.parametrize("where", [Filter(), Filter(topic="t"), Filter(state=State.WAITING), Filter(group="g")])
async def test_a_listing_shows_the_damaged_with_its_text_escaped(store: SqliteStore, path: str, where: Filter) -> None:
    await put(store, *(new(name, group="g") for name in "abc"))
    damage(path, "id", "b")
    found = await listed(store, where, limit=2)
    assert keys(found) == ["a", "b", "c"]
    assert found[1].id == "ba\\xffd"


async def test_the_damaged_can_be_read_cancelled_and_replaced(store: SqliteStore, path: str) -> None:
    for verb in ("cancel", "replace"):
        await put_one(store)
        damage(path, "id", "k")
        assert (await see(store, Ref("t", "k"))).id == "ba\\xffd"
        if verb == "cancel":
            assert (await do(store, Cancel("t", "k"))).result is Result.CANCELLED
            assert await look(store, Ref("t", "k")) is None
        else:
            [answer] = await store.add([new(on_conflict=OnConflict.REPLACE)], now=NOW)
            assert answer.result is Result.REPLACED
            assert await see(store, Ref("t", "k")) == answer.record


async def test_a_damaged_lease_can_be_settled(store: SqliteStore, path: str) -> None:
    await put_one(store)
    [held] = (await lease(store)).tasks
    damage(path, "holder", "k")
    assert await settle(store, done(held, keep_until=NOW * 2))
    assert (await see(store, held)).holder == "ba\\xffd"


def change(path: str, statement: str) -> None:
    with closing(sqlite3.connect(path)) as opened:
        opened.executescript(statement)


@pytest.mark.parametrize(
    "statement", ["UPDATE bide_task SET state = 7 WHERE key = 'b'", "UPDATE bide_task SET state = -1"]
)
async def test_a_state_that_there_is_not_is_shown_as_dead(store: SqliteStore, path: str, statement: str) -> None:
    await put(store, *(new(name) for name in "abcde"))
    change(path, statement)
    assert (await see(store, Ref("t", "b"))).state is State.DEAD
    assert all(await store.get([Ref("t", name) for name in "abcde"]))
    assert len(await listed(store, Filter(topic="t"))) == 5


NO_LONGER_STRICT = """
    PRAGMA writable_schema = ON;
    UPDATE sqlite_schema SET sql = replace({0}, 'NOT NULL', '') WHERE name = 'bide_task';
    PRAGMA writable_schema = RESET;
    UPDATE bide_task SET {1} WHERE key = 'b';
    PRAGMA writable_schema = ON;
    UPDATE sqlite_schema SET sql = ({2}) WHERE name = 'bide_task';
    DROP TABLE kept;
"""


@pytest.mark.parametrize(
    "damaged", ["payload = 'text'", "payload = NULL", "token = NULL", "due_at = 'soon'", "attempt = 1.5", "id = NULL"]
)
async def test_values_of_other_types_are_set_aside(store: SqliteStore, path: str, damaged: str) -> None:
    await put(store, *(new(name) for name in "abcd"))
    await store.close()
    kept = "CREATE TABLE kept AS SELECT sql FROM sqlite_schema WHERE name = 'bide_task';"
    change(path, kept + NO_LONGER_STRICT.format("replace(sql, 'STRICT', '')", damaged, "SELECT sql FROM kept"))
    await store.open()
    assert (await see(store, Ref("t", "b"))).key == "b"
    assert len(await listed(store, Filter(topic="t"))) == 4
    assert keys((await lease(store, 4)).tasks) == ["a", "c", "d"]
    [dead] = await listed(store, Filter(topic="t", state=State.DEAD))
    assert (dead.key, dead.error) == ("b", "damaged row: values of other types than the columns declare")


@pytest.mark.parametrize(
    "statement",
    ["DELETE FROM bide_token", "DROP TABLE bide_token", "ALTER TABLE bide_task RENAME COLUMN payload TO body"],
)
async def test_what_is_gone_of_the_tables_is_said_to_be(store: SqliteStore, path: str, statement: str) -> None:
    await put_one(store)
    change(path, statement)
    with pytest.raises(StoreCorrupt, match="is damaged") as caught:
        await lease(store, 1)
    assert path in str(caught.value)


async def test_a_version_that_is_gone_is_said_to_be(store: SqliteStore, path: str) -> None:
    await store.close()
    change(path, "DELETE FROM bide_meta")
    with pytest.raises(StoreCorrupt, match="the version of its schema is gone"):
        await store.open()


async def test_a_task_whose_state_was_damaged_has_a_wake(store: SqliteStore, path: str) -> None:
    await put_one(store)
    with closing(sqlite3.connect(path)) as opened:
        opened.execute("UPDATE bide_task SET state = 4")
        opened.commit()
    assert (await see(store, Ref("t", "k"))).wake_at == NOW


@pytest.mark.parametrize("damaged", ["kind = 'odd'", "what = CAST(x'ff' AS TEXT)", "topic = CAST(x'ff' AS TEXT)"])
async def test_an_event_that_cannot_be_read_hides_no_other(store: SqliteStore, path: str, damaged: str) -> None:
    events = [Event(at=NOW + n, topic="t", key="k", id="i", kind=EventKind.DEAD, what="bad") for n in range(3)]
    await store.record(events)
    change(path, f"UPDATE bide_event SET {damaged} WHERE at = {NOW + 1}")
    assert await store.events() == [events[2], events[0]]
    assert await store.events(Ref("t", "k")) == [events[2], events[0]]


@pytest.mark.parametrize("topics", ["x'c1'", "x'91a1ff'", "x'05'"])
async def test_a_worker_that_cannot_be_read_stops_no_other(store: SqliteStore, path: str, topics: str) -> None:
    change(path, f"INSERT INTO bide_worker VALUES ('odd', {topics}, {NOW * 2})")
    assert await store.announce("w", ["t"], NOW * 2, now=NOW) == {"w": ["t"], "odd": []}


async def test_a_topic_that_is_no_text_is_said_to_be_damage(store: SqliteStore, path: str) -> None:
    await put(store, new("a"), new("b", topic="u"))
    change(path, "UPDATE bide_task SET topic = CAST(x'ff' AS TEXT) WHERE key = 'a'")
    with pytest.raises(StoreCorrupt, match="is damaged"):
        await store.tally()
    assert keys((await lease(store, 1, topic="u")).tasks) == ["b"], "and the other topics go on"


@pytest.mark.parametrize("column", ["attempt", "failures", "losses"])
async def test_a_count_that_cannot_go_on_is_set_aside(store: SqliteStore, path: str, column: str) -> None:
    await put(store, *(new(name) for name in "abc"))
    change(path, f"UPDATE bide_task SET {column} = {2**63 - 1} WHERE key = 'b'")
    assert keys((await lease(store, 3)).tasks) == ["a", "c"]
    [dead] = await listed(store, Filter(topic="t", state=State.DEAD))
    assert dead.key == "b"
