"""Pages, counts and the log, where SQLite's way of doing them could go wrong."""

from __future__ import annotations

import pytest
from tests.stores.many_topics import asked_of_topics

from bide.core.events import Event, EventKind
from bide.core.records import Count, State
from bide.stores.sqlite import SqliteStore, rows
from bide.testing.store_suite.base import NOW, counted, new, put


async def test_counting_stops_at_the_limit(store: SqliteStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "COUNTED", 5)
    await put(store, *(new(str(number)) for number in range(6)), *(new(str(number), topic="u") for number in range(5)))
    tally = await store.tally([NOW - 1, NOW, NOW + 1], upto=5)
    assert counted(tally, "t", State.WAITING) == Count(5, exact=False)
    assert counted(tally, "u", State.WAITING) == Count(5)
    assert list(tally.forecast["t"]) == [Count(0), Count(5, exact=False)]


def event(number: int) -> Event:
    return Event(at=NOW + number, topic="t", key=str(number), id="", kind=EventKind.RETRY)


async def test_the_log_keeps_what_it_is_told_to(path: str) -> None:
    store = SqliteStore(path, events_kept=10)
    await store.open()
    for number in range(100):
        await store.record([event(number)])
    kept = await store.events(limit=1_000)
    assert [one.key for one in kept] == [str(number) for number in range(99, 89, -1)]
    lines = store._open().writer._connection.execute("SELECT count(*) FROM bide_event").fetchone()[0]
    assert lines <= 11, "and the file keeps a tenth more at most"
    assert await store.events(limit=0) == []
    await store.close()


async def test_a_log_of_nothing_keeps_nothing(path: str) -> None:
    store = SqliteStore(path, events_kept=0)
    await store.open()
    await store.record([event(1), event(2)])
    assert await store.events() == []
    await store.close()


async def test_what_is_asked_does_not_grow_with_the_topics(store: SqliteStore) -> None:
    """P11: but for the tally, by one statement for some hundred topics, and the forecast, which counts in the file."""
    statements: list[str] = []
    store._open().reader._connection.set_trace_callback(statements.append)
    asked = await asked_of_topics(store, lambda: sum("count(*) FROM (\n" not in one for one in statements))
    assert asked[1][:2] == asked[100][:2] == asked[1_000][:2]
    assert asked[1_000][2] <= asked[1][2] + 4 * 3
