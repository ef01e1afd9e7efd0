"""What is forgotten: by lines that say when, also if the task has begun another life since, or is locked."""

from __future__ import annotations

from tests.stores.mysql.connections import by_asyncmy
from tests.stores.sql.fixtures import OpensStore

from bide.core.instants import At
from bide.core.names import new_id
from bide.core.records import Filter, Redrive, State
from bide.stores.mysql.connection import Rows, address_of, connect
from bide.testing.store_suite.base import (
    DAY,
    HOUR,
    NOW,
    bring,
    do,
    done,
    lease,
    listed,
    new,
    put,
    settle,
    settle_all,
    take,
)


async def ask(url: str, text: str) -> list[Rows]:
    """What each statement answers, on a connection of its own; {0} is what the names of the tables begin with."""
    address = address_of(url)
    connection = await connect(address, within=10)
    try:
        return await connection.ask(text.format(f"`{address.schema}`.bide"))
    finally:
        await connection.end(within=5)


async def lines(url: str) -> int:
    [[(count,)]] = await ask(url, "SELECT COUNT(*) FROM {0}_kept")
    return int(count)


async def test_a_task_that_lives_again_is_kept_and_its_old_line_goes(url: str, open_store: OpensStore) -> None:
    store = await open_store(url)
    await bring(store, State.DEAD, "k", keep_until=NOW + HOUR)
    await do(store, Redrive("t", "k", new_id(), At(NOW + 2 * HOUR)))
    assert await lines(url) == 1
    assert await store.purge(now=NOW + HOUR, limit=10) == 0
    assert [one.key for one in await listed(store, Filter(topic="t"))] == ["k"]
    assert await lines(url) == 0


async def test_a_second_end_is_what_counts(url: str, open_store: OpensStore) -> None:
    store = await open_store(url)
    await bring(store, State.DEAD, "k", keep_until=NOW + HOUR)
    await do(store, Redrive("t", "k", new_id(), At(NOW)))
    assert await settle(store, done(await take(store), keep_until=NOW + DAY))
    assert await store.purge(now=NOW + HOUR, limit=10) == 0
    assert len(await listed(store, Filter(topic="t", state=State.DONE))) == 1
    assert await store.purge(now=NOW + DAY, limit=10) == 1
    assert await lines(url) == 0


async def test_more_than_go_at_once_and_members_of_groups(url: str, open_store: OpensStore) -> None:
    store = await open_store(url)
    count = 1_500
    await put(store, *[new(str(number), group="g" if number % 3 else None) for number in range(count)])
    held = (await lease(store, count)).tasks
    assert await settle_all(store, [done(one, keep_until=NOW + HOUR) for one in held]) == [True] * count
    assert await store.purge(now=NOW + HOUR, limit=1_200) == 1_200
    assert await store.purge(now=NOW + HOUR, limit=1_200) == 300
    assert await listed(store, Filter(group="g")) == []
    [[(left,)]] = await ask(url, "SELECT (SELECT COUNT(*) FROM {0}_kept) + (SELECT COUNT(*) FROM {0}_grouped)")
    assert left == 0


async def test_what_somebody_has_locked_is_forgotten_later(url: str, open_store: OpensStore) -> None:
    store = await open_store(url)
    await put(store, new("1"), new("2"))
    held = (await lease(store, 2)).tasks
    await settle_all(store, [done(one, keep_until=NOW + HOUR) for one in held])
    async with by_asyncmy(url) as caller:
        table = f"`{address_of(url).schema}`.bide_task"
        await caller.execute(f"UPDATE {table} SET created_at = created_at + 1 WHERE topic = 't' AND `key` = '1'")
        assert await store.purge(now=NOW + HOUR, limit=10) == 1
        await caller.rollback()
    assert await store.purge(now=NOW + HOUR, limit=10) == 1
    assert await lines(url) == 0
