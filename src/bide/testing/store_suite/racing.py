"""Races: many at once over the same tasks; exactly one wins, every time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

import pytest

from bide.core.names import new_id
from bide.core.records import At, Cancel, In, Move, OnConflict, Record, Redrive, Ref, Result, State
from bide.ports import Store
from bide.testing.store_suite.base import (
    HOUR,
    KEPT,
    LEASE,
    NOW,
    SuiteBase,
    add_all,
    bring,
    dead,
    do,
    done,
    extend,
    lease,
    look,
    new,
    put,
    put_and_take,
    put_one,
    retry,
    see,
    settle,
    settle_all,
)

AT_ONCE = 50

First = TypeVar("First")
Second = TypeVar("Second")


async def both(
    number: int, first: Callable[[], Awaitable[First]], second: Callable[[], Awaitable[Second]]
) -> tuple[First, Second]:
    """Start both at once; who is called first alternates."""
    if number % 2:
        two, one = await asyncio.gather(_run(second), _run(first))
    else:
        one, two = await asyncio.gather(_run(first), _run(second))
    return one, two


async def _run(act: Callable[[], Awaitable[First]]) -> First:
    return await act()


async def in_batches(races: int, race: Callable[[int, str], Coroutine[Any, Any, None]]) -> None:
    """Run the races, some at once: each has a number, and a topic of its own."""
    for start in range(0, races, AT_ONCE):
        await asyncio.gather(*(race(number, f"t{number}") for number in range(start, start + AT_ONCE)))


class Racing(SuiteBase):
    """P3: one holder. P4: a lost race is an answer. Where a store can have a second client, that one races."""

    async def test_fifty_workers_take_no_task_twice(self, store: Store, rival: Store) -> None:
        await put(store, *(new(str(number)) for number in range(1_500)))
        taken: list[tuple[str, int]] = []

        async def work(number: int) -> None:
            mine = rival if number % 2 else store
            while batch := (await lease(mine, 1 + number % 7, holder=f"w{number}")).tasks:
                taken.extend((record.key, record.token) for record in batch)
                assert all(await settle_all(mine, [done(record) for record in batch]))

        await asyncio.gather(*(work(number) for number in range(50)))
        assert len(taken) == 1_500
        assert len({key for key, _ in taken}) == 1_500

    async def test_fifty_workers_hold_each_task_once(self, store: Store) -> None:
        await put(store, *(new(str(number)) for number in range(100)))
        answers = await asyncio.gather(*(lease(store, 7, holder=f"w{number}") for number in range(50)))
        held = [record for leased in answers for record in leased.tasks]
        assert sorted(record.key for record in held) == sorted(str(number) for number in range(100))
        assert await asyncio.gather(*(settle(store, done(record)) for record in held)) == [True] * 100

    async def test_lease_against_a_move(self, store: Store, rival: Store) -> None:
        async def race(number: int, topic: str) -> None:
            await put_one(store, new(topic=topic))
            leased, moved = await both(
                number,
                lambda: lease(store, topic=topic),
                lambda: do(rival, Move(topic, "k", At(NOW + HOUR))),
            )
            now_is = await see(store, Ref(topic, "k"))
            if leased.tasks:
                assert (moved.result, now_is) == (Result.UNDER_WAY, leased.tasks[0])
            else:
                assert (moved.result, now_is) == (Result.MOVED, moved.record)

        await in_batches(self.races, race)

    async def test_lease_against_a_conditional_fire_now(self, store: Store, rival: Store) -> None:
        async def race(number: int, topic: str) -> None:
            record = await put_one(store, new(topic=topic))
            leased, fired = await both(
                number,
                lambda: lease(store, topic=topic),
                lambda: do(rival, Move(topic, "k", In(0), record.token)),
            )
            [held] = leased.tasks
            assert fired.record is not None
            if fired.result is Result.MOVED:
                assert held.token > fired.record.token > record.token
            else:
                assert (fired.result, fired.record) == (Result.STALE_TOKEN, held)
            assert await see(store, held) == held

        await in_batches(self.races, race)

    async def test_lease_against_a_cancel(self, store: Store, rival: Store) -> None:
        async def race(number: int, topic: str) -> None:
            await put_one(store, new(topic=topic))
            leased, cancelled = await both(
                number, lambda: lease(store, topic=topic), lambda: do(rival, Cancel(topic, "k", KEPT))
            )
            assert (await see(store, Ref(topic, "k"))).state is State.CANCELLED
            if leased.tasks:
                assert cancelled.result is Result.CANCELLED_WHILE_LEASED
                assert not await settle(store, done(leased.tasks[0]))
            else:
                assert cancelled.result is Result.CANCELLED, "and no delivery starts afterwards"
            assert (await lease(store, topic=topic)).tasks == []

        await in_batches(self.races, race)

    async def test_lease_against_a_redrive(self, store: Store, rival: Store) -> None:
        async def race(number: int, topic: str) -> None:
            gone = await bring(store, State.DEAD, topic=topic)
            assert gone is not None
            leased, redriven = await both(
                number,
                lambda: lease(store, topic=topic),
                lambda: do(rival, Redrive(topic, "k", new_id(), In(0), gone.token)),
            )
            assert redriven.result is Result.REDRIVEN
            assert redriven.record is not None
            held = leased.tasks or (await lease(store, topic=topic)).tasks
            assert [record.id for record in held] == [redriven.record.id], "delivered once, as the new life"
            assert (await do(rival, Redrive(topic, "k", new_id(), In(0)))).result is Result.UNDER_WAY

        await in_batches(self.races, race)

    @pytest.mark.parametrize("on_conflict", list(OnConflict), ids=str)
    async def test_lease_against_a_schedule(self, store: Store, rival: Store, on_conflict: OnConflict) -> None:
        due = At(NOW - HOUR if on_conflict is OnConflict.EARLIEST else NOW)
        if on_conflict is OnConflict.LATEST:
            due = At(NOW + 1)

        async def race(number: int, topic: str) -> None:
            old = await put_one(store, new(topic=topic))
            task = new(topic=topic, due=due, on_conflict=on_conflict)
            leased, [answer] = await both(number, lambda: lease(store, topic=topic), lambda: add_all(rival, [task]))
            now_is = await see(store, old)
            settled = [await settle(store, done(record)) for record in leased.tasks]
            if answer.result is Result.REPLACED:
                assert now_is.id == task.id
                assert settled == [record.id == task.id for record in leased.tasks], "only the new life counts"
            else:
                assert answer.result is (Result.REFUSED if on_conflict is OnConflict.REFUSE else Result.KEPT)
                assert now_is.id == old.id
                assert settled == [True]

        await in_batches(self.races, race)

    async def test_two_workers_race_for_a_lost_lease(self, store: Store, rival: Store) -> None:
        async def race(number: int, topic: str) -> None:
            lost = await put_and_take(store, new(topic=topic))
            one, two = await both(
                number,
                lambda: lease(store, topic=topic, now=NOW + LEASE, holder="one"),
                lambda: lease(rival, topic=topic, now=NOW + LEASE, holder="two"),
            )
            [held] = one.tasks + two.tasks
            assert (held.attempt, held.losses) == (2, 1)
            assert held.token > lost.token
            assert await see(store, held) == held

        await in_batches(self.races, race)

    async def test_a_late_settle_against_the_next_lease(self, store: Store, rival: Store) -> None:
        async def race(number: int, topic: str) -> None:
            late = await put_and_take(store, new(topic=topic))
            settled, leased = await both(
                number,
                lambda: settle(store, done(late), now=NOW + LEASE),
                lambda: lease(rival, topic=topic, now=NOW + LEASE),
            )
            assert settled is (leased.tasks == [])
            assert await look(store, late) == (None if settled else leased.tasks[0])

        await in_batches(self.races, race)

    async def test_a_late_extend_against_the_next_lease(self, store: Store, rival: Store) -> None:
        async def race(number: int, topic: str) -> None:
            late = await put_and_take(store, new(topic=topic))
            extended, leased = await both(
                number,
                lambda: extend(store, late, until=NOW + HOUR, now=NOW + LEASE),
                lambda: lease(rival, topic=topic, now=NOW + LEASE),
            )
            assert extended is (leased.tasks == [])

        await in_batches(self.races, race)

    async def test_a_settle_against_a_cancel(self, store: Store, rival: Store) -> None:
        async def race(number: int, topic: str) -> None:
            held = await put_and_take(store, new(topic=topic))
            outcome = (done(held, keep_until=KEPT), retry(held, In(0)), dead(held))[number % 3]
            settled, cancelled = await both(
                number, lambda: settle(store, outcome), lambda: do(rival, Cancel(topic, "k", KEPT))
            )
            now_is: Record = await see(store, held)
            if not settled:
                assert cancelled.result is Result.CANCELLED_WHILE_LEASED
                assert now_is.state is State.CANCELLED
            elif number % 3 == 1:
                assert (cancelled.result, now_is.state) == (Result.CANCELLED, State.CANCELLED)
            else:
                assert cancelled.result is Result.FINISHED
                assert now_is == cancelled.record

        await in_batches(self.races, race)

    async def test_many_schedules_of_one_free_key_make_one_task(self, store: Store, rival: Store) -> None:
        tasks = [new(on_conflict=OnConflict.KEEP) for _ in range(100)]
        answers = await asyncio.gather(
            *(add_all(rival if number % 2 else store, [task]) for number, task in enumerate(tasks))
        )
        results = [answer.result for [answer] in answers]
        assert (results.count(Result.CREATED), results.count(Result.KEPT)) == (1, 99)
        winner = tasks[results.index(Result.CREATED)]
        assert (await see(store, Ref("t", "k"))).id == winner.id
