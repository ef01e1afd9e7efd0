"""An open transaction of the application's keeps a task locked: nobody waits for that but who asked for that task."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from tests.stores.mysql.conftest import OpensStore
from tests.stores.mysql.connections import by_asyncmy

from bide import Bide, PartlyFailed, StoreUnavailable
from bide.core.records import At, Cancel, Lease, Move, Ref, Result
from bide.stores.mysql import MySqlStore, schema
from bide.stores.mysql.address import address_of
from bide.stores.mysql.errors import Locked, meaning
from bide.testing.store_suite.acts import HOUR, LEASE, NOW, done, lease, look, new, put, retry, see

COUNT = 100
SOON = 5.0
"""Seconds, half of what a call goes on trying for: one wait, and nobody has waited for the end of that."""
pytestmark = pytest.mark.real_time


@asynccontextmanager
async def holding(url: str, key: str) -> AsyncIterator[Any]:
    """A transaction that has changed the task and is open; rolled back."""
    table = f"`{address_of(url).schema}`.bide_task"
    async with by_asyncmy(url) as caller:
        await caller.execute(f"UPDATE {table} SET created_at = created_at + 1 WHERE topic = 't' AND `key` = '{key}'")
        yield caller
        await caller.rollback()


def tasks(**more: Any) -> list[Any]:
    return [new(f"{number:03}", due=At(NOW), **more) for number in range(COUNT)]


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[BaseException]:
    """Errors of statements that waited for a lock as long as our connections do: a second, and more of a slow disk."""
    waited: list[BaseException] = []

    def noted(error: BaseException, where: str, *, adding: bool = False) -> Exception:
        found = meaning(error, where, adding=adding)
        if isinstance(found, Locked) and error not in waited:
            waited.append(error)
        return found

    monkeypatch.setattr("bide.stores.mysql.lane.meaning", noted)
    return waited


async def of_the_others(store: MySqlStore, batch: list[Any], verb: str, waits: list[BaseException]) -> list[Any]:
    """What a batch is answered after one wait; the one that is held up is still to come."""
    async with asyncio.timeout(SOON):
        answers: list[Any] = await getattr(store, f"{verb}_apart")(batch, now=NOW)
    assert len(waits) == 1
    late = [answer for answer in answers if isinstance(answer, asyncio.Future)]
    assert len(late) == 1
    assert not late[0].done()
    assert isinstance(answers[50], asyncio.Future)
    return answers


async def test_a_change(url: str, open_store: OpensStore, waits: list[BaseException]) -> None:
    store = await open_store(url)
    await put(store, *tasks())
    moves = [Move("t", f"{number:03}", At(NOW + HOUR)) for number in range(COUNT)]
    async with holding(url, "050"):
        answers = await of_the_others(store, moves, "change", waits)
        assert {answer.result for answer in answers if not isinstance(answer, asyncio.Future)} == {Result.MOVED}
        [again] = await store.change([Cancel("t", "001")], now=NOW)
        assert again.result is Result.CANCELLED, "and the next call does not wait either"
    assert (await answers[50]).result is Result.MOVED


@pytest.mark.parametrize("how", ["done", "retry"])
async def test_settling(url: str, open_store: OpensStore, waits: list[BaseException], how: str) -> None:
    store = await open_store(url)
    await put(store, *tasks())
    held = (await lease(store, COUNT)).tasks
    held.sort(key=lambda one: one.key)
    outcomes = [done(one) if how == "done" else retry(one, At(NOW + HOUR)) for one in held]
    async with holding(url, "050"):
        answers = await of_the_others(store, outcomes, "settle", waits)
        assert {answer for answer in answers if not isinstance(answer, asyncio.Future)} == {True}
    assert await answers[50] is True
    assert await store.settle(outcomes, now=NOW) == [False] * COUNT, "each was done once"


async def test_a_schedule_of_a_key_that_is_there(url: str, open_store: OpensStore, waits: list[BaseException]) -> None:
    store = await open_store(url)
    await put(store, *tasks())
    async with holding(url, "050"):
        answers = await of_the_others(store, tasks(payload=b"new"), "add", waits)
        assert {answer.result for answer in answers if not isinstance(answer, asyncio.Future)} == {Result.REPLACED}
    assert (await answers[50]).result is Result.REPLACED


@pytest.mark.parametrize("ending", ["commit", "rollback"])
async def test_a_schedule_of_a_key_that_is_being_inserted(
    url: str, open_store: OpensStore, waits: list[BaseException], ending: str
) -> None:
    store = await open_store(url)
    app = Bide(url)
    async with app, by_asyncmy(url) as own:
        await own.verb(app, "schedule", "t", key="050", delay="1h")
        answers = await of_the_others(store, tasks(payload=b"new"), "add", waits)
        assert {answer.result for answer in answers if not isinstance(answer, asyncio.Future)} == {Result.CREATED}
        await (own.commit() if ending == "commit" else own.rollback())
        assert (await answers[50]).result is (Result.REPLACED if ending == "commit" else Result.CREATED)


async def test_leases_of_the_others_are_extended(url: str, open_store: OpensStore, waits: list[BaseException]) -> None:
    store = await open_store(url)
    await put(store, *tasks())
    held = sorted((await lease(store, COUNT)).tasks, key=lambda one: one.key)
    leases = [Lease(one.topic, one.key, one.token) for one in held]
    async with holding(url, "050"):
        with pytest.raises(PartlyFailed) as raised:
            async with asyncio.timeout(SOON):
                await store.extend(leases, now=NOW + 1000, until=NOW + 1000 + LEASE)
        assert len(waits) == 1
    answers = raised.value.answers
    assert isinstance(answers[50], StoreUnavailable)
    assert [answer for answer in answers if answer is True] == [True] * (COUNT - 1)
    for number in (0, 49, 51, 99):
        assert (await see(store, held[number])).wake_at == NOW + 1000 + LEASE
    assert await store.extend(leases, now=NOW + 2000, until=NOW + 2000 + LEASE) == [True] * COUNT


async def test_when_patience_is_over_that_task_alone_fails(url: str, open_store: OpensStore) -> None:
    store = await open_store(url, patience=0.5)
    await put(store, *tasks())
    async with holding(url, "050"):
        with pytest.raises(PartlyFailed) as raised:
            await store.change([Cancel("t", f"{number:03}") for number in range(COUNT)], now=NOW)
    failed = [one for one in raised.value.answers if isinstance(one, Exception)]
    assert [type(one) for one in failed] == [StoreUnavailable]
    assert "keeps the task locked" in str(failed[0])
    assert await look(store, Ref("t", "050")) is not None
    assert await look(store, Ref("t", "049")) is None


async def test_callers_do_not_wait_for_one_another(url: str, waits: list[BaseException]) -> None:
    """Through the app, where a hundred coroutines are one batch."""
    await schema.migrate(url)
    app = Bide(url)
    async with app:
        await app.schedule_many([app.new("t", key=f"{number:03}", delay="1h") for number in range(COUNT)])
        calls: list[asyncio.Task[Any]] = []
        async with holding(url, "050"):
            calls = [asyncio.ensure_future(app.cancel("t", f"{number:03}")) for number in range(COUNT)]
            async with asyncio.timeout(SOON):
                await asyncio.wait([call for number, call in enumerate(calls) if number != 50])
            assert len(waits) == 1
            assert (await app.schedule("t", key="other", delay="1h")).ok
            await asyncio.sleep(2)
            assert not calls[50].done()
        assert (await calls[50]).result == "cancelled"
