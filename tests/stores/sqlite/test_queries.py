"""Every statement is named, has a reason, and finds its rows by an index; counts and the log end at their limits."""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Iterator
from contextlib import closing

import pytest
from tests.stores.many_topics import asked_of_topics
from tests.stores.sqlite.conftest import opened

from bide.core.events import Event, EventKind
from bide.core.records import Count, State
from bide.stores.sql import reading
from bide.stores.sqlite import SqliteStore, database, rows
from bide.stores.sqlite.rows import QUERIES
from bide.testing.store_suite.base import NOW, counted, new, put

SCANS = {
    "has_meta": "the list of tables",
    "tasks_by_names": "the names that were given",
    "workers": "as many rows as workers",
    "forget_workers": "as many rows as workers",
    "events": "the newest lines of the log, from its end, up to the limit",
    "counts": "the topics found so far, which are the rows of the loose scan itself",
}
"""The queries that may visit more than an index leads them to, and over what."""


@pytest.fixture(scope="module", params=["nothing known", "analysed"])
def connection(request: pytest.FixtureRequest) -> Iterator[sqlite3.Connection]:
    """The plans must not change when somebody runs ANALYZE on a file that is as lopsided as they come."""
    with closing(sqlite3.connect(":memory:", isolation_level=None)) as opened:
        database.prepare(opened, ":memory:")
        if request.param == "analysed":
            rows = [("t", f"key {number}", number % 7, 0, number, 0, None, "id", "one group", b"", b"")
                    for number in range(5_000)]  # fmt: skip
            opened.executemany(QUERIES["insert_task"], rows)
            opened.execute("ANALYZE")
        yield opened


def plan(connection: sqlite3.Connection, query: str) -> list[str]:
    highest = 0  # a `?` without a number is the one after the highest before it
    for number in re.findall(r"\?(\d*)", query):
        highest = max(highest, int(number)) if number else highest + 1
    return [row[3] for row in connection.execute(f"EXPLAIN QUERY PLAN {query}", [1] * highest)]


@pytest.mark.parametrize("name", QUERIES)
def test_every_query_is_served_by_an_index(connection: sqlite3.Connection, name: str) -> None:
    steps = plan(connection, QUERIES[name])
    assert not any("TEMP B-TREE" in step for step in steps), steps
    # "SCAN (subquery-1)" counts what a search has found, up to the limit
    scans = [
        step for step in steps if step.startswith("SCAN") and "(subquery" not in step and step != "SCAN CONSTANT ROW"
    ]
    assert bool(scans) == (name in SCANS), steps


@pytest.mark.parametrize(
    ("name", "index"),
    [
        ("task_by_name", "bide_task_name (topic=? AND key=?)"),
        ("due", "bide_task_time (state=? AND topic=? AND at<?)"),
        ("waiting_head", "bide_task_time (state=? AND topic=?)"),
        ("heads", "bide_task_time (state=? AND topic=?)"),
        ("settle_done", "bide_task_name (topic=? AND key=?)"),
        ("page_at_instant", "bide_task_time (state=? AND topic=? AND at=? AND rowid>?)"),
        ("page_after_instant", "bide_task_time (state=? AND topic=? AND at>? AND at<?)"),
        ("next_topic_of_state", "bide_task_time (state=? AND topic>?)"),
        ("page_by_group", "bide_task_group (group_name=? AND <expr>=? AND topic=? AND key>?)"),
        ("purge", "bide_task_kept (keep_until<?)"),
        ("counts", "bide_task_time (state=? AND topic=?)"),
        ("count_waiting_between", "bide_task_time (state=? AND topic=? AND at>? AND at<?)"),
        ("events_by_name", "bide_event_name (topic=? AND key=?)"),
    ],
)
def test_the_index_is_used_to_its_end(connection: sqlite3.Connection, name: str, index: str) -> None:
    assert any(index in step for step in plan(connection, QUERIES[name])), plan(connection, QUERIES[name])


async def test_counting_stops_at_the_limit(store: SqliteStore, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (rows, reading):
        monkeypatch.setattr(module, "COUNTED", 5)
    await put(store, *(new(str(number)) for number in range(6)), *(new(str(number), topic="u") for number in range(5)))
    tally = await store.tally([NOW - 1, NOW, NOW + 1], upto=5)
    assert counted(tally, "t", State.WAITING) == Count(5, exact=False)
    assert counted(tally, "u", State.WAITING) == Count(5)
    assert list(tally.forecast["t"]) == [Count(0), Count(5, exact=False)]


def event(number: int) -> Event:
    return Event(at=NOW + number, topic="t", key=str(number), id="", kind=EventKind.RETRY)


@pytest.mark.parametrize("most", [10, 0])
async def test_the_log_keeps_what_it_is_told_to(path: str, most: int) -> None:
    async with opened(path, events_kept=most) as store:
        for number in range(100):
            await store.record([event(number)])
        kept = await store.events(limit=1_000)
        assert [one.key for one in kept] == [str(number) for number in range(99, 99 - most, -1)]
        lines = store._open().writer._connection.execute("SELECT count(*) FROM bide_event").fetchone()[0]
        assert lines <= most * 1.1, "the file keeps a tenth more at most"
        assert await store.events(limit=0) == []


async def test_what_is_asked_does_not_grow_with_the_topics(store: SqliteStore) -> None:
    """P11: but for the tally, by one statement for some hundred topics, and the forecast, which counts in the file."""
    statements: list[str] = []
    store._open().reader._connection.set_trace_callback(statements.append)
    asked = await asked_of_topics(store, lambda: sum("count(*) FROM (\n" not in one for one in statements))
    assert asked[1][:2] == asked[100][:2] == asked[1_000][:2]
    assert asked[1_000][2] <= asked[1][2] + 4 * 3
