"""Pages, counts and the log, where SQLite's way of doing them could go wrong."""

from __future__ import annotations

import base64

import msgspec
import pytest

from bide.core.errors import BadInput
from bide.core.events import Event, EventKind
from bide.core.records import Count, Filter, In, Page, State
from bide.stores.sqlite import SqliteStore, reading
from bide.testing.store_suite.acts import KEPT, NOW, SECOND, counted, done, keys, lease, listed, new, put, put_one


async def test_pages_over_one_instant_neither_skip_nor_repeat(store: SqliteStore) -> None:
    names = [f"{number:03}" for number in range(50)]
    await put(store, *(new(name) for name in names), new("later", due=In(SECOND)), new("other", topic="u"))
    held = (await lease(store, 20, lasts=0)).tasks
    where = Filter(topic="t", wake_before=NOW + 2 * SECOND)
    assert sorted(keys(await listed(store, where, limit=7))) == [*names, "later"]
    assert keys(await listed(store, Filter(wake_from=NOW + 1, wake_before=NOW + SECOND + 1), limit=3)) == ["later"]
    assert sorted(keys(await listed(store, Filter(topic="t", state=State.LEASED), limit=3))) == sorted(keys(held))
    await store.settle([done(record, keep_until=KEPT) for record in held], now=NOW)
    assert sorted(keys(await listed(store, Filter(state=State.DONE), limit=3))) == sorted(keys(held))
    assert await listed(store, Filter(state=State.DONE, wake_from=0)) == []


@pytest.mark.parametrize(
    "cursor",
    [
        "",
        "nonsense",
        "é",
        base64.urlsafe_b64encode(b"\xc1").decode(),
        base64.urlsafe_b64encode(msgspec.msgpack.encode(["name", "t", 5])).decode(),
        base64.urlsafe_b64encode(msgspec.msgpack.encode(["elsewhere", "t"])).decode(),
    ],
)
async def test_a_cursor_from_elsewhere_is_refused(store: SqliteStore, cursor: str) -> None:
    await put_one(store)
    with pytest.raises(BadInput, match="cursor"):
        await store.find(Filter(), Page(cursor=cursor))


async def test_a_cursor_of_a_list_in_another_order_is_refused(store: SqliteStore) -> None:
    await put(store, new("a"), new("b"))
    found = await store.find(Filter(), Page(limit=1))
    assert found.cursor
    with pytest.raises(BadInput, match="a list by name"):
        await store.find(Filter(state=State.WAITING), Page(cursor=found.cursor))


async def test_counting_stops_at_the_limit(store: SqliteStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "COUNTED", 5)
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
    assert store._database is not None
    rows = store._database._connections[0].execute("SELECT count(*) FROM bide_event").fetchone()[0]
    assert rows <= 11, "and the file keeps a tenth more at most"
    assert await store.events(limit=0) == []
    await store.close()


async def test_a_log_of_nothing_keeps_nothing(path: str) -> None:
    store = SqliteStore(path, events_kept=0)
    await store.open()
    await store.record([event(1), event(2)])
    assert await store.events() == []
    await store.close()
