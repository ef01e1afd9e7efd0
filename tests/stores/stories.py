"""What is done while a fault stands in the way, on any store: done once, and answered right."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from bide.core.instants import LAST_INSTANT, At, Due, In
from bide.core.names import new_id
from bide.core.records import Cancel, Filter, Move, OnConflict, Record, Redrive, Ref, Result, State
from bide.ports import Store
from bide.testing.store_suite.base import (
    HOUR,
    KEPT,
    MINUTE,
    NOW,
    add_all,
    bring,
    change_all,
    dead,
    do,
    done,
    extend,
    keys,
    lease,
    listed,
    look,
    new,
    put,
    put_one,
    retry,
    see,
    settle_all,
    take,
)

Story = Callable[[Store, Callable[[], None]], Awaitable[None]]
"""Prepares, says when the fault is to come, acts, and checks that the act was done once and answered right."""
REF = Ref("t", "k")


async def replaces(store: Store, now_it_fails: Callable[[], None]) -> None:
    before = await put_one(store, new(due=At(NOW + HOUR)))
    now_it_fails()
    [answer] = await add_all(store, [new(due=At(NOW + 2 * HOUR))], now=NOW + 1)
    assert (answer.result, answer.was) == (Result.REPLACED, NOW + HOUR), "what was, not what is"
    assert answer.record == await look(store, before)


async def schedules_many(store: Store, now_it_fails: Callable[[], None]) -> None:
    await put(store, *(new(f"{number}") for number in range(0, 200, 4)))
    now_it_fails()
    tasks = [new(f"{number}", on_conflict=OnConflict.KEEP) for number in range(200)]
    answers = await add_all(store, tasks, now=NOW)
    assert [answer.result for answer in answers] == [
        Result.KEPT if number % 4 == 0 else Result.CREATED for number in range(200)
    ]
    assert [answer.record for answer in answers] == await store.get([Ref("t", task.key) for task in tasks])


async def moves(store: Store, now_it_fails: Callable[[], None]) -> None:
    before = await put_one(store)
    now_it_fails()
    answer = await do(store, Move("t", "k", At(NOW + HOUR), if_token=before.token))
    assert (answer.result, answer.was) == (Result.MOVED, NOW), "its own doing has not made its token stale"
    assert answer.record == await see(store, before)


async def changes(store: Store, now_it_fails: Callable[[], None]) -> None:
    """Of every kind, in one call."""
    gone = await bring(store, State.DEAD)
    assert gone is not None
    await put(store, new("moved"), new("cancelled"))
    now_it_fails()
    again = Redrive("t", "k", new_id(), In(0), gone.token)
    moved, cancelled, nobody, redriven = await change_all(
        store, [Move("t", "moved", In(HOUR)), Cancel("t", "cancelled"), Cancel("t", "nobody"), again]
    )
    assert (moved.result, cancelled.result) == (Result.MOVED, Result.CANCELLED)
    assert (nobody.result, redriven.result) == (Result.NOT_FOUND, Result.REDRIVEN)
    assert [moved.record, redriven.record] == await store.get([Ref("t", "moved"), REF])


async def moves_many(store: Store, now_it_fails: Callable[[], None]) -> None:
    """What applies, what does not, one task twice, and times beyond all others."""
    every_byte = bytes(range(256))
    odd = "\u00e9\u4efb\"'\\\n\U0001f600"
    await put(store, new(odd, payload=every_byte, options=every_byte, group="g"), new("l"), new("m", deadline=NOW + 5))
    dues: list[tuple[str, Due]] = [
        (odd, In(5)),
        ("nobody", In(5)),
        ("m", In(HOUR)),
        ("l", At(-(1 << 62))),
        (odd, In(1 << 62)),
    ]
    now_it_fails()
    first, nobody, refused, early, late = await change_all(store, [Move("t", key, due) for key, due in dues])
    moved = [first, early, late]
    assert [(answer.result, answer.was) for answer in moved] == [(Result.MOVED, was) for was in (NOW, NOW, NOW + 5)]
    assert (nobody.result, refused.result) == (Result.NOT_FOUND, Result.REFUSED)
    assert first.record is not None
    assert (first.record.wake_at, first.record.payload, first.record.options) == (NOW + 5, every_byte, every_byte)
    there = await store.get([Ref("t", "l"), Ref("t", odd)])
    assert there == [early.record, late.record]
    assert [one and (one.due_at, one.wake_at) for one in there] == [(0, NOW), (LAST_INSTANT, LAST_INSTANT)]


async def moves_nobody(store: Store, now_it_fails: Callable[[], None]) -> None:
    now_it_fails()
    assert (await do(store, Move("t", "nobody", In(5)))).result is Result.NOT_FOUND


async def leases(store: Store, now_it_fails: Callable[[], None]) -> None:
    await put(store, *(new(f"{number:03}") for number in range(100)))
    now_it_fails()
    leased = await lease(store, 1_000)
    assert sorted(keys(leased.tasks)) == [f"{number:03}" for number in range(100)]
    assert {(task.attempt, task.losses) for task in leased.tasks} == {(1, 0)}, "nothing was leased in vain"
    assert sorted(leased.tasks, key=by_key) == sorted(await listed(store, Filter(state=State.LEASED)), key=by_key)


async def extends(store: Store, now_it_fails: Callable[[], None]) -> None:
    await put_one(store)
    held = await take(store)
    now_it_fails()
    assert await extend(store, held, until=NOW + HOUR)
    assert (await see(store, held)).wake_at == NOW + HOUR


async def settles_many(store: Store, now_it_fails: Callable[[], None]) -> None:
    await put(store, *(new(f"{number}") for number in range(100)))
    held = (await lease(store, 100)).tasks
    now_it_fails()
    outcomes = [retry(one, At(NOW + HOUR)) if number % 2 else done(one) for number, one in enumerate(held)]
    assert await store.settle(outcomes, now=NOW) == [True] * 100
    left = await listed(store, Filter(topic="t"))
    assert len(left) == 50
    assert {record.failures for record in left} == {1}, "a retry counts once"


async def ends_of_every_kind(store: Store, now_it_fails: Callable[[], None]) -> None:
    await put(store, *(new(f"{number}") for number in range(3)))
    first, second, third = (await lease(store, 3)).tasks
    now_it_fails()
    outcomes = [retry(first, In(7)), done(second, keep_until=KEPT), dead(third)]
    assert await settle_all(store, outcomes) == [True] * 3
    left = [await see(store, held) for held in (first, second, third)]
    assert [(one.state, one.failures) for one in left] == [(State.WAITING, 1), (State.DONE, 0), (State.DEAD, 0)]


async def purges(store: Store, now_it_fails: Callable[[], None]) -> None:
    await put(store, *(new(f"{number}") for number in range(30)))
    held = (await lease(store, 30)).tasks
    assert all(await store.settle([done(one, keep_until=NOW + MINUTE) for one in held], now=NOW))
    now_it_fails()
    assert await store.purge(now=NOW + MINUTE, limit=100) == 30
    assert await listed(store, Filter()) == []


async def refuses(store: Store, now_it_fails: Callable[[], None]) -> None:
    now_it_fails()
    tasks = [new(on_conflict=OnConflict.REFUSE), new(on_conflict=OnConflict.REFUSE)]
    answers = await add_all(store, tasks, now=NOW)
    assert [answer.result for answer in answers] == [Result.CREATED, Result.REFUSED]


async def redrives(store: Store, now_it_fails: Callable[[], None]) -> None:
    await bring(store, State.DEAD)
    now_it_fails()
    assert (await do(store, Redrive("t", "k", new_id(), In(0)))).result is Result.REDRIVEN


async def looks(store: Store, now_it_fails: Callable[[], None]) -> None:
    await put_one(store)
    now_it_fails()
    assert [record.key for record in await listed(store, Filter())] == ["k"]


def by_key(record: Record) -> str:
    return record.key
